"""The kernels on rows of every size and shape, against the twins."""

import mmap

import pytest
import torch

from dsde_kernels import kl_divergence, launch, sample, truncation_threshold, use_backend, verify
from tests.dsde_kernels import test_sampling
from tests.dsde_kernels.test_verify import assert_equal, batch

INF, NAN = float("inf"), float("nan")

pytestmark = pytest.mark.usefixtures("triton_backend")


def rows_of(count, vocabulary, dtype=torch.float32, scale=3.0):
    logits = (torch.randn(count, vocabulary) * scale).to(dtype)
    temperature = torch.tensor([0.7, 0.0, 1.0]).repeat(count)[:count]
    seed = torch.arange(count) * 7919
    return logits, temperature, seed, seed % 5, seed % 3


def check_every_op(vocabulary, count=3, dtype=torch.float32):
    logits, temperature, *keys = rows_of(count, vocabulary, dtype)
    other = torch.randn(count, vocabulary).to(dtype)
    share = torch.full((count,), 0.8)
    arguments = batch([1, 0, 2], vocabulary, dtype=dtype)

    def run():
        threshold = truncation_threshold(logits, temperature, top_p=share)
        return (
            kl_divergence(logits, other, temperature),
            threshold,
            sample(logits, temperature, *keys, threshold),
            verify(**arguments),
        )

    kl, threshold, tokens, out = run()
    with use_backend("torch"):
        want_kl, want_threshold, want_tokens, want = run()
    torch.testing.assert_close(kl, want_kl, rtol=1e-5, atol=2e-6)
    # Ties are left out by the seeds: no cumulative sum of these rows, no ratio and no two best scores lie within
    # 1e-5 of each other, or the exact comparisons below would fail on one backend or the next.
    assert torch.equal(threshold, want_threshold)
    assert torch.equal(tokens, want_tokens)
    for name, got, expected in zip(out._fields, out, want, strict=True):
        if got.dtype == torch.float32:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6, msg=name)
        else:
            assert torch.equal(got, expected), name


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 32, 33, 63, 64, 65, 127, 129])
def test_tiles_and_programs_of_32_and_64_logits(vocabulary, small_tiles):
    check_every_op(vocabulary)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1000, torch.bfloat16),
        (launch.TILE - 1, torch.float16),
        (launch.TILE, torch.float32),
        (launch.TILE + 1, torch.bfloat16),
        (launch.TILE * launch.TILES + 1, torch.float32),
        (50_257, torch.bfloat16),
    ],
)
def test_shipped_tiles(vocabulary, dtype):
    check_every_op(vocabulary, 2, dtype)


@pytest.mark.parametrize("count", [0, 1, 41])
def test_number_of_rows(count, small_tiles):
    logits, temperature, *keys = rows_of(count, 50)
    tokens = sample(logits, temperature, *keys)
    kl = kl_divergence(logits, logits * 0.5, 0.8)
    with use_backend("torch"):
        assert torch.equal(tokens, sample(logits, temperature, *keys))
        torch.testing.assert_close(kl, kl_divergence(logits, logits * 0.5, 0.8), rtol=1e-5, atol=1e-6)


def test_strides_order_and_masked_tails(small_tiles):
    # Row stride V + 3: the padding is NaN, so that a tail lane that is read shows.
    logits, temperature, *keys = rows_of(5, 70)
    wide = torch.full((5, 73), NAN)
    wide[:, :70] = logits
    padded = wide[:, :70]
    threshold = truncation_threshold(padded, temperature, top_k=torch.full((5,), 7))
    assert torch.equal(threshold, truncation_threshold(logits, temperature, top_k=torch.full((5,), 7)))
    assert torch.equal(sample(padded, temperature, *keys), sample(logits, temperature, *keys))
    kl = kl_divergence(padded, logits * 0.5, temperature)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(kl_divergence(logits[order], logits[order] * 0.5, temperature[order]), kl[order])
    assert torch.equal(kl_divergence(padded[2:3], logits[2:3] * 0.5, temperature[2:3]), kl[2:3])


@pytest.mark.parametrize("first", [True, False])
def test_whole_tiles_without_a_finite_logit(first, small_tiles):
    # The first, or all but the first, programs of a row see nothing but -inf.
    logits, temperature, *keys = rows_of(4, 160)
    columns = slice(0, 130) if first else slice(20, 160)
    logits[:, columns] = -INF
    other = torch.randn(4, 160)
    for target, draft in ((logits, other), (other, logits), (logits, logits)):
        kl = kl_divergence(target, draft, temperature)
        with use_backend("torch"):
            torch.testing.assert_close(kl, kl_divergence(target, draft, temperature), rtol=1e-5, atol=1e-6)
    tokens = sample(logits, temperature, *keys)
    assert (tokens >= 130).all() if first else (tokens < 20).all()
    with use_backend("torch"):
        assert torch.equal(tokens, sample(logits, temperature, *keys))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("column", [0, 40, 99])
