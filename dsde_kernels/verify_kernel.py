"""Triton kernels of `verify` and `dsde_step`.

One program for each part of each drafted pair of rows reads it once (`kld_kernel.stream_pair`). The last program of a
sequence to arrive merges the records and decides. Then at most two rows of the sequence are raced over for its last
token (`sampling_kernel.race`), by that same program if the vocabulary is small, else by the parts of a second launch;
the last one commits: it writes the token and takes the sequence's KLD into its slot. The last sequence computes the
batch cap.

Reads U (1 + r / (2K+1)) bytes, U = the N + B target and N draft rows, r = share of sequences that reject, and small
records: 36 bytes per pair of rows and program, 48 a sequence, 20 per part of a race. Writes nothing of vocabulary size.
Eager needs 9 to 13 U.
"""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201, ANN202, SIM102  (jit functions have neither return types nor short-circuits)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .kld_kernel import FAR, FLOOR, INF, LN2, RECORD, merge, shared_load, sound, stream_pair
from .rng_kernel import ACCEPT, RESAMPLE, last_to_arrive, log2_scale, row_at, uniform_first
from .sampling_kernel import RACE, leave, merge_races, race
from .stability import DsdeRule, StabilityState
from .stability_kernel import update_slot
from .verify import EMPTY as _EMPTY
from .verify import Inputs, StepResult, Verification

# What is decided of a sequence: drafts accepted; whether its rows were sound, the token comes from the residual, it has
# to be drawn at all; the token if not; the draft that failed; maximum and kept sum of its target row; both thresholds;
# maximum of its draft row and what its weights are scaled by in the residual.
DECISION = tl.constexpr(12)
EMPTY = tl.constexpr(_EMPTY)
_VOTERS = tl.constexpr(1024)


@triton.jit
def _pick(x, at):
    """The one number of a vector [L] at the place where `at` is true; 0 where it is nowhere."""
    return tl.sum(tl.where(at, x, 0), 0)


@triton.jit
def _drafts(cu_draft, i, max_draft):
    """First draft of sequence i and how many it has, within what was promised: its programs are counted on."""
    first = tl.load(cu_draft + i).to(tl.int64)
    k = (tl.load(cu_draft + i + 1).to(tl.int64) - first).to(tl.int32)
    return first, tl.minimum(tl.maximum(k, 0), max_draft)


@triton.jit
def _threshold(thresholds, row, mask, greedy):
    """Thresholds of rows; -inf, which keeps everything, where there are none or the sequence is greedy."""
    limit = tl.full(mask.shape, -INF, tl.float32)
    if thresholds is not None:
        limit = tl.where(greedy, -INF, tl.load(thresholds + row, mask=mask, other=-INF))
    return limit


