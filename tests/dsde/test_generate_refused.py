"""What a call may not ask for, said before any compute, and options without effect."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, SynthIDTextWatermarkingConfig

from dsde import Decoder, patch
from tests.dsde.generate_support import batch, both

NEW = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}


REFUSED = {
    "guidance_scale": 1.5,
    "token_healing": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "cache_implementation": "static",
    "assistant_early_exit": 1,
    "synced_gpus": True,
    "inputs_embeds": torch.zeros(5, 7, 32),
    "past_key_values": DynamicCache(),
    "negative_prompt_ids": torch.ones(5, 2, dtype=torch.long),
}


@pytest.mark.parametrize(
    "option",
    [
        {"use_cache": False},
        {"prefill_chunk_size": 4},
        {"assistant_confidence_threshold": 0.1},
        {"num_assistant_tokens_schedule": "heuristic"},
        {"max_matching_ngram_size": 5},
        {"assistant_lookbehind": 5},
        {"target_lookbehind": 5},
    ],
    ids=str,
)
def test_options_without_effect(pair, option):
    want, got = both(*pair, NEW | option)
    assert torch.equal(want, got)


class TestRefused:
    @pytest.fixture(autouse=True)
    def no_compute(self, pair, monkeypatch):
        """Refusals come before any forward pass."""
        with patch(*pair):
            for model in pair:
                monkeypatch.setattr(model, "forward", functools.wraps(model.forward)(self.computes))
            yield

    @staticmethod
    def computes(*_, **__):
        raise AssertionError("a forward pass")

    @pytest.mark.parametrize("name", REFUSED)
    def test_by_name(self, pair, name):
        with pytest.raises(ValueError, match=name):
            pair[0].generate(**batch(), **NEW, **{name: REFUSED[name]})

    def test_a_processor_with_state(self, pair):
        marks = SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2, 3])
        with pytest.raises(ValueError, match="SynthIDTextWatermarkLogitsProcessor"):
            pair[0].generate(**batch(), **NEW, watermarking_config=marks)

    @pytest.mark.parametrize(
        "number",
        [
            {"num_assistant_tokens": 3.5},
            {"num_assistant_tokens": "3"},
            {"num_assistant_tokens": -1},
            {"prompt_lookup_num_tokens": 0},
        ],
        ids=str,
    )
    def test_a_length_of_drafts_that_is_none(self, pair, number):
        with pytest.raises(ValueError, match=next(iter(number))):
            pair[0].generate(**batch(), **NEW, **number)

    def test_a_prompt_without_tokens(self, pair):
        with pytest.raises(ValueError, match="input_ids"):
            pair[0].generate(torch.zeros(1, 0, dtype=torch.long), **NEW)

    def test_half_a_mask(self, pair):
        mask = torch.tensor([[0.5, 1, 1]])
        with pytest.raises(ValueError, match="attention_mask"):
            pair[0].generate(torch.tensor([[5, 6, 7]]), attention_mask=mask, **NEW)

    @pytest.mark.parametrize("option", [{"top_p": 1e-32, "do_sample": True}, {"num_assistant_tokens": -1}], ids=str)
    def test_before_a_decoder_makes_its_engine(self, pair, option):
        with pytest.raises(ValueError, match=next(iter(option))):
            pair[0].generate(**batch(), **NEW, **option, custom_generate=Decoder(pair[1]))

    def test_right_padding(self, pair):
        inputs = batch()
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
        with pytest.raises(ValueError, match="attention_mask"):
            pair[0].generate(**inputs, **NEW)

    def test_other_positions(self, pair):
        with pytest.raises(ValueError, match="position_ids"):
            pair[0].generate(**batch(), **NEW, position_ids=torch.arange(1, 8).expand(5, 7))

    def test_another_input(self, pair):
        with pytest.raises(ValueError, match="pixel_values"):
            pair[0].generate(**batch(), **NEW, pixel_values=torch.zeros(1))

    def test_a_typing_error(self, pair):
        with pytest.raises(ValueError, match="temperatur"):
            pair[0].generate(**batch(), **NEW, temperatur=1.0)

    def test_stop_strings_without_a_tokenizer(self, pair):
        with pytest.raises(ValueError, match="stop_strings"):
            pair[0].generate(**batch(), **NEW, stop_strings="end")

    def test_no_padding_id_for_rows_that_stop(self, pair):
        options = NEW | {"pad_token_id": None, "max_time": 10.0}
        with pytest.raises(ValueError, match="pad_token_id"):
            pair[0].generate(**batch(), **options)


def test_a_request_that_never_fits_is_refused_before_any_compute(pair):
    target, draft = pair
    with patch(target, draft, kv_blocks=1, block_size=8) as patched:
        with pytest.raises(ValueError, match="KV positions"):
            target.generate(**batch(), **NEW)
        assert patched.decoder.prepare(target).stats()["steps"] == 0


def test_a_refused_call_streams_nothing(pair):
    target, draft = pair
    seen = []
    streamer = SimpleNamespace(put=seen.append, end=lambda: seen.append("end"))
    with patch(target, draft, kv_blocks=1, block_size=8), pytest.raises(ValueError, match="kv_blocks"):
        target.generate(torch.tensor([[5, 6, 7]]), **NEW, streamer=streamer)
    assert seen == []
