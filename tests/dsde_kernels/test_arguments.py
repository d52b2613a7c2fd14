"""What the ops make of their arguments: kinds, values, strides, gradients, integers of either size."""

import threading

import numpy as np
import pytest
import torch

import dsde_kernels as dk
from dsde_kernels import DsdeRule, StabilityState, launch, use_backend, verify_kernel
from dsde_kernels.verify import Inputs
from tests.dsde_kernels.test_verify import assert_equal, batch

INF = float("inf")
RULE = DsdeRule(calibration_tokens=1, divide_by_temperature=True)


def calls(device=None):
    """Each public op with arguments that fit, all of the optional ones too; the same every time."""
    torch.manual_seed(1)
    arguments = batch([2, 0, 3], vocabulary=30, temperature=(4.0, 0.0, 3.0), device=device)
    logits, temperature = arguments["target_logits"][:3].clone(), arguments["temperature"]
    keys = {"seed": arguments["seed"], "step": arguments["step"], "offset": torch.arange(3, device=device)}
    step = arguments | {
        "target_threshold": torch.linspace(-4.0, 1.0, 8, device=device),
        "draft_threshold": torch.linspace(-4.0, 0.0, 5, device=device),
    }
    state = StabilityState(6, RULE, device or torch.get_default_device())
    slots = {"state": state, "slots": torch.tensor([4, 0, 2], device=device), "rule": RULE}
    yes = torch.tensor([True, False, True], device=device)
    return {
        "kl_divergence": {
            "target_logits": logits, "draft_logits": arguments["draft_logits"][:3], "temperature": temperature,
        },
        "truncation_threshold": {
            "logits": logits, "temperature": temperature, "top_k": torch.tensor([3, 7, 0], device=device),
            "top_p": torch.tensor([0.5, 0.9, 1.0], device=device),
            "min_p": torch.tensor([0.0, 0.1, 0.2], device=device),
        },
        "sample": {
            "logits": logits, "temperature": temperature, **keys,
            "threshold": torch.tensor([-3.0, 50.0, -3.0], device=device),
        },
        "verify": step,
        "dsde_step": step | slots,
        "stability_update": slots | {
            "kld": torch.tensor([0.3, 0.1, 0.15, 0.25, 0.2], device=device), "cu_draft": arguments["cu_draft"],
            "num_accepted": torch.tensor([1, 0, 3], device=device), "temperature": temperature, "ok": yes,
        },
        "speculation_lengths": slots | {"proposed": yes},
    }  # fmt: skip


OPS = calls("cpu")
TENSORS = [(op, name) for op, arguments in OPS.items() for name, x in arguments.items() if isinstance(x, torch.Tensor)]
OPTIONAL = {
    "target_threshold", "draft_threshold", "threshold", "top_k", "top_p", "min_p", "ok", "proposed",
    ("verify", "draft_logits"), ("dsde_step", "draft_logits"),
    ("kl_divergence", "temperature"), ("stability_update", "temperature"),
}  # fmt: skip


def run(op, **change):
    return getattr(dk, op)(**(calls()[op] | change))


def outcome(op, arguments):
    """What the op returns, and the table that it leaves behind."""
    result = getattr(dk, op)(**arguments)
    result = [result] if isinstance(result, torch.Tensor) else list(result)
    return result + ([arguments["state"].table.view(torch.int32)] if "state" in arguments else [])


@pytest.fixture(params=["torch", "triton"])
def backend(request, triton_backend, small_tiles):
    with use_backend(request.param):
        yield request.param


# Kinds


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_what_is_no_tensor_is_refused_by_name(op, name):
    values = [[0, 1, 2], "tensor", True, np.zeros(3, dtype=np.float32)]
    if name not in OPTIONAL and (op, name) not in OPTIONAL:
        values.append(None)
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must be a"):
            run(op, **{name: value})


@pytest.mark.parametrize("value", [[0, 1], "slots", True, None, np.zeros(2, dtype=np.int64)])
def test_reset_takes_no_other_slots(value):
    with pytest.raises(ValueError, match=r"^slots must be a tensor; got"):
        StabilityState(2, RULE).reset(value)


@pytest.mark.parametrize("value", [None, "x", [1], True, 1.5, {}])
@pytest.mark.parametrize("op", ["dsde_step", "stability_update", "speculation_lengths"])
def test_what_is_no_state_or_rule_is_refused_by_name(op, value):
    with pytest.raises(ValueError, match=f"^state must be a StabilityState; got {type(value).__name__}"):
        run(op, state=value)
    with pytest.raises(ValueError, match=f"^rule must be a DsdeRule; got {type(value).__name__}"):
        run(op, rule=value)


