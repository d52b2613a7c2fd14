"""Train the embedded pair from scratch: `python -m dsde.demo.train --out DIR`.

Tokenizer, target, then a draft distilled from the target, all from the text of `dsde.demo.corpus`, on one CPU core.

* The target is deep and narrow (24 layers of width 128), because depth is what a step costs on a CPU at batch 1: its
  step takes several times the draft's (2 layers of width 64) although both are small.
* A deep model is slow to train, so it grows: 6 layers learn first, then every layer is replaced by two copies of itself
  whose outputs are halved, and so again at 12. The grown model computes nearly the same function (one step of the
  residual stream becomes two half steps), and most tokens are seen at the cheap depths.
* The draft learns the target's whole distribution (forward KL) on real text and on the target's own continuations,
  since those are what it meets while decoding. The teacher's last hidden states are kept instead of its logits: 128
  numbers a token, not 4096, and one small product brings the logits back.

Budgets are minutes of wall time, so that the run ends on time on any machine; the card that is written next to the
weights records how many tokens that was. A rerun with the same seed is equal only as far as the machine's speed is.
"""

import argparse
import platform
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import __version__ as version

from dsde.demo import corpus, measure, pair

VOCABULARY = 4096
CONTEXT = 1024
TARGET: dict[str, int] = {"hidden_size": 128, "intermediate_size": 288}
DRAFT: dict[str, int] = {"hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": 2}

STAGES = ((6, 0.3, 256), (12, 0.3, 256), (24, 0.4, 512))
"""The target's growth: layers, share of the time, window length in tokens."""

MICRO_TOKENS = 1024
MICRO_BATCHES = 4
"""Gradients of four micro-batches make a step. The logits of 1,024 tokens are small enough for the allocator to keep
their memory; larger ones are mapped and faulted in anew each time, which costs a third of the speed."""

LEARNING_RATE = 5e-3
RECENT = 200
"""Micro-batches that a reported training loss is a mean of."""

PREFIX, CONTINUATION = 64, 128
"""Tokens of a real prefix and of the target's continuation of it, in the draft's training data."""


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
    end = tokenizer.eos_token_id
    return torch.tensor([token for row in tokenizer(texts)["input_ids"] for token in (*row, end)])


