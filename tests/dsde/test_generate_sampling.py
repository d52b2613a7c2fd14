"""Sampled output of the patched `generate` has the distribution that transformers' own options define.

The exact distribution of the first two tokens comes from the scores that transformers itself returns for every prefix.
Pearson's chi-square over the pairs; each bound has a false-alarm probability of 1e-4, and seeds are fixed.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

from dsde import patch
from tests.dsde.models import build
from tests.dsde.test_generate import EveryThird
from tests.dsde.test_losslessness import FALSE_ALARM, p_value

VOCAB = 8
PROMPT = torch.tensor([[1, 2, 3]])
SAMPLE = {"do_sample": True, "pad_token_id": 0, "eos_token_id": None}
KERNELS = {
    "defaults": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all in the kernels": {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "renormalize_logits": {"top_p": 0.7, "renormalize_logits": True},
}
PROCESSORS = {
    "typical_p": {"typical_p": 0.8},
    "epsilon_cutoff": {"epsilon_cutoff": 0.1},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "top_h": {"top_h": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.5, "temperature": 0.8, "top_k": 0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "logits_processor": {"logits_processor": LogitsProcessorList([EveryThird(), TopKLogitsWarper(5)])},
    "suppress and bias": {"suppress_tokens": [2], "sequence_bias": [[[4], 1.5]]},
}


@pytest.fixture(scope="module")
def pair():
    """A draft that likes what the target dislikes."""
    target = build("llama", vocab_size=VOCAB, num_hidden_layers=1, hidden_size=16, tie_word_embeddings=False)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight.mul_(-2)
    return target, draft


def exact(target, options, firsts=tuple(range(VOCAB))):
    """P(x1, x2) [len(firsts), V] by transformers' own processors."""

    def following(prefixes):
        asked = SAMPLE | options | {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
        return (
            target.generate(prefixes, attention_mask=torch.ones_like(prefixes), **asked).scores[0].double().softmax(-1)
        )

    firsts = torch.tensor(firsts)
    second = following(torch.cat((PROMPT.expand(len(firsts), -1), firsts[:, None]), 1))
    return following(PROMPT)[0, firsts, None] * second


def sampled(pair, options, count, **engine):
    """Pairs of tokens [count, 2], `count` times the two behind the prompt."""
    with patch(*pair, max_sequences=250, kv_blocks=1000, block_size=8, **engine):
        asked = SAMPLE | options | {"max_new_tokens": 2, "num_return_sequences": count}
        return pair[0].generate(PROMPT, **asked)[:, 3:]


def count_pairs(new):
    return torch.bincount(new[:, 0] * VOCAB + new[:, 1], minlength=VOCAB**2).double()


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_option(pair, name):
    counts = count_pairs(sampled(pair, KERNELS[name], 3000, controller="static-1"))
    assert p_value(counts, exact(pair[0], KERNELS[name])) > FALSE_ALARM


@pytest.mark.parametrize("name", PROCESSORS)
def test_processor_option(pair, name):
    counts = count_pairs(sampled(pair, PROCESSORS[name], 800, controller="static-1"))
    assert p_value(counts, exact(pair[0], PROCESSORS[name])) > FALSE_ALARM


def agreement(embedded, options, expected):
    """p-value of samples of the embedded pair against the options `expected`.

    The likeliest first tokens, each with its successor; whatever follows another first token is one cell.
    """
    target = embedded[0]
    likely = target(PROMPT).logits[0, -1].topk(24).indices
    p = exact(target, expected, likely.tolist())
    new = sampled(embedded, options, 800, controller="static-1")
    of, where = (new[:, :1] == likely).max(1)
    counts = torch.bincount((where * p.shape[1] + new[:, 1])[of], minlength=p.numel()).double()
    rest = (~of).sum()[None], (1 - p.sum()).clamp(min=0)[None]
    return p_value(torch.cat((counts, rest[0])), torch.cat((p.flatten(), rest[1])))


@pytest.mark.parametrize("name", KERNELS | PROCESSORS)
def test_option_on_the_embedded_pair(embedded, name):
    options = (KERNELS | PROCESSORS)[name]
    assert agreement(embedded, options, options) > FALSE_ALARM


def test_another_distribution_is_told_apart_on_the_embedded_pair(embedded):
    assert agreement(embedded, {"temperature": 0.8}, {"temperature": 0.6}) < FALSE_ALARM


def test_top_p_of_zero_is_greedy(pair):
    counts = count_pairs(sampled(pair, {"top_p": 0.0}, 20))
    assert counts[exact(pair[0], {"top_p": 0.0}).argmax()] == 20


def test_prompt_lookup(pair):
    target, _ = pair
    counts = count_pairs(sampled((target, "ngram"), {"temperature": 1.3}, 3000))
    assert p_value(counts, exact(target, {"temperature": 1.3})) > FALSE_ALARM


def test_another_distribution_is_told_apart(pair):
    counts = count_pairs(sampled(pair, {"temperature": 0.6}, 3000))
    assert p_value(counts, exact(pair[0], {"temperature": 0.8})) < FALSE_ALARM


def test_torch_seed_repeats_a_call_and_rows_differ(pair):
    target, draft = pair
    asked = SAMPLE | {"max_new_tokens": 12, "num_return_sequences": 3}
    with patch(target, draft):
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(target.generate(PROMPT, **asked))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert len({tuple(row) for row in runs[0].tolist()}) == 3


def test_rows_of_a_prompt_stay_together(pair):
    target, draft = pair
    prompts = torch.tensor([[0, 0, 5], [1, 2, 3]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    with patch(target, draft):
        out = target.generate(prompts, attention_mask=mask, num_return_sequences=2, max_new_tokens=2, **SAMPLE)
    assert out[:, :3].tolist() == [[0, 0, 5], [0, 0, 5], [1, 2, 3], [1, 2, 3]]
