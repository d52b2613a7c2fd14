"""The command line: what it prints, what it refuses, its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dsde.cli import main
from dsde.trace import read_trace

from .conftest import build, weaken

TEXT = "the quick brown fox jumps over the lazy dog; " * 8
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def save_tokenizer(folder: Path, vocab_size: int = 280) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=vocab_size, min_frequency=1, special_tokens=["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target and a draft with one tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    target = build("llama", vocab_size=280)
    for name, model in (("target", target), ("draft", weaken(target))):
        model.save_pretrained(root / name)
        save_tokenizer(root / name)
    return root / "target", root / "draft"


@pytest.fixture
def generate(pair, capsys):
    """``generate(*options) -> (exit code, stdout, stderr)``."""

    def run(*options: object) -> tuple[int, str, str]:
        code = main(["generate", "--target", str(pair[0]), "--draft", str(pair[1]), *map(str, options)])
        return code, *capsys.readouterr()

    return run


def assert_refused(outcome: tuple[int, str, str], *words: str) -> None:
    code, _, err = outcome
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("dsde: error: ")
    assert all(word in lines[0] for word in words), err


def reference(folder: Path, text: str, count: int) -> str:
    """Greedy text by transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_one_prompt_streams_the_text_of_transformers(generate, pair):
    code, out, err = generate("--prompt", "the quick", "--max-new-tokens", 24)
    assert code == 0
    assert out == reference(pair[0], "the quick", 24) + "\n"
    assert "24 tokens" in err


@pytest.mark.parametrize("controller", ["off", "static-3", "dsde"])
def test_several_prompts_print_with_their_index(generate, pair, controller):
    code, out, _ = generate(
        "--prompt", "the lazy", "--prompt", "over", "--max-new-tokens", 9, "--controller", controller
    )
    assert code == 0
    for i, text in enumerate(["the lazy", "over"]):
        assert f"[{i}] length, 9 tokens\n{reference(pair[0], text, 9)}\n" in out


def test_controller_off_needs_no_draft(pair, capsys):
    argv = ["generate", "--target", str(pair[0]), "--prompt", "fox", "--max-new-tokens", "5", "--controller", "off"]
    assert main(argv) == 0
    assert capsys.readouterr().out == reference(pair[0], "fox", 5) + "\n"


def test_prompts_of_a_file(generate, tmp_path, pair):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["the dog", "unused"]}\n\n{"id": 7, "turns": ["jumps"]}\n')
    code, out, _ = generate("--prompts", file, "--max-new-tokens", 6)
    assert code == 0
    assert reference(pair[0], "the dog", 6) in out
    assert reference(pair[0], "jumps", 6) in out


def test_chat_template(generate, pair):
    code, out, _ = generate("--prompt", "the fox", "--chat", "--max-new-tokens", 7)
    assert code == 0
    assert out == reference(pair[0], "<user>the fox<assistant>", 7) + "\n"


def test_sampling_repeats_with_its_seed(generate):
    options = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.01, "--max-new-tokens", 20]
    first = generate("--prompt", "fox", *options, "--seed", 3)
    again = generate("--prompt", "fox", *options, "--seed", 3)
    other = generate("--prompt", "fox", *options, "--seed", 4)
    assert first[:2] == again[:2]
    assert first[1] != other[1]


def test_the_seed_gives_each_prompt_its_own_randomness(generate):
    _, out, _ = generate("--prompt", "fox", "--prompt", "fox", "--temperature", 2, "--max-new-tokens", 20)
    first, second = out.split("[0]")[1].split("[1]") if out.startswith("[0]") else out.split("[1]")[1].split("[0]")
    assert first.strip() != second.strip()


def test_stop_string_ends_the_text(generate, pair):
    full = reference(pair[0], "the quick", 24)
    stop = full[6:8]
    code, out, _ = generate("--prompt", "the quick", "--max-new-tokens", 24, "--stop", stop)
    assert code == 0
    assert stop in out
    assert len(out) < len(full)


