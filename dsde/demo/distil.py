"""The draft: distilled from the target on real text and on the target's own continuations.

The latter are what the draft meets while decoding. The target's last hidden states are kept instead of its logits: 128
numbers a token, not 4096, and one small product brings the logits back.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM

from dsde.demo import pair
from dsde.demo.optimize import MICRO_BATCHES, MICRO_TOKENS, Budget, Optimizer, make_model

PREFIX, CONTINUATION = 64, 128
"""Tokens of a real prefix, and of the target's continuation of it."""

TEMPERATURE = 0.7
REAL_WINDOW = 512


@torch.inference_mode()
def continuations(target: LlamaForCausalLM, tokens: Tensor, minutes: float, rows: int = 128) -> Tensor:
    """Return pieces of real text with the target's continuations, `[n, PREFIX + CONTINUATION]`.

    Half of every batch is greedy, half sampled at `TEMPERATURE`. End-of-text does not stop a row: text after it is as
    good as any for distillation.
    """
    done = []
    budget = Budget(minutes, "continuations")
    for _ in budget:
        starts = torch.randint(len(tokens) - PREFIX, (rows,))
        fresh = tokens[starts[:, None] + torch.arange(PREFIX)]
        text, cache = [fresh], DynamicCache()
        for _ in range(CONTINUATION):
            logits = target(input_ids=fresh, **{pair.CACHE: cache}, logits_to_keep=1).logits[:, -1].float()
            # The largest of logits plus scaled Gumbel noise is a sample.
            logits[rows // 2 :] -= TEMPERATURE * torch.empty_like(logits[rows // 2 :]).exponential_().log()
            fresh = logits.argmax(-1, keepdim=True)
            text.append(fresh)
        done.append(torch.cat(text, 1))
        budget.record(rows * CONTINUATION)
    return torch.cat(done)


@torch.inference_mode()
def hidden_states(target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the target's last hidden states `[n, length, hidden]`; its `lm_head` makes them logits."""
    batches = tqdm(ids.split(4 * MICRO_TOKENS // ids.shape[1]), desc="teacher", mininterval=5)
    return torch.cat([target.model(input_ids=rows, use_cache=False).last_hidden_state for rows in batches])


@torch.no_grad()
def make_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Build a draft whose embeddings are the principal components of the target's, which saves relearning them."""
    draft = make_model(layers=2, hidden=64, intermediate=320)
    components, scales, _ = torch.linalg.svd(target.model.embed_tokens.weight.float(), full_matrices=False)
    width = draft.config.hidden_size
    draft.model.embed_tokens.weight.copy_(components[:, :width] * scales[:width])
    return draft


def distil(
    target: LlamaForCausalLM, tokens: Tensor, minutes: float, generation_minutes: float
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train a draft on the whole distributions of `target`, by forward KL.

    Micro-batches alternate between the target's continuations and as much real text, cut in long windows so that the
    draft also learns late positions.

    Parameters
    ----------
    target : LlamaForCausalLM
        The teacher, in the precision that it is shipped in.
    tokens : Tensor
        `[tokens]`, real text.
    minutes, generation_minutes : float
        Wall time to train, and to write continuations before.

    Returns
    -------
    draft : LlamaForCausalLM
        The draft, in float32.
    card : dict
        The tokens it saw, its last training loss and the size of the two kinds of text.
    """
    own = continuations(target, tokens, generation_minutes)
    real = tokens[: len(tokens) // REAL_WINDOW * REAL_WINDOW].view(-1, REAL_WINDOW)
    real = real[torch.randperm(len(real))[: own.numel() // REAL_WINDOW]]
    data = [(ids, hidden_states(target, ids)) for ids in (own, real)]

    draft = make_draft(target)
    optimizer, budget = Optimizer(draft), Budget(minutes, "draft")
    for progress in budget:
        for ids, hidden in data * (MICRO_BATCHES // len(data)):
            chosen = torch.randint(len(ids), (MICRO_TOKENS // ids.shape[1],))
            with torch.no_grad():
                log_p = target.lm_head(hidden[chosen]).flatten(0, 1).float().log_softmax(-1)
            with torch.autocast("cpu", torch.bfloat16):
                logits = draft(input_ids=ids[chosen], use_cache=False).logits
            log_q = logits.flatten(0, 1).float().log_softmax(-1)
            loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
            (loss / MICRO_BATCHES).backward()
            budget.record(log_q.shape[0], loss.item())
        optimizer.step(progress)
    card = {
        "tokens": budget.tokens,
        "loss_train": round(budget.loss, 4),
        "distilled_tokens": {"continuations": own.numel(), "real": real.numel()},
    }
    return draft.eval(), card
