"""Random numbers of the kernels: the same bits as the twin's."""

import pytest
import torch
import triton
import triton.language as tl

from dsde_kernels import rng, rng_kernel
from tests.dsde_kernels.test_rng import KNOWN_ANSWERS

pytestmark = pytest.mark.usefixtures("triton_backend")

_exponential, _philox, _tile, _first, _to_uniform = (
    rng_kernel.exponential, rng_kernel.philox, rng_kernel.uniform_tile, rng_kernel.uniform_first, rng_kernel._uniform
)  # fmt: skip
RESAMPLE = rng_kernel.RESAMPLE


@triton.jit
def _philox_kernel(words, out):
    w0, w1, w2, w3 = _philox(
        tl.load(words).to(tl.uint32), tl.load(words + 1).to(tl.uint32), tl.load(words + 2).to(tl.uint32),
        tl.load(words + 3).to(tl.uint32), tl.load(words + 4).to(tl.uint32), tl.load(words + 5).to(tl.uint32),
    )  # fmt: skip
    tl.store(out, w0.to(tl.int64))
    tl.store(out + 1, w1.to(tl.int64))
    tl.store(out + 2, w2.to(tl.int64))
    tl.store(out + 3, w3.to(tl.int64))


@triton.jit
def _numbers_kernel(seed, step, offset, start, tile, first, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    tl.store(tile + lane, _tile(tl.load(seed), tl.load(step), tl.load(offset), start, RESAMPLE, TILE))
    tl.store(first + lane, _first(tl.load(seed), tl.load(step), lane, RESAMPLE))


@triton.jit
def _ends_kernel(words, uniform, exponential, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    u = _to_uniform(tl.load(words + lane).to(tl.uint32))
    tl.store(uniform + lane, u)
    tl.store(exponential + lane, _exponential(u))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    words = torch.tensor([int(word, 16) for word in f"{counter} {key}".split()])
    out = torch.zeros(4, dtype=torch.int64)
    _philox_kernel[(1,)](words, out)
    assert out.tolist() == [int(word, 16) for word in expected.split()]


@pytest.mark.parametrize("key", [(0, 0, 0), (-1, 5, 2), (2**63 - 1, 2**31 - 1, 9), (1 << 40, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_numbers_have_the_twins_bits(key, dtype):
    seed, step, offset = (torch.tensor([k]).to(dtype) for k in key)
    tile, first = torch.zeros(64), torch.zeros(64)
    _numbers_kernel[(1,)](seed, step, offset, 128, tile, first, TILE=64)
    assert torch.equal(tile, rng.uniform_torch(seed, step, offset, rng.RESAMPLE, 192)[0, 128:])
    lanes = torch.arange(64)
    want = rng.uniform_torch(seed.expand(64), step.expand(64), lanes, rng.RESAMPLE, 1)[:, 0]
    assert torch.equal(first, want)


def test_uniform_and_exponential_at_both_ends():
    words = torch.tensor([0, 1, 2, 1000, 2**16, 2**31, 2**32 - 129, 2**32 - 1])
    u, e = torch.zeros(8), torch.zeros(8)
    _ends_kernel[(1,)](words, u, e, TILE=8)
    want = (words.float() + 0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
    assert torch.equal(u, want)
    assert (u.min(), u.max()) == (2.0**-33, 1 - 2.0**-24)
    torch.testing.assert_close(e.double(), -(-u.double()).log1p(), rtol=4e-7, atol=0)  # also at 2^-33: no coarse tail
