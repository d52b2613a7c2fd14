"""Sampled output has the target's distribution, whatever the draft says.

The draft is adversarial: it likes exactly what the target dislikes. The exact distributions of the second and third
token, and of each with the one behind it, come from running the target over all prefixes. The first token comes from
the prompt's own step, the later ones from drafts. The bound on each p-value is its false-alarm probability, 1e-4; seeds
are fixed, so the outcome is the same on every run of one machine.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from scipy.stats import chi2

from dsde import Dsde, Engine, SamplingParams, Static
from dsde.proposer import Drafts
from dsde_kernels import DsdeRule
from tests.dsde.models import build

VOCAB = 8
SAMPLES = 8_000
MANY = 20_000  # enough for a bias of 3 %, in the test that is shown to catch one
FALSE_ALARM = 1e-4
END = 3


@pytest.fixture(scope="module")
def pair():
    target = build("llama", vocab_size=VOCAB, num_hidden_layers=1, hidden_size=16, tie_word_embeddings=False)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight.mul_(-2)
    return target, draft


def exact(target, prompt, temperature):
    """P(x1, x2, x3, x4) by the target itself, [V, V, V, V]."""
    prefixes = torch.tensor([[*prompt, *p] for p in itertools.product(range(VOCAB), repeat=3)])
    with torch.inference_mode():
        p = (target(prefixes).logits.double() / temperature).softmax(-1)
    n = len(prompt)
    return torch.stack(
        [
            p[:, n - 1 + i]
            .view(VOCAB, VOCAB, VOCAB, VOCAB)[(slice(None),) * i + (0,) * (3 - i)]
            .reshape(*([VOCAB] * (i + 1)), *([1] * (3 - i)))
            .expand(*([VOCAB] * 4))
            for i in range(4)
        ]
    )


def sample(pair, controller, params, count=SAMPLES):
    engine = Engine(*pair, controller, max_sequences=500, kv_blocks=1500, block_size=8)
    prompt = [1, 2, 3]
    done = engine.generate([prompt] * count, params)
    lengths = {c.trace[2].sl for c in done if len(c.trace) > 2}
    return prompt, torch.tensor([c.token_ids for c in done]), engine.stats(), lengths


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
    """p-values of the second and the third token, and of each with the one behind it."""
    values = []
    for at in (1, 2):
        single = torch.bincount(tokens[:, at], minlength=VOCAB).double()
        both = torch.bincount(tokens[:, at] * VOCAB + tokens[:, at + 1], minlength=VOCAB**2).double()
        others = [i for i in range(4) if i != at]
        values.append(p_value(single, joint.sum(others)))
        values.append(p_value(both, joint.sum([i for i in others if i != at + 1])))
    return values


class _Nosy(Static):
    """Drafts long where the last step's drafts, rejected ones included, diverged much: a controller bent on harm."""

    def observe(self, requests, result):
        first = 0
        for request, step in zip(requests, self.counts, strict=True):
            signal = result.kld[first : first + step].sum().item()
            first += step
            request.sl = 1 + (signal > 2.0) * 2

    def verify(self, requests, **inputs):
        self.counts = inputs["cu_draft"].diff().tolist()
        return super().verify(requests, **inputs)


# Out of calibration after the first drafts, so that the KLD of discarded drafts decides the lengths that follow.
_SHORT = DsdeRule(sl_min=1, sl_start=1, sl_limit=3, calibration_tokens=1, alpha=0.1, cap="ceil")
CONTROLLERS = {
    "off": lambda: "off",
    "static": lambda: "static-3",
    "dsde": lambda: Dsde(_SHORT),
    "nosy": lambda: _Nosy(3),
}


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_sampled_output_has_the_targets_distribution(pair, controller):
    params = SamplingParams(max_new_tokens=6, temperature=0.5)
    count = MANY if controller == "static" else SAMPLES
    prompt, tokens, stats, lengths = sample(pair, CONTROLLERS[controller](), params, count)
    if controller in ("dsde", "nosy"):
        assert len(lengths) > 1  # the lengths depend on the drafts
    if controller != "off":
        assert 0.02 < stats["accepted"] / stats["drafted"] < 0.6  # both branches are taken
    for p in compare(tokens, exact(pair[0], prompt, 0.5).prod(0)):
        assert p > FALSE_ALARM


