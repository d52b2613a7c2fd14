import math

import pytest
import torch
from scipy import stats

import dsde_kernels
from dsde_kernels import (
    DsdeRule,
    StabilityState,
    dsde_step,
    kl_divergence,
    sample,
    speculation_lengths,
    stability_update,
    truncation_threshold,
    verify,
)
from tests.dsde_kernels import oracle
from tests.dsde_kernels.test_stability import state_of

INF, NAN = float("inf"), float("nan")


def batch(lengths, vocabulary=37, draft_vocabulary=None, temperature=(0.0, 0.7, 1.0), dtype=torch.float32, device=None):
    """A ragged batch whose drafts are drawn from the draft logits, as keyword arguments of `verify`."""
    drafts, sequences = sum(lengths), len(lengths)
    target = torch.randn(drafts + sequences, vocabulary, device=device) * 2
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    owner = torch.arange(sequences, device=device).repeat_interleave(
        torch.tensor(lengths, device=device, dtype=torch.int64)
    )
    rows = torch.arange(drafts, device=device) + owner
    width = draft_vocabulary or vocabulary
    draft = torch.randn(drafts, width, device=device)
    shared = min(width, vocabulary)
    draft[:, :shared] += target[rows, :shared]
    target, draft = target.to(dtype), draft.to(dtype)
    temperature = torch.tensor([temperature[i % len(temperature)] for i in range(sequences)], device=device)
    seed = torch.arange(sequences, device=device) * 104729 + 5
    step = torch.arange(sequences, device=device) % 3
    offset = torch.arange(drafts, device=device) - cu[owner]
    tokens = sample(draft[:, :shared], temperature[owner], seed[owner], step[owner], offset)
    return {
        "target_logits": target,
        "draft_logits": draft,
        "draft_tokens": tokens,
        "cu_draft": cu,
        "temperature": temperature,
        "seed": seed,
        "step": step,
        "max_draft": max(lengths, default=0),
    }


def simple(target, draft, tokens, lengths, temperature, **more):
    """`verify` of explicit rows; seeds count up."""
    sequences = len(lengths)
    seed = torch.arange(sequences)
    arguments = {
        "temperature": torch.full((sequences,), float(temperature)),
        "seed": seed,
        "step": torch.zeros_like(seed),
        "max_draft": max(lengths, default=0),
    }
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return verify(target, draft, torch.tensor(tokens, dtype=torch.int64), cu, **(arguments | more))


def assert_equal(got, want):
    """Bit-equal results, NaN where NaN is."""
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert torch.equal(a.nan_to_num(nan=-77.0), b.nan_to_num(nan=-77.0)), name