def test_trace_has_a_line_for_each_step(generate, tmp_path):
    file = tmp_path / "deep" / "trace.jsonl"
    code, _, _ = generate("--prompt", "a", "--prompt", "b", "--max-new-tokens", 30, "--trace", file)
    assert code == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {frozenset(r) for r in records} == {frozenset({"request", "step", "sl", "accepted", "kld", "wvir"})}
    traces = read_trace(file)
    assert set(traces) == {0, 1}
    assert all(step.accepted <= step.sl for steps in traces.values() for step in steps)
    # Every step emits one token more than it accepts; only the last may be cut by the limit.
    for steps in traces.values():
        assert sum(s.accepted + 1 for s in steps[:-1]) < 30 <= sum(s.accepted + 1 for s in steps)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", ""], ["prompt 0", "empty"]),
        (["--prompt", "a", "--prompt", " \n"], ["prompt 1", "empty"]),
        (["--prompt", "fox " * 200], ["prompt 0", "context of 128"]),
        (["--prompt", "a", "--temperature", "-1"], ["temperature", "-1"]),
        (["--prompt", "a", "--temperature", "nan"], ["temperature", "nan"]),
        (["--prompt", "a", "--top-p", "1.5"], ["top_p", "1.5"]),
        (["--prompt", "a", "--top-k", "0"], ["top_k", "0"]),
        (["--prompt", "a", "--stop", ""], ["stop"]),
        (["--prompt", "a", "--controller", "magic"], ["controller", "magic"]),
        (["--prompt", "a", "--target", "./nowhere"], ["./nowhere", "no such folder"]),
        (["--prompt", "a", "--draft", "/no/where"], ["/no/where", "no such folder"]),
        (["--prompts", "nothing.jsonl"], ["nothing.jsonl", "No such file"]),
        (["--prompt", "fox \udcff"], ["prompt 0", "Unicode"]),
        (["--prompt", "a", "--temperature", "1", "--top-k", str(10**30)], ["top_k"]),
        (["--prompt", "a", "--temperature", "1e-320"], ["temperature"]),
        (["--prompt", "a", "--temperature", "inf"], ["temperature"]),
    ],
)
def test_bad_input_ends_with_one_line(generate, options, words):
    assert_refused(generate(*options), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"turns": ["a"]}\n{"turns": [}\n', [":2:", "not JSON"]),
        ("[1]\n", [":1:", "JSON object"]),
        ('\n{"prompt": "a"}\n', [":2:", '"turns"']),
        ('{"turns": []}\n', [":1:", '"turns"']),
        ('{"turns": ["  "]}\n', [":1:", "empty"]),
        ("\n", ["no prompts"]),
        ('{"turns": ["a"]}\n' + "[" * 100_000, [":2:", "recursion"]),
        ('{"turns": ["a"], "id": ' + "9" * 5000 + "}", [":1:", "digits"]),
        ('{"turns": ["\\ud800"]}', [":1:", "Unicode"]),
        (b"\x89PNG\r\n\x1a\n\xff", ["not UTF-8"]),
    ],
)
def test_bad_prompt_file_names_the_line(generate, tmp_path, content, words):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(generate("--prompts", file), str(file), *words)


def test_byte_order_mark_is_skipped(generate, tmp_path, pair):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["jumps"]}\n', encoding="utf-8-sig")
    assert generate("--prompts", file, "--max-new-tokens", 6)[:2] == (0, reference(pair[0], "jumps", 6) + "\n")


def test_trace_that_cannot_be_written_is_refused_before_the_run(generate, tmp_path, monkeypatch):
    monkeypatch.setattr("dsde.cli._load_engine", lambda *args: pytest.fail("the models were loaded"))
    assert_refused(generate("--prompt", "a", "--trace", tmp_path), str(tmp_path), "directory")
    (tmp_path / "file").touch()
    assert_refused(generate("--prompt", "a", "--trace", tmp_path / "file" / "trace.jsonl"), "file")


def test_more_sequences_than_a_step_has_rows(generate, pair):
    code, out, _ = generate("--prompt", "fox", "--max-sequences", 4000, "--max-new-tokens", 4)
    assert (code, out) == (0, reference(pair[0], "fox", 4) + "\n")


def test_prompt_lookup_as_draft(generate, pair):
    code, out, _ = generate("--draft", "ngram", "--prompt", "the quick the quick", "--max-new-tokens", 12)
    assert (code, out) == (0, reference(pair[0], "the quick the quick", 12) + "\n")


