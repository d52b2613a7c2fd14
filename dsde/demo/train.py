"""Train the embedded pair from scratch: `python -m dsde.demo.train`.

A tokenizer, a target and a draft distilled from it, all from the text of `dsde.demo.corpus`, on one CPU core.

The target is deep and narrow (24 layers of width 128), because depth is what a step costs on a CPU at batch 1: its step
takes several times the draft's (2 layers of width 64) although both are small. A deep model is slow to train, so it
grows: 6 layers learn first, then every layer is replaced by two copies of itself whose outputs are halved, and so again
at 12. The grown model computes nearly the same function (one step of the residual stream becomes two half steps), and
most tokens are seen at the cheap depths.

Budgets are minutes of wall time, so that the run ends on time on any machine; the card that is written next to the
weights records how many tokens that was. A rerun with the same seed is equal only as far as the machine's speed is.
"""

import argparse
import json
import platform
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dsde.demo import corpus, measure, pair
from dsde.demo.distil import distil
from dsde.demo.optimize import END, MICRO_BATCHES, VOCABULARY, Budget, Optimizer, make_model, windows

STAGES = ((0.0, 6, 256), (0.3, 12, 256), (0.6, 24, 512))
"""The target's growth: when (as a fraction of its time), to how many layers, on windows of how many tokens."""

SAVE_EVERY = 180
"""Seconds between copies of the unfinished target, so that a broken run is not lost."""


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `VOCABULARY` entries; its only special token ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[pair.END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=pair.END_OF_TEXT,
        pad_token=pair.END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return all documents as one row of ids `[tokens]`, an end-of-text id after each."""
    return torch.tensor([token for row in tokenizer(texts)["input_ids"] for token in (*row, END)])


def make_target(layers: int) -> LlamaForCausalLM:
    """Build a random target of `layers` layers."""
    return make_model(layers, hidden=128, intermediate=288)


@torch.no_grad()
def grow(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a target of `layers` layers, a multiple of `model`'s, that computes nearly the same function."""
    grown = make_target(layers)
    copies = layers // model.config.num_hidden_layers
    grown.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(model.model.norm.state_dict())
    for index, layer in enumerate(grown.model.layers):
        layer.load_state_dict(model.model.layers[index // copies].state_dict())
        layer.self_attn.o_proj.weight /= copies
        layer.mlp.down_proj.weight /= copies
    return grown


def train_target(tokens: Tensor, minutes: float, scratch: Path) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train the target on next tokens.

    Parameters
    ----------
    tokens : Tensor
        `[tokens]`, the packed corpus.
    minutes : float
        Wall time to train.
    scratch : Path
        Folder for the unfinished model.

    Returns
    -------
    target : LlamaForCausalLM
        The target, in float32.
    card : dict
        The tokens it saw and its last training loss.
    """
    model, stages, saved = None, list(STAGES), time.perf_counter()
    budget = Budget(minutes, "target")
    for progress in budget:
        if stages and progress >= stages[0][0]:
            _, layers, length = stages.pop(0)
            model = grow(model, layers) if model else make_target(layers)
            optimizer, batches = Optimizer(model), windows(tokens, length)
        assert model is not None  # the first stage starts at 0
        for ids in islice(batches, MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
            budget.record(ids.numel(), loss.item())
        optimizer.step(progress)
        if time.perf_counter() - saved > SAVE_EVERY:
            model.save_pretrained(scratch)
            saved = time.perf_counter()
    assert model is not None
    return model.eval(), {"tokens": budget.tokens, "loss_train": round(budget.loss, 4)}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Round the model to bfloat16, before anything is measured on it or learnt from it, and write a checkpoint."""
    model.bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)  # less than half as large


def main() -> None:
    """Run the whole pipeline and write weights, tokenizer and card."""
    parser = argparse.ArgumentParser(prog="python -m dsde.demo.train", description="Train the embedded model pair.")
    parser.add_argument("--out", type=Path, default=pair.WEIGHTS, help="folder for target/, draft/ and card.json")
    parser.add_argument("--minutes", type=float, default=37, help="time to train the target")
    parser.add_argument("--generation-minutes", type=float, default=6, help="time to write continuations for the draft")
    parser.add_argument("--draft-minutes", type=float, default=12, help="time to train the draft")
    parser.add_argument("--draft-only", action="store_true", help="keep the target that is in the folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    texts = corpus.training_texts(options.seed)
    if options.draft_only:
        target = pair.load_model(options.out / "target", torch.bfloat16)
        tokenizer = pair.load_tokenizer(options.out)
        tokens = pack(tokenizer, texts)
        card = json.loads((options.out / "card.json").read_text())
    else:
        tokenizer = train_tokenizer(texts)
        tokens = pack(tokenizer, texts)
        target, target_card = train_target(tokens, options.minutes, options.out / "unfinished")
        save(target, tokenizer, options.out / "target")
        card = {
            "corpus": {
                "text": "source and docstrings of the Python standard library",
                "licence": "PSF-2.0",
                "documents": len(texts),
                "tokens": len(tokens),
            },
            "target": target_card,
        }
    draft, card["draft"] = distil(target, tokens, options.draft_minutes, options.generation_minutes)
    save(draft, tokenizer, options.out / "draft")
    card["arguments"] = {name: value for name, value in vars(options).items() if name not in ("out", "draft_only")}
    card["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    measure.write_card(card, options.out)


if __name__ == "__main__":
    main()
