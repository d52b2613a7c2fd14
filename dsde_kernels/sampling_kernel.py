"""Triton kernel of `sampling.sample`, and the race that verification shares with it.

The race of a row runs over its tiles in order and needs one read: weights are relative to the running maximum, and the
best score falls with them when the maximum rises. Random numbers cost more than reading, so a tile draws them only if
it has any weight, and takes their logarithm only if one of its numbers u could win: -log1p(-u) >= u.
"""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201  (jit functions have neither return types nor short-circuits)

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .kld_kernel import INF, fall, sound, total
from .rng_kernel import DRAFT, exponential, last_to_arrive, log2_scale, row_at, uniform_tile

# A record: maximum, sum, best score, its token.
RECORD = tl.constexpr(4)
_MARGIN = tl.constexpr(0.999)  # more than rounding can make of e >= u


@triton.jit
def race(
    target, start, stop, scale, threshold, top,  # the row, from its column `start` to `stop`; its maximum if known
    draft, shared, draft_threshold, draft_top, draft_scale,  # what to take off the weights; draft may be None
    banned, residual,
    greedy, seed, step, offset,
    STREAM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Winner of a row's race, its score, the largest weight, the maximum and the sum of the kept.

    Weights are 2^t; where `residual` is set, less 2^d * draft_scale, or 0 at the column `banned` where there is no
    draft row; never below 0. Where `greedy` is set the winner is the first column of the maximum.
    """
    token = tl.full([], 0, tl.int32)
    best, heaviest = 0.0, 0.0
    width = tl.where(residual, shared, 0)
    banned = tl.where(residual, banned, -1)
    s = tl.zeros([TILE], tl.float32)
    for first in range(start, stop, TILE):
        column = first + tl.arange(0, TILE)
        x = tl.load(target + column, mask=column < stop, other=-INF).to(tl.float32)
        tile_top = tl.max(x, 0)
        if tile_top > top:
            down = tl.exp2(fall(top, tile_top, scale))
            best *= down
            heaviest *= down
            s *= down
            top = tile_top
            if greedy:
                token = tl.min(tl.where(x == top, column, stop), 0)
        weight = tl.exp2((x - tl.where(top == -INF, 0.0, top)) * scale)
        weight = tl.where(x < threshold, 0.0, weight)  # keeps NaN
        s += weight
        if draft is not None:
            y = tl.load(draft + column, mask=column < width, other=-INF).to(tl.float32)
            less = tl.exp2((y - draft_top) * scale) * draft_scale
            weight = tl.maximum(weight - tl.where((column >= width) | (y < draft_threshold), 0.0, less), 0.0)
        else:
            weight = tl.where(column == banned, 0.0, weight)
        tile_heaviest = tl.max(weight, 0)
        heaviest = tl.maximum(heaviest, tile_heaviest)
        if (tile_heaviest > 0) & (greedy == 0):
            u = uniform_tile(seed, step, offset, first, STREAM, TILE)
            if tl.max(weight - (best * _MARGIN) * u, 0) > 0:
                score = weight / exponential(u)
                tile_best = tl.max(score, 0)
                if tile_best > best:
                    best = tile_best
                    token = tl.min(tl.where(score == tile_best, column, stop), 0)
    return token, best, heaviest, top, total(s)


@triton.jit(do_not_specialize_on_alignment=["temperature", "seed", "step", "offset", "threshold"])
def sample_kernel(
    logits, stride,  # [R, V]
    temperature, seed, step, offset,  # [R]
    threshold,  # [R] or None
    tokens,  # [R]
    records,  # [R * SPLIT, RECORD]
    counters,  # [R]
    vocabulary,
    SPLIT: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    t = tl.load(temperature + row)
    greedy = t == 0
    scale = log2_scale(t)
    limit = -INF
    if threshold is not None:
        limit = tl.where(greedy, -INF, tl.load(threshold + row))
    start = part * (TILE * TILES)
    token, best, _heaviest, top, s = race(
        row_at(logits, row, stride), start, tl.minimum(start + TILE * TILES, vocabulary), scale, limit,
        tl.full([], -INF, tl.float32), None, 0, 0.0, 0.0, 0.0, 0, False,
        greedy, tl.load(seed + row), tl.load(step + row), tl.load(offset + row), DRAFT, TILE,
    )  # fmt: skip
    own = row_at(records, row * SPLIT, RECORD)
    record = own + part * RECORD
    tl.store(record, top)
    tl.store(record + 1, s)
    tl.store(record + 2, best)
    tl.store(record + 3, token.to(tl.float32, bitcast=True))
    if last_to_arrive(counters + row, SPLIT):
        top, s, best, token = -INF, 0.0, 0.0, 0
        for other in range(SPLIT):
            record = own + other * RECORD
            other_top = tl.load(record, cache_modifier=".cg")
            other_best = tl.load(record + 2, cache_modifier=".cg")
            new_top = tl.maximum(top, other_top)
            ours, theirs = tl.exp2(fall(top, new_top, scale)), tl.exp2(fall(other_top, new_top, scale))
            s = s * ours + tl.load(record + 1, cache_modifier=".cg") * theirs
            best *= ours
            other_best *= theirs
            wins = tl.where(greedy, other_top > top, other_best > best)
            other_token = tl.load(record + 3, cache_modifier=".cg").to(tl.int32, bitcast=True)
            token = tl.where(wins, other_token, token)
            best = tl.where(wins, other_best, best)
            top = new_top
        tl.store(tokens + row, tl.where(sound(s), token, -1).to(tl.int64))


def sample_triton(
    logits: Tensor, temperature: Tensor, seed: Tensor, step: Tensor, offset: Tensor, threshold: Tensor | None
) -> Tensor:
    (rows, vocabulary), device = logits.shape, logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        split = launch.splits(vocabulary)
        counters, records = launch.workspace(device, rows, rows * split * RECORD.value)
        sample_kernel[(rows * split,)](
            logits, logits.stride(0),
            temperature.contiguous(), seed.contiguous(), step.contiguous(), offset.contiguous(),
            None if threshold is None else threshold.contiguous(),
            tokens, records, counters,
            vocabulary,
            split, launch.TILE, launch.TILES,
            num_warps=launch.WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return tokens
