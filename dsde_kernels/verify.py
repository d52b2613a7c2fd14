"""Verify a ragged batch of drafts by rejection sampling, and DSDE's whole step after it.

With p the target and q the draft distribution at a position, both after temperature and truncation, the drafted token x
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318)

    passes iff  u < p(x) / q(x)                        u from the accept stream, offset = position j
    else        draw from  max(p - q, 0) / sum         race on the resample stream, offset = number accepted
    all passed  draw from  p of the bonus row          the same stream

which leaves every emitted token distributed as p. KLD (see kld.py) is taken at every drafted position.

The twin sweeps the N pairs of rows once for KLD, p(x) and q(x) (once more if truncation is on), then one target row
and, after a rejection, one draft row a sequence. It holds at most two float32 matrices of N rows.

Edge rules
* Temperature 0: passes iff x is the target's argmax, lowest id on ties; no number is drawn; KLD and log-probabilities
  are taken at temperature 1 and without truncation.
* p(x) = 0 never passes; p = q always does, since both come from the same operations and u < 1.
* Empty residual (nothing but rounding left): draw from p.
* No draft logits: drafts are deterministic, q is 1 at x. KLD is then -log p(x), with p(x) = 0 counted as 1e-8.
* Draft id outside [0, Vt): it is rejected and the row is drawn from p.
* Draft columns beyond Vt are ignored: drafts must be drawn from ``draft_logits[:, :Vt]``. Target columns beyond Vd have
  q = 0.
* A row that is consumed and holds NaN, +inf or no finite logit ends its sequence: `ok` False, no token from there on. A
  sequence consumes target rows up to and including the one it draws its last token from, and, when it is sampled, the
  draft rows of the drafts it looks at. Greedy verification never looks at q: there, a broken draft row only makes its
  KLD NaN.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from . import rng
from .backend import traced, use_triton
from .checks import check_device, check_logits, check_range, check_vector
from .kld import LOG_FLOOR, kl_from_log_probs_torch
from .rows import argmax, log_softmax
from .sampling import race_torch
from .stability import DsdeRule, StabilityState, speculation_lengths_torch, stability_update_torch

_EMPTY = 1e-30  # p = q leaves exactly 0, both come from the same operations; nothing this small is worth drawing from


class Verification(NamedTuple):
    """Outcome of one verification of B sequences with N drafts.

    Attributes
    ----------
    tokens : [B, max_draft+1] int64
        Accepted drafts, then the resampled or bonus token; -1 beyond.
    num_accepted : [B] int32
        Drafts kept. Emitted tokens are one more, or just these where `ok` is False.
    kld : [N] float32
        KL(p || q) at each drafted position, nats; NaN where a row of logits is broken.
    accept_prob : [N] float32
        min(1, p/q) of each draft; for greedy sequences 1 iff it is the argmax. 0 for ids outside the vocabulary.
    logprobs : [B, max_draft+1] float32
        log p of each emitted token, after temperature and truncation (greedy: temperature 1, none); 0 beyond.
    ok : [B] bool
        False where a consumed row of logits holds NaN, +inf or no finite number.
    """

    tokens: Tensor
    num_accepted: Tensor
    kld: Tensor
    accept_prob: Tensor
    logprobs: Tensor
    ok: Tensor


class StepResult(NamedTuple):
    """`Verification`, then what DSDE makes of it.

    Attributes
    ----------
    next_sl : [B] int32
        Speculation length of each sequence's next step, capped.
    sl_cap : 0-d float32
        The batch cap; +inf where there is none.
    """

    tokens: Tensor
    num_accepted: Tensor
    kld: Tensor
    accept_prob: Tensor
    logprobs: Tensor
    ok: Tensor
    next_sl: Tensor
    sl_cap: Tensor


def verify_torch(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None,
    draft_threshold: Tensor | None,
) -> Verification:
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
        ratio = (log_p - log_q).exp_().clamp_(max=1.0).nan_to_num_(nan=0.0).masked_fill_(unknown, 0.0)
        u = rng.uniform_torch(seed[owner], step[owner], index[:-1] - first[owner], rng.ACCEPT, 1)[:, 0]
        passes = torch.where(greedy[owner], passes, (u < ratio) & (kld == kld))
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
        kld = -untruncated.masked_fill(untruncated == -torch.inf, LOG_FLOOR)
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
    use = rejected & (residual.amax(-1) > _EMPTY)
    return torch.where(use[:, None], residual, p)


def dsde_step_torch(
    verification: Verification,
    cu_draft: Tensor,
    temperature: Tensor,
    state: StabilityState,
    slots: Tensor,
    rule: DsdeRule,
) -> StepResult:
    proposed = stability_update_torch(
        state, slots, verification.kld, cu_draft, verification.num_accepted, rule, temperature, verification.ok
    )
    return StepResult(*verification, *speculation_lengths_torch(state, slots, rule, proposed))


def verify(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    *,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None = None,
    draft_threshold: Tensor | None = None,
) -> Verification:
    """Accept or reject each draft of a ragged batch and draw one more token for each sequence.

    Sequence i drafted ``k_i = cu_draft[i+1] - cu_draft[i]`` tokens; its draft rows start at ``cu_draft[i]``, its target
    rows at ``cu_draft[i] + i``, of which the last (the k_i + 1st) is the bonus row.

    Parameters
    ----------
    target_logits : [N+B, Vt] float32, bfloat16 or float16
        Raw logits, any row stride >= Vt. Not changed.
    draft_logits : [N, Vd] float32, bfloat16 or float16, or None
        What the drafts were drawn from (columns beyond Vt ignored). None: deterministic drafts, q is one-hot.
    draft_tokens : [N] int64
        Ids outside [0, Vt), such as the placeholder -1, are rejected and the row is drawn from p.
    cu_draft : [B+1] int32 or int64
        Exclusive cumulative sum of k, with a leading 0.
    temperature : [B] float32
        0 is greedy.
    seed, step : [B] int32 or int64
        The request's seed and its own count of verifications: a pair must not be used twice.
    max_draft : int
        At least every k_i; sets the width of the results.
    target_threshold : [N+B] float32, optional
        From `truncation_threshold`, for each target row.
    draft_threshold : [N] float32, optional
        The thresholds the drafts were drawn with.

    Returns
    -------
    Verification

    Raises
    ------
    ValueError
        Wrong shape, dtype or device; a temperature below 0 or a `cu_draft` that is no such sum (both read on CPU
        tensors only).

    Examples
    --------
    Two sequences with two drafts and none, vocabulary 3, greedy:

    >>> target = torch.tensor([[0., 9, 0], [0, 0, 9], [9, 0, 0], [0, 0, 9]])
    >>> zeros = torch.zeros(2, dtype=torch.int64)
    >>> out = verify(target, None, torch.tensor([1, 0]), torch.tensor([0, 2, 2]), temperature=torch.zeros(2),
    ...              seed=zeros, step=zeros, max_draft=2)
    >>> out.tokens.tolist(), out.num_accepted.tolist()
    ([[1, 2, -1], [2, -1, -1]], [1, 0])
    """
    arguments = (target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft)
    if traced(target_logits):
        return Verification(*torch.ops.dsde_kernels.verify(*arguments, target_threshold, draft_threshold))
    return run_verify(*arguments, target_threshold, draft_threshold)


def run_verify(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None,
    draft_threshold: Tensor | None,
) -> Verification:
    arguments = (target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft)
    _check(*arguments, target_threshold, draft_threshold)
    if use_triton(target_logits.device):
        from .verify_kernel import verify_triton

        return verify_triton(*arguments, target_threshold, draft_threshold)
    return verify_torch(*arguments, target_threshold, draft_threshold)


def dsde_step(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    *,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    state: StabilityState,
    slots: Tensor,
    rule: DsdeRule,
    target_threshold: Tensor | None = None,
    draft_threshold: Tensor | None = None,
) -> StepResult:
    """`verify`, then `stability_update` and `speculation_lengths`: one whole DSDE step.

    Parameters
    ----------
    state : StabilityState
        Built for `rule`; the slots `slots` are changed in place, except those of sequences without drafts, with a KLD
        that is not finite, or with `ok` False.
    slots : [B] int32 or int64
        A different slot for each sequence.
    rule : DsdeRule

    The other parameters, and the errors, are those of `verify`.

    Returns
    -------
    StepResult
    """
    arguments = (target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft)
    thresholds = (target_threshold, draft_threshold)
    if traced(target_logits):
        parts = (state.table, state.weights, slots, rule.numbers())
        return StepResult(*torch.ops.dsde_kernels.dsde_step(*arguments, *thresholds, *parts))
    return run_dsde_step(*arguments, *thresholds, state, slots, rule)


def run_dsde_step(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None,
    draft_threshold: Tensor | None,
    state: StabilityState,
    slots: Tensor,
    rule: DsdeRule,
) -> StepResult:
    arguments = (target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft)
    _check(*arguments, target_threshold, draft_threshold)
    check_vector("slots", slots, cu_draft.shape[0] - 1, target_logits.device, integer=True)
    check_device("state", state.table, target_logits.device)
    if use_triton(target_logits.device):
        from .verify_kernel import dsde_step_triton

        return dsde_step_triton(*arguments, target_threshold, draft_threshold, state, slots, rule)
    verification = verify_torch(*arguments, target_threshold, draft_threshold)
    return dsde_step_torch(verification, cu_draft, temperature, state, slots, rule)


def _check(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None,
    draft_threshold: Tensor | None,
) -> None:
    device, drafts = target_logits.device, draft_tokens.numel()
    check_vector("draft_tokens", draft_tokens, drafts, device, integer=True)
    sequences = temperature.numel()
    check_vector("temperature", temperature, sequences, device, integer=False)
    check_vector("cu_draft", cu_draft, sequences + 1, device, integer=True)
    check_vector("seed", seed, sequences, device, integer=True)
    check_vector("step", step, sequences, device, integer=True)
    check_logits("target_logits", target_logits, drafts + sequences)
    if draft_logits is not None:
        check_logits("draft_logits", draft_logits, drafts, device)
    if target_threshold is not None:
        check_vector("target_threshold", target_threshold, drafts + sequences, device, integer=False)
    if draft_threshold is not None:
        check_vector("draft_threshold", draft_threshold, drafts, device, integer=False)
    check_range("temperature", temperature, 0.0, torch.finfo(torch.float32).max)
    if cu_draft.device.type == "cpu":
        cu = cu_draft.tolist()
        lengths = [b - a for a, b in pairwise(cu)]
        if cu[0] != 0 or cu[-1] != drafts or min(lengths, default=0) < 0 or max(lengths, default=0) > max_draft:
            raise ValueError(
                f"cu_draft must rise from 0 to {drafts}, the number of draft tokens, in steps of at most "
                f"max_draft = {max_draft}; got {cu}"
            )
