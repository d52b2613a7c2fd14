"""Greedy output and scores of the patched `generate` equal transformers' own, option by option."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CamembertConfig,
    FalconConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    RobertaConfig,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from dsde import Decoder, patch
from tests.dsde.generate_support import batch, both, same_scores
from tests.dsde.models import weaken

EOS = [3, 9, 24]
NEW = {"max_new_tokens": 14, "pad_token_id": 0, "eos_token_id": EOS}


class EveryThird(LogitsProcessor):
    """Depends on the whole prefix: its length, its padding and its last token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids.shape[1] % 3 :: 3] -= 4.0
        favoured = input_ids.sum(1, keepdim=True) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(scores, 2.0))


def allowed(row, ids):
    """A different set for each row, of the prompt and of the last token."""
    return [t for t in range(61) if (t + row + int(ids[-1])) % 2]


OPTIONS = {
    "plain": {},
    "max_length": {"max_new_tokens": None, "max_length": 18},
    "default length": {"max_new_tokens": None},
    "one eos": {"eos_token_id": 9},
    "no eos": {"eos_token_id": None, "pad_token_id": None},
    "pad id": {"pad_token_id": 5},
    "pad from eos": {"pad_token_id": None},
    "min_length": {"min_length": 17},
    "min_new_tokens": {"min_new_tokens": 9},
    "max_time": {"max_time": 1000.0},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "repetition_penalty < 1": {"repetition_penalty": 0.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[14], [16, 23], [50, 50]]},
    "sequence_bias": {"sequence_bias": [[[14], -9.0], [[50, 50], -9.0], [[20], 3.0]]},
    "suppress_tokens": {"suppress_tokens": [14, 50, 23]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [54, 35, 18]},
    "forced_eos_token_id": {"forced_eos_token_id": 24},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.4)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "logits_processor": {"logits_processor": LogitsProcessorList([EveryThird()])},
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1000.0)])},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4, "suppress_tokens": [7]},
}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("name", OPTIONS)
def test_option(tiny, name):
    check(*tiny("llama"), NEW | OPTIONS[name])


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("name", ["plain", "several"])
def test_architecture(tiny, family, name):
    check(*tiny(family), NEW | OPTIONS[name])


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("name", OPTIONS)
def test_option_on_the_embedded_pair(embedded, name):
    check(*embedded, NEW | OPTIONS[name], batch(vocabulary=512))


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
        FalconConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3, alibi=True
        ),
    ],
    ids=["bloom", "falcon"],
)
def test_architecture_that_attends_by_itself(config):
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    with pytest.warns(UserWarning, match="exact, but slower"):
        check(target, weaken(target), NEW | OPTIONS["several"])


@pytest.mark.parametrize("kind", [RobertaConfig, CamembertConfig])
def test_architecture_that_counts_positions_otherwise_by_itself(kind):
    config = kind(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=130,
        is_decoder=True,
        eos_token_id=None,
        pad_token_id=1,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    check(target, weaken(target), NEW | OPTIONS["several"])


def test_processors_are_not_rounded_to_the_models_half_precision(tiny):
    """A bias below the distance of two bfloat16 numbers decides between tokens that the model gives equal logits."""
    target, draft = (copy.deepcopy(m).bfloat16() for m in tiny("llama"))
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight[30:60] = model.lm_head.weight[:30]  # each of these tokens has an equal
    bias = [[[t], 1e-3] for t in range(30, 60)]
    outputs = both(target, draft, NEW | {"eos_token_id": None, "sequence_bias": bias}, controller="static-3")
    for output in outputs:
        assert (output[:, batch()["input_ids"].shape[1] :] >= 30).all()


def test_forced_bos_follows_a_prompt_of_one_token(tiny):
    inputs = {"input_ids": torch.tensor([[7], [20]])}
    check(*tiny("llama"), NEW | {"forced_bos_token_id": 33}, inputs)


def test_draft_by_prompt_lookup(tiny):
    target, _ = tiny("llama")
    check(target, "ngram", NEW | OPTIONS["several"])


@pytest.mark.parametrize("controller", ["off", "static-3"])
def test_controllers(tiny, controller):
    want, got = both(*tiny("llama"), NEW, controller=controller)
    assert torch.equal(want, got)


@pytest.mark.parametrize(
    "number",
    [
        {"max_new_tokens": np.int64(5)},
        {"max_new_tokens": 5.0},
        {"max_new_tokens": torch.tensor(5)},
        {"max_new_tokens": None, "max_length": np.int32(12)},
        {"eos_token_id": -1},
        {"eos_token_id": 9.0},
    ],
    ids=str,
)
def test_numbers_that_transformers_takes(tiny, number):
    want, got = both(*tiny("llama"), NEW | number)
    assert torch.equal(want, got)


def test_a_length_criterion_that_the_prompt_has_passed_gives_one_token(tiny):
    want, got = both(*tiny("llama"), NEW | {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(2)])})
    assert torch.equal(want, got)


def test_a_processor_may_drop_columns(tiny):
    want, got = both(*tiny("llama"), NEW | {"logits_processor": LogitsProcessorList([lambda ids, x: x[:, :40]])})
    assert torch.equal(want, got)


def test_prompts_of_32_bits(tiny):
    want, got = both(*tiny("llama"), NEW, {"input_ids": torch.tensor([[5, 6, 7]], dtype=torch.int32)})
    assert want.dtype == got.dtype and torch.equal(want, got)


def test_config_object_and_positional_prompt(tiny):
    target, draft = tiny("llama")
    config = GenerationConfig(repetition_penalty=1.4, **NEW)
    ids = batch()["input_ids"]  # the mask follows from the padding id
    want = target.generate(ids, config)
    with patch(target, draft):
        assert torch.equal(target.generate(ids, config), want)


def test_options_of_the_models_own_config(tiny):
    target, draft = tiny("llama")
    before = target.generation_config
    try:
        target.generation_config = GenerationConfig(no_repeat_ngram_size=2, **NEW)
        want, got = both(target, draft, {})
    finally:
        target.generation_config = before
    assert torch.equal(want, got)


def test_dictionary_without_scores(tiny):
    want, got = both(*tiny("llama"), NEW | {"return_dict_in_generate": True})
    assert torch.equal(want.sequences, got.sequences)
    assert got.scores is None and got.logits is None


def test_decoder_as_custom_generate(tiny):
    target, draft = tiny("llama")
    want = target.generate(**batch(), **NEW)
    decoder = Decoder(draft, controller="static-2")
    got = [target.generate(**batch(), **NEW, custom_generate=decoder) for _ in range(2)]
    assert torch.equal(got[0], want) and torch.equal(got[1], want)


def test_more_rows_than_the_engine_runs_at_a_time(tiny):
    want, got = both(*tiny("llama"), NEW, max_sequences=2)
    assert torch.equal(want, got)


def check(target, draft, options, inputs=None):
    asked = options | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    inputs = batch() if inputs is None else inputs
    want, got = both(target, draft, asked, inputs)
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)
    width = inputs["input_ids"].shape[1]
    eos = options["eos_token_id"] if options["eos_token_id"] is not None else []
    assert same_scores(want.scores, got.scores, want.sequences, width, eos)
    assert same_scores(want.logits, got.logits, want.sequences, width, eos)