def test_a_broken_logit_in_any_program_breaks_its_row_only(value, column, small_tiles):
    logits, temperature, *keys = rows_of(3, 100)
    clean = sample(logits, temperature, *keys)
    clean_kl = kl_divergence(logits, logits.flip(1), temperature)
    logits[1, column] = value
    assert sample(logits, temperature, *keys).tolist() == [clean[0], -1, clean[2]]
    kl = kl_divergence(logits, logits.flip(1), temperature)
    assert kl.isnan().tolist() == [False, True, False]
    assert torch.equal(kl[::2], clean_kl[::2])


def test_argmax_ties_across_programs_take_the_lowest_id(small_tiles):
    logits = torch.zeros(1, 200)
    logits[0, [70, 71, 150, 199]] = 5.0
    zero = torch.zeros(1, dtype=torch.int64)
    assert sample(logits, torch.zeros(1), zero, zero, zero).tolist() == [70]
    target = logits.repeat(2, 1)
    out = verify(target, None, torch.tensor([70]), torch.tensor([0, 1]), temperature=torch.zeros(1), seed=zero,
                 step=zero, max_draft=1)  # fmt: skip
    assert out.tokens.tolist() == [[70, 70]]


def test_a_late_winner_by_a_narrow_margin_in_the_same_program(small_tiles, monkeypatch):
    # Its tile is looked at only if one of its numbers could win.
    monkeypatch.setattr(launch, "RACE_TILES", 2)
    test_sampling.test_a_late_winner_by_a_narrow_margin()


def test_thresholds_of_negative_zero_tied_and_half_precision_logits(small_tiles):
    k = torch.tensor([2])
    logits = torch.tensor([[-1.0, 0.0, -0.0, -2.0]])
    assert truncation_threshold(logits, torch.ones(1), k).tolist() == [0.0]
    for dtype in (torch.float16, torch.bfloat16):
        x = (torch.randn(3, 77) * 5).to(dtype)
        k, p, m = torch.tensor([1, 5, 76]), torch.tensor([0.9, 0.5, 0.99]), torch.tensor([0.0, 0.01, 1e-4])
        got = truncation_threshold(x, torch.ones(3), k, p, m)
        with use_backend("torch"):
            assert torch.equal(got, truncation_threshold(x, torch.ones(3), k, p, m))
        assert all(g in row.float() for g, row in zip(got.tolist(), x, strict=True))  # an exact logit of the row


def test_the_whole_row_is_one_large_temperature_or_a_tiny_one(small_tiles):
    logits, _, *keys = rows_of(4, 90)
    for t in (1e-38, 1e-4, 1e4, 1e38):
        temperature = torch.full((4,), t)
        tokens = sample(logits, temperature, *keys)
        with use_backend("torch"):
            assert torch.equal(tokens, sample(logits, temperature, *keys))


def test_rows_beyond_2_to_the_31(monkeypatch, device, small_tiles):
    # Three rows whose stride is 2^30 + 8 elements: the last starts beyond 2^31. On the CPU the memory between them is
    # reserved, never touched.
    stride, vocabulary = 2**30 + 8, 40
    size = 2 * stride + vocabulary
    if device == "cpu":
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # a name since Python 3.13
        memory = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
        # The interpreter would copy arguments back onto themselves, all of them.
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    else:
        flat = torch.empty(size, dtype=torch.bfloat16)
    far = flat.as_strided((3, vocabulary), (stride, 1))
    near = torch.randn(3, vocabulary).bfloat16()
    far.copy_(near)
    one, zero = torch.ones(3), torch.arange(3)
    assert torch.equal(sample(far, one, zero, zero, zero), sample(near, one, zero, zero, zero))
    assert torch.equal(kl_divergence(far, near), torch.zeros(3))
    assert torch.equal(kl_divergence(near, far), torch.zeros(3))
    top_k = torch.full((3,), 3)
    assert torch.equal(truncation_threshold(far, one, top_k), truncation_threshold(near, one, top_k))
    more = {
        "cu_draft": torch.tensor([0, 2]),
        "temperature": one[:1],
        "seed": zero[:1],
        "step": zero[:1],
        "max_draft": 2,
    }
    ids = torch.tensor([5, 6])
    assert_equal(verify(far, far[1:], ids, **more), verify(near, near[1:], ids, **more))
