import pytest
import torch
from scipy import stats

from dsde_kernels import sample, truncation_threshold, use_backend
from tests.dsde_kernels import oracle

INF = float("inf")


def keys(rows, device="cpu"):
    r = torch.arange(rows, device=device)
    return r * 7919, r % 5, r % 3


def test_sample_equals_a_scalar_race(device):
    logits = torch.randn(12, 37, device=device) * 3
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.0] * 3, device=device)
    threshold = torch.full((12,), -1.0, device=device)
    seed, step, offset = keys(12, device)
    got = sample(logits, temperature, seed, step, offset, threshold).tolist()
    for r in range(12):
        t = temperature[r].item()
        p = oracle.softmax(logits[r], t, -1.0)
        want = oracle.argmax(logits[r]) if t == 0 else oracle.race(p, r * 7919, r % 5, r % 3, oracle.DRAFT)
        assert got[r] == want


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_sample_has_the_softmax_distribution(temperature, device):
    trials, vocabulary = 100_000, 16
    row = torch.randn(vocabulary)
    seed = torch.arange(trials, device=device)
    tokens = sample(
        row.to(device).expand(trials, -1).contiguous(),
        torch.full((trials,), temperature, device=device),
        seed,
        torch.zeros_like(seed),
        torch.zeros_like(seed),
    )
    observed = torch.bincount(tokens, minlength=vocabulary).cpu().numpy()
    expected = trials * torch.tensor(oracle.softmax(row, temperature), dtype=torch.float64).numpy()
    assert stats.chisquare(observed, expected).pvalue > 1e-6  # false alarm: 1e-6


def test_a_rare_token_is_drawn_as_often_as_it_should():
    # p = 2^-12 over 3 * 2^16 trials: 48 expected, 6 sigma either side (false alarm 2e-9 in the normal limit).
    trials = 3 << 16
    logits = torch.tensor([[0.0, -12 * 0.6931472]]).repeat(trials, 1)
    seed = torch.arange(trials)
    tokens = sample(logits, torch.ones(trials), seed, seed * 0, seed * 0)
    assert 7 <= tokens.sum().item() <= 90


def test_greedy_takes_the_lowest_id_on_ties(device):
    logits = torch.tensor([[1.0, 3, 3, 3], [2, 2, 2, 2], [-INF, -INF, 0, 0]], device=device)
    seed, step, offset = keys(3, device)
    assert sample(logits, torch.zeros(3, device=device), seed, step, offset).tolist() == [1, 0, 2]


def test_thresholds_above_every_logit():
    # Nothing to draw from; greedy rows don't look at theirs.
    logits = torch.tensor([[1.0, 3, 2], [1, 3, 2], [1, 3, 2]])
    zero = torch.zeros(3, dtype=torch.int64)
    threshold = torch.tensor([3.5, 3.5, 3.0])
    assert sample(logits, torch.tensor([1.0, 0.0, 1.0]), zero, zero, zero, threshold).tolist() == [-1, 1, 1]


def test_a_late_winner_by_a_narrow_margin():
    # Seeds, found by search, with which the best of 64 equal weights lies in the second half, less than 1 % ahead.
    seeds = [684, 1434, 1579, 1829, 2162, 3496, 3837, 3908]
    want = [63, 45, 51, 42, 43, 47, 38, 33]
    assert [oracle.race([1.0] * 64, seed, 0, 0, oracle.DRAFT) for seed in seeds] == want
    seed = torch.tensor(seeds)
    assert sample(torch.zeros(8, 64), torch.ones(8), seed, seed * 0, seed * 0).tolist() == want


def test_greedy_draws_no_number(monkeypatch):
    monkeypatch.setattr("dsde_kernels.rng.philox_torch", lambda *_: pytest.fail("random numbers for greedy rows"))
    assert sample(torch.eye(3), torch.zeros(3), *keys(3)).tolist() == [0, 1, 2]


def test_broken_rows_give_minus_one_and_leave_others_alone(device):
    logits = torch.randn(8, 9, device=device)
    logits[1, 4], logits[3], logits[5, 0], logits[7, 2] = float("nan"), -INF, INF, -INF
    for t in (0.0, 0.8):
        temperature = torch.full((8,), t, device=device)
        tokens = sample(logits, temperature, *keys(8, device))
        rows = torch.tensor([0, 2, 4, 6, 7], device=device)
        alone = sample(logits[rows], temperature[rows], *(k[rows] for k in keys(8, device)))
        assert tokens[[1, 3, 5]].tolist() == [-1, -1, -1]
        assert tokens[rows].tolist() == alone.tolist()
        assert (alone >= 0).all()


