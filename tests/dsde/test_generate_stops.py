"""Where generation ends, to the token, and what streamers see."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import (
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)

from dsde import Decoder, patch
from tests.dsde.generate_support import batch, tokenizer

NEW = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
PROMPT = torch.tensor([[9, 30, 12, 44]])


@pytest.fixture(scope="module")
def twin(tiny):
    """A target and a draft that always agrees: every block is accepted in full."""
    target, _ = tiny("llama")
    return target, copy.deepcopy(target)


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.got.append(value)

    def end(self):
        self.ends += 1


class AfterTokens(StoppingCriteria):
    """Ends each row when its text holds `count` tokens above 8."""

    def __init__(self, count):
        self.count = count

    def __call__(self, input_ids, scores):
        return (input_ids > 8).sum(1) >= self.count


@pytest.mark.parametrize("end", range(1, 8))
def test_a_stop_string_in_the_middle_of_a_block(twin, end):
    target, draft = twin
    tok = tokenizer()
    text = target.generate(PROMPT, **NEW)[0]
    letters = tok.decode(text[4 + end - 1 : 4 + end + 1])
    with patch(target, draft, controller="static-8", tokenizer=tok):
        got = target.generate(PROMPT, **NEW, stop_strings=[letters])[0]
    whole = tok.decode(got)
    assert whole.endswith(letters)
    assert letters not in whole[:-1]
    assert torch.equal(got, text[: len(got)])


@pytest.mark.parametrize("count", [5, 8, 11])
def test_a_custom_criterion_in_the_middle_of_a_block(twin, count):
    target, draft = twin
    options = NEW | {"stopping_criteria": StoppingCriteriaList([AfterTokens(count)])}
    want = target.generate(PROMPT, **options)
    with patch(target, draft, controller="static-8"):
        got = target.generate(PROMPT, **options)
    assert torch.equal(got, want)
    assert int((got > 8).sum()) == count


def test_rows_end_each_at_its_own_token(twin):
    target, draft = twin
    options = NEW | {"stopping_criteria": StoppingCriteriaList([AfterTokens(9)]), "eos_token_id": 60}
    want = target.generate(**batch(), **options)
    with patch(target, draft, controller="static-5"):
        assert torch.equal(target.generate(**batch(), **options), want)
    assert (want[:, -1] == 0).any() and (want[:, -1] != 0).any()


def test_eos_in_the_middle_of_a_block(twin):
    target, draft = twin
    text = target.generate(PROMPT, **NEW)[0, 4:].tolist()
    for position, token in enumerate(text[:7]):
        with patch(target, draft, controller="static-8"):
            got = target.generate(PROMPT, **NEW | {"eos_token_id": [token]})[0, 4:].tolist()
        assert got == text[: text.index(token) + 1]
        assert len(got) <= position + 1


@pytest.mark.parametrize("length", [1, 2, 5])
def test_max_new_tokens_is_never_overshot(twin, length):
    target, draft = twin
    with patch(target, draft, controller="static-8"):
        assert target.generate(PROMPT, **NEW | {"max_new_tokens": length}).shape[1] == 4 + length


def test_max_time_ends_after_the_first_token_when_it_is_over(twin):
    target, draft = twin
    options = NEW | {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.0, initial_timestamp=1.0)])}
    with patch(target, draft):
        assert target.generate(PROMPT, **options).shape[1] == 5


def test_stop_strings_by_call_config_and_decoder(twin):
    target, draft = twin
    tok = tokenizer()
    letters = tok.decode(target.generate(PROMPT, **NEW)[0, 7:9])
    want = target.generate(PROMPT, **NEW, stop_strings=letters, tokenizer=tok)
    with patch(target, draft):
        assert torch.equal(target.generate(PROMPT, **NEW, stop_strings=letters, tokenizer=tok), want)
        config = copy.deepcopy(target.generation_config)
        config.update(**NEW, stop_strings=letters)
        assert torch.equal(target.generate(PROMPT, generation_config=config, tokenizer=tok), want)
        assert config.stop_strings == letters
        criteria = StoppingCriteriaList([StopStringCriteria(tok, letters)])
        assert torch.equal(target.generate(PROMPT, **NEW, stopping_criteria=criteria), want)
    decoder = Decoder(draft, stop_strings=letters, tokenizer=tok)
    assert torch.equal(target.generate(PROMPT, **NEW, custom_generate=decoder), want)


@pytest.mark.parametrize("through", ["patch", "decoder"])
def test_a_streamer_sees_what_plain_decoding_shows(twin, through):
    target, draft = twin
    plain, ours = Recorder(), Recorder()
    target.generate(PROMPT, **NEW, streamer=plain)
    if through == "patch":
        with patch(target, draft):
            target.generate(PROMPT, **NEW, streamer=ours)
    else:
        target.generate(PROMPT, **NEW, custom_generate=Decoder(draft, streamer=ours))
    assert [v.tolist() for v in ours.got] == [v.tolist() for v in plain.got]
    assert [v.dim() for v in ours.got] == [2] + [1] * 12
    assert ours.ends == 1


def test_a_batch_is_streamed_by_columns(twin):
    target, draft = twin
    plain, ours = Recorder(), Recorder()
    options = NEW | {"eos_token_id": [3, 9, 24]}
    target.generate(**batch(), **options, streamer=plain)
    with patch(target, draft):
        target.generate(**batch(), **options, streamer=ours)
    assert [v.tolist() for v in ours.got] == [v.tolist() for v in plain.got]
    assert ours.ends == 1


def test_text_streamers(twin, capsys):
    target, draft = twin
    tok = tokenizer()
    target.generate(PROMPT, **NEW, streamer=TextStreamer(tok))
    plain = capsys.readouterr().out
    with patch(target, draft):
        target.generate(PROMPT, **NEW, streamer=TextStreamer(tok))
        assert capsys.readouterr().out == plain
        stream = TextIteratorStreamer(tok, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=target.generate, args=(PROMPT,), kwargs=NEW | {"streamer": stream})
        thread.start()
        assert "".join(stream) == tok.decode(target.generate(PROMPT, **NEW)[0, 4:])
        thread.join()


def test_a_streamer_that_raises_ends_the_call(twin):
    target, draft = twin

    class Full(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.got) == 4:
                raise InterruptedError

    with patch(target, draft) as patched:
        with pytest.raises(InterruptedError):
            target.generate(PROMPT, **NEW, streamer=Full())
        assert not patched.decoder.prepare(target).has_work
