"""Packed forward passes equal the model's own, however the text is cut and wherever its blocks lie."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CpmAntConfig,
    DiffLlamaConfig,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    MiniMaxConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    XLNetConfig,
)

from dsde.attention import PackedRows
from dsde.blocks import BlockTable
from dsde.cache import CannotPack, CannotRollBack, PackedModel, Segment
from dsde.fallback import load
from tests.dsde.models import COMMON, CONFIGS, VOCAB, build

CUTS = [0, 5, 6, 18, 21]
# Contiguous, reversed, interleaved with the other sequence's blocks.
TABLES = [([0, 1, 2, 3, 4, 5], [6, 7, 8, 9]), ([11, 9, 7, 5, 3, 1], [0, 2, 4, 6])]

FORGETS_NOTHING = {
    "lfm2": lambda: Lfm2Config(**COMMON | {"num_hidden_layers": 2}, layer_types=["conv", "full_attention"]),
    "minimax": lambda: MiniMaxConfig(
        **COMMON | {"num_hidden_layers": 2},
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"],
        block_size=4,
    ),
    "openai-gpt": lambda: OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "xlnet": lambda: XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=48),
    "cpmant": lambda: CpmAntConfig(
        vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=2
    ),
}


def own_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def check_packed(model, tables):
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(0, VOCAB, (21,), generator=generator).tolist()
    b = torch.randint(0, VOCAB, (16,), generator=generator).tolist()
    packed = PackedModel(model, 48, 4)
    ta, tb = BlockTable(list(tables[0])), BlockTable(list(tables[1]))
    got_a, got_b = [], []
    with packed.packed():
        for i, (start, end) in enumerate(itertools.pairwise(CUTS)):
            part_b = slice(4 * i, 4 * i + 4)
            logits = packed.forward([Segment(a[start:end], start, ta), Segment(b[part_b], 4 * i, tb)])
            got_a.append(logits[: end - start])
            got_b.append(logits[end - start :])
    torch.testing.assert_close(torch.cat(got_a), own_logits(model, a), rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(torch.cat(got_b), own_logits(model, b), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("family", CONFIGS)
def test_equals_own_forward(family, tables):
    check_packed(build(family, initializer_range=0.05), tables)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "opt"])
def test_softcap_sinks_and_learned_positions(name):
    common = COMMON | {"initializer_range": 0.05}
    config = {
        "gemma2": lambda: Gemma2Config(**common, head_dim=8, sliding_window=7, attn_logit_softcapping=5.0),
        "gpt_oss": lambda: GptOssConfig(
            **common,
            head_dim=8,
            sliding_window=7,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
        "opt": lambda: OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
        ),
    }[name]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    check_packed(model, TABLES[1])


def test_rows_beyond_the_mask_strip():
    model = build("mistral", max_position_embeddings=512, initializer_range=0.05)
    ids = torch.randint(0, VOCAB, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    packed = PackedModel(model, 256, 8)
    table = BlockTable(list(range(32)))
    with packed.packed():
        got = torch.cat([packed.forward([Segment(ids[s:e], s, table)]) for s, e in ((0, 70), (70, 72), (72, 200))])
    torch.testing.assert_close(got, own_logits(model, ids), rtol=1e-4, atol=2e-6)


def test_keep_selects_rows():
    model = build("llama")
    packed = PackedModel(model, 32, 8)
    table = BlockTable([0])
    with packed.packed():
        every = packed.forward([Segment([1, 2, 3, 4], 0, table)])
        some = packed.forward([Segment([1, 2, 3, 4], 0, table)], keep=[3, 1])
    torch.testing.assert_close(some, every[[3, 1]])


def test_the_models_own_attention_comes_back():
    model = build("llama")
    packed = PackedModel(model, 32, 8)
    before = own_logits(model, [1, 2, 3])
    with pytest.raises(KeyError), packed.packed():
        assert model.config._attn_implementation == "dsde_packed"
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(own_logits(model, [1, 2, 3]), before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "cannot run packed .*0 of 2"),
        (
            FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
            "cannot run packed",
        ),
        (MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4), "rolled back"),
    ],
    ids=["bloom", "falcon", "mamba"],
)
def test_models_that_cannot_run_packed_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        PackedModel(AutoModelForCausalLM.from_config(config).eval(), 32, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DiffLlamaConfig(**COMMON), "attends twice"),
        (PhimoeConfig(**COMMON, sliding_window=7, num_local_experts=2), "sliding window"),
        (Llama4TextConfig(**COMMON, head_dim=8, attention_chunk_size=8, num_local_experts=1), "chunked_attention"),
    ],
    ids=["diffllama", "phimoe", "llama4"],
)
def test_attention_that_lives_in_the_mask_or_comes_twice_is_refused(config, message):
    """Such models would run, and give other tokens than their own."""
    with pytest.raises(CannotPack, match=message):
        PackedModel(AutoModelForCausalLM.from_config(config).eval(), 64, 8)


@pytest.mark.parametrize("name", FORGETS_NOTHING)
def test_caches_that_cannot_be_rolled_back_are_refused(name):
    """Short convolutions and linear attention; no cache at all; a cache that goes on differently than the model."""
    model = AutoModelForCausalLM.from_config(FORGETS_NOTHING[name]()).eval()
    with pytest.raises(CannotRollBack, match="rolled back") as caught:
        load(model, 64, 8)
    assert caught.value.model is model


def test_a_model_whose_packed_logits_differ_is_refused(monkeypatch):
    """The probe's own last line of defence: here the model is lied to about its scaling."""
    model = build("llama")
    attend = PackedRows.attend
    monkeypatch.setattr(PackedRows, "attend", lambda self, *a: attend(self, *a[:5], 3.0, *a[6:]))
    with pytest.raises(CannotPack, match="differ from its own"):
        PackedModel(model, 64, 8)


def test_long_rope_ends_where_its_keys_would_change():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    config = Phi3Config(**COMMON, original_max_position_embeddings=32, rope_parameters=rope)
    assert PackedModel(AutoModelForCausalLM.from_config(config).eval(), 64, 8).context == 32


def test_a_store_that_does_not_fit_says_so():
    with pytest.raises(MemoryError, match="positions"):
        PackedModel(build("llama"), 2**45, 8)


def test_float64_is_refused():
    with pytest.raises(ValueError, match="float64"):
        PackedModel(build("llama").double(), 32, 8)


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match="training mode"):
        PackedModel(build("llama").train(), 32, 8)