def make_model(sizes: dict[str, int], layers: int, end: int) -> LlamaForCausalLM:
    """Build a random Llama with 4 query heads, 2 key-value heads and tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        **{**sizes, "num_hidden_layers": layers},
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def grow(model: LlamaForCausalLM, layers: int, end: int) -> LlamaForCausalLM:
    """Return a model of `layers` layers, a multiple of `model`'s, that computes nearly the same function."""
    grown = make_model(TARGET, layers, end)
    copies = layers // model.config.num_hidden_layers
    grown.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(model.model.norm.state_dict())
    for index, layer in enumerate(grown.model.layers):
        layer.load_state_dict(model.model.layers[index // copies].state_dict())
        layer.self_attn.o_proj.weight /= copies
        layer.mlp.down_proj.weight /= copies
    return grown


class Optimizer:
    """Muon for the layers' matrices, AdamW for embeddings and norms; one learning rate for both.

    Muon learns clearly more from few tokens. The rate warms up over the first 30 steps of each stage, stays, and falls
    linearly to zero over the second half of the whole run.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self._steps = 0

    def step(self, progress: float) -> None:
        """Update the parameters from their gradients; `progress` is the fraction of the run that has passed."""
        self._steps += 1
        rate = LEARNING_RATE * min(1.0, self._steps / 30, 2 * (1 - progress))
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()


class Budget:
    """Wall time as a progress bar; iterating yields the fraction of the run that has passed, until 1."""

    def __init__(self, minutes: float, label: str) -> None:
        self.tokens = 0
        self.seconds = 60 * minutes
        self._bar = tqdm(total=round(self.seconds), desc=label, unit="s", mininterval=5)

    def __iter__(self) -> Iterator[float]:
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < self.seconds:
            yield elapsed / self.seconds
        self._bar.close()

    def show(self, progress: float, tokens: int, loss: float) -> None:
        """Count `tokens` and show the loss."""
        self.tokens += tokens
        self._bar.set_postfix(Mtokens=f"{self.tokens / 1e6:.2f}", loss=f"{loss:.3f}", refresh=False)
        self._bar.update(round(progress * self.seconds) - self._bar.n)


def windows(tokens: Tensor, length: int) -> Iterator[Tensor]:
    """Yield shuffled micro-batches `[MICRO_TOKENS / length, length]`, each epoch cut at another offset."""
    while True:
        offset = int(torch.randint(length, ()))
        rows = tokens[offset : offset + (len(tokens) - offset) // length * length].view(-1, length)
        yield from rows[torch.randperm(len(rows))].split(MICRO_TOKENS // length)[:-1]


def recent(losses: deque[float]) -> float:
    """Return the mean of the last losses."""
    return sum(losses) / len(losses)


def cross_entropy(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the mean loss of predicting each token from those before it, in nats."""
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train_target(tokens: Tensor, end: int, minutes: float, scratch: Path) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train the target and return it with the tokens it saw and its last training loss (a running mean).

    An unfinished model is saved to `scratch` every three minutes, so that a broken run is not lost.
    """
    model, stage, saved, losses = None, -1, 0.0, deque[float](maxlen=RECENT)
    starts = [sum(share for _, share, _ in STAGES[:i]) for i in range(len(STAGES))]
    budget = Budget(minutes, "target")
    for progress in budget:
        if stage + 1 < len(STAGES) and progress >= starts[stage + 1]:
            stage += 1
            layers, _, length = STAGES[stage]
            model = grow(model, layers, end) if model else make_model(TARGET, layers, end)
            optimizer, batches = Optimizer(model), windows(tokens, length)
        assert model is not None
        for ids in islice(batches, MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model, ids) / MICRO_BATCHES
            loss.backward()
            losses.append(MICRO_BATCHES * loss.item())
        optimizer.step(progress)
        budget.show(progress, MICRO_BATCHES * MICRO_TOKENS, recent(losses))
        if (elapsed := progress * budget.seconds) - saved > 180:
            saved = elapsed
            model.save_pretrained(scratch)
    assert model is not None
    return model.eval(), {"tokens": budget.tokens, "loss_train": round(recent(losses), 4)}


@torch.inference_mode()
def continuations(target: LlamaForCausalLM, tokens: Tensor, minutes: float, rows: int = 128) -> Tensor:
    """Return real prefixes with the target's continuations, `[n, PREFIX + CONTINUATION]`.

    Half of every batch is greedy, half sampled at temperature 0.7. End-of-text does not stop a row: text after it is as
    good as any for distillation.
    """
    done = []
    budget = Budget(minutes, "continuations")
    for progress in budget:
        starts = torch.randint(len(tokens) - PREFIX, (rows,))
        ids = tokens[starts[:, None] + torch.arange(PREFIX)]
        cache = DynamicCache()
        fresh, texts = ids, [ids]
        for _ in range(CONTINUATION):
            logits = target(input_ids=fresh, **{pair.CACHE: cache}, logits_to_keep=1).logits[:, -1].float()
            logits[rows // 2 :] += 0.7 * -torch.log(-torch.log(torch.rand(rows - rows // 2, logits.shape[1])))
            fresh = logits.argmax(-1, keepdim=True)
            texts.append(fresh)
        done.append(torch.cat(texts, 1))
        budget.show(progress, rows * CONTINUATION, 0.0)
    return torch.cat(done)


@torch.inference_mode()
def hidden_states(target: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the target's last hidden states `[n, length, hidden]` in bfloat16; `lm_head` makes them logits."""
    step = 4 * MICRO_TOKENS // ids.shape[1]
    batches = tqdm(ids.split(step), desc="teacher", mininterval=5)
    return torch.cat([target.model(input_ids=rows, use_cache=False).last_hidden_state.bfloat16() for rows in batches])


def distil(
    target: LlamaForCausalLM, tokens: Tensor, end: int, minutes: float, generation_minutes: float
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train the draft on the target's distributions; return it with the tokens it saw and its last KL divergence.

    Batches alternate between the target's continuations and real text; the latter is cut in long windows so that the
    draft also learns late positions.
    """
    teacher = LlamaForCausalLM(target.config).eval()
    teacher.load_state_dict(target.state_dict())
    teacher.bfloat16()
    own = continuations(teacher, tokens, generation_minutes)
    offset = int(torch.randint(512, ()))
    real = tokens[offset : offset + (len(tokens) - offset) // 512 * 512].view(-1, 512)
    real = real[torch.randperm(len(real))[: own.numel() // 512]]
    data = [(ids, hidden_states(teacher, ids)) for ids in (own, real)]

    model = make_model(DRAFT, DRAFT["num_hidden_layers"], end)
    optimizer, losses = Optimizer(model), deque[float](maxlen=RECENT)
    budget = Budget(minutes, "draft")
    for progress in budget:
        for ids, hidden in data * (MICRO_BATCHES // len(data)):
            chosen = torch.randint(len(ids), (MICRO_TOKENS // ids.shape[1],))
            with torch.autocast("cpu", torch.bfloat16):
                log_p = teacher.lm_head(hidden[chosen]).flatten(0, 1).float().log_softmax(-1).detach()
                log_q = model(input_ids=ids[chosen], use_cache=False).logits.flatten(0, 1).float().log_softmax(-1)
            loss = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") / MICRO_BATCHES
            loss.backward()
            losses.append(MICRO_BATCHES * loss.item())
        optimizer.step(progress)
        budget.show(progress, MICRO_BATCHES * MICRO_TOKENS, recent(losses))
    return model.eval(), {
        "tokens": budget.tokens,
        "kl_train": round(recent(losses), 4),
        "distilled_tokens": {"continuations": own.numel(), "real": real.numel()},
    }


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a bfloat16 checkpoint with its tokenizer; rounding happens here, before anything is measured."""
    model.bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Run the whole pipeline and write weights, tokenizer and card."""
    parser = argparse.ArgumentParser(prog="python -m dsde.demo.train", description="Train the embedded model pair.")
    parser.add_argument("--out", type=Path, default=pair.WEIGHTS, help="folder for target/, draft/ and card.json")
    parser.add_argument("--minutes", type=float, default=40, help="training time of the target")
    parser.add_argument("--generation-minutes", type=float, default=6, help="time to write continuations for the draft")
    parser.add_argument("--draft-minutes", type=float, default=12, help="training time of the draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    start = time.perf_counter()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    texts = corpus.training_texts(options.seed)
    tokenizer = train_tokenizer(texts)
    tokens, held_out = pack(tokenizer, texts), pack(tokenizer, corpus.held_out_texts())
    end = tokenizer.eos_token_id
    print(f"corpus: {len(texts)} documents, {len(tokens)} tokens; held out: {len(held_out)} tokens", flush=True)

    target, target_card = train_target(tokens, end, options.minutes, options.out / "unfinished")
    save(target, tokenizer, options.out / "target")
    draft, draft_card = distil(target, tokens, end, options.draft_minutes, options.generation_minutes)
    save(draft, tokenizer, options.out / "draft")
    card = {
        "arguments": {name: value for name, value in vars(options).items() if name != "out"},
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": version},
        "corpus": {
            "text": "source and docstrings of the Python standard library of that version",
            "licence": "PSF-2.0",
            "documents": len(texts),
            "tokens": len(tokens),
        },
        "target": target_card,
        "draft": draft_card,
    }
    measure.write_card(card, options.out)


if __name__ == "__main__":
    main()
