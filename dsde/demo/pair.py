"""The embedded model pair and the prompts to try it on.

A 24-layer Llama (4.4 M parameters) and a 2-layer draft distilled from it, trained by `dsde.demo.train` on Python's
standard library; `weights/card.json` says how, and what was measured. The prompts are pieces of standard library files
that were never trained on, read from this machine's own Python.
"""

import ast
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import signature
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dsde import models
from dsde.demo import corpus

WEIGHTS = Path(__file__).parent / "weights"
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What transformers calls a key-value cache: the short name is new in 5.24."""

END_OF_TEXT = "<|endoftext|>"
SHORTEST, LONGEST = 40, 120
"""Length of a prompt, in tokens."""


NATURES = ("function", "class", "prose", "imports", "doctest", "table")


class Prompt(NamedTuple):
    """A piece of a held-out file.

    Attributes
    ----------
    nature : str
        One of `NATURES`.
    source : str
        The file, relative to the standard library's folder.
    text : str
        The prompt: whole lines, indented as if the piece stood alone.
    """

    nature: str
    source: str
    text: str


def load_pair(
    dtype: torch.dtype = torch.float32, folder: Path = WEIGHTS
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the embedded pair on the CPU.

    Parameters
    ----------
    dtype : torch.dtype
        Type to compute in. The weights are stored in bfloat16.
    folder : Path
        Where `target/` and `draft/` are; the shipped weights unless given.

    Returns
    -------
    target, draft : LlamaForCausalLM
        The models, in evaluation mode.
    tokenizer : PreTrainedTokenizerFast
        The tokenizer that both use.
    """
    return load_model(folder / "target", dtype), load_model(folder / "draft", dtype), load_tokenizer(folder)


def load_model(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Load one model of a pair from its own folder."""
    return cast(LlamaForCausalLM, models.load_model(folder, dtype, "cpu"))


@cache
def load_tokenizer(folder: Path = WEIGHTS) -> PreTrainedTokenizerFast:
    """Load the tokenizer of the pair in `folder`."""
    return cast(PreTrainedTokenizerFast, models.load_tokenizer(folder / "target"))


def prompts(n: int) -> list[str]:
    """Return the first `n` prompts of `held_out_prompts`.

    Raises
    ------
    ValueError
        If this machine's standard library has fewer.
    """
    available = held_out_prompts()
    if not 0 <= n <= len(available):
        raise ValueError(f"n must be between 0 and {len(available)}, the number of held-out prompts here, got {n}")
    return [prompt.text for prompt in available[:n]]


@cache
def held_out_prompts(folder: Path = WEIGHTS) -> tuple[Prompt, ...]:
    """Return all prompts of this machine, natures in turn, each nature going through the files in turn.

    Any start of the list is therefore mixed. The list is the same on every machine with the same Python and the same
    held-out files.
    """
    files = [list(_prompts_of(source, load_tokenizer(folder))) for source in corpus.held_out_files()]
    return tuple(_in_turn(_in_turn([p for p in file if p.nature == nature] for file in files) for nature in NATURES))


def _prompts_of(source: str, tokenizer: PreTrainedTokenizerFast) -> Iterator[Prompt]:
    """Yield the prompts of one file."""
    for nature, piece in _pieces(corpus.read(source)):
        if text := _cut(textwrap.dedent(piece), tokenizer):
            yield Prompt(nature, source, text)


def _in_turn(rows: Iterable[list[Prompt]]) -> list[Prompt]:
    """Return the first prompt of each row, then the second of each, and so on."""
    return [prompt for prompt in chain.from_iterable(zip_longest(*rows)) if prompt]


def _pieces(code: str) -> Iterator[tuple[str, str]]:
    """Yield the nature and the text of each piece of a Python file that can start a prompt."""
    lines = code.splitlines(keepends=True)
    tree = ast.parse(code)
    imports = [node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports:
        yield "imports", "".join(lines[imports[0] - 1 :])
    for node in ast.walk(tree):
        text = "".join(lines[node.lineno - 1 : node.end_lineno]) if isinstance(node, ast.stmt) else ""
        if isinstance(node, ast.ClassDef):
            yield "class", text
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.List | ast.Tuple | ast.Set):
            yield "table", text
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            docstring = node.body[0]
            prose = "".join(lines[docstring.lineno - 1 : docstring.end_lineno])
            if isinstance(node, ast.Module):
                yield "prose", prose
            else:
                yield "function", "".join(lines[node.lineno - 1 : docstring.end_lineno])
            if (start := prose.find(">>>")) >= 0:
                yield "doctest", prose[prose.rfind("\n", 0, start) + 1 :]


def _cut(text: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the start of `text`: whole lines, at most `LONGEST` tokens; empty if that is less than `SHORTEST`."""
    text = text[: 16 * LONGEST]  # a class can be long, and its tokens are a few characters each
    ends = tokenizer(text, return_offsets_mapping=True)["offset_mapping"][:LONGEST]
    start = text[: ends[-1][1]] if ends else ""
    start = start[: start.rfind("\n") + 1]
    return start if len(tokenizer(start)["input_ids"]) >= SHORTEST else ""
