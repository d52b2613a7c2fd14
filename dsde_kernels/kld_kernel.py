"""Triton kernel of `kld`, and the pass over a pair of rows that verification shares with it.

One read of both rows. With t, d the logits times log2(e) / T, relative to running maxima m_t, m_d, a program keeps

    S_t = sum 2^t    S_d = sum 2^d    W = sum 2^t (t - d)    lost = sum 2^t where q is 0, whose d counts as 0 in W

and sums over the kept tokens where rows are truncated. When a maximum rises, t or d falls by a constant for all earlier
tokens, so W moves with S_t and lost (`_moved`); then

    KL(p || q) = ln 2 (W / S_t - log2 S_t + (1 - lost / S_t) log2 S_d - lost / S_t log2 1e-8)

Programs of a row leave records of RECORD floats; the last to finish merges them in order. Broken rows show in S: a NaN
or +inf makes it NaN, no finite logit leaves 0.
"""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201, ANN202  (jit functions have neither return types nor short-circuits)

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .kld import FARTHEST, LOG_FLOOR
from .rng_kernel import last_to_arrive, log2_scale, row_at

# A record: maximum, sum and sum of the kept of the target, the same of the draft, W, lost, and the target's argmax.
RECORD = tl.constexpr(9)
# Constants stand on the right of a tensor: the interpreter of Triton 3.8 makes the result a constant otherwise.
INF = tl.constexpr(float("inf"))
LN2 = tl.constexpr(math.log(2))
FLOOR = tl.constexpr(LOG_FLOOR)
_LOG2_FLOOR = tl.constexpr(LOG_FLOOR / math.log(2))
FAR = tl.constexpr(-FARTHEST / math.log(2))  # q is 0 from here on; stands for -inf where that meets a zero


@triton.jit
def fall(old, new, scale):
    """What a log2 weight relative to the maximum `old` loses when the maximum becomes `new`."""
    return tl.where(old == -INF, 0.0, tl.maximum((old - new) * scale, FAR))


@triton.jit
def _moved(w, s_t, lost, fall_t, fall_d):
    """W [..] relative to new maxima."""
    return tl.exp2(fall_t) * (w + s_t * fall_t - (s_t - lost) * fall_d)


@triton.jit
def total(x):
    """Sum of a tile. In float64, so that the order, which follows the alignment of the rows, hardly ever shows."""
    return tl.sum(x.to(tl.float64), 0).to(tl.float32)


@triton.jit
def sound(s):
    """Whether a row with sum `s` has finite logits, and no NaN or +inf."""
    return (s > 0) & (s < INF)


