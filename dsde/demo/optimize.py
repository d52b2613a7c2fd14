"""What the trainings of target and draft share: the models' shape, the batches, the optimizer and the time budget."""

import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4096
CONTEXT = 1024
END = 0
"""Id of end-of-text, the tokenizer's first entry."""

MICRO_TOKENS = 1024
MICRO_BATCHES = 4
"""Gradients of four micro-batches make a step. The logits of 1,024 tokens are small enough for the allocator to keep
their memory; larger ones are mapped and faulted in anew each time, which costs a third of the speed."""

LEARNING_RATE = 5e-3
WARMUP_STEPS = 30


def make_model(layers: int, hidden: int, intermediate: int) -> LlamaForCausalLM:
    """Build a random Llama with 4 query heads, 2 key-value heads and tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    return LlamaForCausalLM(config)


def windows(tokens: Tensor, length: int) -> Iterator[Tensor]:
    """Yield shuffled micro-batches `[MICRO_TOKENS / length, length]`, each epoch cut at another offset."""
    while True:
        offset = int(torch.randint(length, ()))
        rows = tokens[offset : offset + (len(tokens) - offset) // length * length].view(-1, length)
        yield from rows[torch.randperm(len(rows))].split(MICRO_TOKENS // length)[:-1]


class Optimizer:
    """Muon for the layers' matrices, AdamW for embeddings and norms; one learning rate for both.

    Muon learns clearly more from few tokens. The rate warms up in every stage, stays, and falls linearly to zero over
    the second half of the whole run.
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
        rate = LEARNING_RATE * min(1.0, self._steps / WARMUP_STEPS, 2 * (1 - progress))
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()


class Budget:
    """Wall time as a progress bar: iterating yields the fraction that has passed, until it is 1."""

    def __init__(self, minutes: float, label: str) -> None:
        self.tokens = 0
        self._seconds = 60 * minutes
        self._losses: deque[float] = deque(maxlen=200)
        self._bar = tqdm(total=round(self._seconds), desc=label, unit="s", mininterval=5)

    def __iter__(self) -> Iterator[float]:
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < self._seconds:
            self._bar.update(round(elapsed) - self._bar.n)
            yield elapsed / self._seconds
        self._bar.close()

    @property
    def loss(self) -> float:
        """Mean of the last 200 losses."""
        return sum(self._losses) / max(1, len(self._losses))

    def record(self, tokens: int, loss: float | None = None) -> None:
        """Count `tokens`, and `loss` as theirs."""
        self.tokens += tokens
        if loss is not None:
            self._losses.append(loss)
        self._bar.set_postfix(Mtokens=f"{self.tokens / 1e6:.2f}", loss=f"{self.loss:.3f}", refresh=False)
