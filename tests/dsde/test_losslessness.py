"""Sampled output has the target's distribution, whatever the draft says.

The draft is adversarial: it likes exactly what the target dislikes. The target's exact distribution of the second
token, and of the second and third together, comes from running it over all prefixes. The first token comes from the
prompt's own step, the later ones from drafts. Each bound is the chi-square quantile at a false-alarm probability of
1e-4 a comparison; seeds are fixed, so the outcome is the same on every run of one machine.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from scipy.stats import chi2

from dsde import Dsde, Engine, SamplingParams, Static
from tests.dsde.models import build

VOCAB = 8
SAMPLES = 12_000
FALSE_ALARM = 1e-4


@pytest.fixture(scope="module")
def pair():
    target = build("llama", vocab_size=VOCAB, num_hidden_layers=1, hidden_size=16, tie_word_embeddings=False)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight.mul_(-2)
    return target, draft


def exact(target, prompt, temperature):
    """P(x1, x2, x3) by the target itself, [V, V, V]."""
    prefixes = torch.tensor([[*prompt, a, b] for a, b in itertools.product(range(VOCAB), repeat=2)])
    with torch.inference_mode():
        p = (target(prefixes).logits.double() / temperature).softmax(-1)
    n = len(prompt)
    first = p[0, n - 1]
    second = p[::VOCAB, n]
    third = p[:, n + 1].view(VOCAB, VOCAB, VOCAB)
    return first[:, None, None] * second[:, :, None] * third


def sample(pair, controller, params):
    engine = Engine(*pair, controller, max_sequences=500, kv_blocks=1500, block_size=8)
    prompt = [1, 2, 3]
    done = engine.generate([prompt] * SAMPLES, params)
    return prompt, torch.tensor([c.token_ids for c in done]), engine.stats()


def p_value(counts, probabilities):
    """Pearson's chi-square; cells expected below 5 are pooled."""
    expected = probabilities.flatten() * counts.sum()
    counts = counts.flatten()
    small = expected < 5
    if small.any():
        counts = torch.cat((counts[~small], counts[small].sum()[None]))
        expected = torch.cat((expected[~small], expected[small].sum()[None]))
    keep = expected > 0
    assert (counts[~keep] == 0).all()
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum().item()
    return chi2.sf(statistic, int(keep.sum()) - 1)


def compare(tokens, joint):
    """p-values of the second token and of the pair (second, third)."""
    second = torch.bincount(tokens[:, 1], minlength=VOCAB).double()
    both = torch.bincount(tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**2).double()
    return p_value(second, joint.sum((0, 2))), p_value(both, joint.sum(0))


@pytest.mark.parametrize("controller", ["off", "static-3", "dsde"])
def test_sampled_output_has_the_targets_distribution(pair, controller):
    prompt, tokens, stats = sample(pair, controller, SamplingParams(max_new_tokens=4, temperature=0.5))
    if controller != "off":
        assert 0.02 < stats["accepted"] / stats["drafted"] < 0.6  # both branches are taken
    for p in compare(tokens, exact(pair[0], prompt, 0.5)):
        assert p > FALSE_ALARM


def test_truncated_output_has_the_truncated_distribution(pair):
    params = SamplingParams(max_new_tokens=4, temperature=1.0, top_k=5, top_p=0.9)
    prompt, tokens, _ = sample(pair, "static-3", params)
    joint = exact(pair[0], prompt, 1.0)
    first = joint.sum((1, 2))
    second = joint.sum(2) / first[:, None]
    third = joint / joint.sum(2, keepdim=True)

    def cut(p):
        order = p.argsort(-1, descending=True)
        ranked = p.gather(-1, order)
        ranked[..., 5:] = 0
        ranked /= ranked.sum(-1, keepdim=True)
        ranked[ranked.cumsum(-1) - ranked >= 0.9] = 0
        ranked /= ranked.sum(-1, keepdim=True)
        return torch.zeros_like(p).scatter(-1, order, ranked)

    joint = cut(first)[:, None, None] * cut(second)[:, :, None] * cut(third)
    for p in compare(tokens, joint):
        assert p > FALSE_ALARM


class _Biased(Static):
    """Keeps the first draft unseen in 3 % of the verifications."""

    def verify(self, requests, **inputs):
        result = super().verify(requests, **inputs)
        for i, request in enumerate(requests):
            start = int(inputs["cu_draft"][i])
            if request.id % 100 < 3 and int(inputs["cu_draft"][i + 1]) > start:
                result.tokens[i, 0] = inputs["draft_tokens"][start]
        return result


def test_a_bias_of_three_percent_is_caught(pair):
    prompt, tokens, _ = sample(pair, _Biased(3), SamplingParams(max_new_tokens=4, temperature=0.5))
    single, both = compare(tokens, exact(pair[0], prompt, 0.5))
    assert single < FALSE_ALARM and both < FALSE_ALARM


def test_seeded_runs_repeat_and_seeds_differ(pair):
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5)
    runs = [Engine(*pair, Dsde()).generate([[1, 2, 3]], params)[0].token_ids for _ in range(2)]
    assert runs[0] == runs[1]
    other = Engine(*pair, Dsde()).generate([[1, 2, 3]], SamplingParams(max_new_tokens=20, temperature=1.0, seed=6))
    assert other[0].token_ids != runs[0]
    unseeded = SamplingParams(max_new_tokens=20, temperature=1.0)
    a, b = Engine(*pair, Dsde(), seed=1).generate([[1, 2, 3]] * 2, unseeded)
    assert a.token_ids != b.token_ids
