import math

import pytest
import torch

from dsde_kernels import kl_divergence
from tests.dsde_kernels import oracle

INF = float("inf")


def reference(target, draft, temperature=1.0):
    temperatures = [temperature] * len(target) if isinstance(temperature, float) else temperature.tolist()
    return torch.tensor(
        [
            oracle.kl(oracle.softmax(t, s), oracle.softmax(d[: target.shape[1]], s))
            for t, d, s in zip(target, draft, temperatures, strict=True)
        ],
        dtype=torch.float64,
        device="cpu",
    )


def eager(target, draft):
    log_p, log_q = target.float().log_softmax(-1), draft.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 4099])
def test_as_exact_as_eager(dtype, vocabulary, device):
    target = (torch.randn(5, vocabulary, device=device) * 4).to(dtype)
    draft = (target + torch.randn(5, vocabulary, device=device)).to(dtype)
    want = reference(target, draft)
    error = (kl_divergence(target, draft).cpu().double() - want).abs().max()
    assert error <= 2 * (eager(target, draft).cpu().double() - want).abs().max() + 1e-6


@pytest.mark.parametrize("temperature", [0.5, [0.2, 1.0, 3.0, 0.0]])
def test_temperature_applies_to_both_sides_and_zero_counts_as_one(temperature):
    temperature = temperature if isinstance(temperature, float) else torch.tensor(temperature)
    target, draft = torch.randn(4, 50), torch.randn(4, 50)
    torch.testing.assert_close(
        kl_divergence(target, draft, temperature).cpu().double(),
        reference(target, draft, temperature),
        rtol=1e-5,
        atol=1e-6,
    )
    assert torch.equal(kl_divergence(target, draft, 0.0), kl_divergence(target, draft))


def test_equal_rows_give_zero(device):
    x = torch.randn(3, 100, device=device)
    assert kl_divergence(x, x.clone(), 0.7).tolist() == [0, 0, 0]


def test_zero_target_probability_adds_nothing():
    target = torch.tensor([[0.0, -INF, 0.0], [0.0, -INF, 0.0]])
    draft = torch.tensor([[0.0, 0.0, 0.0], [0.0, -INF, 0.0]])
    torch.testing.assert_close(kl_divergence(target, draft), torch.tensor([math.log(1.5), 0.0]))


def test_zero_draft_probability_counts_as_1e_minus_8():
    got = kl_divergence(torch.zeros(1, 2), torch.tensor([[0.0, -INF]]))
    want = 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - math.log(1e-8))
    torch.testing.assert_close(got, torch.tensor([want]))


@pytest.mark.parametrize(("target_width", "draft_width"), [(40, 33), (33, 40), (40, 1)])
def test_vocabularies_of_different_width(target_width, draft_width, device):
    target, draft = torch.randn(6, target_width, device=device), torch.randn(6, draft_width, device=device)
    torch.testing.assert_close(
        kl_divergence(target, draft).cpu().double(), reference(target, draft), rtol=1e-5, atol=1e-6
    )


def test_masked_logits_stay_finite():
    target, draft = torch.randn(4, 64), torch.randn(4, 64)
    target[:, ::3], draft[:, 1::3] = torch.finfo(torch.float32).min, -INF
    assert kl_divergence(target, draft).isfinite().all()
    assert kl_divergence(target, draft, 0.1).isfinite().all()


def test_broken_rows_give_nan_and_leave_others_alone():
    target, draft = torch.randn(6, 8), torch.randn(6, 8)
    clean = kl_divergence(target, draft)
    target[0, 3], draft[1, 3], target[2], draft[3], target[4, 0] = float("nan"), float("nan"), -INF, -INF, INF
    got = kl_divergence(target, draft)
    assert got[:5].isnan().all()
    assert got[5] == clean[5]


