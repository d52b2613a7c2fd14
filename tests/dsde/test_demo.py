"""The demonstration: its figures, its verdict and the draft made of the target's own layers."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from dsde.cli import main
from dsde.demo import run, smollm
from dsde.trace import read_trace

from .conftest import build, weaken

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


@pytest.fixture
def task(monkeypatch):
    target = build("llama")
    task = run.Task("a tiny pair", target, weaken(target), PROMPTS, max_new_tokens=12, rounds=2)
    monkeypatch.setattr(run, "embedded_pair", lambda prompts, max_new_tokens: task)
    return task


def test_demo_prints_a_row_for_each_mode_and_batch(task, tmp_path, capsys):
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.jsonl"
    assert main(["demo", "--json", str(figures), "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "all outputs identical: 36 of 36" in out
    assert [line.split("|")[1:3] for line in out.splitlines() if "x |" in line] == [
        [f" {batch:5} ", f" {mode:8} "] for batch in (3, 1) for mode in run.MODES
    ]
    result = json.loads(figures.read_text())
    assert result["environment"]["dtype"] == "float32"
    assert [row["tokens"] for row in result["rows"]] == [36] * 6
    assert [row["ratio_to_off"] for row in result["rows"] if row["mode"] == "off"] == [1, 1]
    assert sorted(read_trace(trace)) == [0, 1, 2]


def test_demo_decodes_some_prompts_alone_on_the_threads_of_the_task(task, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    result, _ = run.demonstrate(dataclasses.replace(task, singly=2, threads=1))
    assert [row["decoded"] for row in result["rows"]] == [6, 6, 6, 4, 4, 4]
    assert result["identical"]
    assert "torch threads: 1," in run.report(result)
    assert "at batch 1 the first 2;" in run.report(result)


def test_demo_fails_when_outputs_differ(task, monkeypatch, capsys):
    monkeypatch.setattr(run, "_reference", lambda task, prompt, bar: [0] * 12)
    assert main(["demo"]) == 1
    assert "OUTPUTS DIFFER: 0 of 36" in capsys.readouterr().out


def test_demo_of_an_llm_that_is_not_installed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--llm"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dsde: error: ")
    assert "make demo-llm" in err
    assert err.count("\n") == 1


def test_dropping_layers_skips_them_and_shares_the_rest():
    model = build("llama")
    draft = smollm.drop_layers(model, (1,))
    assert {p.data_ptr() for p in draft.parameters()} <= {p.data_ptr() for p in model.parameters()}
    ids = torch.tensor([PROMPTS[0]])
    # A layer whose two outputs are nothing passes its input on.
    layer = model.model.layers[1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    torch.testing.assert_close(draft(ids).logits, model(ids).logits)
    assert draft.config.num_hidden_layers == 2
    assert model.config.num_hidden_layers == 3