def pick(out, lengths, rows):
    """The part of a result that belongs to the sequences `rows`, in that order."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    drafts = [d for i in rows for d in range(starts[i], starts[i + 1])]
    per_draft = {"kld", "accept_prob"}
    return type(out)(*(x[drafts] if name in per_draft else x[rows] for name, x in zip(out._fields, out, strict=True)))


LENGTHS = [3, 0, 1, 5, 2, 0, 4, 1, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case", ["plain", "draft narrower", "draft wider", "truncated", "deterministic", "deterministic truncated"]
)
def test_equals_the_scalar_reference(case, dtype, device):
    for repeat in range(4):
        widths = {"draft narrower": 29, "draft wider": 45}
        arguments = batch(LENGTHS, draft_vocabulary=widths.get(case), dtype=dtype, device=device)
        arguments["seed"] += repeat
        if "deterministic" in case:
            arguments["draft_logits"] = None
        if "truncated" in case:
            rows = arguments["target_logits"].shape[0]
            owner = torch.arange(9).repeat_interleave(torch.tensor(LENGTHS) + 1)
            half = torch.full((rows,), 0.6, device=device)
            arguments["target_threshold"] = truncation_threshold(
                arguments["target_logits"], arguments["temperature"][owner.to(device)], top_p=half
            )
            if arguments["draft_logits"] is not None:
                owner = torch.arange(9).repeat_interleave(torch.tensor(LENGTHS))
                arguments["draft_threshold"] = truncation_threshold(
                    arguments["draft_logits"], arguments["temperature"][owner.to(device)], top_p=half[:22]
                )
        arguments["draft_tokens"][[2, 9, 16]] = torch.tensor([-1, 2**40, -1], device=device)  # greedy, sampled twice
        got = verify(**arguments)
        want = oracle.verify(*arguments.values())
        assert got.num_accepted.tolist() == want["num_accepted"]
        assert got.tokens.tolist() == want["tokens"]
        assert got.ok.all()
        for name in ("kld", "accept_prob", "logprobs"):
            expected = torch.tensor(want[name], dtype=torch.float64)
            torch.testing.assert_close(getattr(got, name).cpu().double(), expected, rtol=2e-5, atol=2e-6, msg=name)


def test_dtypes_and_shapes(device):
    out = verify(**batch([2, 0, 3], device=device))
    assert [(x.dtype, list(x.shape)) for x in out] == [
        (torch.int64, [3, 4]),
        (torch.int32, [3]),
        (torch.float32, [5]),
        (torch.float32, [5]),
        (torch.float32, [3, 4]),
        (torch.bool, [3]),
    ]


# Greedy


def test_greedy_keeps_the_matching_prefix():
    peak = torch.eye(5) * 9
    target = peak[[1, 2, 3, 4, 0, 2, 2, 1]]  # A: three drafts, B: none, C: two
    out = simple(target, None, [1, 2, 0, 2, 2], [3, 0, 2], 0)
    assert out.tokens.tolist() == [[1, 2, 3, -1], [0, -1, -1, -1], [2, 2, 1, -1]]
    assert out.num_accepted.tolist() == [2, 0, 2]
    assert out.accept_prob.tolist() == [1, 1, 0, 1, 1]


def test_greedy_ties_take_the_lowest_id():
    target = torch.tensor([[0.0, 5, 5], [5, 5, 5]])
    assert simple(target, None, [2], [1], 0).tokens.tolist() == [[1, -1]]
    assert simple(target, None, [1], [1], 0).tokens.tolist() == [[1, 0]]


def test_greedy_kld_is_taken_at_temperature_one():
    arguments = batch([3], temperature=(0.0,))
    want = kl_divergence(arguments["target_logits"][:3], arguments["draft_logits"])
    assert torch.equal(verify(**arguments).kld, want)


def test_greedy_ignores_thresholds():
    arguments = batch([3, 2, 0], temperature=(0.0, 1.0, 0.0))
    plain = verify(**arguments)
    high = verify(**arguments, target_threshold=arguments["target_logits"].amax(-1))
    assert torch.equal(high.logprobs[[0, 2]], plain.logprobs[[0, 2]])
    assert torch.equal(high.tokens[[0, 2]], plain.tokens[[0, 2]])
    assert high.logprobs[1, 0] == 0  # one token kept: probability 1


def test_thresholds_of_the_caller_stay_as_they_are():
    # Greedy sequences ignore theirs, in a batch with sampled ones.
    arguments = batch([3, 2, 0], temperature=(0.0, 1.0, 0.0))
    thresholds = {"target_threshold": torch.full((8,), -1.0), "draft_threshold": torch.full((5,), -1.5)}
    kept = {name: x.clone() for name, x in thresholds.items()}
    verify(**arguments, **thresholds)
    for name, x in thresholds.items():
        assert torch.equal(x, kept[name]), name


def test_greedy_batch_draws_no_number(monkeypatch):
    monkeypatch.setattr("dsde_kernels.rng.philox_torch", lambda *_: pytest.fail("random numbers for greedy rows"))
    verify(**batch(LENGTHS, temperature=(0.0,)))


# Acceptance


def test_equal_distributions_always_pass(device):
    for t in (0.05, 0.6, 1.0, 4.0):
        arguments = batch([5] * 400, temperature=(t,), device=device)
        rows = torch.arange(2000, device=device) + torch.arange(400, device=device).repeat_interleave(5)
        draft = torch.empty(2000, 40, device=device)[:, :37].copy_(arguments["target_logits"][rows])
        # Every token of the vocabulary, drawn or not, also those of vanishing probability.
        arguments |= {"draft_logits": draft, "draft_tokens": torch.arange(2000, device=device) % 37}
        out = verify(**arguments)
        assert (out.accept_prob == 1).all()
        assert (out.num_accepted == 5).all()
        assert (out.kld == 0).all()


# Seeds whose first number of the stream `accept`, at step 0 and offset 0, is 6.6e-9, 1 - 2^-24 and 1/2 exactly: found
# by search, so that the edges are met with real keys, on every backend.
LOWEST, HIGHEST, HALF = 68886837, 61551765, 94204517


def test_seeds_of_the_ends_and_the_middle():
    numbers = torch.tensor([oracle.uniform(s, 0, 0, oracle.ACCEPT, 0) for s in (LOWEST, HALF, HIGHEST)])  # in float32
    assert 0 < numbers[0] < 2**-27 and numbers[1:].tolist() == [0.5, 1 - 2**-24]


def test_zero_target_probability_never_passes():
    target, draft = torch.zeros(4, 3), torch.zeros(2, 3)
    target[:, 1] = -INF
    draft[1, 1] = -INF  # q = 0 as well
    out = simple(target, draft, [1, 1], [1, 1], 1.0, seed=torch.tensor([LOWEST, LOWEST]))
    assert out.num_accepted.tolist() == [0, 0]
    assert out.accept_prob.tolist() == [0, 0]
    assert 1 not in out.tokens


def test_equal_probabilities_pass_at_the_largest_uniform_number():
    row = torch.randn(40)
    out = simple(row.repeat(2, 1), row[None], [3], [1], 1.0, seed=torch.tensor([HIGHEST]))
    assert (out.accept_prob.tolist(), out.num_accepted.tolist()) == ([1.0], [1])


def test_a_uniform_number_equal_to_the_ratio_rejects():
    # p(0) / q(0) is exactly 1/2 here, and so is u.
    out = simple(torch.zeros(2, 2), torch.tensor([[0.0, -INF]]), [0], [1], 1.0, seed=torch.tensor([HALF]))
    assert (out.accept_prob.tolist(), out.num_accepted.tolist()) == ([0.5], [0])


def test_truncated_draft_token_is_rejected_and_never_emitted(device):
    arguments = batch([3] * 60, temperature=(1.5,), device=device)
    target = arguments["target_logits"]
    threshold = target.kthvalue(35, -1).values  # three tokens kept
    out = verify(**arguments, target_threshold=threshold)
    for i in range(60):
        for j in range(out.num_accepted[i] + 1):
            assert target[i * 4 + j, out.tokens[i, j]] >= threshold[i * 4 + j]


def test_mean_acceptance_is_the_overlap_of_p_and_q(device):
    trials = 20_000
    p_logits, q_logits = torch.randn(12), torch.randn(12)
    overlap = sum(map(min, oracle.softmax(p_logits), oracle.softmax(q_logits)))
    seed, zero = torch.arange(trials, device=device), torch.zeros(trials, dtype=torch.int64, device=device)
    ones = torch.ones(trials, device=device)
    draft = q_logits.to(device).repeat(trials, 1)
    tokens = sample(draft, ones, seed, zero, zero)
    cu = torch.arange(trials + 1, device=device)
    out = verify(
        p_logits.to(device).repeat(2 * trials, 1),
        draft,
        tokens,
        cu,
        temperature=ones,
        seed=seed,
        step=zero,
        max_draft=1,
    )
    bound = 5.5 * 0.5 / math.sqrt(trials)  # standard deviation at most 1/2: false alarm 4e-8 each
    assert abs(out.num_accepted.double().mean() - overlap) < bound
    assert abs(out.accept_prob.double().mean() - overlap) < bound


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_id_beyond_the_drafts_vocabulary_has_q_of_zero(temperature):
    # The draft has 20 columns; the last one is likely, and so is what lies behind the row in memory.
    wide = torch.zeros(2, 44)
    wide[:, 19:] = 30.0
    draft = wide[:, :20]
    target = torch.zeros(3, 40)
    target[0, 30] = target[1, 39] = 3.0
    out = simple(target, draft, [30, 39], [2], temperature)
    assert out.accept_prob.tolist() == [1, 1]
    assert out.num_accepted.tolist() == [2]
    assert out.tokens[0, :2].tolist() == [30, 39]


def test_a_draft_id_beyond_a_broken_draft_row_is_not_accepted():
    draft = torch.zeros(1, 20)
    draft[0, 3] = NAN
    out = simple(torch.zeros(2, 40), draft, [30], [1], 1.0)
    assert (out.accept_prob.tolist(), out.num_accepted.tolist(), out.ok.tolist()) == ([0], [0], [False])
    assert out.tokens.tolist() == [[-1, -1]]
    assert out.kld.isnan().tolist() == [True]


# Resampling


def test_residual_has_no_mass_where_the_draft_is_larger(device):
    arguments = batch([1] * 2000, vocabulary=8, temperature=(1.0,), device=device)
    arguments["draft_logits"] = -arguments["target_logits"][::2].contiguous()
    ids = arguments["draft_tokens"] = sample(
        arguments["draft_logits"],
        torch.ones(2000, device=device),
        arguments["seed"],
        arguments["step"],
        arguments["step"] * 0,
    )
    out = verify(**arguments)
    p, q = arguments["target_logits"][::2].double().softmax(-1), arguments["draft_logits"].double().softmax(-1)
    rejected = (out.num_accepted == 0).nonzero()[:, 0]
    assert len(rejected) > 500
    drawn = out.tokens[rejected, 0]
    assert (p[rejected, drawn] > q[rejected, drawn]).all()
    assert (drawn != ids[rejected]).all()


def test_empty_residual_draws_from_the_target(monkeypatch):
    # p = q, but the draft is made to fail.
    real = dsde_kernels.rng.uniform_torch

    def fail(seed, step, offset, stream, count):
        return real(seed, step, offset, stream, count).clamp_(min=1.0 if stream == 1 else 0.0)

    monkeypatch.setattr("dsde_kernels.rng.uniform_torch", fail)
    row = torch.tensor([0.3, -INF, 1.0, -2.0, -INF])
    out = simple(row.repeat(800, 1), row.repeat(400, 1), [0] * 400, [1] * 400, 1.0)
    assert (out.num_accepted == 0).all()
    assert set(out.tokens[:, 0].tolist()) == {0, 2, 3}
    p = oracle.softmax(row)
    want = [oracle.race(p, seed, 0, 0, oracle.RESAMPLE) for seed in range(400)]
    assert out.tokens[:, 0].tolist() == want


def test_a_residual_of_rounding_stays_on_the_support_of_the_target():
    # q is p but for rounding: the draft's logits are shifted. Where p / q falls short of 1, the largest u rejects, and
    # nothing or next to nothing is left to draw from.
    trials = 60
    target = torch.full((trials, 6), -INF)
    target[:, 1:5] = torch.randn(trials, 4)
    seed = torch.full((trials,), HIGHEST)
    out = simple(target.repeat_interleave(2, 0), target + 5.3, [2] * trials, [1] * trials, 1.0, seed=seed)
    assert out.ok.all() and (out.accept_prob > 1 - 1e-5).all()
    drawn = out.tokens[out.num_accepted == 0, 0]
    assert len(drawn) > 5 and ((drawn >= 1) & (drawn <= 4)).all()


def log(*p):
    return torch.tensor(p).log()


@pytest.mark.parametrize(
    ("p", "q", "target_limit", "draft_limit", "residual"),
    [
        # What truncation drops from q leaves p whole there ...
        ((0.0, 0.5, 0.5), (0.5, 0.4, 0.1), 0.0, 0.45, (0.0, 0.5, 0.5)),
        # ... and makes the rest of q larger: (.5, .5, 0), more than p at 1, of which the untruncated q has .25.
        ((0.0, 0.4, 0.6), (0.25, 0.25, 0.24), 0.0, 0.245, (0.0, 0.0, 0.6)),
        # Truncation of p: (0, .5, .5), more than q at 1, of which the untruncated p has .3.
        ((0.0, 0.3, 0.3, 0.2, 0.2), (0.4, 0.4, 0.0, 0.1, 0.1), 0.25, 0.0, (0.0, 0.1, 0.5)),
    ],
    ids=["dropped from q", "more of q", "more of p"],
)
def test_the_residual_is_that_of_the_truncated_distributions(p, q, target_limit, draft_limit, residual):
    # Draft 0 has p = 0, so it fails.
    trials = 12
    out = simple(
        log(*p).repeat(2 * trials, 1), log(*q).repeat(trials, 1), [0] * trials, [1] * trials, 1.0,
        target_threshold=log(target_limit).repeat(2 * trials), draft_threshold=log(draft_limit).repeat(trials),
    )  # fmt: skip
    assert out.num_accepted.tolist() == [0] * trials
    assert out.tokens[:, 0].tolist() == [oracle.race(residual, s, 0, 0, oracle.RESAMPLE) for s in range(trials)]


def test_a_small_residual_is_not_an_empty_one():
    # p is 1/4 each; q has 6e-4 more at the draft, so that each other token keeps 2e-4. The largest u rejects.
    draft = torch.zeros(4, 4).fill_diagonal_(3.2e-3)
    out = simple(torch.zeros(8, 4), draft, [0, 1, 2, 3], [1] * 4, 1.0, seed=torch.full((4,), HIGHEST))
    want = [oracle.race([float(v != x) for v in range(4)], HIGHEST, 0, 0, oracle.RESAMPLE) for x in range(4)]
    assert out.num_accepted.tolist() == [0] * 4
    assert out.tokens[:, 0].tolist() == want
    winner_of_p = oracle.race([1.0] * 4, HIGHEST, 0, 0, oracle.RESAMPLE)
    assert want[winner_of_p] != winner_of_p  # which a draw from p would give


@pytest.mark.parametrize("bad", [-1, -5, 5, 2**40])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("deterministic", [False, True])
def test_placeholder_and_foreign_ids_are_rejected_and_the_row_drawn_from_p(bad, temperature, deterministic):
    target = torch.zeros(4, 5)
    target[:, 2] = 30.0
    draft = torch.zeros(3, 5)
    draft[:, 2] = 30.0  # the residual would hardly have any mass at 2
    out = simple(target, None if deterministic else draft, [2, bad, 2], [3], temperature)
    assert out.tokens.tolist() == [[2, 2, -1, -1]]
    assert out.num_accepted.tolist() == [1]
    assert out.accept_prob[1] == 0
    assert out.kld.isfinite().all()


def test_a_placeholder_draws_from_p_and_not_from_the_residual():
    target = torch.tensor([0.0, 0.0, -INF]).repeat(400, 1)
    draft = torch.tensor([30.0, 0.0, 0.0]).repeat(200, 1)  # leaves a residual at 1 only
    out = simple(target, draft, [-1] * 200, [1] * 200, 1.0)
    assert 60 < (out.tokens[:, 0] == 0).sum() < 140  # 100 expected, 5.6 sigma: false alarm 2e-8


def test_deterministic_drafts_never_come_back_after_a_rejection():
    row = torch.tensor([0.0, 0.0, 0.0])
    out = simple(row.repeat(600, 1), None, [1] * 300, [1] * 300, 1.0)
    rejected = out.tokens[out.num_accepted == 0, 0]
    assert 150 < len(rejected) < 250
    assert set(rejected.tolist()) == {0, 2}
    torch.testing.assert_close(out.kld, torch.full((300,), math.log(3)))


def test_deterministic_kld_counts_zero_probability_as_1e_minus_8():
    row = torch.tensor([0.0, -INF])
    out = simple(row.repeat(2, 1), None, [1], [1], 0.5)
    torch.testing.assert_close(out.kld, torch.tensor([-math.log(1e-8)]))
    assert out.tokens.tolist() == [[0, -1]]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_deterministic_kld_of_a_finite_mask_counts_as_1e_minus_8(temperature):
    # As far as 1e15 nats a distance counts, beyond that p is 0.
    target = torch.zeros(6, 4)
    target[torch.arange(3), [0, 2, 3]] = torch.tensor([-1e30, torch.finfo(torch.float32).min, -1e14])
    out = simple(target[[0, 5, 1, 5, 2, 5]], None, [0, 2, 3], [1] * 3, temperature)
    floor = -math.log(1e-8)
    torch.testing.assert_close(out.kld, torch.tensor([floor, floor, 1e14 / (temperature or 1.0)]))
    assert (out.accept_prob.tolist(), out.ok.tolist()) == ([0] * 3, [True] * 3)


# Ragged edges


def test_no_drafts_draw_from_the_bonus_row(device):
    arguments = batch([0, 0, 0], device=device)
    out = verify(**arguments)
    assert out.num_accepted.tolist() == [0, 0, 0]
    assert out.tokens.shape == (3, 1)
    assert out.tokens[:, 0].tolist() == [row[0] for row in oracle.verify(*arguments.values())["tokens"]]
    assert out.kld.shape == (0,)


@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_batch(deterministic, device):
    arguments = batch([], device=device) | ({"draft_logits": None} if deterministic else {})
    out = verify(**(arguments | {"max_draft": 4, "temperature": torch.zeros(0, device=device)}))
    assert [list(x.shape) for x in out] == [[0, 5], [0], [0], [0], [0, 5], [0]]


def test_vocabulary_of_one():
    out = simple(torch.zeros(3, 1), torch.zeros(2, 1), [0, 0], [2], 1.0)
    assert out.tokens.tolist() == [[0, 0, 0]]
    assert out.logprobs.tolist() == [[0, 0, 0]]


def test_wide_max_draft_only_pads():
    arguments = batch(LENGTHS)
    narrow, wide = verify(**arguments), verify(**(arguments | {"max_draft": 9}))
    assert torch.equal(wide.tokens[:, :7], narrow.tokens)
    assert (wide.tokens[:, 7:] == -1).all()
    assert (wide.logprobs[:, 7:] == 0).all()


# Broken rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["nan", "no finite", "plus inf"])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_broken_target_row_ends_its_sequence_only(kind, row, temperature):
    peak = torch.eye(6) * 60
    target = peak[[1, 2, 3, 4, 5, 0, 1]]  # A: rows 0 to 2, B: rows 3 to 5, C: row 6
    draft = peak[[1, 2, 4, 5]]
    clean = simple(target, draft, [1, 2, 4, 5], [2, 2, 0], temperature)
    assert clean.tokens.tolist() == [[1, 2, 3], [4, 5, 0], [1, -1, -1]]
    if kind == "nan":
        target[3 + row, 2] = NAN
    elif kind == "no finite":
        target[3 + row] = -INF
    else:
        target[3 + row, [4, 5, 0][row]] = INF
    out = simple(target, draft, [1, 2, 4, 5], [2, 2, 0], temperature)
    assert out.ok.tolist() == [True, False, True]
    assert out.tokens.tolist() == [[1, 2, 3], [4, 5, 0][:row] + [-1] * (3 - row), [1, -1, -1]]
    assert out.num_accepted.tolist() == [2, row, 0]
    assert out.logprobs.isfinite().all()
    assert out.accept_prob.isfinite().all()
    assert out.kld[:2].tolist() == clean.kld[:2].tolist()


@pytest.mark.parametrize("value", [NAN, -INF, INF])
def test_a_broken_draft_row_ends_a_sampled_sequence(value):
    target = torch.eye(6)[[1, 2, 3]] * 60
    draft = target[:2].clone()
    draft[1] = value
    out = simple(target, draft, [1, 2], [2], 1.0)
    assert out.tokens.tolist() == [[1, -1, -1]]
    assert (out.ok.tolist(), out.num_accepted.tolist()) == ([False], [1])
    greedy = simple(target, draft, [1, 2], [2], 0.0)
    assert greedy.tokens.tolist() == [[1, 2, 3]]
    assert greedy.ok.tolist() == [True]
    assert greedy.kld.isnan().tolist() == [False, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_that_is_not_consumed_does_no_harm(temperature):
    target = torch.eye(6)[[1, 2, 3]] * 200
    target[1:] = NAN
    draft = torch.zeros(2, 6)
    draft[1] = NAN
    out = simple(target, draft, [4, 4], [2], temperature)
    assert out.tokens.tolist() == [[1, -1, -1]]
    assert out.ok.tolist() == [True]


# Independence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_bit_identical_in_any_order_and_alone(dtype, deterministic, device):
    arguments = batch(LENGTHS, vocabulary=1003, dtype=dtype, device=device)
    if deterministic:
        arguments["draft_logits"] = None
    out = verify(**arguments)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()

    def select(rows):
        drafts = [d for i in rows for d in range(starts[i], starts[i + 1])]
        targets = [d + i for i in rows for d in range(starts[i], starts[i + 1] + 1)]
        draft = arguments["draft_logits"]
        return verify(
            arguments["target_logits"][targets],
            None if draft is None else draft[drafts],
            arguments["draft_tokens"][drafts],
            torch.tensor([0] + [LENGTHS[i] for i in rows], device=device).cumsum(0).int(),
            **{name: arguments[name][rows] for name in ("temperature", "seed", "step")},
            max_draft=arguments["max_draft"],
        )

    for rows in ([4, 8, 0, 1, 7, 2, 6, 3, 5], *([i] for i in range(9)), [3, 0]):
        assert_equal(select(rows), pick(out, LENGTHS, rows))


def test_row_strides_and_untouched_inputs(device):
    arguments = batch(LENGTHS, device=device)
    want = verify(**arguments)
    for name in ("target_logits", "draft_logits"):
        rows, vocabulary = arguments[name].shape
        wide = torch.full((rows, vocabulary + 3), NAN, device=device)
        wide[:, :vocabulary] = arguments[name]
        arguments[name] = wide[:, :vocabulary]
    kept = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    assert_equal(verify(**arguments), want)
    for name, x in kept.items():
        assert torch.equal(arguments[name], x), name


def test_uninitialised_memory_is_never_used(monkeypatch):
    arguments = batch(LENGTHS)
    want = verify(**arguments)

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(NAN) if x.is_floating_point() else x.fill_(True if x.dtype == torch.bool else 2**30 + 7)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    assert_equal(verify(**arguments), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_peak_memory_is_two_copies_of_the_draft_rows(temperature, dtype):
    arguments = batch([4] * 8, vocabulary=20_000, temperature=(temperature,), dtype=dtype)
    budget = 2 * 32 * 20_000 * 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        verify(**arguments)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0 < peak <= budget * 1.02  # a little for the small tensors


# Losslessness: V = 16, draft = -target, one seed a trial, 200,000 trials.

TRIALS, WIDTH = 200_000, 16


@pytest.fixture(scope="module")
def table(device):
    """Target logits of a chain: row 0 first, then row 1 + first token."""
    return (torch.randn(WIDTH + 1, WIDTH, generator=torch.Generator().manual_seed(3)) * 0.6).to(device)


@pytest.fixture(scope="module")
def decoded(table, device):
    """First two tokens of TRIALS decodings, in one step or two, and the first step's drafts."""
    seed = torch.arange(TRIALS, device=device)
    zero, ones = torch.zeros_like(seed), torch.ones(TRIALS, device=device)
    start = table[:1].expand(TRIALS, -1)
    first = sample((-start).contiguous(), ones, seed, zero, zero)
    second = sample(-table[1:][first], ones, seed, zero, zero + 1)
    target = torch.stack((start, table[1:][first], table[1:][second]), 1).view(-1, WIDTH)
    draft = -torch.stack((start, table[1:][first]), 1).view(-1, WIDTH)
    drafts = torch.stack((first, second), 1)
    cu = torch.arange(0, 2 * TRIALS + 1, 2, device=device)
    out = verify(target, draft, drafts.view(-1), cu, temperature=ones, seed=seed, step=zero, max_draft=2)
    tokens = out.tokens[:, :2].clone()
    # Rejected at once: a second step, again with a draft.
    short = tokens[:, 1] < 0
    seed, ones = seed[short], ones[short]
    step, zero = torch.ones_like(seed), torch.zeros_like(seed)
    row = table[1:][tokens[short, 0]]
    draft = sample(-row, ones, seed, step, zero)
    cu = torch.arange(len(seed) + 1, device=device)
    again = verify(row.repeat_interleave(2, 0), -row, draft, cu, temperature=ones, seed=seed, step=step, max_draft=1)
    tokens[short, 1] = again.tokens[:, 0]
    return tokens.cpu(), drafts.cpu()


