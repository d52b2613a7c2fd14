"""Torch twin of `verify` and `dsde_step`.

Sweeps the N pairs of rows once for KLD, p(x) and q(x) (once more if truncation is on), then one target row and, after a
rejection, one draft row a sequence. It holds at most two float32 matrices of N rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rng
from .kld import FARTHEST, LOG_FLOOR, kl_from_log_probs_torch
from .rows import argmax, log_softmax
from .sampling import race_torch
from .stability import DsdeRule, StabilityState, speculation_lengths_torch, stability_update_torch
from .verify import EMPTY, Inputs, StepResult, Verification


def verify_torch(x: Inputs) -> Verification:
    target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft, *thresholds = x
    target_threshold, draft_threshold = thresholds
    drafts, vocabulary = draft_tokens.shape[0], target_logits.shape[1]
    device = target_logits.device
    cu = cu_draft.long()
    first, k = cu[:-1], cu[1:] - cu[:-1]
    index = torch.arange(drafts + 1, device=device)
    owner = torch.bucketize(index[:-1], cu[1:], right=True)  # the sequence of each draft
    draft_rows = index[:-1] + owner
    bonus_rows = cu[1:] + torch.arange(k.shape[0], device=device)

    sampled = bool(temperature.any())
    greedy = temperature == 0
    row_temperature = temperature.masked_fill(greedy, 1.0) if sampled else None
    if not sampled:
        target_threshold = draft_threshold = None
    if target_threshold is not None:
        target_threshold = target_threshold.clone()
        target_threshold[draft_rows[greedy[owner]]] = -torch.inf
        target_threshold[bonus_rows[greedy]] = -torch.inf

    # One sweep over the drafted rows. A broken target row shows as log p = NaN at its argmax.
    kld, log_p, log_q = _score(
        target_logits.index_select(0, draft_rows),
        None if draft_logits is None else draft_logits[:, :vocabulary],
        draft_tokens.clamp(0, vocabulary - 1),
        None if row_temperature is None else row_temperature[owner],
        None if target_threshold is None else target_threshold[draft_rows],
        draft_threshold,
    )
    unknown = (draft_tokens < 0) | (draft_tokens >= vocabulary)
    if draft_logits is None:
        kld.masked_fill_(unknown, -LOG_FLOOR)
    top = argmax(target_logits)
    is_top = draft_tokens == top[draft_rows]
    passes, accept_prob = is_top & (log_p == log_p), is_top.float()
    if sampled:
        ratio = (log_p - log_q).exp_().clamp_(max=1.0).nan_to_num_(nan=0.0).masked_fill_(unknown | kld.isnan(), 0.0)
        u = rng.uniform_torch(seed[owner], step[owner], index[:-1] - first[owner], rng.ACCEPT, 1)[:, 0]
        passes = torch.where(greedy[owner], passes, u < ratio)
        accept_prob = torch.where(greedy[owner], accept_prob, ratio)

    # One row a sequence.
    column = torch.arange(max_draft + 1, device=device)
    position = (first[:, None] + column).clamp_(max=max(drafts - 1, 0))

    def spread(x: Tensor) -> Tensor:
        return x.take(position) if drafts else x.new_zeros(position.shape)

    num_accepted = (spread(passes) & (column < k[:, None])).cumprod(1).sum(1)

    # One more token a sequence: from the row after its last accepted draft.
    final = bonus_rows - k + num_accepted
    log_p_final = log_softmax(
        target_logits.index_select(0, final),
        row_temperature,
        None if target_threshold is None else target_threshold[final],
    )
    token, ok = top[final], None
    if sampled:
        rows = temperature.nonzero()[:, 0]
        weights = log_p_final[rows].exp_()
        if drafts:
            stopped = (first + num_accepted)[rows].clamp_(max=drafts - 1)  # the draft that failed, if one did
            rejected = (num_accepted < k)[rows] & ~unknown[stopped]
            if draft_logits is None:
                q = None
            else:
                threshold = None if draft_threshold is None else draft_threshold[stopped]
                q = log_softmax(draft_logits[stopped, :vocabulary], temperature[rows], threshold).exp_()
                ok = torch.ones_like(greedy)
                ok[rows] = ~(rejected & kld[stopped].isnan())
            weights = _residual(weights, q, draft_tokens[stopped].clamp_(0, vocabulary - 1), rejected)
        token[rows] = race_torch(weights, seed[rows], step[rows], num_accepted[rows], rng.RESAMPLE)
    logprob = log_p_final.gather(1, token[:, None])[:, 0]
    ok = logprob == logprob if ok is None else ok & (logprob == logprob)

    tokens, logprobs = spread(draft_tokens), spread(log_p)
    at, beyond = column == num_accepted[:, None], column > num_accepted[:, None]
    broken = ~ok
    return Verification(
        tokens=torch.where(at, token.masked_fill_(broken, -1)[:, None], tokens).masked_fill_(beyond, -1),
        num_accepted=num_accepted.int(),
        kld=kld,
        accept_prob=accept_prob,
        logprobs=torch.where(at, logprob.masked_fill_(broken, 0.0)[:, None], logprobs).masked_fill_(beyond, 0.0),
        ok=ok,
    )


def _score(
    target: Tensor,
    draft: Tensor | None,
    tokens: Tensor,
    temperature: Tensor | None,
    target_threshold: Tensor | None,
    draft_threshold: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """KLD, log p(x) and log q(x) of each drafted row; p and q after truncation, KLD before it.

    At most two matrices of N rows live at a time, `target` (a copy) among them.
    """
    log_p = log_q = None
    if target_threshold is not None:
        log_p = _gather(log_softmax(target, temperature, target_threshold), tokens)
    if draft is not None and draft_threshold is not None:
        log_q = _gather(log_softmax(draft, temperature, draft_threshold), tokens)
    target_log_probs = log_softmax(target, temperature)
    del target
    untruncated = _gather(target_log_probs, tokens)
    if draft is None:
        kld = -F.threshold(untruncated, -FARTHEST, LOG_FLOOR)
        log_q = torch.zeros_like(kld)
    else:
        draft_log_probs = log_softmax(draft, temperature)
        log_q = _gather(draft_log_probs, tokens) if log_q is None else log_q
        kld = kl_from_log_probs_torch(target_log_probs, draft_log_probs)
    return kld, untruncated if log_p is None else log_p, log_q


def _gather(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Entry `ids` >= 0 of each row, -inf where there is no such column."""
    width = log_probs.shape[1]
    values = log_probs.gather(1, ids.clamp(max=width - 1)[:, None])[:, 0]
    return values.masked_fill_(ids >= width, -torch.inf)


def _residual(p: Tensor, q: Tensor | None, ids: Tensor, rejected: Tensor) -> Tensor:
    """max(p - q, 0) where a draft was rejected and something is left of it, else p. None: q is 1 at `ids`."""
    residual = p.clone()
    if q is None:
        residual.scatter_(1, ids[:, None], 0.0)
    else:
        residual[:, : q.shape[1]].sub_(q).clamp_(min=0.0)
    use = rejected & (residual.amax(-1) > EMPTY)
    return torch.where(use[:, None], residual, p)


def dsde_step_torch(x: Inputs, state: StabilityState, slots: Tensor, rule: DsdeRule) -> StepResult:
    out = verify_torch(x)
    proposed = stability_update_torch(state, slots, out.kld, x.cu_draft, out.num_accepted, rule, x.temperature, out.ok)
    return StepResult(*out, *speculation_lengths_torch(state, slots, rule, proposed))
