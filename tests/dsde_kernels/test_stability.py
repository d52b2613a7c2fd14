import math
import random

import pytest
import torch

from dsde_kernels import DsdeRule, StabilityState, speculation_lengths, stability_update
from tests.dsde_kernels import oracle

RELEASED = DsdeRule.released_code()


def state_of(capacity, rule):
    """A state where tensors are made: on a GPU if the kernels run there."""
    return StabilityState(capacity, rule, torch.get_default_device())


def ragged(lists, device="cpu"):
    flat = [x for row in lists for x in row]
    cu = torch.tensor([0] + [len(row) for row in lists], dtype=torch.int32).cumsum(0).int()
    return torch.tensor(flat, dtype=torch.float32, device=device), cu.to(device)


def update(state, rule, klds, accepted, slots=None, temperature=None, **more):
    kld, cu = ragged(klds, state.table.device)
    device = kld.device
    slots = torch.arange(len(klds), device=device) if slots is None else torch.tensor(slots, device=device)
    temperature = None if temperature is None else torch.tensor(temperature, device=device)
    accepted = torch.tensor(accepted, dtype=torch.int32, device=device)
    return stability_update(state, slots, kld, cu, accepted, rule, temperature, **more)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "rule",
    [
        DsdeRule(),
        RELEASED,
        DsdeRule(cap="floor", calibration_tokens=7, long_window=12, short_window=3),
        DsdeRule(cap=None),
    ],
    ids=["paper", "released", "small", "uncapped"],
)
def test_random_histories_equal_the_scalar_rule(rule, seed, device):
    dice = random.Random(seed)
    capacity = 7
    state = StabilityState(capacity, rule, device)
    ours = [oracle.Rule(rule) for _ in range(capacity)]
    for _ in range(60):
        slots = dice.sample(range(capacity), dice.randint(1, 5))
        klds = [[dice.expovariate(4) for _ in range(dice.choice([0, 1, 3, ours[s].sl]))] for s in slots]
        accepted = [dice.choice([len(k), dice.randint(0, len(k))]) for k in klds]
        temperature = [dice.choice([0.0, 0.7, 1.0]) for _ in slots]
        proposed = update(state, rule, klds, accepted, slots, temperature)
        assert proposed.tolist() == [bool(k) for k in klds]
        for s, k, a, t in zip(slots, klds, accepted, temperature, strict=True):
            ours[s].step(k, a, t)
            assert state.drafted[s] == ours[s].drafted
            assert state.sl_max[s] == (ours[s].sl_max if ours[s].calibrated else rule.sl_limit)
            assert state.mean_kld[s].item() == pytest.approx(ours[s].mu, rel=1e-5)
            assert state.wvir[s].item() == pytest.approx(ours[s].wvir, rel=1e-4)
            if abs(ours[s].exact - round(ours[s].exact)) < 1e-3:  # float32 may round the other way
                ours[s].sl = state.sl[s].item()
            assert state.sl[s] == ours[s].sl
        sl, cap = speculation_lengths(state, torch.tensor(slots, device=device), rule, proposed)
        want, want_cap = oracle.cap(rule, [ours[s] for s in slots], [bool(k) for k in klds])
        assert sl.tolist() == want
        assert cap.item() == want_cap


@pytest.mark.parametrize(("rounding", "cap"), [("nearest", 4), ("floor", 4), ("ceil", 5), (None, math.inf)])
def test_the_articles_example_of_the_cap(rounding, cap):
    rule = DsdeRule(cap=rounding)
    state = state_of(4, rule)
    state.drafted[:] = rule.calibration_tokens
    state.sl[:] = torch.tensor([10, 2, 3, 2], dtype=torch.int32)
    sl, got = speculation_lengths(state, torch.arange(4), rule)
    assert got.item() == cap
    assert sl.dtype == torch.int32
    assert sl.tolist() == [int(min(cap, 10)), 2, 3, 2]


def test_calibration_neither_votes_nor_is_capped():
    rule = DsdeRule()
    state = state_of(3, rule)
    state.drafted[:] = torch.tensor([30, 29, 30], dtype=torch.int32)
    state.sl[:] = torch.tensor([3, 10, 5], dtype=torch.int32)
    sl, cap = speculation_lengths(state, torch.arange(3), rule)
    assert (sl.tolist(), cap.item()) == ([3, 10, 4], 4)


def test_a_sequence_that_sat_out_does_not_vote_but_is_capped():
    rule = DsdeRule()
    state = state_of(2, rule)
    state.drafted[:] = 30
    state.sl[:] = torch.tensor([3, 9], dtype=torch.int32)
    sl, cap = speculation_lengths(state, torch.arange(2), rule, torch.tensor([True, False]))
    assert (sl.tolist(), cap.item()) == ([3, 3], 3)


