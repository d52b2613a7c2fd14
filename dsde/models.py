"""Load a target and a draft from folders or the Hub, and check that they speak the same tokens."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# Letters, digits, spaces, indentation, accents, other scripts, an emoji of several bytes.
_PROBE = "def f(x):\n    return x ** 2  # naïve café, 東京, Привет, 1234567890 🙂\n\n\tThe end."


def load_model(name: str | Path, dtype: torch.dtype = torch.float32, device: str | None = None) -> Any:
    """Load a causal language model in evaluation mode.

    Parameters
    ----------
    name : str or Path
        A local folder or a model id on the Hub.
    dtype : torch.dtype
        Type of the weights.
    device : str, optional
        Where to put it; None takes the GPU if there is one.

    Raises
    ------
    ValueError
        Nothing usable is found there.
    """
    model = _load(AutoModelForCausalLM, str(name), dtype=dtype)
    return model.to(device or best_device()).eval()


def best_device() -> str:
    """The GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer of a local folder or a model id on the Hub; ValueError if there is none."""
    return _load(AutoTokenizer, str(name))


def check_tokenizers(target: Any, draft: Any) -> None:
    """Refuse a draft whose token ids mean something else than the target's.

    Classes and padded vocabulary sizes may differ; what counts is that each id stands for the same token and that both
    cut text the same way.

    Raises
    ------
    ValueError
        The tokenizers disagree; the message says where.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        token = min(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        raise ValueError(
            f"the tokenizers of target and draft disagree: {token!r} is id {ours.get(token)} and {theirs.get(token)}"
        )
    # Without special tokens: prompts come as ids, whatever one of the two would put before a text.
    if target.encode(_PROBE, add_special_tokens=False) != draft.encode(_PROBE, add_special_tokens=False):
        raise ValueError("the tokenizers of target and draft disagree: same vocabulary, but they cut text differently")


def _load(auto: Any, name: str, **options: Any) -> Any:
    folder = Path(name).expanduser()
    # What has the form of a Hub id is looked for there; everything else can only be a folder.
    if not folder.is_dir() and (name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith("/")):
        raise ValueError(f"no such folder: {name}")
    try:
        return auto.from_pretrained(folder if folder.is_dir() else name, **options)
    except Exception as error:  # a broken file makes transformers raise almost anything
        where = f"cannot load {name}" if folder.is_dir() else f"{name} is no folder here and cannot be had from the Hub"
        kind = "" if isinstance(error, OSError | ValueError) and str(error) else f"{type(error).__name__}: "
        raise ValueError(f"{where}: {kind}{textwrap.shorten(str(error), 300, placeholder=' ...')}") from error