def test_does_not_depend_on_the_batch_or_strides_and_keeps_its_inputs(device):
    wide_target, wide_draft = torch.randn(7, 1003, device=device), torch.randn(7, 1005, device=device)
    target, draft = wide_target[:, :1000], wide_draft[:, :1000]
    kept = wide_target.clone(), wide_draft.clone()
    temperature = torch.linspace(0, 2, 7, device=device)
    got = kl_divergence(target, draft, temperature)
    order = torch.randperm(7, device=device)
    assert torch.equal(kl_divergence(target[order], draft[order], temperature[order]), got[order])
    alone = [kl_divergence(target[[r]], draft[[r]], temperature[[r]]) for r in range(7)]
    assert torch.equal(torch.cat(alone), got)
    assert torch.equal(wide_target, kept[0])
    assert torch.equal(wide_draft, kept[1])


def test_a_long_row_alone_equals_itself_among_others():
    # Torch splits the sum of one long row over threads.
    target, draft = torch.randn(2, 70_001), torch.randn(2, 70_001)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        got = kl_divergence(target, draft)
        assert torch.equal(kl_divergence(target[:1], draft[:1]), got[:1])
    finally:
        torch.set_num_threads(threads)


def test_no_rows(device):
    assert kl_divergence(torch.zeros(0, 5, device=device), torch.zeros(0, 3, device=device)).shape == (0,)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("target_logits", (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3))),
        ("draft_logits", (torch.zeros(2, 3), torch.zeros(3, 3))),
        ("draft_logits", (torch.zeros(2, 3), torch.zeros(2, 6)[:, ::2])),
        ("temperature", (torch.zeros(2, 3), torch.zeros(2, 3), -1.0)),
        ("temperature", (torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([1.0, -1.0]))),
        ("temperature", (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3))),
    ],
)
def test_refuses(name, arguments):
    with pytest.raises(ValueError, match=name):
        kl_divergence(*arguments)


# Masks of large finite numbers


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [(-1e30, torch.bfloat16), (torch.finfo(torch.float32).min, torch.float32)],
    ids=["-1e30", "lowest"],
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_finite_masks_of_the_draft_count_as_1e_minus_8(mask, temperature, dtype):
    # Before and behind the draft's maximum, in whole tiles, and in all of them but one; the last row masks the target.
    target, draft = torch.randn(6, 200), torch.randn(6, 200)
    draft[:, 100] = 6.0
    target, draft = target.to(dtype), draft.to(dtype)
    mask = torch.tensor(mask, dtype=dtype).item()
    for row, columns in enumerate((slice(0, 100), slice(101, 200), slice(0, 200, 2), slice(32, 96), slice(128, 192))):
        keeps_the_maximum = draft[row, 100].item()
        draft[row, columns] = mask
        draft[row, 100] = keeps_the_maximum
    target[5, :96] = mask
    got = kl_divergence(target, draft, temperature)
    torch.testing.assert_close(got.cpu().double(), reference(target, draft, temperature), rtol=1e-5, atol=1e-5)
    draft = draft.masked_fill(draft == mask, -INF)
    torch.testing.assert_close(got, kl_divergence(target, draft, temperature), rtol=1e-5, atol=1e-5)


def test_a_draft_probability_counts_down_to_exp_minus_1e15():
    # p = 1/4 each and q = 1/3 of three: the rest is a quarter of the fourth's distance.
    logits = torch.zeros(4, 4)
    logits[:, 3] = torch.tensor([-1e3, -1e14, -1e16, -3e38])
    rest = 0.75 * math.log(3) - math.log(4)
    want = torch.tensor([250.0 + 0.25 * math.log(3) + rest, 2.5e13] + [rest - 0.25 * math.log(1e-8)] * 2)
    torch.testing.assert_close(kl_divergence(torch.zeros(4, 4), logits), want, rtol=1e-5, atol=1e-6)
    got = kl_divergence(torch.zeros(4, 4), logits.flip(1))  # behind it
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_floor_of_q_does_not_make_it_negative():
    # p = e^-22 where q = 1e-8: alone, that column would add e^-22 (-22 + 18.4).
    target, draft = torch.tensor([[0.0, -22.0]]), torch.tensor([[0.0, -INF]])
    assert kl_divergence(target, draft).tolist() == [0]
