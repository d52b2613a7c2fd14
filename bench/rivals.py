"""What others run between the logits and the tokens: the rivals of the ops.

Each verifier takes the batch and returns the number of drafts accepted, [B]; what it computes beside that is part of
its time. It starts, as the ops do, from logits at temperature 1. `unfit` says why one cannot run a batch.

No verifier here computes the KL divergence or log-probabilities: each does less than `verify`.

vLLM is called by the interface of 0.32, and ran with that version's CPU kernels, never on a GPU. The call into
FlashInfer was compared with the signature in flashinfer-python 0.7.4; it never ran. Missing are the kernels of vLLM's
model runner V2, SGLang's chain sampling and Liger's KL divergence.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TOP_K, TOP_P = 50, 0.9  # of the truncation


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
    """Plain torch on the flat rows: softmax both, gather, ratio, accept, residual, race."""
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
    """VLLM's rejection sampler, softmax of both sides (the target's inside it) and the bonus draw included."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    B = len(batch.lengths)
    tokens = rejection_sample(
        draft_token_ids=batch.tokens.int(),
        num_draft_tokens=batch.lengths,
        max_spec_len=max(batch.lengths),
        cu_num_draft_tokens=batch.cu[1:],
        draft_probs=batch.draft.softmax(-1, dtype=torch.float32),
        target_logits=batch.target[batch.rows].float(),
        bonus_token_ids=_draw(batch.target[batch.bonus].softmax(-1, dtype=torch.float32)).int()[:, None],
        sampling_metadata=SimpleNamespace(
            all_greedy=False, all_random=True, generators={}, temperature=torch.ones(B, device=batch.target.device)
        ),
    )
    return (tokens >= 0).sum(1) - 1


def kl_eager(target: Tensor, draft: Tensor) -> Tensor:
    """KL(p || q) of each pair of rows in plain torch."""
    log_p = target.log_softmax(-1, dtype=torch.float32)
    log_q = draft.log_softmax(-1, dtype=torch.float32)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def sample_eager(batch: Batch) -> Tensor:
    """Softmax and race."""
    return _draw(batch.draft.softmax(-1, dtype=torch.float32))


def threshold_sort(batch: Batch) -> Tensor:
    """Smallest draft logit that top-k and then top-p keep, row by row, by the steps of transformers' warpers."""
    logits = batch.draft.float()
    kth = logits.topk(TOP_K).values[:, -1:]
    rising = logits.masked_fill(logits < kth, -torch.inf).sort(-1).values
    cut = rising.softmax(-1).cumsum(-1) <= 1 - TOP_P
    cut[:, -1] = False
    return rising.masked_fill(cut, torch.inf).amin(-1)


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


def _draw(weights: Tensor) -> Tensor:
    """One index a row by an exponential race, as engines draw; multinomial adds passes that check its input."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


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
    out = tokens.new_full((first.shape[0], K + 1), -1).index_put((owner, column), tokens)
    place = torch.arange(K + 1, device=target.device)
    out = torch.where(place == accepted[:, None], _draw(residual)[:, None], out)
    return out.masked_fill(place > accepted[:, None], -1), accepted