@pytest.mark.parametrize("value", [None, "2", [2], True, 2.0, -1, torch.tensor(2), np.int64(2)])
def test_counts_are_integers(value):
    for op in ("verify", "dsde_step"):
        with pytest.raises(ValueError, match=r"^max_draft must be an int >= 0; got"):
            run(op, max_draft=value)
    with pytest.raises(ValueError, match=r"^capacity must be an int >= 0; got"):
        StabilityState(value, RULE)


@pytest.mark.parametrize("value", [None, "x", {}, RULE.numbers()])
def test_a_state_is_built_for_a_rule(value):
    with pytest.raises(ValueError, match=r"^rule must be a DsdeRule; got"):
        StabilityState(2, value)


@pytest.mark.parametrize("field", vars(DsdeRule()))
def test_fields_of_the_rule_are_of_their_kind(field):
    values = ["2", [2], (2,), torch.tensor(1.0)]
    if field == "cap":
        values = ["round", 1, True, [None], ()]
    else:
        default = getattr(DsdeRule(), field)
        values += [None, INF, -INF, float("nan"), 1e30, 2**31]
        values += [1.5, 2.0, True] if type(default) is int else [True] if type(default) is float else [0, 1, 0.5]
    for value in values:
        with pytest.raises(ValueError, match=f"^{field} must be"):
            DsdeRule(**{field: value})


# Values


@pytest.mark.parametrize("op", ["dsde_step", "stability_update", "speculation_lengths", "reset"])
@pytest.mark.parametrize("slots", [[1, 0, 1], [0, 1, 6], [-1, 0, 1], [0, 1, 2**40]])
def test_slots_are_different_places_of_the_state(op, slots):
    slots = torch.tensor(slots)
    with pytest.raises(ValueError, match=r"^slots must differ and lie in \[0, 6\); got"):
        calls()["dsde_step"]["state"].reset(slots) if op == "reset" else run(op, slots=slots)


@pytest.mark.parametrize("op", ["dsde_step", "stability_update", "speculation_lengths", "reset"])
@pytest.mark.parametrize("slots", [torch.zeros(3), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3).bool()])
def test_slots_are_a_vector_of_integers(op, slots):
    with pytest.raises(ValueError, match=r"^slots must"):
        calls()["dsde_step"]["state"].reset(slots) if op == "reset" else run(op, slots=slots)


@pytest.mark.parametrize("op", ["dsde_step", "stability_update"])
def test_each_sequence_has_a_slot(op):
    with pytest.raises(ValueError, match="must have shape"):
        run(op, slots=torch.arange(4))


@pytest.mark.parametrize("op", ["dsde_step", "stability_update", "speculation_lengths"])
def test_the_state_has_the_rules_window(op):
    with pytest.raises(ValueError, match=r"^state must be built for the rule's long_window of 12; got one for 30"):
        run(op, rule=DsdeRule(long_window=12))


def test_the_state_is_on_the_device_of_the_logits():
    state, slots = StabilityState(6, RULE, "meta"), torch.arange(3, device="meta")
    with pytest.raises(ValueError, match=r"^state must be on cpu; got meta"):
        run("dsde_step", state=state, slots=slots)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cu_draft", [0, 2, 2, 4]),
        ("cu_draft", [1, 2, 2, 5]),
        ("cu_draft", [0, 3, 2, 5]),
        ("num_accepted", [0, -1, 0]),
        ("num_accepted", [0, 6, 0]),
        ("temperature", [0.0, -0.5, 1.0]),
        ("temperature", [0.0, float("nan"), 1.0]),
        ("temperature", [0.0, INF, 1.0]),
    ],
)
def test_the_update_looks_at_values(name, values):
    with pytest.raises(ValueError, match=f"^{name} must.*got"):
        run("stability_update", **{name: torch.tensor(values)})