def chi_square(tokens, table):
    """p-values of the first token and of the pair."""
    p = torch.tensor([oracle.softmax(row) for row in table.cpu()], dtype=torch.float64)
    pair = p[0][:, None] * p[1:]
    seen = torch.bincount(tokens[:, 0] * WIDTH + tokens[:, 1], minlength=WIDTH**2).view(WIDTH, WIDTH)
    expected = pair * TRIALS
    assert expected.min() > 5  # where the chi-square approximation holds
    return (
        stats.chisquare(seen.sum(1).numpy(), expected.sum(1).numpy()).pvalue,
        stats.chisquare(seen.flatten().numpy(), expected.flatten().numpy()).pvalue,
    )


def test_emitted_tokens_have_the_target_distribution(decoded, table):
    single, pair = chi_square(decoded[0], table)
    assert single > 1e-6  # false alarm: 1e-6 each
    assert pair > 1e-6


def test_the_same_test_catches_a_bias_of_three_percent(decoded, table):
    # Three decodings in a hundred keep their drafts, whatever verification said.
    tokens, drafts = decoded
    kept = torch.arange(TRIALS) % 100 < 3
    single, pair = chi_square(torch.where(kept[:, None], drafts, tokens), table)
    assert single < 1e-6
    assert pair < 1e-6


