"""What the tests of the drop-in share: a tokenizer for the tiny models, a ragged batch, a comparison."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dsde import patch
from tests.dsde.models import VOCAB

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def tokenizer(letters: str = LETTERS) -> PreTrainedTokenizerFast:
    """One token a letter, ids from 9 on; below are special tokens."""
    vocabulary = {f"<{i}>": i for i in range(9)} | {c: 9 + i for i, c in enumerate(letters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<1>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<0>", unk_token="<1>")


def batch(lengths=(7, 1, 5, 4, 6), vocabulary: int = VOCAB, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded random prompts of these lengths."""
    width = max(lengths)
    ids = torch.randint(1, vocabulary, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def both(target, draft, options: dict, inputs: dict | None = None, **engine):
    """Outputs of transformers' own generate and of the patched one."""
    inputs = batch() if inputs is None else inputs
    want = target.generate(**inputs, **options)
    with patch(target, draft, **engine):
        got = target.generate(**inputs, **options)
    return want, got


def same_scores(want, got, sequences: torch.Tensor, width: int, eos=(), atol: float = 1e-4) -> bool:
    """Whether per-step tensors agree in every row up to its end."""
    assert len(want) == len(got)
    live = torch.ones(len(sequences), dtype=torch.bool)
    for step, (a, b) in enumerate(zip(want, got, strict=True)):
        a, b = a[live], b[live]
        if a.dtype != b.dtype or not torch.equal(a.isfinite(), b.isfinite()):
            return False
        if not torch.allclose(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0), atol=atol, rtol=1e-4):
            return False
        live &= ~torch.isin(sequences[:, width + step], torch.tensor(eos))
    return True