def test_never_draws_what_truncation_drops(device):
    logits = torch.randn(500, 33, device=device)
    temperature = torch.full((500,), 5.0, device=device)
    threshold = truncation_threshold(logits, temperature, top_k=torch.full((500,), 2, device=device))
    tokens = sample(logits, temperature, *keys(500, device), threshold)
    assert (logits.gather(1, tokens[:, None])[:, 0] >= threshold).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample_does_not_depend_on_the_batch_and_keeps_its_input(dtype, device):
    wide = torch.randn(9, 36, device=device).to(dtype)
    logits = wide[:, :33]  # row stride V + 3
    temperature = torch.tensor([0.0, 0.7, 1.3] * 3, device=device)
    before = wide.clone()
    tokens = sample(logits, temperature, *keys(9, device))
    order = torch.randperm(9, device=device)
    mixed = sample(logits[order], temperature[order], *(k[order] for k in keys(9, device)))
    alone = torch.cat([sample(logits[[r]], temperature[[r]], *(k[[r]] for k in keys(9, device))) for r in range(9)])
    assert torch.equal(mixed, tokens[order])
    assert torch.equal(alone, tokens)
    assert torch.equal(wide, before)


def test_very_small_temperature_is_the_argmax(device):
    logits = torch.randn(6, 20, device=device) * 30
    tokens = sample(logits, torch.full((6,), 1e-38, device=device), *keys(6, device))
    assert torch.equal(tokens, logits.argmax(-1))


def test_no_rows(device):
    empty = torch.zeros(0, device=device)
    assert sample(torch.zeros(0, 5, device=device), empty, *keys(0, device)).shape == (0,)
    assert truncation_threshold(torch.zeros(0, 5, device=device), empty, top_p=empty).shape == (0,)


RULES = [
    {},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.4},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.1},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 99},
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_threshold_equals_the_scalar_filter(rule, temperature, device):
    logits = torch.randn(7, 19, device=device)
    tensors = {
        name: torch.full((7,), value, dtype=torch.int32 if name == "top_k" else torch.float32, device=device)
        for name, value in rule.items()
    }
    got = truncation_threshold(logits, torch.full((7,), temperature, device=device), **tensors)
    want = [
        oracle.threshold(
            row, temperature, rule.get("top_k", 0), tensors.get("top_p", torch.ones(1))[0].item(), rule.get("min_p", 0)
        )
        for row in logits
    ]
    assert got.tolist() == want


def test_top_p_counts_what_top_k_left():
    # p = .5, .25, .25 of the three; after top_k = 2 the rest is .667, .333, so top_p = .6 needs one token, not two.
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    logits[0, 2] -= 1e-3
    one = torch.ones(1)
    both = truncation_threshold(logits, one, torch.tensor([2]), torch.tensor([0.6]))
    alone = truncation_threshold(logits, one, None, torch.tensor([0.6]))
    assert both.tolist() == [logits[0, 0].item()]
    assert alone.tolist() == [logits[0, 1].item()]


def test_ties_at_the_threshold_are_all_kept():
    logits = torch.tensor([[3.0, 1, 1, 1, 0]])
    threshold = truncation_threshold(logits, torch.ones(1), top_k=torch.tensor([2]))
    assert (logits >= threshold[:, None]).tolist() == [[True, True, True, True, False]]


def test_disabled_rows_beside_enabled_ones():
    logits = torch.randn(3, 11)
    k, p, m = torch.tensor([0, -1, 4]), torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3)
    threshold = truncation_threshold(logits, torch.ones(3), k, p, m)
    assert threshold[:2].tolist() == [-INF, -INF]
    assert (logits[2] >= threshold[2]).sum() == 4


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("logits", {"logits": torch.zeros(3)}),
        ("logits", {"logits": torch.zeros(2, 4, dtype=torch.float64)}),
        ("logits", {"logits": torch.zeros(4, 2).T}),
        ("temperature", {"temperature": torch.tensor([1.0, -0.5])}),
        ("temperature", {"temperature": torch.tensor([1.0, float("nan")])}),
        ("temperature", {"temperature": torch.ones(3)}),
        ("seed", {"seed": torch.zeros(2)}),
        ("threshold", {"threshold": torch.zeros(2, dtype=torch.int64)}),
    ],
)
def test_sample_refuses(name, change):
    zero = torch.zeros(2, dtype=torch.int64)
    arguments = {"logits": torch.zeros(2, 4), "temperature": torch.ones(2), "seed": zero, "step": zero, "offset": zero}
    with pytest.raises(ValueError, match=name):
        sample(**(arguments | change))


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.1), ("min_p", 1.5), ("top_p", float("nan"))]
)
def test_threshold_refuses_values_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"{name} must lie in .* got"):
        truncation_threshold(torch.zeros(1, 4), torch.ones(1), **{name: torch.tensor([value])})


def test_backend_choice(monkeypatch):
    with use_backend("torch"):
        sample(torch.eye(3), torch.zeros(3), *keys(3))
    with pytest.raises(ValueError, match="cuda-graphs"), use_backend("cuda-graphs"):
        pass
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), use_backend("triton"):
        sample(torch.eye(3), torch.zeros(3), *keys(3))
    monkeypatch.setenv("DSDE_BACKEND", "triton")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        sample(torch.eye(3), torch.zeros(3), *keys(3))
    monkeypatch.setenv("DSDE_BACKEND", "cuda-graphs")
    with pytest.raises(ValueError, match="DSDE_BACKEND"):
        sample(torch.eye(3), torch.zeros(3), *keys(3))