@pytest.mark.parametrize("slots", [[], [0, 1]])
def test_nobody_takes_part(slots):
    rule = DsdeRule()
    sl, cap = speculation_lengths(state_of(2, rule), torch.tensor(slots, dtype=torch.int64), rule)
    assert sl.tolist() == [rule.sl_start] * len(slots)
    assert cap.item() == math.inf


def test_calibration_doubles_only_after_full_acceptance():
    rule = DsdeRule(sl_start=2, calibration_tokens=100)
    state = state_of(1, rule)
    lengths = []
    for accepted in (1, 2, 4, 7, 8, 10):
        k = state.sl[0].item()
        update(state, rule, [[0.1] * k], [min(accepted, k)])
        lengths.append(state.sl[0].item())
    assert lengths == [2, 4, 8, 8, 10, 10]


def test_the_step_that_completes_calibration_sets_sl_max_and_follows_the_rule():
    rule = DsdeRule(calibration_tokens=10)
    state = state_of(1, rule)
    update(state, rule, [[0.2] * 5], [2])
    assert (state.sl[0], state.sl_max[0]) == (5, 10)
    update(state, rule, [[0.0] * 5], [5])
    # A = 5, mean = .1, max = .2: 5 * 1.5 = 7.5 -> 7 for the 1e-6 below the line; mu = 0 -> SL_hat = SL_max, no doubling
    assert (state.sl_max[0], state.sl[0]) == (7, 7)
    update(state, rule, [[5.0] * 5], [5])
    assert (state.sl_max[0], state.sl[0]) == (7, rule.sl_min)


def test_wvir_edges():
    rule = DsdeRule()
    state = state_of(3, rule)
    update(state, rule, [[0.3], [0.3, 0.3], [0.1, 0.9]], [0, 0, 0])
    assert state.wvir.tolist() == [0.0, 20.0, 1.0]


def test_weights_count_age_from_the_newest_value():
    rule = DsdeRule(decay=0.5, short_window=2, long_window=3)
    state = state_of(1, rule)
    update(state, rule, [[4.0, 0.0]], [0])
    update(state, rule, [[1.0]], [0])
    # long: weights 1/4, 1/2, 1 on 4, 0, 1: mean 8/7, Var 74/49 - ... ; short: weights 1/2, 1 on 0, 1
    long = (4 * 0.25 + 1) / 1.75
    long = (0.25 * (4 - long) ** 2 + 0.5 * long**2 + (1 - long) ** 2) / 1.75
    short = (0.5 * (2 / 3) ** 2 + (1 / 3) ** 2) / 1.5
    assert state.wvir[0].item() == pytest.approx(short / long, rel=1e-6)


def test_more_drafts_than_the_window_holds():
    rule = DsdeRule(short_window=2, long_window=3, calibration_tokens=4, sl_limit=8)
    state, ours = state_of(1, rule), oracle.Rule(rule)
    values = [0.5, 0.1, 0.9, 0.2, 0.05, 0.3, 0.12]
    update(state, rule, [values], [4])
    ours.step(values, 4)
    assert state.wvir[0].item() == pytest.approx(ours.wvir, rel=1e-5)
    assert (state.sl[0], state.sl_max[0]) == (ours.sl, ours.sl_max)


def test_no_drafts_failures_and_broken_klds_change_nothing():
    rule = DsdeRule()
    state = state_of(5, rule)
    update(state, rule, [[0.1, 0.2]] * 5, [1] * 5)
    before = state.table.clone()
    klds = [[], [0.3], [float("nan"), 0.1], [math.inf], [0.3]]
    proposed = update(state, rule, klds, [0, 1, 1, 0, 1], ok=torch.tensor([True, False, True, True, True]))
    assert proposed.tolist() == [False, False, False, False, True]
    assert torch.equal(state.table[:4], before[:4])
    assert not torch.equal(state.table[4], before[4])


def test_update_touches_only_its_slots_and_reset_restores():
    rule = DsdeRule()
    state, fresh = state_of(4, rule), state_of(4, rule)
    update(state, rule, [[0.1, 0.4], [0.7]], [2, 0], slots=[3, 1])
    assert torch.equal(state.table[[0, 2]], fresh.table[[0, 2]])
    assert state.drafted.tolist() == [0, 1, 0, 2]
    state.reset(torch.tensor([3, 1]))
    assert torch.equal(state.table, fresh.table)
    assert state.sl.tolist() == [rule.sl_start] * 4