def test_truncated_output_has_the_truncated_distribution(pair):
    params = SamplingParams(max_new_tokens=6, temperature=1.0, top_k=5, top_p=0.9)
    prompt, tokens, _, _ = sample(pair, "static-3", params)
    conditionals = exact(pair[0], prompt, 1.0)

    def cut(p):
        order = p.argsort(-1, descending=True)
        ranked = p.gather(-1, order)
        ranked[..., 5:] = 0
        ranked /= ranked.sum(-1, keepdim=True)
        ranked[ranked.cumsum(-1) - ranked >= 0.9] = 0
        ranked /= ranked.sum(-1, keepdim=True)
        return torch.zeros_like(p).scatter(-1, order, ranked)

    # Each conditional is a distribution over its own dimension.
    joint = torch.stack([cut(p.movedim(i, -1)).movedim(-1, i) for i, p in enumerate(conditionals)]).prod(0)
    for p in compare(tokens, joint):
        assert p > FALSE_ALARM


class _Biased(Static):
    """Keeps the first draft unseen in 3 % of the requests."""

    def verify(self, requests, **inputs):
        result = super().verify(requests, **inputs)
        for i, request in enumerate(requests):
            start = int(inputs["cu_draft"][i])
            if request.id % 100 < 3 and int(inputs["cu_draft"][i + 1]) > start:
                result.tokens[i, 0] = inputs["draft_tokens"][start]
        return result


def test_a_bias_of_three_percent_is_caught(pair):
    prompt, tokens, _, _ = sample(pair, _Biased(3), SamplingParams(max_new_tokens=6, temperature=0.5), MANY)
    values = compare(tokens, exact(pair[0], prompt, 0.5).prod(0))
    assert values[0] < FALSE_ALARM and values[1] < FALSE_ALARM


class _NoEnd:
    """Takes the drafted end-of-sequence id back, which makes drafting depend on what was drawn."""

    def __init__(self, proposer):
        self.proposer = proposer
        self.cached_after = proposer.cached_after

    def propose(self, *step):
        drafts = self.proposer.propose(*step)
        keep = [token != END for tokens in drafts.tokens for token in tokens]
        tokens = [[t for t in own if t != END] for own in drafts.tokens]
        return Drafts(tokens, None if drafts.logits is None else drafts.logits[keep])


@pytest.mark.parametrize("biased", [False, True])
def test_drafts_that_end_with_an_end_of_sequence_id(pair, biased):
    """Whoever drafts the end leaves the draft batch; a proposer that takes the end back then is caught.

    The first three tokens jointly, the second and the third; tokens behind the end count as the end. The false-alarm
    probability of each p-value's bound is 1e-4, 3e-4 in all.
    """
    engine = Engine(*pair, "static-3", max_sequences=500, kv_blocks=1500, block_size=8)
    if biased:
        engine.proposer = _NoEnd(engine.proposer)
    prompt = [1, 2, 3]
    done = engine.generate([prompt] * 6_000, SamplingParams(max_new_tokens=5, temperature=0.5, eos=[END]))
    first, second, third = torch.tensor([(c.token_ids + [END] * 3)[:3] for c in done]).unbind(1)
    joint = exact(pair[0], prompt, 0.5).prod(0).sum(3)
    for ended in (joint[END], *joint[:, END]):  # all that could have followed is the end
        total = ended.sum()
        ended.zero_()
        ended[(END,) * ended.ndim] = total
    values = [
        p_value(torch.bincount(first * VOCAB**2 + second * VOCAB + third, minlength=VOCAB**3).double(), joint),
        p_value(torch.bincount(second, minlength=VOCAB).double(), joint.sum((0, 2))),
        p_value(torch.bincount(third, minlength=VOCAB).double(), joint.sum((0, 1))),
    ]
    if biased:
        assert max(values) < FALSE_ALARM
    else:
        assert len({step.sl for c in done for step in c.trace[1:2]}) > 1  # some ended before the third draft
        assert min(values) > FALSE_ALARM


def test_seeded_runs_repeat_and_seeds_differ(pair):
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5)
    runs = [Engine(*pair, Dsde()).generate([[1, 2, 3]], params)[0].token_ids for _ in range(2)]
    assert runs[0] == runs[1]
    other = Engine(*pair, Dsde()).generate([[1, 2, 3]], SamplingParams(max_new_tokens=20, temperature=1.0, seed=6))
    assert other[0].token_ids != runs[0]
    unseeded = SamplingParams(max_new_tokens=20, temperature=1.0)
    a, b = Engine(*pair, Dsde(), seed=1).generate([[1, 2, 3]] * 2, unseeded)
    assert a.token_ids != b.token_ids
