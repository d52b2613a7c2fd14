"""Faults of transformers' assisted generation that users reported, by issue number: trigger and right behaviour."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import StoppingCriteria, StoppingCriteriaList

from dsde import patch
from tests.dsde.generate_support import LETTERS, batch, both, tokenizer
from tests.dsde.models import build, weaken
from tests.dsde.test_generate_sampling import PROMPT, SAMPLE, exact
from tests.dsde.test_losslessness import FALSE_ALARM, p_value

NEW = {"max_new_tokens": 16, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def pair(tiny):
    return tiny("llama")


@pytest.fixture(scope="module")
def contrary():
    """A small vocabulary and a draft that likes what the target dislikes."""
    target = build("llama", vocab_size=8, num_hidden_layers=1, hidden_size=16, tie_word_embeddings=False)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        draft.lm_head.weight.mul_(-2)
    return target, draft


def pairs_of_tokens(pair, options, count=3000):
    """How often each pair of first tokens is sampled."""
    target, draft = pair
    asked = SAMPLE | options | {"max_new_tokens": 2, "num_return_sequences": count}
    with patch(target, draft, controller="static-1", max_sequences=250, kv_blocks=1000, block_size=8):
        new = target.generate(PROMPT, **asked)[:, 3:]
    return torch.bincount(new[:, 0] * 8 + new[:, 1], minlength=64).double()


def padded_vocabulary(model, size):
    """The same model with rows for ids that mean nothing."""
    wide = copy.deepcopy(model)
    wide.resize_token_embeddings(size)
    with torch.no_grad():
        wide.lm_head.weight[model.config.vocab_size :] = 0
    return wide


def test_32165_batches(pair):
    """Assisted generation is refused for more than one prompt."""
    target, draft = pair
    want = target.generate(**batch(), **NEW)
    with patch(target):
        assert torch.equal(target.generate(**batch(), **NEW, assistant_model=draft), want)


def test_several_sequences_of_a_prompt(contrary):
    """Assisted generation is refused for num_return_sequences > 1."""
    target, draft = contrary
    with patch(target):
        out = target.generate(PROMPT, **SAMPLE, max_new_tokens=4, num_return_sequences=3, assistant_model=draft)
    assert out.shape == (3, 7)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_40739_num_assistant_tokens_of_the_call(pair, k):
    """num_assistant_tokens given to generate was ignored in favour of the assistant's own config."""
    target, _ = pair
    with patch(target, copy.deepcopy(target)) as patched:
        target.generate(PROMPT, **NEW, num_assistant_tokens=k)
        stats = patched.decoder.prepare(target).stats()
    # A perfect draft: the prompt's own step gives one token, every other step k drafts and one more.
    assert stats["steps"] == 1 + -(-15 // (k + 1))
    assert stats["drafted"] == stats["accepted"] >= k


def test_48039_stop_strings_and_criteria_within_a_block(pair):
    """Stop strings and criteria were looked at only after a whole block of drafts was committed."""
    target, _ = pair
    tok = tokenizer()

    class Contains(StoppingCriteria):
        def __init__(self, token):
            self.token = token

        def __call__(self, input_ids, scores):
            return (input_ids[:, 4:] == self.token).any(1)

    prompt = torch.tensor([[9, 30, 12, 44]])
    text = target.generate(prompt, **NEW)[0, 4:].tolist()
    with patch(target, copy.deepcopy(target), controller="static-20", tokenizer=tok):
        for token in text:
            first = text.index(token)
            criteria = StoppingCriteriaList([Contains(token)])
            got = target.generate(prompt, **NEW, stopping_criteria=criteria)[0, 4:].tolist()
            assert got == text[: first + 1]
            if token > 8:
                got = target.generate(prompt, **NEW, stop_strings=[LETTERS[token - 9]])[0, 4:].tolist()
                assert got == text[: first + 1]


def test_47912_eos_in_the_middle_of_an_accepted_block(pair):
    """Tokens after an accepted end-of-sequence id stayed in the output."""
    target, _ = pair
    prompt = torch.tensor([[9, 30, 12, 44]])
    text = target.generate(prompt, **NEW)[0, 4:].tolist()
    for token in text:
        options = NEW | {"eos_token_id": token}
        want, got = both(target, copy.deepcopy(target), options, {"input_ids": prompt}, controller="static-20")
        assert torch.equal(want, got)
        assert got[0, 4:].tolist() == text[: text.index(token) + 1]


def test_max_new_tokens_cuts_a_block(pair):
    """A block that is accepted in full must not overshoot."""
    target, _ = pair
    with patch(target, copy.deepcopy(target), controller="static-20"):
        for n in (1, 2, 5):
            assert target.generate(PROMPT, **NEW | {"max_new_tokens": n}).shape[1] == 3 + n


def test_47932_top_k_cuts_the_draft_too(contrary):
    """The target was cut to top_k (50 by default) and the draft was not: sampled output was biased."""
    options = {"top_k": 3, "temperature": 1.2}
    assert p_value(pairs_of_tokens(contrary, options), exact(contrary[0], options)) > FALSE_ALARM


def test_32867_a_sampling_target_gets_a_sampling_draft(contrary):
    """The assistant picked greedily while its softmax was taken for the distribution that it drew from."""
    assert p_value(pairs_of_tokens(contrary, {}), exact(contrary[0], {})) > FALSE_ALARM


@pytest.mark.parametrize("issue", ["45307", "30728"])
@pytest.mark.parametrize("wider", ["target", "draft"])
def test_45307_30728_padded_vocabularies(pair, issue, wider):
    """One tokenizer, embeddings padded to different widths: refused, or sent through text and back."""
    target, draft = pair
    if wider == "target":
        target = padded_vocabulary(target, 64)
    else:
        draft = padded_vocabulary(draft, 72)
    # 45307: nothing else is given. 30728: both tokenizers are.
    tok = tokenizer()
    options = {} if issue == "45307" else {"tokenizer": tok, "assistant_tokenizer": copy.deepcopy(tok)}
    want = target.generate(**batch(), **NEW, repetition_penalty=1.3)
    with patch(target) as patched:
        got = target.generate(**batch(), **NEW, repetition_penalty=1.3, assistant_model=draft, **options)
        stats = patched.decoder.prepare(target).stats()
    assert torch.equal(want, got)
    assert stats["accepted"] > 0


def test_other_tokenizer_of_the_same_size(pair):
    """Tokenizers were compared by size: two different ones of one size gave garbage drafts in silence."""
    target, draft = pair
    ours, theirs = tokenizer(), tokenizer(LETTERS[::-1])
    assert len(ours) == len(theirs)
    with pytest.raises(ValueError, match="disagree"):
        patch(target, draft, tokenizer=ours, draft_tokenizer=theirs)
    with patch(target), pytest.raises(ValueError, match="disagree"):
        target.generate(**batch(), **NEW, assistant_model=draft, tokenizer=ours, assistant_tokenizer=theirs)


A, B = tokenizer(), tokenizer(LETTERS[::-1])


@pytest.mark.parametrize(
    ("given", "of_call"),
    [
        ({"tokenizer": A}, {"assistant_tokenizer": B}),
        ({"draft_tokenizer": B}, {"tokenizer": A}),
        ({}, {"tokenizer": A, "assistant_tokenizer": B}),
        ({"tokenizer": A, "draft_tokenizer": B}, {}),
    ],
    ids=["draft's by call", "target's by call", "both by call", "both by patch"],
)
def test_tokenizers_by_patch_and_call(pair, given, of_call):
    target, draft = pair
    with patch(target, **given), pytest.raises(ValueError, match="disagree"):
        target.generate(**batch(), **NEW, assistant_model=draft, **of_call)


def test_tokenizers_belong_to_their_draft(pair):
    """A call with another draft needn't have the tokenizer of the patch's own, which is compared again behind it."""
    target, draft = pair
    with patch(target, draft, draft_tokenizer=B):
        target.generate(**batch(), **NEW, assistant_model=weaken(target, seed=3), tokenizer=A)
        with pytest.raises(ValueError, match="disagree"):
            target.generate(**batch(), **NEW, tokenizer=A)


def test_a_tokenizer_that_is_none(pair):
    with patch(*pair), pytest.raises(ValueError, match="assistant_tokenizer"):
        pair[0].generate(**batch(), **NEW, assistant_tokenizer="rubbish")


def test_tokenizers_that_begin_texts_differently(pair):
    """Prompts are ids: whether a tokenizer would put a beginning-of-text before them is no difference."""
    target, draft = pair
    begins = tokenizer()
    begins._tokenizer.post_processor = TemplateProcessing(single="<2> $A", special_tokens=[("<2>", 2)])
    assert begins.encode("ab") != A.encode("ab")
    with patch(target, draft, tokenizer=A, draft_tokenizer=begins):
        pass


def test_tokenizers_are_found_beside_the_models(pair, tmp_path):
    """Nobody passes tokenizers to generate: those that lie beside the checkpoints are compared."""
    loaded = []
    for model, letters in zip(pair, (LETTERS, LETTERS[::-1]), strict=True):
        folder = tmp_path / letters
        model.save_pretrained(folder)
        tokenizer(letters).save_pretrained(folder)
        loaded.append(type(model).from_pretrained(folder).eval())
    with pytest.raises(ValueError, match="disagree"):
        patch(*loaded)


@pytest.mark.parametrize(("issue", "family"), [("46629", "gemma3"), ("47447", "mistral"), ("48280", "mistral")])
def test_46629_47447_48280_sliding_windows(tiny, issue, family):
    """Rolling back a sliding-window cache crashed (46629), or drafts beyond the window corrupted it (47447, 48280)."""
    target, draft = tiny(family)
    assert target.config.sliding_window == 7
    prompt = torch.arange(1, 4)[None] if issue == "47447" else torch.arange(1, 21)[None]
    implementation = "eager" if issue == "48280" else "sdpa"
    before = target.config._attn_implementation
    try:
        for model in (target, draft):
            model.set_attn_implementation(implementation)
        want, got = both(target, draft, NEW | {"max_new_tokens": 40}, {"input_ids": prompt}, controller="static-10")
    finally:
        for model in (target, draft):
            model.set_attn_implementation(before)
    assert torch.equal(want, got)


def test_35099_33257_draft_in_another_format(pair):
    """Target and assistant in different formats (and devices, below) failed."""
    target, draft = pair
    half = copy.deepcopy(draft).to(torch.bfloat16)
    want, got = both(target, half, NEW | {"repetition_penalty": 1.3})
    assert torch.equal(want, got)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
@pytest.mark.parametrize("issue", ["35099", "33257"])
def test_35099_33257_draft_on_another_device(pair, issue):
    """Target and assistant on different devices failed, either way round."""
    target, draft = (copy.deepcopy(m) for m in pair)
    (target if issue == "35099" else draft).cuda()
    inputs = {k: v.to(target.device) for k, v in batch().items()}
    want, got = both(target, draft, NEW | {"repetition_penalty": 1.3, "suppress_tokens": [5]}, inputs)
    assert torch.equal(want, got)


def test_36337_no_generate_within_generate(pair, monkeypatch):
    """Each round ran a whole nested generate of the assistant, preparation included, and lost the gain."""
    target, _ = pair
    draft = weaken(target)
    monkeypatch.setattr(draft, "generate", None)
    calls = []
    forward = draft.forward
    monkeypatch.setattr(draft, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    with patch(target, draft, controller="static-4") as patched:
        calls.clear()
        target.generate(**batch(), **NEW)
        steps = patched.decoder.prepare(target).stats()["steps"]
    assert len(calls) <= 4 * steps + 1  # one pass of the whole batch for each drafted token
