"""Traces on disk and their picture."""

from __future__ import annotations

import json

import pytest

from dsde.cli import main
from dsde.request import Completion, StepTrace
from dsde.trace import read_trace, write_trace


def completion(request_id: int, trace: list[StepTrace]) -> Completion:
    return Completion(
        request_id=request_id,
        prompt_ids=[1],
        token_ids=[2],
        logprobs=[0.0],
        logits=None,
        finish_reason="length",
        error=None,
        trace=trace,
        ttft=0.1,
        latency=0.2,
    )


def line(**changes: object) -> str:
    record = {"request": 0, "step": 0, "sl": 5, "accepted": 3, "kld": 0.4, "wvir": 1.1}
    return json.dumps(record | changes) + "\n"


STEPS = [StepTrace(0, 5, 3, 0.4, 1.1), StepTrace(1, 3, 3, 0.1, None), StepTrace(2, 0, 0, None, None)]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, [completion(0, STEPS[:2]), completion(4, STEPS)])
    return path


def test_round_trip(trace):
    assert read_trace(trace) == {0: STEPS[:2], 4: STEPS}


@pytest.mark.parametrize("options", [[], ["--request", "0"]])
def test_plot_writes_a_picture(trace, tmp_path, options):
    output = tmp_path / "new" / "out.png"
    assert main(["plot", str(trace), "-o", str(output), *options]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_run_without_drafts(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, [completion(0, [StepTrace(i, 0, 0, None, None) for i in range(3)])])
    assert main(["plot", str(path), "-o", str(tmp_path / "out.png")]) == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["no steps"]),
        ("{\n", [":1:", "not JSON"]),
        (json.dumps({"request": 0, "step": 0}) + "\n", [":1:", "fields"]),
        (line(sl="5"), [":1:", "sl", '"5"']),
        (line(sl=True), [":1:", "sl", "true"]),
        (line(accepted=10**400), [":1:", "accepted"]),
        (line(request=[0]), [":1:", "request", "[0]"]),
        (line() + line(request="b"), [":2:", "request", '"b"']),
        (line(kld="0.5"), [":1:", "kld", '"0.5"']),
        (line(wvir=10**400), [":1:", "wvir"]),
        ("[" * 100_000, [":1:", "recursion"]),
        ("9" * 5000, [":1:", "digits"]),
        (b"\x89PNG\xff", ["not UTF-8"]),
    ],
)
def test_bad_trace_ends_with_one_line(tmp_path, capsys, content, words):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["plot", str(path), "-o", str(tmp_path / "out.png")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dsde: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in (str(path), *words)), err


@pytest.mark.parametrize(
    ("options", "words"),
    [(["-o", "x.png", "--request", "9"], ["no request 9"]), (["-o", "x.doc"], ["doc"])],
)
def test_bad_plot_options(trace, tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(trace), *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dsde: error: ")
    assert all(word in err for word in words)
