"""Tiny random models of real architectures, and drafts that agree with them by halves."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Larger than usual, so that a random model's next token depends visibly on the text.
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=8),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=7),
    "gemma3": lambda: Gemma3TextConfig(
        **COMMON,
        head_dim=8,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,  # its scaled embeddings would make every token repeat itself
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    ),
}


def build(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random model of that family in float32 evaluation mode."""
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def weaken(model: PreTrainedModel, noise: float = 0.1, seed: int = 1) -> PreTrainedModel:
    """A draft for `model`: the same weights, each disturbed by relative noise."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(1 + noise * torch.randn(weight.shape, generator=generator))
    return draft
