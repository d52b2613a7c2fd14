"""Triton kernel of `verify` and `dsde_step`: a whole step in one launch.

One program for each part of each drafted pair of rows reads it once (`kld_kernel.stream_pair`). The last program of a
sequence to arrive merges the records, decides, draws the one more token from at most two rows that it reads for it,
writes the sequence's results and takes its KLD into its slot. The last sequence computes the batch cap.

Reads U (1 + r / (2K+1)) bytes, U = the N + B target and N draft rows, r = share of sequences that reject, and per pair
of rows and program a record of 36 bytes, written and read; writes nothing of vocabulary size. Eager needs 9 to 13 U.
"""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201, ANN202, SIM102  (jit functions have neither return types nor short-circuits)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .kld_kernel import FLOOR, INF, LN2, RECORD, merge, sound, stream_pair
from .rng_kernel import ACCEPT, RESAMPLE, last_to_arrive, log2_scale, row_at, uniform_first
from .sampling_kernel import race
from .stability import DsdeRule, StabilityState
from .stability_kernel import rule_arguments, update_slot
from .verify import _EMPTY, StepResult, Verification

EMPTY = tl.constexpr(_EMPTY)
_VOTERS = tl.constexpr(1024)
_CAPS = {"nearest": 0, "floor": 1, "ceil": 2}


@triton.jit
def _pick(x, at):
    """The one number of a vector [L] at the place where `at` is true; 0 where it is nowhere."""
    return tl.sum(tl.where(at, x, 0), 0)


@triton.jit
def _threshold(thresholds, row, mask, greedy):
    """Thresholds of rows; -inf, which keeps everything, where there are none or the sequence is greedy."""
    limit = tl.where(mask, -INF, -INF)
    if thresholds is not None:
        limit = tl.where(greedy, -INF, tl.load(thresholds + row, mask=mask, other=-INF))
    return limit


