import math

import pytest
import torch
from scipy import stats

from dsde_kernels import rng
from tests.dsde_kernels import oracle

# Published known-answer vectors of Philox4x32-10 (Random123): counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected, device):
    counter, key, expected = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    got = rng.philox_torch(
        tuple(torch.tensor([c], device=device) for c in counter), tuple(torch.tensor([k], device=device) for k in key)
    )
    assert [int(word) for word in got] == expected
    assert oracle.philox(counter, key) == expected


def test_philox_broadcasts_a_constant_counter(device):
    index = torch.arange(5, device=device)[None]
    seed = torch.tensor([[7], [2**32 - 1]], device=device)
    step = torch.tensor([[3], [4]], device=device)
    got = torch.stack(rng.philox_torch((index, step, step, index[:, :1]), (seed, seed)), -1)
    for r, (s, t) in enumerate([(7, 3), (2**32 - 1, 4)]):
        for i in range(5):
            assert got[r, i].tolist() == oracle.philox([i, t, t, 0], [s, s])


@pytest.mark.parametrize("stream", [rng.DRAFT, rng.ACCEPT, rng.RESAMPLE])
def test_uniform_follows_key_and_counter(stream, device):
    keys = [(0, 0, 0), (-1, 5, 2), (2**63 - 1, 2**31 - 1, 9), (1 << 40, 1, 1)]
    seed, step, offset = (torch.tensor(column, device=device) for column in zip(*keys, strict=True))
    got = rng.uniform_torch(seed, step.int(), offset.int(), stream, 7)
    want = [[oracle.uniform(*key, stream, i) for i in range(7)] for key in keys]
    torch.testing.assert_close(got.cpu().double(), torch.tensor(want, dtype=torch.float64), rtol=2**-24, atol=0)


def test_uniform_goes_on_from_chunk_to_chunk(device):
    # 300 rows take their numbers 256 at a time, and a single one 65,536.
    seed = torch.arange(300, device=device)
    got = rng.uniform_torch(seed, seed % 3, seed % 2, rng.DRAFT, 600)
    index = [0, 255, 256, 511, 512, 599]
    want = [[oracle.uniform(r, r % 3, r % 2, rng.DRAFT, i) for i in index] for r in (0, 299)]
    torch.testing.assert_close(got[[0, 299]][:, index].cpu().double(), torch.tensor(want, dtype=torch.float64))
    one = torch.tensor([7], device=device)
    alone = rng.uniform_torch(one, one, one, rng.DRAFT, 65_540)[0, [3, 65_535, 65_536, 65_539]].cpu().double()
    want = [oracle.uniform(7, 7, 7, rng.DRAFT, i) for i in (3, 65_535, 65_536, 65_539)]
    torch.testing.assert_close(alone, torch.tensor(want, dtype=torch.float64))


def test_uniform_stays_strictly_inside_the_unit_interval(monkeypatch, device):
    words = torch.tensor([[0, 1, 2**31, 2**32 - 129, 2**32 - 1]], device=device)
    monkeypatch.setattr(rng, "philox_torch", lambda counter, key: (words,) * 4)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    u = rng.uniform_torch(zero, zero, zero, rng.ACCEPT, 20)
    assert u.dtype == torch.float32
    assert u.min().item() == 2.0**-33
    assert u.max().item() == 1 - 2.0**-24
    e = rng.exponential_torch(zero, zero, zero, rng.ACCEPT, 20)
    assert e.min().item() == 2.0**-33
    assert 16 < e.max().item() < 17


def test_exponential_resolves_its_small_end(device):
    # Of 2^22 numbers about 1 lies below 2^-22; steps of 2^-24 would put all numbers near 0 on multiples of 2^-24.
    count = 1 << 18
    seeds, zero = torch.arange(16, device=device), torch.zeros(16, dtype=torch.int64, device=device)
    e = rng.exponential_torch(seeds, zero, zero, rng.DRAFT, count)
    assert (e > 0).all()
    small = e[e < 2.0**-14].double() * 2**24
    assert small.numel() > 100
    assert (small != small.round()).double().mean() > 0.9


def test_exponential_has_the_exponential_distribution(device):
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    e = rng.exponential_torch(zero + 11, zero, zero, rng.RESAMPLE, 100_000)[0].cpu().numpy()
    assert stats.kstest(e, "expon").pvalue > 1e-6  # false alarm: 1e-6


def test_streams_steps_and_offsets_do_not_repeat(device):
    seed = torch.zeros(4, dtype=torch.int64, device=device)
    step, offset = torch.tensor([0, 0, 1, 1], device=device), torch.tensor([0, 1, 0, 1], device=device)
    u = torch.cat([rng.uniform_torch(seed, step, offset, stream, 64) for stream in range(3)])
    correlation = torch.corrcoef(u.double())
    off_diagonal = correlation - torch.eye(12, dtype=torch.float64, device=device)
    assert off_diagonal.abs().max() < 6 / math.sqrt(64)  # 66 pairs, 6 sigma: false alarm below 1e-6


@pytest.mark.parametrize(("rows", "count"), [(0, 5), (3, 0), (2, 1)])
def test_shapes(rows, count, device):
    z = torch.zeros(rows, dtype=torch.int64, device=device)
    assert rng.uniform_torch(z, z, z, rng.DRAFT, count).shape == (rows, count)
