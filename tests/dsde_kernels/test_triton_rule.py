"""The DSDE rule and the batch cap, exactly, in all their forms: twin and kernel, separate ops and fused step."""

import math

import pytest
import torch

from dsde_kernels import DsdeRule, dsde_step, speculation_lengths, stability_update, use_backend, verify_kernel
from tests.dsde_kernels.test_stability import state_of

INF, NAN = float("inf"), float("nan")
FORMS = {
    "twin": ("torch", False),
    "twin fused": ("torch", True),
    "kernel": ("triton", False),
    "kernel fused": ("triton", True),
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def take(request, triton_backend):
    """One step of given KLDs and acceptances in one of the forms."""
    backend, fused = request.param

    def run(state, rule, klds, accepted, temperature=0.0, failed=()):
        with use_backend(backend):
            return (_fused if fused else _separate)(state, rule, klds, accepted, temperature, failed)

    return run


def _inputs(klds, temperature):
    count = len(klds)
    kld = torch.tensor([x for values in klds for x in values])
    cu_draft = torch.tensor([0, *map(len, klds)]).cumsum(0).int()
    temperatures = temperature if isinstance(temperature, list) else [temperature] * count
    return kld, cu_draft, torch.tensor(temperatures), torch.arange(count)


def _separate(state, rule, klds, accepted, temperature, failed):
    kld, cu_draft, temperature, slots = _inputs(klds, temperature)
    ok = torch.tensor([i not in failed for i in range(len(klds))])
    proposed = stability_update(state, slots, kld, cu_draft, torch.tensor(accepted), rule, temperature, ok)
    lengths, cap = speculation_lengths(state, slots, rule, proposed)
    return lengths.tolist(), cap.item()


def _fused(state, rule, klds, accepted, temperature, failed):
    """p = (1, 0) and q = (exp(-KLD), 1 - exp(-KLD)): draft 0 is accepted, draft 1 is not. Failing: a NaN bonus row."""
    kld, cu_draft, temperature, slots = _inputs(klds, temperature)
    lengths = [len(values) for values in klds]
    target = torch.tensor([0.0, -INF]).repeat(len(kld) + len(klds), 1)
    for i in failed:
        target[cu_draft[i + 1] + i] = NAN
    scale = temperature.masked_fill(temperature == 0, 1.0).repeat_interleave(torch.tensor(lengths))
    x = kld.double()
    draft = torch.stack((-x, (-(-x).expm1()).log()), 1) * scale[:, None]
    ids = [int(j >= n) for n, k in zip(accepted, lengths, strict=True) for j in range(k)]
    zero = torch.zeros(len(klds), dtype=torch.int64)
    out = dsde_step(
        target, draft.float(), torch.tensor(ids, dtype=torch.int64), cu_draft, temperature=temperature, seed=zero,
        step=zero, max_draft=max(lengths), state=state, slots=slots, rule=rule,
    )  # fmt: skip
    assert out.num_accepted.tolist() == accepted
    assert out.ok.tolist() == [i not in failed for i in range(len(klds))]
    torch.testing.assert_close(out.kld, kld, rtol=1e-5, atol=1e-6)
    return out.next_sl.tolist(), out.sl_cap.item()


def calibrated(rule, lengths):
    """Sequences whose step with a KLD of 0 gives these SL_hat."""
    state = state_of(len(lengths), rule)
    state.drafted[:] = rule.calibration_tokens
    state.sl[:] = torch.tensor(lengths, dtype=torch.int32)
    state.sl_max[:] = state.sl
    return state


# The cap


@pytest.mark.parametrize(
    ("rounding", "caps"),
    [("nearest", [4, 3, 3, 4]), ("floor", [4, 2, 2, 4]), ("ceil", [5, 3, 3, 4]), (None, [INF] * 4)],
)
def test_each_rounding_of_the_mean(rounding, caps, take):
    # Means of 4.25, 2.5 (halves go up), 2.75 and exactly 4.
    rule = DsdeRule(cap=rounding)
    for lengths, cap in zip([[10, 2, 3, 2], [2, 3], [2, 3, 3, 3], [4, 4, 4]], caps, strict=True):
        got = take(calibrated(rule, lengths), rule, [[0.0]] * len(lengths), [1] * len(lengths))
        assert got == ([min(n, cap) for n in lengths], cap)


def test_only_calibrated_sequences_that_drafted_vote(take):
    # In order: votes 3; sat out, capped; in calibration, doubles; in calibration, sat out; votes 4.
    rule = DsdeRule()
    state = calibrated(rule, [3, 9, 5, 5, 4])
    state.drafted[2:4] = 0
    assert take(state, rule, [[0.0], [], [0.0], [], [0.0]], [1, 0, 1, 0, 1]) == ([3, 4, 10, 5, 4], 4)


def test_nobody_votes(take):
    rule = DsdeRule()
    state = calibrated(rule, [9, 5])
    state.drafted[1] = 0
    assert take(state, rule, [[], [0.0]], [0, 1]) == ([9, 10], INF)


def test_a_step_that_failed_neither_counts_nor_votes_nor_ends_calibration(take):
    # Their bonus row is broken while their KLD is finite. The first lacks one draft for calibration: no cap for it.
    rule = DsdeRule()
    state = calibrated(rule, [5, 10, 3])
    state.drafted[0] = rule.calibration_tokens - 1
    before = state.table.clone()
    assert take(state, rule, [[0.0], [0.3], [0.0]], [1, 1, 1], failed=(0, 1)) == ([5, 3, 3], 3)
    assert torch.equal(state.table[:2], before[:2])
    assert state.drafted.tolist() == [29, 30, 31]


def test_more_sequences_than_one_pass_of_the_cap_takes(monkeypatch, device, take):
    # Interpreted, where sequences are slow, passes are made smaller.
    passes = 1024
    if device == "cpu":
        passes = 4
        monkeypatch.setattr(verify_kernel, "_VOTERS", type(verify_kernel._VOTERS)(passes))
    count = 2 * passes + 2
    rule = DsdeRule()
    lengths = [2 + i % 8 for i in range(passes)] + [9] * (count - passes)
    drafts = [i % 3 > 0 for i in range(count)]
    votes = [n for n, drafted in zip(lengths, drafts, strict=True) if drafted]
    cap = math.floor(sum(votes) / len(votes) + 0.5)
    assert cap < 9
    got = take(calibrated(rule, lengths), rule, [[0.0] * x for x in drafts], [int(x) for x in drafts])
    assert got == ([min(n, cap) for n in lengths], cap)


# The rule


@pytest.mark.parametrize(
    ("change", "sl_max", "sl"),
    [
        ({}, 7, 6),  # SL_max: 4 (1 + .75) = 7; SL: 2 + .650 * 5
        ({"alpha": 1.0}, 7, 7),  # 2 + .838 * 5
        ({"alpha": 4.0}, 7, 3),  # 2 + .178 * 5
        ({"alpha": 4.0, "sl_min_fraction": 0.5}, 7, 5),  # 4 + .178 * 3
        ({"sl_max_coefficient": 0.2}, 5, 4),  # 4 (1 + .15) = 4.6; 2 + .650 * 3
        ({"sl_max_coefficient": 0.0}, 4, 4),  # 2 + .650 * 2
        ({"sl_limit": 6}, 6, 5),  # 2 + .650 * 4
    ],
)
def test_each_constant_of_the_rule(change, sl_max, sl, take):
    # One step ends calibration: mean .15, maximum .2, 4 accepted, WVIR 1, SF = exp(.3) - 1 = .350.
    rule = DsdeRule(calibration_tokens=2, **change)
    state = state_of(1, rule)
    assert take(state, rule, [[0.1, 0.2] * 4], [4]) == ([sl], sl)
    assert (state.sl_max.tolist(), state.sl.tolist()) == ([sl_max], [sl])


def test_doubling_stops_at_the_limit(take):
    rule = DsdeRule(sl_limit=7)
    assert take(state_of(2, rule), rule, [[0.1] * 5] * 2, [5, 4]) == ([7, 5], INF)


@pytest.mark.parametrize(("spread", "wvir", "sl"), [(0.005, 1.0, 7), (0.0005, 20.0, 2)])
def test_a_flat_history_is_one_of_variance_below_1e_minus_6(spread, wvir, sl, take):
    # Variances of 2.5e-5 and 2.5e-7; SF = exp(.2) - 1, SL_max = 8.
    rule = DsdeRule(calibration_tokens=2)
    state = state_of(1, rule)
    assert take(state, rule, [[0.1 + spread, 0.1 - spread] * 4], [4]) == ([sl], sl)
    assert state.wvir[0].item() == pytest.approx(wvir, rel=1e-3)
    assert state.sl_max[0] == 8


def test_temperature_divides_the_mean_where_the_rule_says_so(take):
    # Mean of .15 over temperatures .5, 2 and, greedy, none: as with alpha 4, 1 and 2.
    for divide, lengths in ((True, [3, 7, 6]), (False, [6, 6, 6])):
        rule = DsdeRule(calibration_tokens=2, divide_by_temperature=divide, cap=None)
        got = take(state_of(3, rule), rule, [[0.1, 0.2] * 4] * 3, [4] * 3, [0.5, 2.0, 0.0])
        assert got == (lengths, INF)
