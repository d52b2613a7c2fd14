"""The `custom_generate` folder: in a model's own folder, borrowed for a call, and under `transformers serve`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dsde.generate import Patch
from tests.dsde.generate_support import batch, tokenizer

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "custom_generate"
NEW = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
# Appended to the recipe, so that the test sees what the server's engine did.
REPORT = """

import json as _json

_generate = generate


def generate(*args, model, **kwargs):
    output = _generate(*args, model=model, **kwargs)
    with open(os.environ["DSDE_TEST_REPORT"], "w") as file:
        _json.dump(model._dsde.decoder.prepare(model).stats(), file)
    return output
"""


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    """A model's folder with its draft and the recipe."""
    monkeypatch.delenv("DSDE_DRAFT", raising=False)
    target, draft = tiny("llama")
    place = tmp_path / "model"
    target.save_pretrained(place)
    draft.save_pretrained(place / "draft")
    for where in (place, place / "draft"):
        tokenizer().save_pretrained(where)
    shutil.copytree(RECIPE, place / "custom_generate", ignore=shutil.ignore_patterns("__pycache__"))
    return place


def test_a_model_brings_its_generate_along(folder, tiny):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    want = tiny("llama")[0].generate(**batch(), **NEW)
    assert torch.equal(model.generate(**batch(), **NEW), want)
    assert torch.equal(model.generate(batch()["input_ids"], **NEW), want)
    assert isinstance(model._dsde, Patch)
    stats = model._dsde.decoder.prepare(model).stats()
    assert stats["drafted"] > 0
    with pytest.warns(UserWarning, match="hands this call back"):
        model.generate(**batch(), **NEW, num_beams=2)


def test_without_a_draft_folder_it_is_prompt_lookup(folder, tiny):
    shutil.rmtree(folder / "draft")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert torch.equal(model.generate(**batch(), **NEW), tiny("llama")[0].generate(**batch(), **NEW))
    assert model._dsde.draft == "ngram"


def test_borrowed_for_one_call(folder, tiny):
    target, draft = tiny("llama")
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    want = target.generate(**batch(), **NEW)
    recipe = {"custom_generate": str(folder), "trust_remote_code": True}
    assert torch.equal(model.generate(**batch(), **NEW, **recipe, assistant_model=draft), want)
    assert "generate" not in vars(model)


def missing():
    """What `transformers serve` needs and is not installed."""
    return [p for p in ("fastapi", "uvicorn", "openai", "rich") if importlib.util.find_spec(p) is None]


@pytest.fixture
def server(folder, tmp_path):
    """`transformers serve` of that folder on loopback; yields its address and where the engine's counters go."""
    if missing():
        pytest.skip(f'transformers serve needs pip install "transformers[serving]": no {", ".join(missing())} here')
    code = folder / "custom_generate" / "generate.py"
    code.write_text(code.read_text() + REPORT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report = tmp_path / "report.json"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "DSDE_TEST_REPORT": str(report),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
    }
    start = "from transformers.cli.transformers import main; main()"
    options = [str(folder), "--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", start, "serve", *options], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.5)
        yield address, report
    finally:
        process.terminate()
        process.wait(30)


def test_served_and_streamed(server, folder, tiny):
    address, report = server
    prompt = "hello"
    body = {"model": str(folder), "prompt": prompt, "max_tokens": 12, "stream": True, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    pieces = []
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data.startswith("{"):
                pieces += [c["text"] for c in json.loads(data).get("choices", ()) if c.get("text")]
    tok = tokenizer()
    want = tiny("llama")[0].generate(**tok(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    assert "".join(pieces) == tok.decode(want[0, len(prompt) :], skip_special_tokens=True)
    assert len(pieces) > 1
    assert json.loads(report.read_text())["drafted"] > 0
