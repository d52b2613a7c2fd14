"""What only a GPU shows: graphs, streams, a second device."""

import pytest
import torch

from dsde_kernels import DsdeRule, StabilityState, dsde_step, sample, stability_update, verify
from tests.dsde_kernels.test_arguments import RULE, calls, outcome
from tests.dsde_kernels.test_verify import assert_equal, batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# A race within the launch that decides, or in a second one.
in_both_forms = pytest.mark.parametrize("vocabulary", [500, 40_000], ids=["one launch", "two launches"])


class Step:
    """A `dsde_step` on tensors of its own, which can be taken again."""

    def __init__(self, vocabulary, seed):
        torch.manual_seed(seed)
        self.arguments = batch([3, 0, 2], vocabulary, device="cuda")
        self.state = StabilityState(4, RULE, "cuda")
        self.slots = torch.tensor([2, 0, 3], device="cuda")

    def run(self):
        return dsde_step(**self.arguments, state=self.state, slots=self.slots, rule=RULE)

    def table(self):
        return self.state.table.view(torch.int32).clone()


@in_both_forms
def test_captured_steps_replay_in_any_order_and_at_once(vocabulary):
    # Their workspaces must not be one another's, nor what an eager step has left.
    steps = [Step(vocabulary, seed) for seed in (1, 2)]
    want, tables, graphs, results = [], [], [], []
    for step in steps:
        want.append(step.run())
        tables.append(step.table())
        step.state.reset(step.slots)
    torch.cuda.synchronize()
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(step.run())
        graphs.append(graph)

    def check():
        torch.cuda.synchronize()
        for step, result, expected, table in zip(steps, results, want, tables, strict=True):
            assert_equal(result, expected)
            assert torch.equal(step.table(), table)
            for x in result:
                x.fill_(1)
            step.state.reset(step.slots)
        torch.cuda.synchronize()

    graphs[1].replay()
    graphs[0].replay()
    check()
    graphs[0].replay()
    steps[1].run()  # eager, between them
    steps[1].state.reset(steps[1].slots)
    graphs[1].replay()
    check()
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        check()


@in_both_forms
def test_eager_steps_on_two_streams_at_once(vocabulary):
    steps = [Step(vocabulary, seed) for seed in (1, 2)]
    want = [step.run() for step in steps]
    tables = [step.table() for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    for _ in range(20):
        for step in steps:
            step.state.reset(step.slots)
        torch.cuda.synchronize()
        got = []
        for stream, step in zip(streams, steps, strict=True):
            with torch.cuda.stream(stream):
                got.append(step.run())
        torch.cuda.synchronize()
        for step, result, expected, table in zip(steps, got, want, tables, strict=True):
            assert_equal(result, expected)
            assert torch.equal(step.table(), table)


def compiled_with_graphs(function):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, mode="reduce-overhead", fullgraph=True)


@in_both_forms
def test_compiled_ops_in_graph_trees(vocabulary):
    # A run to warm up, one to capture, then replays; a second function makes the tree branch.
    arguments = Step(vocabulary, 1).arguments
    target, draft = arguments.pop("target_logits"), arguments.pop("draft_logits")

    def draw(target):
        rows = target[:3] * 1.0
        keys = arguments["seed"], arguments["step"], arguments["step"]
        return sample(rows, arguments["temperature"], *keys)

    def both(target, draft):
        return draw(target), *verify(target * 1.0, draft, **arguments)

    first, second = compiled_with_graphs(both), torch.compile(draw, mode="reduce-overhead", fullgraph=True)
    for turn in range(5):
        target = target.roll(1, 0).clone()
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in first(target, draft)]
        again = second(target).clone()
        for a, b in zip(got, both(target, draft), strict=True):
            assert torch.equal(a.nan_to_num(nan=-77.0), b.nan_to_num(nan=-77.0)), turn
        assert torch.equal(again, got[0])
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@in_both_forms
def test_a_compiled_step_changes_its_state(vocabulary):
    ours, other = Step(vocabulary, 1), Step(vocabulary, 1)
    # Otherwise graphs are given up because the table is changed.
    torch._dynamo.mark_static_address(ours.state.table)
    run = compiled_with_graphs(ours.run)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in run()]
        for a, b in zip(got, other.run(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(ours.table(), other.table())


@pytest.mark.parametrize("window", [1, 30, 64, 200])
def test_the_fused_update_has_the_bits_of_the_separate_one(window):
    # Beyond 32 values the order of a sum follows the number of warps.
    rule = DsdeRule(calibration_tokens=6, long_window=window, short_window=min(window, 10))
    fused, separate = StabilityState(4, rule, "cuda"), StabilityState(4, rule, "cuda")
    slots = torch.tensor([2, 0, 3], device="cuda")
    for _ in range(40):
        arguments = batch([3, 1, 8], vocabulary=500, device="cuda")
        out = dsde_step(**arguments, state=fused, slots=slots, rule=rule)
        more = arguments["cu_draft"], out.num_accepted, rule, arguments["temperature"], out.ok
        stability_update(separate, slots, out.kld, *more)
        assert torch.equal(fused.table.view(torch.int32), separate.table.view(torch.int32))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", calls("cpu"))
def test_tensors_on_another_device_than_the_current_one(op):
    def on(device):
        arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in calls("cpu")[op].items()}
        return arguments | ({"state": StabilityState(6, RULE, device)} if "state" in arguments else {})

    with torch.cuda.device(0):
        got, want = outcome(op, on("cuda:1")), outcome(op, on("cuda:0"))
        assert torch.cuda.current_device() == 0
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.cpu().nan_to_num(nan=-77.0), b.cpu().nan_to_num(nan=-77.0))