@triton.jit
def _decide(
    target, target_stride, draft, draft_stride, temperature, seed, step,
    draft_tokens, target_threshold, draft_threshold,
    tokens, kld, logprobs, num_accepted, accept_prob, decision,
    records, i, first, k, vocabulary, shared, max_draft,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the records of sequence i, write everything but its last token, and store how that is to be drawn."""
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
        log_q = tl.zeros(drafted.shape, tl.float32)
        fine_d = drafted
        surprise = ((x - top_t) * scale - tl.log2(s_t)) * -LN2
        kl = tl.where(sound(s_t), tl.where(surprise < -LN2 * FAR, surprise, -FLOOR), float("nan"))
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
    tl.store(decision, n.to(tl.float32, bitcast=True))
    tl.store(decision + 1, healthy.to(tl.float32))
    tl.store(decision + 2, residual.to(tl.float32))
    tl.store(decision + 3, (healthy & ((rejected == 0) | (greedy == 0))).to(tl.float32))
    tl.store(decision + 4, _pick(argmax, stopped).to(tl.float32, bitcast=True))
    tl.store(decision + 5, _pick(ids, stopped).to(tl.int32).to(tl.float32, bitcast=True))
    tl.store(decision + 6, tl.where(rejected, _pick(top_t, stopped), -INF))
    tl.store(decision + 7, _pick(kept_t, stopped))
    tl.store(decision + 8, _pick(limit_t, column == n))
    tl.store(decision + 9, _pick(limit_d, stopped))
    tl.store(decision + 10, _pick(top_d, stopped))
    tl.store(decision + 11, tl.div_rn(_pick(kept_t, stopped), _pick(kept_d, stopped)))  # exactly 1 where p = q

    place = i.to(tl.int64) * (max_draft + 1) + column
    others = (column <= max_draft) & (column != n)
    tl.store(tokens + place, tl.where(column < n, ids, -1), mask=others)
    tl.store(logprobs + place, tl.where(column < n, log_p * LN2, 0.0), mask=others)
    tl.store(num_accepted + i, n)


@triton.jit
def _cap(next_sl, sl_cap, sequences, RULE: tl.constexpr):
    """Cap the lengths [sequences], which arrive as 4 * length + 2 * past calibration + voted.

    Sums of integers are exact, whatever their order.
    """
    whole, votes = 0, 0
    for first in range(0, sequences, _VOTERS):
        i = first + tl.arange(0, _VOTERS)
        code = shared_load(next_sl + i, i < sequences)
        voter = (code & 3) == 3
        whole += tl.sum(tl.where(voter, code >> 2, 0), 0)
        votes += tl.sum(voter.to(tl.int32), 0)
    cap = tl.full([], 0x7FFFFFFF, tl.int32)
    if votes > 0:
        if RULE.cap == "nearest":
            cap = (2 * whole + votes) // (2 * votes)
        elif RULE.cap == "floor":
            cap = whole // votes
        else:
            cap = (whole + votes - 1) // votes
    for first in range(0, sequences, _VOTERS):
        i = first + tl.arange(0, _VOTERS)
        code = shared_load(next_sl + i, i < sequences)
        tl.store(next_sl + i, tl.where((code & 2) > 0, tl.minimum(code >> 2, cap), code >> 2), mask=i < sequences)
    tl.store(sl_cap, tl.where(votes > 0, cap.to(tl.float32), INF))


@triton.jit
def _draw(
    target, target_stride, draft, draft_stride, temperature, seed, step, cu_draft,
    decision, races, counter, i, part, vocabulary, shared, max_draft,
    PARTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Race over one of PARTS parts for the last token of sequence i.

    Whether this program is the one to commit it; the token, the maximum and the kept sum of its row.
    """
    n = tl.load(decision).to(tl.int32, bitcast=True)
    residual, draws = tl.load(decision + 2) > 0, tl.load(decision + 3) > 0
    token = tl.load(decision + 4).to(tl.int32, bitcast=True)
    top, kept = tl.load(decision + 6), tl.load(decision + 7)
    t = tl.load(temperature + i)
    scale = log2_scale(t)
    first, _k = _drafts(cu_draft, i, max_draft)
    rejected_draft = draft
    if draft is not None:
        rejected_draft = row_at(draft, first + n, draft_stride)

    row, limit, greedy = row_at(target, first + i + n, target_stride), tl.load(decision + 8), t == 0
    commits = (draws == 0) & (part == 0)
    start, stop = 0, vocabulary
    if PARTS > 1:
        start, stop = part * (TILE * TILES), tl.minimum((part + 1) * (TILE * TILES), vocabulary)
    if draws:
        token, best, heaviest, top, kept = race(
            row, start, stop, scale, limit, top,
            rejected_draft, shared, tl.load(decision + 9), tl.load(decision + 10), tl.load(decision + 11),
            tl.load(decision + 5).to(tl.int32, bitcast=True), residual, kept * EMPTY,
            greedy, tl.load(seed + i), tl.load(step + i), n, RESAMPLE, TILE,
        )  # fmt: skip
        commits = True
        if PARTS > 1:
            leave(races, part, token, best, heaviest, top, kept, PARTS)
            commits = last_to_arrive(counter, PARTS)
            if commits:
                token, _best, _heaviest, top, kept = merge_races(races, scale, greedy, PARTS)
    return commits, token, top, kept


@triton.jit
def _commit(
    target, target_stride, temperature, cu_draft,
    tokens, kld, logprobs, ok, table, slots, weights, next_sl, sl_cap,
    decision, counters, i, sequences, vocabulary, max_draft, token, top, kept,
    RULE: tl.constexpr,
):  # fmt: skip
    """Write the last token of sequence i, take its KLD into its slot; the last sequence computes the cap."""
    n = tl.load(decision).to(tl.int32, bitcast=True)
    healthy = (tl.load(decision + 1) > 0) & sound(kept)
    t = tl.load(temperature + i)
    first, k = _drafts(cu_draft, i, max_draft)
    row = row_at(target, first + i + n, target_stride)
    x = tl.load(row + token, mask=token < vocabulary, other=-INF).to(tl.float32)  # nobody wins where nothing is sound
    place = i.to(tl.int64) * (max_draft + 1) + n
    tl.store(tokens + place, tl.where(healthy, token, -1).to(tl.int64))
    tl.store(logprobs + place, tl.where(healthy, ((x - top) * log2_scale(t) - tl.log2(kept)) * LN2, 0.0))
    tl.store(ok + i, healthy)
    if table is not None:
        sl, past, voted = update_slot(table, tl.load(slots + i), weights, kld + first, k, n, healthy, t, RULE)
        if RULE.cap is None:
            tl.store(next_sl + i, sl)
            if i == 0:
                tl.store(sl_cap, INF)
        else:
            tl.store(next_sl + i, 4 * sl + 2 * past.to(tl.int32) + voted.to(tl.int32))
            if last_to_arrive(counters + sequences, sequences):
                _cap(next_sl, sl_cap, sequences, RULE)


@triton.jit
def _finish(
    target, target_stride, draft, draft_stride, temperature, seed, step, cu_draft,
    tokens, kld, logprobs, ok, table, slots, weights, next_sl, sl_cap,
    decisions, races, counters, i, part, sequences, vocabulary, shared, max_draft,
    RULE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """What follows the decision on sequence i, in the same launch or in the second: draw, then commit."""
    decision = row_at(decisions, i, DECISION)
    commits, token, top, kept = _draw(
        target, target_stride, draft, draft_stride, temperature, seed, step, cu_draft,
        decision, row_at(races, i, RACE * PARTS) if PARTS > 1 else None, counters + i, i, part,
        vocabulary, shared, max_draft, PARTS, TILE, TILES,
    )  # fmt: skip
    if commits:
        _commit(
            target, target_stride, temperature, cu_draft,
            tokens, kld, logprobs, ok, table, slots, weights, next_sl, sl_cap,
            decision, counters, i, sequences, vocabulary, max_draft, token, top, kept, RULE,
        )  # fmt: skip


# A batch that grows or a vector that is a slice of another must not compile the kernels again.
_LOOSE = {
    "do_not_specialize": ["sequences", "max_draft"],
    "do_not_specialize_on_alignment": [
        "draft_tokens", "cu_draft", "temperature", "seed", "step", "target_threshold", "draft_threshold", "slots"
    ],
}  # fmt: skip


@triton.jit(**_LOOSE)
def verify_kernel(
    target, target_stride, draft, draft_stride,  # [N+B, Vt]; [N, Vd] or None
    temperature, seed, step, cu_draft,  # [B], [B], [B], [B+1]
    tokens, kld, logprobs, ok,  # outputs, as in Verification
    table, slots, weights, next_sl, sl_cap,  # of the step; None for verify alone
    decisions, races, counters,  # [B, DECISION]; [B, RACE, PARTS] or None; one a sequence, one for the batch
    sequences, vocabulary, shared, max_draft,
    draft_tokens, target_threshold, draft_threshold,  # [N]; [N+B] or None; [N] or None
    num_accepted, accept_prob,  # outputs
    records,  # [N * SPLIT, RECORD]
    RULE: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # Sequences in order, so that early ones are decided while later ones are still read.
    unit = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    i = unit // (max_draft + 1)
    j = unit % (max_draft + 1)
    first, k = _drafts(cu_draft, i, max_draft)
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
    # The bonus row is not read yet; one program arrives for it, so that a sequence without drafts is decided too.
    if (j < k) | ((j == k) & (part == 0)):
        if last_to_arrive(counters + i, k * SPLIT + 1):
            _decide(
                target, target_stride, draft, draft_stride, temperature, seed, step,
                draft_tokens, target_threshold, draft_threshold,
                tokens, kld, logprobs, num_accepted, accept_prob, row_at(decisions, i, DECISION),
                records, i, first, k, vocabulary, shared, max_draft, SPLIT, COLUMNS,
            )  # fmt: skip
            if PARTS == 1:
                tl.debug_barrier()  # decision and KLD of all threads are there
                _finish(
                    target, target_stride, draft, draft_stride, temperature, seed, step, cu_draft,
                    tokens, kld, logprobs, ok, table, slots, weights, next_sl, sl_cap,
                    decisions, races, counters, i, 0, sequences, vocabulary, shared, max_draft,
                    RULE, PARTS, TILE, TILES,
                )  # fmt: skip


@triton.jit(**_LOOSE)
def draw_kernel(
    target, target_stride, draft, draft_stride,  # as for verify_kernel, which ran before
    temperature, seed, step, cu_draft,
    tokens, kld, logprobs, ok,
    table, slots, weights, next_sl, sl_cap,
    decisions, races, counters,
    sequences, vocabulary, shared, max_draft,
    RULE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    _finish(
        target, target_stride, draft, draft_stride, temperature, seed, step, cu_draft,
        tokens, kld, logprobs, ok, table, slots, weights, next_sl, sl_cap,
        decisions, races, counters, tl.program_id(0) // PARTS, tl.program_id(0) % PARTS,
        sequences, vocabulary, shared, max_draft, RULE, PARTS, TILE, TILES,
    )  # fmt: skip


def verify_triton(x: Inputs) -> Verification:
    out = Verification.empty(x)
    _launch(x, out, None, None, None, (None, None))
    return out


def dsde_step_triton(x: Inputs, state: StabilityState, slots: Tensor, rule: DsdeRule) -> StepResult:
    out, device = Verification.empty(x), x.target_logits.device
    next_sl = torch.empty(x.temperature.shape, dtype=torch.int32, device=device)
    sl_cap = torch.full((), torch.inf, device=device) if not len(next_sl) else torch.empty((), device=device)
    _launch(x, out, state, slots.contiguous(), rule, (next_sl, sl_cap))
    return StepResult(*out, next_sl, sl_cap)


def _launch(
    x: Inputs,
    out: Verification,
    state: StabilityState | None,
    slots: Tensor | None,
    rule: DsdeRule | None,
    lengths: tuple[Tensor | None, Tensor | None],
) -> None:
    device, sequences, vocabulary = x.target_logits.device, x.temperature.shape[0], x.target_logits.shape[1]
    if not sequences:
        return
    split, parts = launch.splits(vocabulary), launch.race_parts(vocabulary)
    common: tuple[Any, ...] = (
        x.target_logits, x.target_logits.stride(0),
        x.draft_logits, 0 if x.draft_logits is None else x.draft_logits.stride(0),
        x.temperature.contiguous(), x.seed.contiguous(), x.step.contiguous(), x.cu_draft.contiguous(),
        out.tokens, out.kld, out.logprobs, out.ok,
        None if state is None else state.table, slots, None if state is None else state.weights, *lengths,
        launch.scratch(device, "decisions", sequences * DECISION.value),
        None if parts == 1 else launch.scratch(device, "races", sequences * RACE.value * parts),
        launch.counters(device, sequences + 1),
        sequences, vocabulary,
        vocabulary if x.draft_logits is None else min(vocabulary, x.draft_logits.shape[1]),
        x.max_draft,
    )  # fmt: skip
    options = {"num_warps": launch.WARPS, "enable_fp_fusion": False}
    plain = parts > 1 and x.target_threshold is None and x.draft_threshold is None
    with torch.cuda.device_of(x.target_logits):
        verify_kernel[(sequences * (x.max_draft + 1) * split,)](
            *common,
            x.draft_tokens.contiguous(),
            *(None if limit is None else limit.contiguous() for limit in (x.target_threshold, x.draft_threshold)),
            out.num_accepted, out.accept_prob,
            launch.scratch(device, "records", x.draft_tokens.shape[0] * split * RECORD.value),
            rule, parts, split, triton.next_power_of_2(x.max_draft + 1), launch.TILE, launch.TILES,
            **options, **({} if plain else launch.LIMIT),
        )  # fmt: skip
        if parts > 1:
            draw_kernel[(sequences * parts,)](*common, rule, parts, launch.TILE, launch.RACE_TILES, **options)