def test_bit_identical_whatever_the_batch():
    rule = DsdeRule()
    klds = [torch.rand(k).tolist() for k in (3, 0, 10, 1, 7)]
    accepted = [1, 0, 10, 1, 2]
    together, permuted, alone = (state_of(5, rule) for _ in range(3))
    for _ in range(6):
        update(together, rule, klds, accepted)
        order = [4, 2, 0, 3, 1]
        update(permuted, rule, [klds[i] for i in order], [accepted[i] for i in order], slots=order)
        for i in range(5):
            update(alone, rule, [klds[i]], [accepted[i]], slots=[i])
    assert torch.equal(together.table.view(torch.int32), permuted.table.view(torch.int32))
    assert torch.equal(together.table.view(torch.int32), alone.table.view(torch.int32))


def test_huge_kld_of_a_first_draft_does_not_make_nan():
    rule = DsdeRule(calibration_tokens=1)
    state = state_of(1, rule)
    update(state, rule, [[500.0]], [1])
    assert state.wvir[0] == 0
    assert state.sl[0] == state.sl_max[0] == 2  # A = 1, ratio 1: SL_max 2; x = 0


def test_an_enormous_kld_counts_as_1e15_and_leaves_the_neighbours_cap_alone():
    # Its square would not be finite. The neighbour's SL_hat is 6 (2 + .650 * 5), so the cap is the mean of 2 and 6.
    rule = DsdeRule(calibration_tokens=2)
    state, bounded = state_of(2, rule), state_of(2, rule)
    for other, huge in ((state, 3e38), (bounded, 1e15)):
        proposed = update(other, rule, [[huge, 0.1], [0.1, 0.2] * 4], [2, 4])
        lengths, cap = speculation_lengths(other, torch.arange(2), rule, proposed)
        assert (proposed.tolist(), lengths.tolist(), cap.item()) == ([True, True], [2, 4], 4)
        assert other.sl.tolist() == [2, 6]
    for _ in range(4):  # also beside ordinary values, and more of its kind
        update(state, rule, [[3e38, 0.1, 3e38], [0.1]], [3, 1])
        update(bounded, rule, [[1e15, 0.1, 1e15], [0.1]], [3, 1])
        assert state.table[:, :-4].isfinite().all()
        assert state.sl[0] == 2
    assert torch.equal(state.table.view(torch.int32), bounded.table.view(torch.int32))


def test_temperature_divides_only_in_the_released_variant():
    for rule, divided in (
        (DsdeRule(calibration_tokens=2), False),
        (DsdeRule(calibration_tokens=2, divide_by_temperature=True), True),
    ):
        state = state_of(2, rule)
        update(state, rule, [[0.1, 0.15] + [0.1] * 6] * 2, [8, 8], temperature=[0.25, 0.0])
        assert (state.sl[0] < state.sl[1]) == divided


def test_empty_batch():
    rule = DsdeRule()
    state = state_of(1, rule)
    assert update(state, rule, [], [], slots=torch.zeros(0, dtype=torch.int64).tolist() or None).shape == (0,)


def test_released_code_constants():
    assert (RELEASED.decay, RELEASED.calibration_tokens, RELEASED.cap) == (0.9, 100, "ceil")
    assert (RELEASED.sl_max_coefficient, RELEASED.sl_min_fraction, RELEASED.divide_by_temperature) == (0.5, 0.1, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", -1.0), ("decay", 0.0), ("decay", 1.1), ("short_window", 0), ("long_window", 5), ("sl_min", 0),
        ("sl_limit", 1), ("sl_start", 11), ("sl_start", 1), ("calibration_tokens", 0), ("sl_max_coefficient", -0.1),
        ("cap", "round"), ("sl_min_fraction", 2.0), ("alpha", float("nan")),
    ],
)  # fmt: skip
def test_rule_refuses(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be .*; got"):
        DsdeRule(**{field: value})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("slots", {"slots": torch.zeros(2)}),
        ("kld", {"kld": torch.zeros(3, dtype=torch.float64)}),
        ("cu_draft", {"cu_draft": torch.tensor([0, 3])}),
        ("num_accepted", {"num_accepted": torch.zeros(2)}),
        ("ok", {"ok": torch.zeros(2)}),
    ],
)
def test_update_refuses(name, change):
    rule = DsdeRule()
    arguments = {
        "slots": torch.arange(2),
        "kld": torch.zeros(3),
        "cu_draft": torch.tensor([0, 2, 3]),
        "num_accepted": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=name):
        stability_update(state_of(2, rule), **(arguments | change), rule=rule)


@pytest.mark.parametrize("proposed", [torch.ones(2), torch.ones(3, dtype=torch.bool)], ids=["float", "long"])
def test_speculation_lengths_refuses_a_wrong_proposed(proposed):
    rule = DsdeRule()
    with pytest.raises(ValueError, match="proposed"):
        speculation_lengths(state_of(2, rule), torch.arange(2), rule, proposed)
