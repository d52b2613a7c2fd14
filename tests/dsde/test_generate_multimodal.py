"""Text-only calls of checkpoints that can see as well."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from dsde import patch
from tests.dsde.generate_support import batch, both
from tests.dsde.models import COMMON, VOCAB

NEW = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": None}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma3():
    config = Gemma3Config(
        text_config=COMMON | {"head_dim": 8, "sliding_window": 6},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 2,
        boi_token_index=VOCAB - 3,
        eoi_token_index=VOCAB - 4,
    )
    return Gemma3ForConditionalGeneration(config)


def llava():
    config = LlavaConfig(
        text_config=LlamaConfig(**COMMON), vision_config=CLIPVisionConfig(**VISION), image_token_index=VOCAB - 2
    )
    return LlavaForConditionalGeneration(config)


def qwen2_vl():
    config = Qwen2VLConfig(
        text_config=COMMON
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
        image_token_id=VOCAB - 2,
        video_token_id=VOCAB - 3,
        vision_start_token_id=VOCAB - 4,
        vision_end_token_id=VOCAB - 5,
    )
    return Qwen2VLForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gemma3, llava, qwen2_vl])
def test_text_only(make):
    torch.manual_seed(0)
    model = make().eval()
    inputs = batch(vocabulary=VOCAB - 5)
    for given in (inputs, {"input_ids": inputs["input_ids"][:1]}):
        want, got = both(model, "ngram", NEW, given)
        assert torch.equal(want, got)


def test_token_types():
    """All text is what the model takes by itself; images are refused."""
    torch.manual_seed(0)
    model = gemma3().eval()
    ids = torch.tensor([[5, 6, 7]])
    types = torch.zeros_like(ids)
    want, got = both(model, "ngram", NEW, {"input_ids": ids, "token_type_ids": types})
    assert torch.equal(want, got)
    types[0, 1] = 1
    with patch(model, "ngram"), pytest.raises(ValueError, match="token_type_ids"):
        model.generate(ids, token_type_ids=types, **NEW)


def test_token_types_of_a_text_model(tiny):
    """GPT-2 adds the embedding of type 0, which is that of token 0."""
    target, _ = tiny("gpt2")
    ids = torch.tensor([[5, 6, 7]])
    types = torch.zeros_like(ids)
    assert not target(ids, token_type_ids=types).logits.allclose(target(ids).logits)
    with patch(target, "ngram"), pytest.raises(ValueError, match="token_type_ids"):
        target.generate(ids, token_type_ids=types, **NEW)


def test_positions_of_an_image():
    """Its axes run apart."""
    torch.manual_seed(0)
    model = qwen2_vl().eval()
    positions = torch.arange(3).expand(3, 1, 3).clone()
    positions[1, 0, 2] = 1
    with patch(model, "ngram"), pytest.raises(ValueError, match="position_ids"):
        model.generate(torch.tensor([[5, 6, 7]]), position_ids=positions, **NEW)
