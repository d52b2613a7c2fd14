"""What others run between the logits and the tokens: the rivals of the verification, KL and sampling ops.

Each verifier takes the batch and returns the number of drafts accepted, [B]; what it computes beside that is part of
its time. It starts, as the ops do, from logits at temperature 1. `unfit` says why one cannot run a batch.

The call into FlashInfer follows its published signature, the one into vLLM is a guess at its interface.
Neither has run.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Logits, drafts and where they lie: B sequences, N drafts, at most K a sequence.

    Attributes
    ----------
    target, draft : [N+B, V], [N, V]
        Raw logits.
    tokens : [N] int64
        Drawn from `draft`.
    cu : [B+1] int32
        Exclusive cumulative sum of the numbers of drafts.
    lengths : list of int
        The numbers of drafts.
    owner, column, rows : [N] int64
        Sequence of each draft, its place in it, its row in `target`.
    first, bonus : [B] int64
        First draft and bonus row of each sequence.
    """

    target: Tensor
    draft: Tensor
    tokens: Tensor
    cu: Tensor
    lengths: list[int]
    owner: Tensor
    column: Tensor
    rows: Tensor
    first: Tensor
    bonus: Tensor

    @property
    def uniform(self) -> bool:
        """Whether every sequence has as many drafts."""
        return len(set(self.lengths)) == 1


def eager(batch: Batch) -> Tensor:
    """Plain torch on the flat rows: softmax both, gather, ratio, accept, residual, multinomial."""
    return _verify(*_tensors(batch), max(batch.lengths))[1]


def compiled(batch: Batch) -> Tensor:
    """`eager` through torch.compile, in one graph, for these shapes."""
    if not _compiled:
        _compiled.append(torch.compile(_verify, fullgraph=True, dynamic=False))
    return _compiled[0](*_tensors(batch), max(batch.lengths))[1]


def transformers(batch: Batch) -> Tensor:
    """The rejection sampling of transformers' assisted generation."""
    from transformers.generation.utils import _speculative_sampling

    target, draft, ids = batch.target[None].float(), batch.draft[None].float(), batch.tokens[None]
    return _speculative_sampling(ids, draft, ids.shape[1], target)[1][None]


def flashinfer(batch: Batch) -> Tensor:
    """FlashInfer's chain sampling, softmax of both sides included."""
    from flashinfer.sampling import chain_speculative_sampling

    B, V = len(batch.lengths), batch.target.shape[1]
    p = batch.target.softmax(-1, dtype=torch.float32).view(B, -1, V)
    q = batch.draft.softmax(-1, dtype=torch.float32).view(B, -1, V)
    return chain_speculative_sampling(q, batch.tokens.view(B, -1).int(), p)[2]


def vllm(batch: Batch) -> Tensor:
    """VLLM's rejection sampler, softmax of both sides and the bonus draw included."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    p = batch.target.softmax(-1, dtype=torch.float32)
    parameters = inspect.signature(rejection_sample).parameters
    # Newer versions take logits and do the softmax themselves.
    side = {"target_logits": batch.target[batch.rows].float()}
    if "target_probs" in parameters:
        side = {"target_probs": p[batch.rows]}
    ones = torch.ones(len(batch.lengths), device=p.device)
    tokens = rejection_sample(
        draft_token_ids=batch.tokens.int(),
        num_draft_tokens=batch.lengths,
        max_spec_len=max(batch.lengths),
        cu_num_draft_tokens=batch.cu[1:],
        draft_probs=batch.draft.softmax(-1, dtype=torch.float32),
        bonus_token_ids=p[batch.bonus].multinomial(1).int(),
        sampling_metadata=SimpleNamespace(all_greedy=False, all_random=True, generators={}, temperature=ones),
        **side,
    )
    return (tokens >= 0).sum(1) - 1


def kl_eager(batch: Batch) -> Tensor:
    """KL(p || q) of each drafted position in plain torch."""
    log_p = batch.target[batch.rows].log_softmax(-1, dtype=torch.float32)
    log_q = batch.draft.log_softmax(-1, dtype=torch.float32)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def sample_eager(batch: Batch) -> Tensor:
    """Softmax and multinomial."""
    return batch.draft.softmax(-1, dtype=torch.float32).multinomial(1)[:, 0]


def unfit(name: str, batch: Batch) -> str | None:
    """Why the rival `name` cannot run `batch`; None if it can."""
    if name in ("flashinfer", "vllm"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
        if batch.target.device.type == "cpu":
            return f"{name} has no such kernel for the CPU"
    if name == "transformers" and len(batch.lengths) > 1:
        return "transformers verifies one sequence at a time"
    if name == "flashinfer" and not batch.uniform:
        return "flashinfer takes one number of drafts for the whole batch"
    return None


def forget_compiled() -> None:
    """Compile anew for the next batch, whose shapes differ."""
    torch.compiler.reset()
    _compiled.clear()


_compiled: list[Any] = []


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return batch.target, batch.draft, batch.tokens, batch.owner, batch.column, batch.rows, batch.first, batch.bonus


def _verify(
    target: Tensor,
    draft: Tensor,
    tokens: Tensor,
    owner: Tensor,
    column: Tensor,
    rows: Tensor,
    first: Tensor,
    bonus: Tensor,
    K: int,
) -> tuple[Tensor, Tensor]:
    p, q = target.softmax(-1, dtype=torch.float32), draft.softmax(-1, dtype=torch.float32)
    ratio = p[rows, tokens] / q.gather(1, tokens[:, None])[:, 0]
    passes = torch.zeros(first.shape[0], K, dtype=torch.bool, device=target.device)
    passes = passes.index_put((owner, column), torch.rand_like(ratio) < ratio)
    accepted = passes.cumprod(1).sum(1)
    final = first + torch.arange(first.shape[0], device=target.device) + accepted
    rejected = final < bonus
    stopped = (first + accepted).clamp(max=tokens.shape[0] - 1)
    residual = (p[final] - q[stopped] * rejected[:, None]).clamp(min=0)
    token = residual.multinomial(1)
    out = tokens.new_full((first.shape[0], K + 1), -1).index_put((owner, column), tokens)
    place = torch.arange(K + 1, device=target.device)
    out = torch.where(place == accepted[:, None], token, out)
    return out.masked_fill(place > accepted[:, None], -1), accepted