@triton.jit
def _finish(
    target, target_stride, draft, draft_stride, draft_tokens, temperature, seed, step, target_threshold,
    draft_threshold,
    tokens, num_accepted, kld, accept_prob, logprobs, ok,
    records, i, first, k, vocabulary, shared, max_draft,
    SPLIT: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decide, draw and commit for sequence i; its number of accepted drafts and whether its rows were sound."""
    t = tl.load(temperature + i)
    greedy = t == 0
    scale = log2_scale(t)
    column = tl.arange(0, COLUMNS)
    drafted = column < k
    row = first + column  # of the draft; the target's is i further
    merged = merge(
        row_at(records, row, SPLIT * RECORD), drafted, scale,
        SPLIT, draft is not None, target_threshold is not None, draft_threshold is not None,
    )  # fmt: skip
    top_t, s_t, kept_t, top_d, s_d, kept_d, kl, argmax = merged

    # The drafted token: log2 p and q after truncation, KLD before it.
    ids = tl.load(draft_tokens + row, mask=drafted, other=-1).to(tl.int64)
    known = (ids >= 0) & (ids < vocabulary)
    x = tl.load(row_at(target, row + i, target_stride) + ids, mask=known, other=-INF).to(tl.float32)
    limit_t = _threshold(target_threshold, row + i, column <= k, greedy)
    log_p = tl.where(x < limit_t, -INF, (x - top_t) * scale - tl.log2(kept_t))
    fine = sound(s_t) & (kept_t > 0)
    limit_d = _threshold(draft_threshold, row, drafted, greedy)
    if draft is not None:
        y = tl.load(row_at(draft, row, draft_stride) + ids, mask=known & (ids < shared), other=-INF).to(tl.float32)
        log_q = tl.where(y < limit_d, -INF, (y - top_d) * scale - tl.log2(kept_d))
        fine_d = sound(s_d) & (kept_d > 0)
    else:
        log_q = tl.where(drafted, 0.0, 0.0)
        fine_d = drafted
        surprise = -LN2 * ((x - top_t) * scale - tl.log2(s_t))
        kl = tl.where(sound(s_t), tl.where(surprise < INF, surprise, -FLOOR), float("nan"))
        kl = tl.where(known, kl, -FLOOR)
    tl.store(kld + row, kl, mask=drafted)

    # Acceptance.
    request, count = tl.load(seed + i), tl.load(step + i)
    ratio = tl.where(known & fine & fine_d & (log_p > -INF), tl.exp2(tl.minimum(log_p - log_q, 0.0)), 0.0)
    ratio = tl.where(greedy, (known & sound(s_t) & (ids == argmax)).to(tl.float32), ratio)
    passes = uniform_first(request, count, column, ACCEPT) < ratio  # greedy: 0 or 1
    tl.store(accept_prob + row, ratio, mask=drafted)
    n = tl.min(tl.where(drafted & (passes == 0), column, k), 0)

    # One more token, from target row n: the residual after a rejection, p after the last draft or a foreign id.
    stopped = (column == n) & drafted
    rejected = n < k
    residual = rejected & (greedy == 0) & (_pick(known.to(tl.int32), stopped) > 0)
    healthy = (rejected == 0) | (_pick(fine.to(tl.int32), stopped) > 0)
    healthy = healthy & ((residual == 0) | (_pick(fine_d.to(tl.int32), stopped) > 0))
    token = _pick(argmax, stopped)
    top = tl.where(rejected, _pick(top_t, stopped), -INF)
    kept = _pick(kept_t, stopped)
    final = row_at(target, first + i + n, target_stride)
    rejected_draft = draft
    if draft is not None:
        rejected_draft = row_at(draft, first + n, draft_stride)
    # A residual that is nothing but rounding makes a second turn, with p.
    draws = healthy & ((rejected == 0) | (greedy == 0))
    for _ in range(2):
        if draws:
            token, _best, heaviest, top, kept = race(
                final, 0, vocabulary, scale, _pick(limit_t, column == n), top,
                rejected_draft, shared, _pick(limit_d, stopped), _pick(top_d, stopped),
                _pick(kept_t, stopped) / _pick(kept_d, stopped),
                _pick(ids, stopped), residual,
                greedy, request, count, n, RESAMPLE, TILE,
            )  # fmt: skip
            draws = residual & (heaviest <= EMPTY * kept)
            residual = residual & (heaviest < 0)
    healthy = healthy & sound(kept)
    log_final = (tl.load(final + token).to(tl.float32) - top) * scale - tl.log2(kept)

    place = i.to(tl.int64) * (max_draft + 1) + column
    inside = column <= max_draft
    emitted = tl.where(column < n, ids, tl.where(column == n, tl.where(healthy, token, -1), -1))
    tl.store(tokens + place, emitted, mask=inside)
    logs = tl.where(column < n, LN2 * log_p, tl.where(column == n, tl.where(healthy, LN2 * log_final, 0.0), 0.0))
    tl.store(logprobs + place, logs, mask=inside)
    tl.store(num_accepted + i, n)
    tl.store(ok + i, healthy)
    return n, healthy


@triton.jit
def _cap(next_sl, sl_cap, sequences, CAP: tl.constexpr):
    """Cap the lengths [sequences], which arrive as 4 * length + 2 * past calibration + voted.

    Sums of integers are exact, whatever their order.
    """
    whole, votes = 0, 0
    for first in range(0, sequences, _VOTERS):
        i = first + tl.arange(0, _VOTERS)
        code = tl.load(next_sl + i, mask=i < sequences, other=0, cache_modifier=".cg")
        voter = (code & 3) == 3
        whole += tl.sum(tl.where(voter, code >> 2, 0), 0)
        votes += tl.sum(voter.to(tl.int32), 0)
    cap = tl.full([], 0x7FFFFFFF, tl.int32)
    if votes > 0:
        if CAP == 0:
            cap = (2 * whole + votes) // (2 * votes)
        elif CAP == 1:
            cap = whole // votes
        else:
            cap = (whole + votes - 1) // votes
    for first in range(0, sequences, _VOTERS):
        i = first + tl.arange(0, _VOTERS)
        code = tl.load(next_sl + i, mask=i < sequences, other=0, cache_modifier=".cg")
        tl.store(next_sl + i, tl.where((code & 2) > 0, tl.minimum(code >> 2, cap), code >> 2), mask=i < sequences)
    tl.store(sl_cap, tl.where(votes > 0, cap.to(tl.float32), INF))


@triton.jit(
    # A batch that grows or a vector that is a slice of another must not compile the kernel again.
    do_not_specialize=["sequences", "max_draft"],
    do_not_specialize_on_alignment=[
        "draft_tokens", "cu_draft", "temperature", "seed", "step", "target_threshold", "draft_threshold", "slots"
    ],
)  # fmt: skip
def verify_kernel(
    target, target_stride, draft, draft_stride,  # [N+B, Vt]; [N, Vd] or None
    draft_tokens, cu_draft, temperature, seed, step,  # [N], [B+1], [B], [B], [B]
    target_threshold, draft_threshold,  # [N+B] or None; [N] or None
    tokens, num_accepted, kld, accept_prob, logprobs, ok,  # outputs, as in Verification
    table, slots, weights, next_sl, sl_cap,  # of the step; None for verify alone
    records, counters,  # [N * SPLIT, RECORD]; one a sequence, one for the batch
    sequences, vocabulary, shared, max_draft,
    ALPHA: tl.constexpr, COEFFICIENT: tl.constexpr, FRACTION: tl.constexpr, SL_MIN: tl.constexpr,
    SL_LIMIT: tl.constexpr, CALIBRATION: tl.constexpr, WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr,
    DIVIDE: tl.constexpr, CAP: tl.constexpr,
    SPLIT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Sequences in order, so that early ones draw their last token while later ones are still read.
    unit = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    i = unit // (max_draft + 1)
    j = unit % (max_draft + 1)
    first = tl.load(cu_draft + i).to(tl.int64)
    k = (tl.load(cu_draft + i + 1).to(tl.int64) - first).to(tl.int32)
    if j < k:
        t = tl.load(temperature + i)
        greedy = t == 0
        limit_t, limit_d, draft_row = None, None, None
        if target_threshold is not None:
            limit_t = tl.where(greedy, -INF, tl.load(target_threshold + first + i + j))
        if draft is not None:
            draft_row = row_at(draft, first + j, draft_stride)
            if draft_threshold is not None:
                limit_d = tl.where(greedy, -INF, tl.load(draft_threshold + first + j))
        stream_pair(
            row_at(target, first + i + j, target_stride), draft_row, part * (TILE * TILES), vocabulary, shared,
            log2_scale(t), limit_t, limit_d, greedy,
            row_at(records, (first + j) * SPLIT + part, RECORD), TILE, TILES,
        )  # fmt: skip
    # The bonus row is not read yet; one program arrives for it, so that a sequence without drafts is finished too.
    if (j < k) | ((j == k) & (part == 0)):
        if last_to_arrive(counters + i, k * SPLIT + 1):
            accepted, healthy = _finish(
                target, target_stride, draft, draft_stride, draft_tokens, temperature, seed, step, target_threshold,
                draft_threshold,
                tokens, num_accepted, kld, accept_prob, logprobs, ok,
                records, i, first, k, vocabulary, shared, max_draft, SPLIT, TILE, COLUMNS,
            )  # fmt: skip
            if table is not None:
                tl.debug_barrier()  # the KLD of all threads is there
                sl, past, voted = update_slot(
                    table, tl.load(slots + i), weights,
                    kld + first, k, accepted, healthy, tl.load(temperature + i),
                    ALPHA, COEFFICIENT, FRACTION, SL_MIN, SL_LIMIT, CALIBRATION, WINDOW, WINDOW_BLOCK, DIVIDE,
                )  # fmt: skip
                if sl_cap is None:
                    tl.store(next_sl + i, sl)
                else:
                    tl.store(next_sl + i, 4 * sl + 2 * past.to(tl.int32) + voted.to(tl.int32))
                    if last_to_arrive(counters + sequences, sequences):
                        _cap(next_sl, sl_cap, sequences, CAP)


def verify_triton(
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
    return _launch(*arguments, target_threshold, draft_threshold, DsdeRule(), None, None)[0]


def dsde_step_triton(
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
    verification, next_sl, sl_cap = _launch(*arguments, target_threshold, draft_threshold, rule, state, slots)
    return StepResult(*verification, next_sl, sl_cap)


def _launch(
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
    rule: DsdeRule,
    state: StabilityState | None,
    slots: Tensor | None,
) -> tuple[Verification, Any, Any]:
    device, drafts, sequences = target_logits.device, draft_tokens.shape[0], temperature.shape[0]
    vocabulary = target_logits.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    out = Verification(
        tokens=empty(sequences, max_draft + 1, dtype=torch.int64),
        num_accepted=empty(sequences, dtype=torch.int32),
        kld=empty(drafts),
        accept_prob=empty(drafts),
        logprobs=empty(sequences, max_draft + 1),
        ok=empty(sequences, dtype=torch.bool),
    )
    next_sl = sl_cap = None
    if state is not None:
        next_sl = empty(sequences, dtype=torch.int32)
        capped = rule.cap is not None and sequences > 0
        sl_cap = empty() if capped else torch.full((), torch.inf, device=device)
    if sequences:
        split = launch.splits(vocabulary)
        counters, records = launch.workspace(device, sequences + 1, drafts * split * RECORD.value)
        verify_kernel[(sequences * (max_draft + 1) * split,)](
            target_logits, target_logits.stride(0),
            draft_logits, 0 if draft_logits is None else draft_logits.stride(0),
            draft_tokens.contiguous(), cu_draft.contiguous(),
            temperature.contiguous(), seed.contiguous(), step.contiguous(),
            None if target_threshold is None else target_threshold.contiguous(),
            None if draft_threshold is None else draft_threshold.contiguous(),
            *out,
            None if state is None else state.table, None if slots is None else slots.contiguous(),
            None if state is None else state.weights, next_sl, None if rule.cap is None else sl_cap,
            records, counters,
            sequences, vocabulary, vocabulary if draft_logits is None else min(vocabulary, draft_logits.shape[1]),
            max_draft,
            **rule_arguments(rule), CAP=_CAPS[rule.cap or "nearest"],
            SPLIT=split, TILE=launch.TILE, TILES=launch.TILES, COLUMNS=triton.next_power_of_2(max_draft + 1),
            num_warps=launch.WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out, next_sl, sl_cap