# The whole step


def test_dsde_step_composes_the_three_ops(device):
    rule = DsdeRule(calibration_tokens=4)
    state, separate = StabilityState(12, rule, device), StabilityState(12, rule, device)
    slots = torch.tensor([3, 0, 7, 2, 11, 5, 1, 4, 9], device=device)
    for _ in range(3):
        arguments = batch(LENGTHS, device=device)
        got = dsde_step(**arguments, state=state, slots=slots, rule=rule)
        want = verify(**arguments)
        proposed = stability_update(
            separate, slots, want.kld, arguments["cu_draft"], want.num_accepted, rule, arguments["temperature"], want.ok
        )
        assert_equal(got, (*want, *speculation_lengths(separate, slots, rule, proposed)))
        assert torch.equal(state.table, separate.table)
    assert got.next_sl.dtype == torch.int32
    assert got.sl_cap.shape == ()


def test_a_failed_sequence_keeps_its_slot_and_does_not_vote():
    rule = DsdeRule(calibration_tokens=1)
    state = state_of(2, rule)
    arguments = batch([2, 2], temperature=(0.0,))
    arguments["target_logits"][:3] = NAN
    result = dsde_step(**arguments, state=state, slots=torch.arange(2), rule=rule)
    assert result.ok.tolist() == [False, True]
    assert state.drafted.tolist() == [0, 2]
    assert result.sl_cap == state.sl[1]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("target_logits", {"target_logits": torch.zeros(4, 5)}),
        ("target_logits", {"target_logits": torch.zeros(5, 5, dtype=torch.float64)}),
        ("target_logits", {"target_logits": torch.zeros(5, 10)[:, ::2]}),
        ("draft_logits", {"draft_logits": torch.zeros(2, 5)}),
        ("draft_logits", {"draft_logits": torch.zeros(1, 5).expand(3, 5)}),
        ("draft_tokens", {"draft_tokens": torch.zeros(3)}),
        ("cu_draft", {"cu_draft": torch.tensor([0, 3])}),
        ("cu_draft", {"cu_draft": torch.tensor([0, 1, 2])}),
        ("cu_draft", {"cu_draft": torch.tensor([0, 4, 3])}),
        ("max_draft", {"max_draft": 1}),
        ("temperature", {"temperature": torch.tensor([0.0, -1.0])}),
        ("temperature", {"temperature": torch.tensor([0.0, INF])}),
        ("seed", {"seed": torch.zeros(3, dtype=torch.int64)}),
        ("step", {"step": torch.zeros(2)}),
        ("target_threshold", {"target_threshold": torch.zeros(3)}),
        ("draft_threshold", {"draft_threshold": torch.zeros(2)}),
        ("seed", {"seed": torch.zeros(2, dtype=torch.int64, device="meta")}),
    ],
)
def test_refuses(name, change):
    zero = torch.zeros(2, dtype=torch.int64)
    arguments = {
        "target_logits": torch.zeros(5, 5),
        "draft_logits": torch.zeros(3, 5),
        "draft_tokens": torch.zeros(3, dtype=torch.int64),
        "cu_draft": torch.tensor([0, 2, 3]),
        "temperature": torch.ones(2),
        "seed": zero,
        "step": zero,
        "max_draft": 2,
    }
    verify(**arguments)
    with pytest.raises(ValueError, match=rf"{name}.*got"):
        verify(**(arguments | change))
