"""The ops under torch.library, torch.compile and capture: registered, traceable, without a host sync."""

import pytest
import torch

import dsde_kernels as dk
from dsde_kernels import DsdeRule, StabilityState
from tests.dsde_kernels.test_verify import batch

RULE = DsdeRule(calibration_tokens=3)
OPS = torch.ops.dsde_kernels


def calls(device):
    """Arguments of each registered op."""
    arguments = batch([2, 0, 1], vocabulary=40, device=device)
    state = StabilityState(4, RULE, device)
    ones, ids = torch.ones(3, device=device), torch.arange(3, device=device)
    logits = arguments["target_logits"][:3].clone()
    verify = (*arguments.values(), None, None)
    slots = (state.table, state.weights, ids)
    return {
        "kl_divergence": (logits, logits.flip(0), ones),
        "sample": (logits, ones, ids, ids, ids, None),
        "truncation_threshold": (logits, ones, ids, ones * 0.5, None),
        "verify": verify,
        "dsde_step": (*verify, *slots, RULE.numbers()),
        "stability_update": (*slots, ones, arguments["cu_draft"], ids.int(), RULE.numbers(), None, None),
        "speculation_lengths": (*slots, RULE.numbers(), None),
    }


@pytest.mark.parametrize("name", calls("cpu"))
def test_opcheck(name, device):
    result = torch.library.opcheck(getattr(OPS, name).default, calls(device)[name])
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiled_whole(backend, device):
    arguments = batch([2, 0, 1], vocabulary=40, device=device)
    target, draft = arguments.pop("target_logits"), arguments.pop("draft_logits")
    slots = torch.arange(3, device=device)
    states = [StabilityState(4, RULE, device) for _ in range(2)]

    def step(target, draft, state):
        scaled = target * 1.5
        rows = scaled[:3]
        threshold = dk.truncation_threshold(rows, arguments["temperature"], top_p=arguments["temperature"] * 0 + 0.9)
        out = dk.dsde_step(scaled, draft, **arguments, state=state, slots=slots, rule=RULE)
        lengths, cap = dk.speculation_lengths(state, slots, RULE)
        keys = (arguments["seed"], arguments["step"], slots)
        token = dk.sample(rows, arguments["temperature"], *keys, threshold)
        return *out, lengths, cap, token, dk.kl_divergence(rows, draft, 0.7) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with dk.use_backend(backend):
        got, want = compiled(target, draft, states[0]), step(target, draft, states[1])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(states[0].table, states[1].table)
    assert states[0].drafted.tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize("name", calls("cpu"))
def test_no_launcher_looks_at_values(name, monkeypatch):
    # On tensors without data whatever reads a value, copies to the host or allocates by data raises; the kernels
    # themselves are left out.
    from dsde_kernels import kld_kernel, sampling_kernel, stability_kernel, threshold_kernel, verify_kernel

    launched = []

    class Stub:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append(grid)

    for module, kernel in (
        (kld_kernel, "kl_kernel"),
        (sampling_kernel, "sample_kernel"),
        (threshold_kernel, "threshold_kernel"),
        (stability_kernel, "update_kernel"),
        (verify_kernel, "verify_kernel"),
    ):
        monkeypatch.setattr(module, kernel, Stub())
    for method in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, method, lambda *_, name=method: pytest.fail(f"calls {name}"))
    arguments = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in calls_without_values()[name]]
    implementation = getattr(dk.ops, name)
    implementation(*arguments)
    assert len(launched) == (name != "speculation_lengths")  # one launch


def calls_without_values():
    """As `calls`, without drawing anything."""
    f = torch.zeros
    i = {"dtype": torch.int64, "device": "meta"}
    logits, ones, ids = f(3, 40, device="meta"), f(3, device="meta"), f(3, **i)
    verify = (f(6, 40, device="meta"), logits, ids, f(4, **i), ones, ids, ids, 2, None, None)
    slots = (f(4, 38, device="meta"), f(2, 30, device="meta"), ids)
    return {
        "kl_divergence": (logits, logits, ones),
        "sample": (logits, ones, ids, ids, ids, None),
        "truncation_threshold": (logits, ones, ids, ones, None),
        "verify": verify,
        "dsde_step": (*verify, *slots, RULE.numbers()),
        "stability_update": (*slots, ones, f(4, **i), ids, RULE.numbers(), None, None),
        "speculation_lengths": (*slots, RULE.numbers(), None),
    }


def test_workspace_is_kept_and_zero_after_use(device):
    from dsde_kernels import launch

    with dk.use_backend("triton"):
        dk.verify(**batch([1, 0], vocabulary=20, device=device))
        before = {key: x.data_ptr() for key, x in launch._buffers.items()}
        dk.verify(**batch([1, 0], vocabulary=20, device=device))
    assert before == {key: x.data_ptr() for key, x in launch._buffers.items()}
    assert all((x == 0).all() for x in launch._buffers.values() if x.dtype == torch.int32 and x.device.type != "meta")


@pytest.mark.parametrize("name", calls("cpu"))
def test_registered_ops_keep_no_workspace(name, monkeypatch, device):
    # torch.compile's graph trees warm them up with memory that they take back.
    from dsde_kernels import launch

    arguments = calls(device)[name]
    monkeypatch.setattr(launch, "_buffers", {})
    with dk.use_backend("triton"):
        getattr(OPS, name)(*arguments)
    assert not launch._buffers
