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
from .kld_kernel import INF, fall, shared_load, sound, total
from .rng_kernel import DRAFT, exponential, last_to_arrive, log2_scale, row_at, uniform_tile

# What a part of a race leaves: winner, its score, the largest weight, the maximum and the sum of the kept.
RACE = tl.constexpr(5)
_MARGIN = tl.constexpr(0.999)  # more than rounding can make of e >= u


@triton.jit
def race(
    target, start, stop, scale, threshold, top,  # the row, from its column `start` to `stop`; its maximum if known
    draft, shared, draft_threshold, draft_top, draft_scale,  # what to take off the weights; draft may be None
    banned, residual, least,
    greedy, seed, step, offset,
    STREAM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Winner of a row's race, its score, the largest weight, the maximum and the sum of the kept.

    Weights are 2^t; where `residual` is set, less 2^d * draft_scale, or 0 at the column `banned` where there is no
    draft row; up to `least` they count as nothing. As long as a residual is nothing, the race is over 2^t; its largest
    weight is 0 then. Where `greedy` is set the winner is the first column of the maximum.
    """
    token = tl.full([], 0, tl.int32)
    best = tl.full([], 0.0, tl.float32)
    heaviest = best
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
            rest = weight - tl.where((column >= width) | (y < draft_threshold), 0.0, less)
        else:
            rest = tl.where(column == banned, 0.0, weight)
        rest = tl.where(rest > least, rest, 0.0)
        tile_heaviest = tl.max(rest, 0)
        if (heaviest == 0) & (tile_heaviest > 0):
            best = 0.0
        heaviest = tl.maximum(heaviest, tile_heaviest)
        nothing = residual & (heaviest == 0)
        if ((tile_heaviest > 0) | nothing) & (greedy == 0):
            weight = tl.where(nothing, weight, rest)
            u = uniform_tile(seed, step, offset, first, STREAM, TILE)
            if tl.max(weight - (best * _MARGIN) * u, 0) > 0:
                score = weight / exponential(u)
                tile_best = tl.max(score, 0)
                if tile_best > best:
                    best = tile_best
                    token = tl.min(tl.where(score == tile_best, column, stop), 0)
    return token, best, heaviest, top, total(s)


@triton.jit
def leave(records, part, token, best, heaviest, top, s, PARTS: tl.constexpr):
    """Store what `race` returned of one part for `merge_races`."""
    tl.store(records + part, token.to(tl.float32, bitcast=True))
    tl.store(records + PARTS + part, best)
    tl.store(records + 2 * PARTS + part, heaviest)
    tl.store(records + 3 * PARTS + part, top)
    tl.store(records + 4 * PARTS + part, s)


@triton.jit
def merge_races(records, scale, greedy, PARTS: tl.constexpr):
    """What `race` returns of a row, from what its PARTS parts left."""
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    mask = part < PARTS
    token = shared_load(records + part, mask).to(tl.int32, bitcast=True)
    tops = tl.where(mask, shared_load(records + 3 * PARTS + part, mask), -INF)
    top = tl.max(tops, 0)
    down = tl.exp2(fall(tops, top, scale))
    weights = shared_load(records + 2 * PARTS + part, mask) * down
    heaviest = tl.max(weights, 0)
    score = shared_load(records + PARTS + part, mask) * down
    # A part may be alone in finding its residual nothing: then it has no say.
    score = tl.where(heaviest == 0, score, tl.where(weights > 0, score, 0.0))
    s = tl.sum(shared_load(records + 4 * PARTS + part, mask) * down, 0)
    best = tl.max(score, 0)
    wins = tl.where(greedy, tops == top, score == best) & mask
    return tl.min(tl.where(wins, token, 0x7FFFFFFF), 0), best, heaviest, top, s


@triton.jit(do_not_specialize_on_alignment=["temperature", "seed", "step", "offset", "threshold"])
def sample_kernel(
    logits, stride,  # [R, V]
    temperature, seed, step, offset,  # [R]
    threshold,  # [R] or None
    tokens,  # [R]
    races,  # [R, RACE, PARTS]
    counters,  # [R]
    vocabulary,
    PARTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    t = tl.load(temperature + row)
    greedy = t == 0
    scale = log2_scale(t)
    limit = -INF
    if threshold is not None:
        limit = tl.where(greedy, -INF, tl.load(threshold + row))
    start = part * (TILE * TILES)
    token, best, heaviest, top, s = race(
        row_at(logits, row, stride), start, tl.minimum(start + TILE * TILES, vocabulary), scale, limit,
        tl.full([], -INF, tl.float32), None, 0, 0.0, 0.0, 0.0, 0, t < 0, 0.0,
        greedy, tl.load(seed + row), tl.load(step + row), tl.load(offset + row), DRAFT, TILE,
    )  # fmt: skip
    own = row_at(races, row, RACE * PARTS)
    leave(own, part, token, best, heaviest, top, s, PARTS)
    if last_to_arrive(counters + row, PARTS):
        token, best, heaviest, top, s = merge_races(own, scale, greedy, PARTS)
        tl.store(tokens + row, tl.where(sound(s), token, -1).to(tl.int64))


def sample_triton(
    logits: Tensor, temperature: Tensor, seed: Tensor, step: Tensor, offset: Tensor, threshold: Tensor | None
) -> Tensor:
    (rows, vocabulary), device = logits.shape, logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        parts = launch.race_parts(vocabulary)
        with torch.cuda.device_of(tokens):
            sample_kernel[(rows * parts,)](
                logits, logits.stride(0),
                temperature.contiguous(), seed.contiguous(), step.contiguous(), offset.contiguous(),
                None if threshold is None else threshold.contiguous(),
                tokens, launch.scratch(device, "races", rows * RACE.value * parts), launch.counters(device, rows),
                vocabulary,
                parts, launch.TILE, launch.RACE_TILES,
                num_warps=launch.WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return tokens
