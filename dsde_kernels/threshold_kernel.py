"""Triton kernel of `sampling.truncation_threshold`: a search over the bit patterns of logits, without a sort.

Bits of a float32, its sign turned around, order as the floats do. top-k is the largest pattern that at least k logits
reach, top-p the largest one whose reachers hold at least the share top_p of the mass; either is the pattern of a logit
of the row, since nothing changes between two. Two bits are settled in one pass over the row: 16 passes, and 8 or 10
for the 16 or 19 leading bits that bfloat16 and float16 use. min-p follows from the maximum. A last pass takes the
smallest logit that all rules keep.

One program a row, which stays in the cache; at most 2 * passes + 3 reads of it, against a sort's several and its
vocabulary-sized temporaries.
"""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201, ANN202  (jit functions have neither return types nor short-circuits)

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .kld_kernel import INF, total
from .rng_kernel import log2_scale, row_at

_SIGN = tl.constexpr(0x80000000)
_ALL = tl.constexpr(0xFFFFFFFF)
_PASSES = {torch.float32: 16, torch.float16: 10, torch.bfloat16: 8}


@triton.jit
def _pattern(x):
    """The uint32 that orders as x does; -0 and 0 are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where(bits >= _SIGN, bits ^ _ALL, bits | _SIGN)


@triton.jit
def _search(row, vocabulary, top, scale, least, target, MASS: tl.constexpr, PASSES: tl.constexpr, TILE: tl.constexpr):
    """Largest pattern, of 2 * PASSES leading bits, that logits of weight `target` reach.

    Weighed are the logits of at least the pattern `least`: by 1, or if MASS by their probability times a constant.
    """
    settled = least * 0
    for turn in range(PASSES):
        bit = 2 * (PASSES - 1 - turn)
        one, two, three = settled + (1 << bit), settled + (2 << bit), settled + (3 << bit)
        reach_1 = tl.zeros([TILE], tl.float32)
        reach_2 = tl.zeros([TILE], tl.float32)
        reach_3 = tl.zeros([TILE], tl.float32)
        for start in range(0, vocabulary, TILE):
            column = start + tl.arange(0, TILE)
            x = tl.load(row + column, mask=column < vocabulary, other=-INF).to(tl.float32)
            pattern = _pattern(x) >> (32 - 2 * PASSES)
            if MASS:
                weight = tl.where(pattern >= least, tl.exp2((x - top) * scale), 0.0)
            else:
                weight = tl.where(column < vocabulary, 1.0, 0.0)
            reach_1 += tl.where(pattern >= one, weight, 0.0)
            reach_2 += tl.where(pattern >= two, weight, 0.0)
            reach_3 += tl.where(pattern >= three, weight, 0.0)
        # What is reached only falls as the pattern rises, so the steps that reach enough can be counted.
        steps = (total(reach_1) >= target).to(tl.int32) + (total(reach_2) >= target).to(tl.int32)
        steps += (total(reach_3) >= target).to(tl.int32)
        settled += (steps << bit).to(tl.uint32)
    return settled


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def threshold_kernel(
    logits, stride,  # [R, V]
    temperature, top_k, top_p, min_p,  # [R]; the last three or None
    out,  # [R]
    vocabulary,
    PASSES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    row = row_at(logits, r, stride)
    t = tl.load(temperature + r)
    threshold = -INF
    if t > 0:
        scale = log2_scale(t)
        highest = tl.full([TILE], -INF, tl.float32)
        for start in range(0, vocabulary, TILE):
            column = start + tl.arange(0, TILE)
            x = tl.load(row + column, mask=column < vocabulary, other=-INF).to(tl.float32)
            highest = tl.maximum(highest, x)
        top = tl.max(highest, 0)

        least = tl.full([], 0, tl.uint32)
        if top_k is not None:
            k = tl.load(top_k + r)
            if (k > 0) & (k < vocabulary):
                least = _search(row, vocabulary, top, scale, least, k.to(tl.float32), False, PASSES, TILE)
        if top_p is not None:
            share = tl.load(top_p + r)
            if share < 1:
                s = tl.zeros([TILE], tl.float32)
                for start in range(0, vocabulary, TILE):
                    column = start + tl.arange(0, TILE)
                    x = tl.load(row + column, mask=column < vocabulary, other=-INF).to(tl.float32)
                    s += tl.where(_pattern(x) >> (32 - 2 * PASSES) >= least, tl.exp2((x - top) * scale), 0.0)
                least = tl.maximum(
                    least, _search(row, vocabulary, top, scale, least, share * total(s), True, PASSES, TILE)
                )
        lowest = -INF
        if min_p is not None:
            lowest = tl.log2(tl.load(min_p + r))
        smallest = tl.full([TILE], INF, tl.float32)
        kept = tl.zeros([TILE], tl.int32)
        for start in range(0, vocabulary, TILE):
            column = start + tl.arange(0, TILE)
            x = tl.load(row + column, mask=column < vocabulary, other=-INF).to(tl.float32)
            keep = (_pattern(x) >> (32 - 2 * PASSES) >= least) & ((x - top) * scale >= lowest) & (column < vocabulary)
            smallest = tl.where(keep, tl.minimum(smallest, x), smallest)
            kept += keep.to(tl.int32)
        if tl.sum(kept, 0) < vocabulary:
            threshold = tl.min(smallest, 0)
    tl.store(out + r, threshold)


def truncation_threshold_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    (rows, vocabulary), device = logits.shape, logits.device
    out = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        with torch.cuda.device_of(out):
            threshold_kernel[(rows,)](
                logits, logits.stride(0),
                temperature.contiguous(),
                *(None if x is None else x.contiguous() for x in (top_k, top_p, min_p)),
                out, vocabulary,
                _PASSES[logits.dtype], launch.SEARCH_TILE,
                num_warps=launch.SEARCH_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return out