def test_draft_is_needed(pair, capsys):
    code = main(["generate", "--target", str(pair[0]), "--prompt", "a"])
    assert_refused((code, *capsys.readouterr()), "--draft")


def test_folder_without_a_model(generate, tmp_path):
    assert_refused(generate("--prompt", "a", "--target", tmp_path), "cannot load", str(tmp_path))


@pytest.fixture
def copied(pair, tmp_path):
    """``copied(file name, content) -> folder``: the target with that file replaced."""

    def make(name: str, content: str) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(pair[0], folder)
        (folder / name).write_text(content)
        return folder

    return make


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": 3}', '{"version": "1.0", "model": null}', "\0", ""])
def test_broken_tokenizer(generate, copied, content):
    folder = copied("tokenizer.json", content)
    assert_refused(generate("--prompt", "a", "--target", folder), "cannot load", str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"vocab_size": None},
        {"rope_parameters": 7},
        {"model_type": "no such type"},
    ],
)
def test_broken_config(generate, copied, pair, change):
    config = json.loads((pair[0] / "config.json").read_text())
    folder = copied("config.json", json.dumps(config | change))
    assert_refused(generate("--prompt", "a", "--target", folder), "cannot load", str(folder))


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ x.y.z }}"])
def test_broken_chat_template(generate, copied, template):
    folder = copied("chat_template.jinja", template)
    assert_refused(generate("--prompt", "a", "--chat", "--target", folder), "prompt 0", "chat template")


def test_hub_id_without_network(generate, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused(generate("--prompt", "a", "--draft", "some/model"), "some/model", "Hub")


def test_tokenizers_that_disagree(generate, pair, tmp_path):
    build("llama", vocab_size=280).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, vocab_size=270)
    assert_refused(generate("--prompt", "a", "--draft", tmp_path), "tokenizers", "disagree")


def test_same_vocabulary_with_other_merges(generate, pair, tmp_path):
    build("llama", vocab_size=280).save_pretrained(tmp_path)
    tokenizer = save_tokenizer(tmp_path)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = state["model"]["merges"][:0]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert_refused(generate("--prompt", "a", "--draft", tmp_path), "tokenizers", "differently")


def test_chat_without_a_template(pair, tmp_path, capsys):
    target = tmp_path / "target"
    build("llama", vocab_size=280).save_pretrained(target)
    save_tokenizer(target)
    (target / "chat_template.jinja").unlink()
    code = main(["generate", "--target", str(target), "--controller", "off", "--prompt", "a", "--chat"])
    assert_refused((code, *capsys.readouterr()), "chat template")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "--target", "x", "--prompt", "a", "--top-k", "few"],
        ["generate", "--target", "x", "--prompt", "a", "--max-new-tokens", "0"],
        ["generate", "--target", "x", "--prompt", "a", "--max-sequences", "-1"],
        ["generate", "--target", "x", "--prompts", ""],
        ["generate", "--target", "x", "--prompt", "a", "--trace", ""],
        ["generate", "--target", "", "--prompt", "a"],
        ["generate", "--target", "x", "--prompt", "a", "--max-sequences", "9" * 5000],
        ["demo", "--prompts", "0"],
        ["demo", "--json", ""],
        ["plot", "trace.jsonl"],
    ],
)
def test_usage_errors_are_one_line(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert_refused((exit_.value.code, *capsys.readouterr()), "--help")


def test_as_a_module(pair):
    command = [sys.executable, "-m", "dsde", "generate", "--target", str(pair[0]), "--draft", str(pair[1])]
    done = subprocess.run([*command, "--prompt", "lazy", "--max-new-tokens", "5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == reference(pair[0], "lazy", 5) + "\n"


def test_terminal_that_lacks_a_character(pair):
    command = [sys.executable, "-m", "dsde", "generate", "--target", str(pair[0]), "--controller", "off"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    # High temperature: bytes of all kinds, so characters beyond ASCII and broken ones.
    options = ["--prompt", "fox", "--temperature", "50", "--max-new-tokens", "60"]
    done = subprocess.run([*command, *options], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


def test_help_waits_for_no_torch():
    code = "import sys; from dsde.cli import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