@triton.jit
def stream_pair(
    target, draft, start, vocabulary, shared, scale, target_threshold, draft_threshold, greedy, record,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Read TILES tiles of a target row and, unless None, of its draft row from column `start`; write their record."""
    m_t = tl.full([], -INF, tl.float32)
    m_d = m_t
    s_t = tl.zeros([TILE], tl.float32)
    s_d = tl.zeros([TILE], tl.float32)
    kept_t = tl.zeros([TILE], tl.float32)
    kept_d = tl.zeros([TILE], tl.float32)
    w = tl.zeros([TILE], tl.float32)
    lost = tl.zeros([TILE], tl.float32)
    peak = start  # where the first tile that holds the maximum begins
    place = tl.arange(0, TILE)
    # Two tiles are on their way while one is worked on, but none where the sums of the kept take up the registers.
    STAGES: tl.constexpr = 3 if target_threshold is None and draft_threshold is None else 1
    for tile in tl.range(tl.minimum(TILES, tl.cdiv(vocabulary - start, TILE)), num_stages=STAGES):
        first = start + tile * TILE
        column = first + place
        # What lies past the end is masked here and not by the load, which is made tiles ahead: its mask would wait in
        # registers.
        x = tl.load(target + column, mask=column < vocabulary).to(tl.float32)
        x = tl.where(place < vocabulary - first, x, -INF)
        top_t = tl.max(x, 0)
        rises = top_t > m_t
        if draft is not None:
            y = tl.load(draft + column, mask=column < shared).to(tl.float32)
            y = tl.where(place < shared - first, y, -INF)
            top_d = tl.max(y, 0)
            rises = rises | (top_d > m_d)
        if rises:
            peak = tl.where(top_t > m_t, first, peak)
            new_t = tl.maximum(m_t, top_t)
            fall_t = fall(m_t, new_t, scale)
            if draft is not None:
                new_d = tl.maximum(m_d, top_d)
                fall_d = fall(m_d, new_d, scale)
                lost = tl.where(fall_d > FAR, lost, s_t)  # so far above that q is 0 at all earlier tokens
                w = _moved(w, s_t, lost, fall_t, fall_d)
                lost *= tl.exp2(fall_t)
                s_d *= tl.exp2(fall_d)
                kept_d *= tl.exp2(fall_d)
                m_d = new_d
            s_t *= tl.exp2(fall_t)
            kept_t *= tl.exp2(fall_t)
            m_t = new_t

        # Nothing but -inf so far: any finite reference will do.
        t = (x - tl.where(m_t == -INF, 0.0, m_t)) * scale
        e_t = tl.exp2(t)
        s_t += e_t
        if target_threshold is not None:
            kept_t += tl.where(x < target_threshold, 0.0, e_t)  # keeps NaN
        if draft is not None:
            d = (y - tl.where(m_d == -INF, 0.0, m_d)) * scale
            e_d = tl.exp2(d)
            s_d += e_d
            if draft_threshold is not None:
                kept_d += tl.where(y < draft_threshold, 0.0, e_d)
            possible = d > FAR
            lost += tl.where(possible, 0.0, e_t)
            w = tl.fma(e_t, tl.maximum(t, FAR) - tl.where(possible, d, 0.0), w)

    # The maximum's tile once more, from the cache: a search for its column within the loop takes more registers.
    column = peak + place
    width = tl.where(greedy, vocabulary, 0)
    x = tl.load(target + column, mask=column < width, other=-INF).to(tl.float32)
    argmax = tl.min(tl.where(x == m_t, column, width), 0)
    tl.store(record, m_t)
    tl.store(record + 1, total(s_t))
    if target_threshold is not None:
        tl.store(record + 2, total(kept_t))
    if draft is not None:
        tl.store(record + 3, m_d)
        tl.store(record + 4, total(s_d))
        if draft_threshold is not None:
            tl.store(record + 5, total(kept_d))
        tl.store(record + 6, total(w))
        tl.store(record + 7, total(lost))
    tl.store(record + 8, argmax.to(tl.float32, bitcast=True))


@triton.jit
def shared_load(pointer, mask):
    """What other programs have stored: past the first-level cache, which does not see it."""
    return tl.load(pointer, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def merge(
    records, mask, scale,
    SPLIT: tl.constexpr, DRAFT: tl.constexpr, TARGET_KEPT: tl.constexpr, DRAFT_KEPT: tl.constexpr,
):  # fmt: skip
    """The SPLIT records of each row [L], merged in order: maximum, sum, kept (target; draft), KL and argmax, [L] each.

    KL is NaN where a row is broken, and without meaning where DRAFT is False.
    """
    m_t = tl.full(mask.shape, -INF, tl.float32)
    m_d = m_t
    s_t = tl.zeros(mask.shape, tl.float32)
    s_d, kept_t, kept_d, w, lost = s_t, s_t, s_t, s_t, s_t
    argmax = tl.zeros(mask.shape, tl.int32)
    for part in range(SPLIT):
        record = records + part * RECORD
        top_t, more_t = shared_load(record + 0, mask), shared_load(record + 1, mask)
        new_t = tl.maximum(m_t, top_t)
        ours_t, theirs_t = fall(m_t, new_t, scale), fall(top_t, new_t, scale)
        if DRAFT:
            top_d, more_d = shared_load(record + 3, mask), shared_load(record + 4, mask)
            more_w, more_lost = shared_load(record + 6, mask), shared_load(record + 7, mask)
            new_d = tl.maximum(m_d, top_d)
            ours_d, theirs_d = fall(m_d, new_d, scale), fall(top_d, new_d, scale)
            lost = tl.where(ours_d > FAR, lost, s_t)
            more_lost = tl.where(theirs_d > FAR, more_lost, more_t)
            w = _moved(w, s_t, lost, ours_t, ours_d) + _moved(more_w, more_t, more_lost, theirs_t, theirs_d)
            lost = lost * tl.exp2(ours_t) + more_lost * tl.exp2(theirs_t)
            s_d = s_d * tl.exp2(ours_d) + more_d * tl.exp2(theirs_d)
            if DRAFT_KEPT:
                kept_d = kept_d * tl.exp2(ours_d) + shared_load(record + 5, mask) * tl.exp2(theirs_d)
            m_d = new_d
        s_t = s_t * tl.exp2(ours_t) + more_t * tl.exp2(theirs_t)
        if TARGET_KEPT:
            kept_t = kept_t * tl.exp2(ours_t) + shared_load(record + 2, mask) * tl.exp2(theirs_t)
        argmax = tl.where(top_t > m_t, shared_load(record + 8, mask).to(tl.int32, bitcast=True), argmax)
        m_t = new_t
    share = lost / s_t
    kl = (w / s_t - tl.log2(s_t) + (1.0 - share) * tl.log2(s_d) - share * _LOG2_FLOOR) * LN2
    kl = tl.where(sound(s_t) & sound(s_d), tl.maximum(kl, 0.0), float("nan"))
    return m_t, s_t, kept_t if TARGET_KEPT else s_t, m_d, s_d, kept_d if DRAFT_KEPT else s_d, kl, argmax


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def kl_kernel(
    target, target_stride,  # [R, Vt]
    draft, draft_stride,  # [R, Vd]
    temperature,  # [R] or None
    out,  # [R]
    records,  # [R * SPLIT, RECORD]
    counters,  # [R]
    vocabulary, shared,
    SPLIT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    scale = log2_scale(1.0 if temperature is None else tl.load(temperature + row))
    own = row_at(records, row * SPLIT, RECORD)
    stream_pair(
        row_at(target, row, target_stride), row_at(draft, row, draft_stride), part * (TILE * TILES), vocabulary, shared,
        scale, None, None, False, own + part * RECORD, TILE, TILES,
    )  # fmt: skip
    if last_to_arrive(counters + row, SPLIT):
        one = tl.arange(0, 1)
        kl = merge(own + one, one == 0, scale, SPLIT, True, False, False)[6]
        tl.store(out + row + one, kl)


def kl_divergence_triton(target_logits: Tensor, draft_logits: Tensor, temperature: Tensor | None) -> Tensor:
    (rows, vocabulary), device = target_logits.shape, target_logits.device
    out = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        split = launch.splits(vocabulary)
        with torch.cuda.device_of(out):
            kl_kernel[(rows * split,)](
                target_logits, target_logits.stride(0),
                draft_logits, draft_logits.stride(0),
                None if temperature is None else temperature.contiguous(),
                out, launch.scratch(device, "records", rows * split * RECORD.value), launch.counters(device, rows),
                vocabulary, min(vocabulary, draft_logits.shape[1]),
                split, launch.TILE, launch.TILES,
                num_warps=launch.WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out
