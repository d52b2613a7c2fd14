"""Random numbers of `rng`, and what else every kernel shares: row addresses, the temperature's scale, tickets."""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201, ANN202  (jit functions have neither return types nor short-circuits)

import math

import triton
import triton.language as tl

from . import rng

DRAFT = tl.constexpr(rng.DRAFT)
ACCEPT = tl.constexpr(rng.ACCEPT)
RESAMPLE = tl.constexpr(rng.RESAMPLE)

_M0, _M1 = tl.constexpr(rng._M0), tl.constexpr(rng._M1)
_W0, _W1 = tl.constexpr(rng._W0), tl.constexpr(rng._W1)
_LARGEST = tl.constexpr(rng._LARGEST)
_LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 words."""
    for _ in tl.static_range(10):
        a, b = c0, c2
        c0 = tl.umulhi(b, _M1) ^ c1 ^ k0
        c2 = tl.umulhi(a, _M0) ^ c3 ^ k1
        c1 = b * _M1
        c3 = a * _M0
        k0 += _W0
        k1 += _W1
    return c0, c1, c2, c3


@triton.jit
def _word(x):
    return (x.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _uniform(word):
    return tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), _LARGEST)


@triton.jit
def uniform_first(seed, step, offset, STREAM: tl.constexpr):
    """Number 0 of each offset [L]."""
    zero = _word(offset * 0)
    high = _word(seed.to(tl.int64) >> 32)
    w0, _w1, _w2, _w3 = philox(zero, _word(offset), _word(step) + zero, zero + STREAM, _word(seed), high)
    return _uniform(w0)


@triton.jit
def uniform_tile(seed, step, offset, start, STREAM: tl.constexpr, TILE: tl.constexpr):
    """Numbers start ... start + TILE - 1 [TILE], start a multiple of 4."""
    index = _word(start // 4 + tl.arange(0, TILE // 4))
    zero = index * 0
    high = _word(seed.to(tl.int64) >> 32)
    w0, w1, w2, w3 = philox(index, _word(offset) + zero, _word(step) + zero, zero + STREAM, _word(seed), high)
    return _uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def exponential(u):
    """-log1p(-u): the error of rounding 1 - u is divided out, so that a small u gives u itself."""
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))


@triton.jit
def row_at(base, row, stride):
    """Address of a row, in 64 bits: rows times stride passes 2^31."""
    return base + row.to(tl.int64) * stride


@triton.jit
def log2_scale(temperature):
    """log2(e) / T, with which a difference of logits becomes one of log2 probabilities; T = 0 counts as 1.

    The bound keeps it finite: below, any two different logits are infinitely far apart anyway.
    """
    return _LOG2E / tl.maximum(tl.where(temperature == 0, 1.0, temperature), 1e-37)


@triton.jit
def last_to_arrive(counter, expected):
    """Take a ticket; True for the last of `expected` programs, which then sees what all of them stored before.

    The last one puts the counter back to zero. What the others are to see must be stored as scalars: the thread that
    stores those takes the ticket, and its release covers no other wavefront's stores on AMD.
    """
    tl.debug_barrier()  # the stores of all threads come before the ticket of one
    last = tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1
    if last:
        tl.store(counter, 0)
    return last
