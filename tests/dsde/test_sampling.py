"""Logits processors on the rows of a step: stateless ones at once, others with each row's own prefix."""

from __future__ import annotations

import pytest
import torch

from dsde import Engine, SamplingParams, Stateless
from dsde.request import Request
from dsde.sampling import process_rows

V = 6


class Recorder:
    """Adds a constant, and remembers what it was shown."""

    def __init__(self, add: float) -> None:
        self.add = add
        self.calls: list[tuple[list[list[int]], torch.Size]] = []

    def __call__(self, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert logits.dtype == torch.float32
        self.calls.append((prefix.tolist(), logits.shape))
        return logits + self.add


def request(number: int, *processors) -> Request:
    return Request(number, [1], SamplingParams(logits_processors=processors), frozenset(), seed=0, limit=10)


def rows(owners, logits, vocabulary=V):
    prefixes = [[1] * (i + 1) for i in range(len(owners))]
    return process_rows(owners, prefixes, logits, vocabulary, logits.device)


def test_stateless_ones_get_all_rows_at_once_and_others_their_prefix():
    shared, own = Recorder(1.0), Recorder(10.0)
    stateless = Stateless(shared)
    a, b, plain = request(0, stateless, own), request(1, stateless), request(2)
    logits = torch.randn(5, V)
    before = logits.clone()
    out = rows([a, a, plain, b, b], logits)
    assert shared.calls == [([[]] * 4, (4, V))]
    assert own.calls == [([[1]], (1, V)), ([[1, 1]], (1, V))]
    assert torch.equal(logits, before)
    assert torch.equal(out, before + torch.tensor([[11.0], [11.0], [0.0], [1.0], [1.0]]))


def test_processors_run_in_the_order_of_each_request():
    double, add = Stateless(lambda _, x: x * 2), Stateless(lambda _, x: x + 1)
    out = rows([request(0, double, add), request(1, add, double), request(2, add)], torch.ones(3, V))
    assert out[:, 0].tolist() == [3.0, 4.0, 2.0]


def test_half_precision_rows_are_processed_and_returned_in_float32():
    logits = torch.ones(1, V, dtype=torch.bfloat16)
    out = rows([request(0, lambda _, x: x + 1e-4)], logits)
    assert out.dtype == torch.float32 and torch.equal(out, torch.ones(1, V) + 1e-4)


def test_a_narrower_draft_is_shown_at_the_targets_width():
    recorder = Recorder(0.0)
    out = rows([request(0, recorder)], torch.ones(1, V - 2))
    assert recorder.calls[0][1] == (1, V) and out.shape == (1, V - 2)


def test_only_the_row_fails_that_a_stateless_processor_cannot_take():
    def picky(_, x):
        if (x > 50).any():
            raise ValueError("too large")
        return x + 1

    shared = Stateless(picky)
    good, bad = request(0, shared), request(1, shared)
    logits = torch.zeros(3, V)
    logits[1, 2] = 99.0
    out = rows([good, bad, good], logits)
    assert out[1].isnan().all() and str(bad.cause) == "too large"
    assert torch.equal(out[[0, 2]], torch.ones(2, V)) and good.cause is None


def test_another_shape_is_a_failure_and_nothing_runs_behind_it():
    behind = Recorder(0.0)
    bad = request(0, Stateless(lambda _, x: x[:, :2]), behind)
    out = rows([bad, request(1, behind)], torch.zeros(2, V))
    assert out[0].isnan().all() and "(1, 2)" in str(bad.cause)
    assert len(behind.calls) == 1


def test_a_step_of_the_engine_calls_a_stateless_processor_once_for_its_target_rows(tiny):
    target, draft = tiny("llama")
    recorder = Recorder(0.0)
    shared = Stateless(recorder)
    engine = Engine(target, draft, "static-3")
    for prompt in ([5, 6, 7], [8, 9]):
        engine.submit(prompt, SamplingParams(12, logits_processors=[shared]))
    engine.step()  # the prompts
    recorder.calls.clear()
    engine.step()
    assert [shape[0] for _, shape in recorder.calls] == [2, 2, 2, 2 * 3 + 2]  # three draft passes, then the target's


def test_a_prefix_becomes_a_tensor_only_for_who_looks_at_it():
    class Untouchable(list):
        def __iter__(self):
            raise AssertionError("read")

        def __len__(self):
            raise AssertionError("read")

    seen = []
    own = Recorder(0.0)
    look = request(0, Stateless(own), lambda p, x: seen.append(p) or x, lambda p, x: seen.append(p) or x)
    share = request(1, Stateless(own))
    prefixes = [[5, 6], Untouchable(), Untouchable()]
    process_rows([look, share, request(2)], prefixes, torch.zeros(3, V), V, torch.device("cpu"))
    assert seen[0] is seen[1] and seen[0].tolist() == [[5, 6]] and seen[0].dtype == torch.int64


def test_a_cause_is_forgotten_with_the_next_rows():
    owner = request(0, lambda p, x: x if p.shape[1] > 1 else None)
    rows([owner, owner], torch.zeros(2, V))
    assert isinstance(owner.cause, AttributeError) and owner.cause.__traceback__ is None
    process_rows([owner], [[1, 2]], torch.zeros(1, V), V, torch.device("cpu"))
    assert owner.cause is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_processor_may_answer_in_another_number_format(dtype):
    out = rows([request(0, lambda _, x: x.to(dtype) + 1)], torch.ones(1, V))
    assert out.dtype == torch.float32 and torch.equal(out, torch.full((1, V), 2.0))


def test_the_cause_is_that_of_the_first_row_which_fails():
    def refuse_from(length):
        def processor(prefix, x):
            if prefix.shape[1] >= length:
                raise ValueError(prefix.shape[1])
            return x

        return processor

    owner = request(0, refuse_from(4), refuse_from(2))
    rows([owner] * 5, torch.zeros(5, V))
    assert str(owner.cause) == "2"
