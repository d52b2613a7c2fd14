"""The embedded pair: what is shipped, that its prompts are held out, and that the draft is worth having."""

import json

import pytest
import torch

from dsde.demo import corpus, measure, pair


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    return pair.load_pair()


def test_weights_are_small():
    size = sum(path.stat().st_size for path in pair.WEIGHTS.rglob("*") if path.is_file())
    assert size <= 10e6


def test_draft_costs_at_most_a_tenth(loaded):
    target, draft, _ = loaded
    assert draft.num_parameters() <= 0.1 * target.num_parameters()


def test_weights_are_stored_in_bfloat16_and_load_in_float32(loaded):
    for model, name in zip(loaded[:2], ("target", "draft"), strict=True):
        assert json.loads((pair.WEIGHTS / name / "config.json").read_text())["dtype"] == "bfloat16"
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


def test_both_folders_hold_the_same_tokenizer(loaded):
    target, draft, tokenizer = loaded
    assert (pair.WEIGHTS / "target/tokenizer.json").read_bytes() == (pair.WEIGHTS / "draft/tokenizer.json").read_bytes()
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer) == 4096
    assert target.config.eos_token_id == draft.config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text", ["", "def f(x):\n    return  x\n\n\n\t'é — 漢字 \U0001f600'  \r\n", "\x00\x7f <|not special|>"]
)
def test_tokenizer_is_lossless(loaded, text):
    tokenizer = loaded[2]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_held_out_files_are_not_trained_on():
    held_out, trained = set(corpus.HELD_OUT), set(corpus.training_files())
    assert held_out.isdisjoint(trained)
    assert len(corpus.held_out_files()) >= 20
    assert {prompt.source for prompt in pair.held_out_prompts()} <= held_out


def test_prompts_are_mixed_and_of_the_promised_length(loaded):
    tokenizer = loaded[2]
    texts = pair.prompts(48)
    assert len(set(texts)) == 48
    assert all(pair.SHORTEST <= len(tokenizer(text)["input_ids"]) <= pair.LONGEST for text in texts)
    assert {prompt.nature for prompt in pair.held_out_prompts()[:6]} == set(pair.NATURES)
    assert pair.prompts(6) == texts[:6]


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="held-out prompts"):
        pair.prompts(10**6)


def test_a_missing_held_out_file_is_skipped(monkeypatch):
    monkeypatch.setattr(corpus, "HELD_OUT", (*corpus.HELD_OUT, "no_such_module.py"))
    assert "no_such_module.py" not in corpus.held_out_files()


def test_tokens_per_step_on_a_known_pattern():
    agree = torch.tensor([True, True, True, False, True, True, True, True, True, True, False])
    # Drafts of 2: [1 1]+1, then [] + own token at the False, [1 1]+1, [1 1]+1, [] + own token: 11 tokens in 5 steps.
    assert measure.emitted_per_step(agree, 2) == 11 / 5


def test_loops_are_found():
    assert measure.loops(torch.arange(5).repeat(20))
    assert not measure.loops(torch.arange(100))


def test_draft_is_worth_having(loaded):
    """The floors are well under what the card records, since other Python versions have other prompts."""
    target, draft, tokenizer = loaded
    found = measure.acceptance(target, draft, tokenizer, pair.held_out_prompts()[:6], tokens=32)
    assert found["greedy_agreement"] >= 0.5
    assert found["sum_min_p_q_temperature_1"] >= 0.4
    assert found["greedy_continuations_that_loop"] < 1.0
