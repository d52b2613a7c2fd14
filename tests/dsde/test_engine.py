"""The decode loop: greedy identity, where requests end, who may disturb whom."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig

from dsde import Dsde, Engine, SamplingParams, Static
from dsde.fallback import SequentialModel
from dsde.proposer import NgramProposer
from dsde_kernels import DsdeRule
from tests.dsde.models import CONFIGS, VOCAB, build, weaken

CONTROLLERS = ["off", "static-1", "static-4", "dsde"]
NEW = 40


def prompts(lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def own_generate(model, prompt, n=NEW, **options):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_equals_transformers_generate(tiny, family, controller):
    target, draft = tiny(family)
    batch = prompts([1, 9, 30, 2, 17])
    engine = Engine(target, draft, controller, block_size=8, max_sequences=4, max_tokens_per_step=24)
    done = engine.generate(batch, SamplingParams(max_new_tokens=NEW))
    for prompt, completion in zip(batch, done, strict=True):
        assert completion.token_ids == own_generate(target, prompt)
        assert completion.finish_reason == "length"
    if controller != "off":  # a test that drafts nothing, or accepts nothing, would show little
        stats = engine.stats()
        assert 0 < stats["accepted"] < stats["drafted"]
    assert engine.stats()["free_blocks"] == engine.stats()["blocks"]


def test_logprobs_are_the_targets(tiny):
    target, draft = tiny("llama")
    (prompt,) = prompts([6])
    (done,) = Engine(target, draft, "dsde").generate([prompt], SamplingParams(max_new_tokens=12))
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, rtol=1e-4, atol=1e-5)


def test_trace_adds_up(tiny):
    target, draft = tiny("llama")
    (done,) = Engine(target, draft, "dsde").generate(prompts([6]), SamplingParams(max_new_tokens=60))
    assert [s.step for s in done.trace] == list(range(len(done.trace)))
    assert done.trace[0].sl == 0 and done.trace[0].kld is None  # the prompt's own step
    assert done.trace[1].sl == 5  # the rule's start
    assert sum(s.accepted + 1 for s in done.trace) >= 60
    assert all(s.kld >= 0 for s in done.trace if s.sl)
    assert done.ttft <= done.latency


@pytest.mark.parametrize("name", ["off", "static-3", "uncapped dsde"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_does_not_depend_on_the_batch(tiny, name, temperature):
    """Bit-equal tokens for a seeded request alone or among others.

    DSDE with its cap is left out on purpose at temperature > 0: the cap makes a request's lengths depend on its
    neighbours, and noise is keyed by the request's own steps, so its tokens differ though their distribution does not.
    """
    target, draft = tiny("llama")

    def engine():
        return Engine(target, draft, Dsde(DsdeRule(cap=None)) if name == "uncapped dsde" else name)

    batch = prompts([5, 12, 3, 8])
    params = [SamplingParams(max_new_tokens=30, temperature=temperature, seed=i) for i in range(4)]
    together = engine().generate(batch, params)
    alone = [engine().generate([p], s)[0] for p, s in zip(batch, params, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    backwards = engine().generate(batch[::-1], params[::-1])
    assert [c.token_ids for c in backwards[::-1]] == [c.token_ids for c in alone]


def test_dsde_with_its_cap_is_independent_of_the_batch_when_greedy(tiny):
    target, draft = tiny("llama")
    batch = prompts([5, 12, 3, 8])
    together = Engine(target, draft, "dsde").generate(batch, SamplingParams(max_new_tokens=60))
    for prompt, done in zip(batch, together, strict=True):
        assert done.token_ids == own_generate(target, prompt, 60)


def test_preemption_loses_nothing(tiny):
    target, draft = tiny("llama")
    batch = prompts([20, 20, 20, 20])
    engine = Engine(target, draft, "static-4", kv_blocks=14, block_size=8)
    done = engine.generate(batch, SamplingParams(max_new_tokens=NEW))
    assert engine.stats()["preemptions"] > 0
    assert [c.token_ids for c in done] == [own_generate(target, p) for p in batch]


def test_requests_join_and_leave_at_any_step(tiny):
    target, draft = tiny("llama")
    batch = prompts([4, 40, 7, 11, 2])
    engine = Engine(target, draft, "dsde", max_sequences=3, max_tokens_per_step=16)
    requests = []
    for i, prompt in enumerate(batch):
        requests.append(engine.submit(prompt, SamplingParams(max_new_tokens=10 + 5 * i)))
        for _ in range(3):
            engine.step()
    while engine.has_work:
        engine.step()
    for i, (prompt, request) in enumerate(zip(batch, requests, strict=True)):
        assert request.completion.token_ids == own_generate(target, prompt, 10 + 5 * i)


def test_eos_inside_an_accepted_block_ends_the_request_there(tiny):
    target, _ = tiny("llama")
    (prompt,) = prompts([6])
    free = own_generate(target, prompt)
    for eos in set(free):
        expected = free[: free.index(eos) + 1]
        (done,) = Engine(target, target, "static-8").generate([prompt], SamplingParams(max_new_tokens=NEW, eos=[eos]))
        assert done.token_ids == expected
        assert done.finish_reason == "stop"
        assert len(done.logprobs) == len(expected)
        assert sum(step.accepted + 1 for step in done.trace) >= len(expected) >= sum(s.accepted for s in done.trace)


def test_eos_comes_from_the_generation_config():
    target = build("llama")
    (prompt,) = prompts([6])
    free = own_generate(target, prompt)
    target.generation_config.eos_token_id = [free[7]]
    (done,) = Engine(target, controller="off").generate([prompt])
    assert done.token_ids == free[: free.index(free[7]) + 1]


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_never_overshoots(tiny, limit):
    target, _ = tiny("llama")
    (prompt,) = prompts([6])
    (done,) = Engine(target, target, "static-8").generate([prompt], SamplingParams(max_new_tokens=limit))
    assert done.token_ids == own_generate(target, prompt, limit)


def test_context_limit_ends_with_length():
    target = build("llama", max_position_embeddings=32)
    (prompt,) = prompts([25])
    (done,) = Engine(target, target, "static-8").generate([prompt], SamplingParams(max_new_tokens=99))
    assert len(done.token_ids) == 7 and done.finish_reason == "length"


def test_a_draft_with_a_shorter_context_stops_drafting(tiny):
    target, _ = tiny("llama")
    draft = build("llama", max_position_embeddings=32)
    (prompt,) = prompts([20])
    (done,) = Engine(target, draft, "static-4").generate([prompt], SamplingParams(max_new_tokens=NEW))
    assert done.token_ids == own_generate(target, prompt)
    assert done.trace[-1].sl == 0


@pytest.mark.parametrize(("target_vocab", "draft_vocab"), [(VOCAB, VOCAB + 7), (VOCAB + 7, VOCAB)])
def test_vocabularies_of_different_width(target_vocab, draft_vocab):
    target = build("llama", vocab_size=target_vocab)
    draft = build("llama", vocab_size=draft_vocab, seed=1)
    batch = prompts([6, 3])
    for temperature in (0.0, 1.0):
        done = Engine(target, draft, "static-3").generate(
            batch, SamplingParams(max_new_tokens=NEW, temperature=temperature)
        )
        assert all(0 <= t < target_vocab for c in done for t in c.token_ids)
    done = Engine(target, draft, "static-3").generate(batch, SamplingParams(max_new_tokens=NEW))
    assert [c.token_ids for c in done] == [own_generate(target, p) for p in batch]


class _Letters:
    """Decodes id i to the i-th letter: enough of a tokenizer for stop strings."""

    def decode(self, ids, **_):
        return "".join(chr(ord("A") + i) for i in ids)


def test_stop_string_ends_inside_an_accepted_block(tiny):
    target, _ = tiny("llama")
    (prompt,) = prompts([6])
    free = own_generate(target, prompt)
    text = _Letters().decode(free)
    for start in range(0, 12, 3):
        stop = text[start : start + 3]
        engine = Engine(target, target, "static-8", tokenizer=_Letters())
        (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=NEW, stop=[stop, "never"]))
        assert done.token_ids == free[: text.index(stop) + 3]
        assert done.finish_reason == "stop"


def test_stopping_criteria_see_every_committed_token(tiny):
    target, _ = tiny("llama")
    (prompt,) = prompts([6])
    free = own_generate(target, prompt)
    for length in (1, 4, 5, 9):
        params = SamplingParams(max_new_tokens=NEW, stopping_criteria=[lambda p, n=length: p.shape[1] == 6 + n])
        (done,) = Engine(target, target, "static-8").generate([prompt], params)
        assert done.token_ids == free[:length] and done.finish_reason == "stop"

    def raising(prefix):
        raise RuntimeError("no opinion")

    (done,) = Engine(target, target, "static-8").generate([prompt], SamplingParams(stopping_criteria=[raising]))
    assert done.finish_reason == "error" and "no opinion" in done.error


def test_kept_logits_are_the_raw_rows_of_the_generated_tokens(tiny):
    target, draft = tiny("llama")
    (prompt,) = prompts([6])
    params = SamplingParams(max_new_tokens=NEW, logits_processors=[lambda _, x: x.roll(1)], keep_logits=True)
    (done,) = Engine(target, draft, "static-4").generate([prompt], params)
    with torch.inference_mode():
        expected = target(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(done.logits, expected, rtol=1e-4, atol=1e-5)
    assert done.token_ids == [(i + 1) % VOCAB for i in expected.argmax(-1).tolist()]


@pytest.mark.parametrize("controller", ["static-4", "dsde"])
def test_ngram_drafts(tiny, controller):
    target, _ = tiny("llama")
    batch = [[1, 2, 3, 4, 5, 1, 2, 3], *prompts([1, 20])]
    engine = Engine(target, "ngram", controller)
    done = engine.generate(batch, SamplingParams(max_new_tokens=100))
    assert [c.token_ids for c in done] == [own_generate(target, p, 100) for p in batch]
    assert engine.stats()["drafted"] > 0


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # three tokens match
        ([7, 3, 5, 8, 3, 6, 3], [6, 3]),  # the most recent of two
        ([2, 3, 4, 8, 3, 6, 2, 3], [4, 8, 3]),  # the longer one wins over the more recent
        ([1, 1, 1], [1]),  # a match may overlap
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_prompt_lookup_takes_the_longest_then_the_most_recent_match(tokens, drafts):
    assert NgramProposer()._lookup(tokens, 3) == drafts
    assert NgramProposer()._lookup(tokens, 0) == []


def test_draft_in_another_number_format(tiny):
    target, draft = tiny("llama")
    batch = prompts([5, 9])
    engine = Engine(target, copy.deepcopy(draft).bfloat16(), "static-4")
    done = engine.generate(batch, SamplingParams(max_new_tokens=NEW))
    assert [c.token_ids for c in done] == [own_generate(target, p) for p in batch]
    assert engine.stats()["accepted"] > 0


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_models_with_their_own_attention_run_sequentially(family):
    if family == "bloom":
        config = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    else:
        config = FalconConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
        )
    config.eos_token_id = None
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    batch = prompts([5, 12, 1])
    with pytest.warns(UserWarning, match="one sequence at a time"):
        engine = Engine(
            target, weaken(target), "dsde", max_tokens_per_step=8, max_sequences=3, kv_blocks=12, block_size=8
        )
    done = engine.generate(batch, SamplingParams(max_new_tokens=NEW))
    assert [c.token_ids for c in done] == [own_generate(target, p, pad_token_id=0) for p in batch]
    stats = engine.stats()
    assert 0 < stats["accepted"] < stats["drafted"]
    assert len(engine.target._caches) == 0


@pytest.mark.parametrize("context", [2, 5, 6, 7])
def test_a_sequential_model_with_a_short_context(context):
    assert SequentialModel(build("gpt2", n_positions=context)).vocabulary == VOCAB


def test_on_tokens_streams_every_token_once(tiny):
    target, draft = tiny("llama")
    seen = []
    engine = Engine(target, draft, "dsde")
    request = engine.submit(prompts([6])[0], on_tokens=lambda r, new: seen.extend(new))
    while engine.has_work:
        engine.step()
    assert seen == request.completion.token_ids


def test_a_failing_request_does_not_disturb_the_others(tiny):
    target, draft = tiny("llama")
    batch = prompts([5, 12, 3])

    def raising(request, new):
        if len(request.tokens) > 20:
            raise RuntimeError("the listener is gone")

    def broken(prefix, logits):
        if prefix.shape[1] > 8:
            raise KeyError("no such prefix")
        return logits

    def nan(prefix, logits):
        return logits * float("nan") if prefix.shape[1] > 9 else logits

    engine = Engine(target, draft, "dsde")
    good = [engine.submit(p) for p in batch]
    bad = [
        engine.submit(batch[0], on_tokens=raising),
        engine.submit(batch[2], SamplingParams(logits_processors=[broken])),
        engine.submit(batch[2], SamplingParams(logits_processors=[nan])),
        engine.submit(batch[0], SamplingParams(logits_processors=[lambda prefix, logits: logits[:, :3]])),
    ]
    while engine.has_work:
        engine.step()
        engine.blocks.check([r.table for r in engine.scheduler.running])
    for prompt, request in zip(batch, good, strict=True):
        assert request.completion.finish_reason == "length"
        assert request.completion.token_ids == own_generate(target, prompt, 128 - len(prompt))
    for request, word in zip(bad, ["listener is gone", "no such prefix", "NaN", "shape"], strict=True):
        assert request.completion.finish_reason == "error"
        assert word in request.completion.error
    assert bad[2].completion.token_ids == own_generate(target, batch[2])[:7]


@pytest.mark.parametrize("end", ["eos", "criterion"])
@pytest.mark.parametrize("behind", ["raises", "masks all"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_may_allow_nothing_behind_its_end(tiny, temperature, behind, end):
    """Drafts and the bonus position lie there all the same."""
    path = {3: 10, 4: 11, 5: 2}

    def grammar(prefix, logits):
        only = torch.full_like(logits, float("-inf"))
        if prefix.shape[1] in path:
            only[:, path[prefix.shape[1]]] = 0
        elif behind == "raises":
            raise KeyError(prefix.shape[1])
        return only

    options = {
        "eos": {"eos": [2]},
        "criterion": {"eos": (), "stopping_criteria": [lambda prefix: prefix[0, -1] == 2]},
    }[end]
    params = SamplingParams(8, temperature, logits_processors=[grammar], **options)
    (done,) = Engine(*tiny("llama"), "static-4").generate([[5, 6, 7]], params)
    assert (done.token_ids, done.finish_reason, done.error) == ([10, 11, 2], "stop", None)


def test_drafting_ends_behind_an_end_of_sequence_id(tiny):
    """The rows that are left out leave no hole: a draft equal to the target diverges nowhere and is always accepted."""
    target, _ = tiny("llama")
    engine = Engine(target, copy.deepcopy(target), "static-8")
    params = [SamplingParams(NEW, temperature=1.0, top_k=20, seed=i, eos=range(0, VOCAB, 5)) for i in range(4)] + [
        SamplingParams(NEW, temperature=1.0, top_k=20, seed=9, eos=())
    ]
    done = engine.generate(prompts([3, 9, 5, 1, 4]), params)
    assert [c.finish_reason for c in done] == ["stop"] * 4 + ["length"]
    assert all(step.accepted == step.sl and (step.kld or 0) < 1e-5 for c in done for step in c.trace)
    assert 0 < engine.stats()["drafted"] == engine.stats()["accepted"]


def test_processors_see_each_positions_exact_prefix(tiny):
    target, draft = tiny("llama")
    (prompt,) = prompts([6])
    prefixes = set()

    def ban_repeats(prefix, logits):
        prefixes.add(tuple(prefix[0].tolist()))
        return logits.index_fill(1, prefix[0, -4:], float("-inf"))

    params = SamplingParams(max_new_tokens=20, logits_processors=[ban_repeats])
    (plain,) = Engine(target, controller="off").generate([prompt], params)
    (done,) = Engine(target, draft, "static-4").generate([prompt], params)
    assert done.token_ids == plain.token_ids
    tokens = prompt + done.token_ids
    assert all(len(set(tokens[i - 4 : i + 1])) == 5 or i < 6 for i in range(4, len(tokens)))
    assert all(tuple(tokens[:n]) in prefixes for n in range(len(prompt), len(tokens)))


def test_abort_in_any_state(tiny):
    target, draft = tiny("llama")
    engine = Engine(target, draft, "dsde", max_sequences=2)
    running, waiting = (engine.submit(p) for p in prompts([5, 6]))
    late = engine.submit(prompts([7])[0])
    engine.step()
    engine.step()
    assert engine.abort(late.id).token_ids == []
    done = engine.abort(running.id)
    assert done.finish_reason == "abort" and done.token_ids
    engine.abort(waiting.id)
    assert not engine.has_work and engine.stats()["free_blocks"] == engine.stats()["blocks"]
    with pytest.raises(ValueError, match="request_id"):
        engine.abort(running.id)


def test_callbacks_may_abort_and_submit(tiny):
    target, draft = tiny("llama")
    engine = Engine(target, draft, "dsde")
    spawned = []

    def chain(request, new):
        if request is first:
            spawned.append(engine.submit([1, 2, 3], SamplingParams(max_new_tokens=4)))
            engine.abort(second.id)
            engine.abort(first.id)

    first = engine.submit([4, 5], on_tokens=chain)
    second = engine.submit([6, 7])
    while engine.has_work:
        engine.step()
    assert first.completion.finish_reason == second.completion.finish_reason == "abort"
    assert [len(r.completion.token_ids) for r in spawned] == [4]
    engine.blocks.check([])


def test_priorities_and_deadlines_order_service(tiny):
    target, draft = tiny("llama")
    engine = Engine(target, draft, "dsde", max_sequences=1)
    short = SamplingParams(max_new_tokens=3)
    names = {
        engine.submit([1], short).id: "plain",
        engine.submit([1], short, deadline=100).id: "late",
        engine.submit([1], short, deadline=1).id: "soon",
        engine.submit([1], short, priority=1).id: "urgent",
    }
    order = []
    while engine.has_work:
        order += [names[c.request_id] for c in engine.step()]
    assert order == ["urgent", "soon", "late", "plain"]


def test_a_controller_object_serves_one_engine(tiny):
    controller = Dsde()
    Engine(*tiny("llama"), controller)
    with pytest.raises(ValueError, match="another engine"):
        Engine(*tiny("llama"), controller)


def test_a_processor_that_fails_on_rejected_drafts_only_changes_nothing(tiny):
    target, draft = tiny("llama")
    (prompt,) = prompts([6])
    path = prompt + own_generate(target, prompt)

    def picky(prefix, logits):
        if prefix[0].tolist() != path[: prefix.shape[1]]:
            raise KeyError("not on the target's own path")
        return logits

    params = SamplingParams(max_new_tokens=NEW, logits_processors=[picky])
    engine = Engine(target, draft, "static-4")
    (done,) = engine.generate([prompt], params)
    assert prompt + done.token_ids == path
    assert engine.stats()["accepted"] < engine.stats()["drafted"]


def test_processors_see_the_targets_width_on_a_narrower_draft():
    target, draft = build("llama", vocab_size=VOCAB + 7), build("llama", seed=1)
    (prompt,) = prompts([6])
    force = VOCAB + 3

    def forced(prefix, logits):
        return torch.full_like(logits, float("-inf")).index_fill(1, torch.tensor([force]), 0.0)

    (done,) = Engine(target, draft, "static-3").generate([prompt], SamplingParams(5, logits_processors=[forced]))
    assert done.token_ids == [force] * 5


def test_callbacks_cannot_step_and_processors_cannot_abort(tiny):
    target, draft = tiny("llama")
    engine = Engine(target, draft, "static-3")
    good = engine.submit([1, 2, 3], SamplingParams(NEW))
    stepping = engine.submit([4, 5], SamplingParams(NEW), on_tokens=lambda r, new: engine.step())
    aborting = engine.submit([4, 5], SamplingParams(NEW, logits_processors=[lambda p, x: engine.abort(good.id)]))
    while engine.has_work:
        engine.step()
    assert "not over" in stepping.completion.error and "processor" in aborting.completion.error
    assert good.completion.token_ids == own_generate(target, [1, 2, 3])


def test_callbacks_may_use_the_model_and_gradients(tiny):
    target, draft = tiny("llama")
    engine = Engine(target, draft, "static-3")
    losses = []

    def learn(request, new):
        ids = torch.tensor([request.tokens])
        losses.append(target(ids, labels=ids).loss)
        losses[-1].backward()
        target.zero_grad()

    done = engine.submit([1, 2, 3], SamplingParams(NEW), on_tokens=learn)
    while engine.has_work:
        engine.step()
    assert done.completion.finish_reason == "length" and losses


def test_an_interrupt_in_a_callback_ends_that_request_alone(tiny):
    target, draft = tiny("llama")
    engine = Engine(target, draft, "static-3")

    def interrupted(request, new):
        raise KeyboardInterrupt

    hit = engine.submit([4, 5], SamplingParams(NEW), on_tokens=interrupted)
    good = engine.submit([1, 2, 3], SamplingParams(NEW))
    short = engine.submit([1, 2, 3], SamplingParams(1))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.has_work:
        engine.step()
    assert hit.completion.finish_reason == "abort"
    assert short.completion.token_ids == own_generate(target, [1, 2, 3], 1)
    assert good.completion.token_ids == own_generate(target, [1, 2, 3])


def test_a_tokenizer_that_fails_ends_only_the_request_that_needs_it(tiny):
    target, draft = tiny("llama")

    class Broken:
        def decode(self, ids, **_):
            raise IndexError("no such piece")

    engine = Engine(target, draft, "static-3", tokenizer=Broken())
    stop = engine.submit([4, 5], SamplingParams(NEW, stop=["x"]))
    good = engine.submit([1, 2, 3], SamplingParams(NEW))
    while engine.has_work:
        engine.step()
    assert "no such piece" in stop.completion.error
    assert good.completion.token_ids == own_generate(target, [1, 2, 3])


def test_a_draft_with_a_shorter_learned_context_than_the_prompt(tiny):
    target, _ = tiny("gpt2")
    draft = build("gpt2", n_positions=32)
    batch = prompts([40, 5])
    done = Engine(target, draft, "static-3", max_tokens_per_step=32).generate(batch, SamplingParams(NEW))
    assert [c.token_ids for c in done] == [own_generate(target, p) for p in batch]


def test_refusals_name_the_argument(tiny):
    target, draft = tiny("llama")
    engine = Engine(target, draft, kv_blocks=4, block_size=8)
    for arguments, message in [
        (([],), "prompt_ids"),
        (([1, VOCAB],), f"prompt_ids.*{VOCAB}"),
        (([1, -1],), "prompt_ids.*-1"),
        (("123",), "a prompt must be a sequence of token ids"),
        (([1.5],), "a prompt must be a sequence of token ids"),
        (([1] * 128,), "context of 128"),
        (([1] * 30, SamplingParams(max_new_tokens=3)), "33 KV positions, kv_blocks hold 32"),
        (([1], SamplingParams(max_new_tokens=3, stop=["x"])), "tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.submit(*arguments)
    for name, value in [
        ("priority", "high"),
        ("priority", 1.5),
        ("deadline", "1"),
        ("deadline", float("nan")),
        ("deadline", -1),
        ("params", {"temperature": 1}),
        ("params", 0),
    ]:
        with pytest.raises(ValueError, match=name):
            engine.submit([1], **{"params": SamplingParams(3)} | {name: value})
    assert not engine.has_work
    with pytest.raises(ValueError, match="prompt_ids"):
        engine.generate([[1, 2], []], SamplingParams(max_new_tokens=3))
    assert not engine.has_work
    with pytest.raises(ValueError, match="controller"):
        Engine(target, draft, "fast")
    with pytest.raises(ValueError, match="draft"):
        Engine(target, controller="dsde")
    with pytest.raises(ValueError, match="max_tokens_per_step"):
        Engine(target, draft, max_sequences=8, max_tokens_per_step=7)
    for name in ("max_sequences", "block_size", "kv_blocks", "max_tokens_per_step"):
        for value in (0, 2.0, "2", True, 2**40):
            with pytest.raises(ValueError, match=name):
                Engine(target, draft, **{name: value})
    for seed in (1.5, None, 2**63):
        with pytest.raises(ValueError, match="seed"):
            Engine(target, draft, seed=seed)


def test_limits_of_numpy(tiny):
    target, draft = tiny("llama")
    limits = {"max_sequences": 2, "kv_blocks": 8, "block_size": 8, "max_tokens_per_step": 16, "seed": 3}
    engine = Engine(target, draft, **{name: np.int32(value) for name, value in limits.items()})
    first = engine.submit([1, 2], SamplingParams(4), priority=np.int64(1), deadline=np.float32(1))
    assert type(first.priority) is int
    (done,) = engine.generate([[1, 2]], SamplingParams(4, temperature=1.0))
    assert len(done.token_ids) == 4


@pytest.mark.parametrize("where", ["processor", "criterion", "callback"])
def test_a_failed_request_holds_neither_engine_nor_cache(tiny, where):
    def boom(*_):
        try:
            {}["y"]
        except KeyError as cause:
            raise KeyError("x") from cause

    params = SamplingParams(
        logits_processors=[boom] if where == "processor" else (),
        stopping_criteria=[boom] if where == "criterion" else (),
    )
    engine = Engine(*tiny("llama"))
    request = engine.submit([1, 2, 3], params, on_tokens=boom if where == "callback" else None)
    engine.step()
    assert request.completion.error == "KeyError: 'x'" and isinstance(request.cause, KeyError)
    alive = weakref.ref(engine), weakref.ref(engine.target.pools[0][1])
    del engine
    gc.collect()
    assert [r() for r in alive] == [None, None]


def test_generate_shows_progress(tiny, capsys):
    target, _ = tiny("llama")
    Engine(target, controller="off").generate(prompts([3, 3]), SamplingParams(max_new_tokens=2), progress=True)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a/path", "ngram"), "target must be a model.*a/path"),
        ((None, "ngram"), "target must be a model.*None"),
        (("target", "a/path"), "draft must be a model.*a/path"),
        (("target", "ngram", object()), "controller must be a name"),
        (("target", "ngram", Dsde), "controller must be a name"),
        (("target", "ngram", 3), "controller must be a name.*3"),
    ],
)
def test_what_is_no_model_or_controller(tiny, arguments, message):
    target, _ = tiny("llama")
    with pytest.raises(ValueError, match=message):
        Engine(*(target if a == "target" else a for a in arguments))


def test_a_static_length_is_a_whole_number():
    with pytest.raises(ValueError, match=r"controller.*3\.5"):
        Static(3.5)