def test_the_registered_ops_check_too():
    # What torch.compile and fake tensors go through.
    state, slots = StabilityState(4, RULE), torch.arange(2)
    lengths = torch.ops.dsde_kernels.speculation_lengths
    assert lengths(state.table, state.weights, slots, RULE.numbers(), None)[0].tolist() == [5, 5]
    for name, arguments in (
        ("slots", (slots * 0, RULE.numbers(), None)),
        ("slots", (slots.float(), RULE.numbers(), None)),
        ("state", (slots, DsdeRule(long_window=12).numbers(), None)),
        ("proposed", (slots, RULE.numbers(), slots)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            lengths(state.table, state.weights, *arguments)
    compiled = torch.compile(dk.speculation_lengths, fullgraph=True, backend="aot_eager")
    assert compiled(state, slots, RULE)[0].tolist() == [5, 5]
    with pytest.raises(ValueError, match=r"^slots must differ"):
        compiled(state, slots * 0, RULE)


# Forms of tensors


def every_second(x):
    """A vector as every second element of one twice as long, between those of its neighbour."""
    return torch.stack((x, x.roll(1)), 1)[:, 0] if x.ndim == 1 else x


def narrow_with_gradients(x):
    """Integers of 32 bits, and floats that require gradients."""
    return x.requires_grad_() if x.is_floating_point() else x.int() if x.dtype == torch.int64 else x


@pytest.mark.parametrize("form", [every_second, narrow_with_gradients])
@pytest.mark.parametrize("op", OPS)
def test_other_forms_of_tensors_change_nothing(op, form, backend):
    want = outcome(op, calls()[op])
    arguments = {name: form(x) if isinstance(x, torch.Tensor) else x for name, x in calls()[op].items()}
    got = outcome(op, arguments)
    assert not any(x.requires_grad for x in got)
    assert "state" not in arguments or not arguments["state"].table.requires_grad
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(nan=-77.0), b.nan_to_num(nan=-77.0))


@pytest.mark.parametrize("op", ["dsde_step", "stability_update", "speculation_lengths"])
def test_opcheck_of_slots_of_32_bits(op, device):
    arguments = calls(device)[op]
    state, slots, rule = (arguments.pop(name) for name in ("state", "slots", "rule"))
    parts = [state.table, state.weights, slots.int(), rule.numbers()]
    if op == "dsde_step":
        flat = [*Inputs(**arguments), *parts]
    elif op == "stability_update":
        *first, temperature, ok = arguments.values()
        flat = [*parts[:3], *first, parts[3], temperature, ok]
    else:
        flat = [*parts, arguments["proposed"]]
    result = torch.library.opcheck(getattr(torch.ops.dsde_kernels, op).default, flat)
    assert set(result.values()) == {"SUCCESS"}


def test_reset_takes_slots_of_32_bits():
    state = StabilityState(3, RULE)
    state.drafted[:] = 7
    state.reset(torch.tensor([2, 0], dtype=torch.int32))
    assert state.drafted.tolist() == [0, 7, 0]


# The kernels' workspace


def test_a_wrong_cu_draft_on_a_gpu_leaves_the_counters_at_zero(triton_backend, small_tiles):
    # There, values are not checked. Sequences are cut to max_draft, so each gets as many programs as it waits for.
    arguments = batch([3, 1], vocabulary=40)
    want = dk.verify(**arguments)
    more = {"target_threshold": None, "draft_threshold": None}
    for cu_draft, max_draft in (([0, 3, 4], 1), ([0, 3, 4], 0), ([0, 4, 2], 2)):
        wrong = {"cu_draft": torch.tensor(cu_draft).int(), "max_draft": max_draft}
        verify_kernel.verify_triton(Inputs(**(arguments | wrong | more)))
        assert all((x == 0).all() for key, x in launch._buffers.items() if "counters" in key)
    assert_equal(dk.verify(**arguments), want)


def test_two_threads_at_once(triton_backend, small_tiles, monkeypatch):
    # Both have decided before either draws: what they leave for the second launch lies in a workspace of their own.
    monkeypatch.setattr(launch, "RACE_TILES", 1)
    first, second = batch([2, 1], vocabulary=70), batch([1, 2], vocabulary=70)
    want = [dk.verify(**first), dk.verify(**second)]
    both, one_at_a_time = threading.Barrier(2, timeout=60), threading.Lock()

    class Launch:
        """A kernel whose launches wait for one another; the interpreter takes one at a time."""

        def __init__(self, kernel, waits):
            self.kernel, self.waits = kernel, waits

        def __getitem__(self, grid):
            def run(*arguments, **options):
                if self.waits:
                    both.wait()
                with one_at_a_time:
                    self.kernel[grid](*arguments, **options)

            return run

    monkeypatch.setattr(verify_kernel, "verify_kernel", Launch(verify_kernel.verify_kernel, False))
    monkeypatch.setattr(verify_kernel, "draw_kernel", Launch(verify_kernel.draw_kernel, True))
    got = [None, None]

    def work(i, arguments):
        got[i] = dk.verify(**arguments)

    threads = [threading.Thread(target=work, args=x) for x in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b)
