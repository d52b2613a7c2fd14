"""Block accounting and limits, after every one of many random steps."""

from __future__ import annotations

import random

import pytest
import torch

from dsde import Dsde, Engine, SamplingParams
from dsde.blocks import BlockManager
from dsde.request import Request
from dsde.scheduler import Scheduler
from dsde_kernels import DsdeRule
from tests.dsde.models import build, weaken


def request(number, tokens, cached=0, sl=0, priority=0, limit=1000):
    r = Request(number, [1] * tokens, SamplingParams(), frozenset(), seed=0, limit=limit, priority=priority)
    r.cached = cached
    r.sl = sl
    return r


def running(scheduler, *requests):
    for r in requests:
        r.slot = scheduler.free_slots.pop()
        assert scheduler.blocks.reserve(r.table, len(r.tokens))
        scheduler.running.append(r)


def shape(entries):
    return [(e.request.id, e.rows, e.sl) for e in entries]


def test_decoding_sequences_come_before_prompts():
    scheduler = Scheduler(BlockManager(100, 4), 8, 16, None)
    running(scheduler, request(0, 5, cached=4, sl=3), request(1, 9, cached=8, sl=2))
    scheduler.add(request(2, 30))
    assert shape(scheduler.schedule(10)) == [(0, 1, 3), (1, 1, 2), (2, 9, 0)]


def test_budget_shrinks_speculation_but_every_sequence_advances():
    scheduler = Scheduler(BlockManager(100, 4), 4, 6, None)
    running(scheduler, *(request(i, 5, cached=4, sl=4) for i in range(4)))
    assert shape(scheduler.schedule(10)) == [(0, 1, 2), (1, 1, 0), (2, 1, 0), (3, 1, 0)]


def test_speculation_shrinks_before_anyone_is_preempted():
    scheduler = Scheduler(BlockManager(6, 4), 4, 64, None)
    running(scheduler, request(0, 8, cached=7, sl=9), request(1, 8, cached=7, sl=9))
    # Six blocks of four: each sequence needs three for its next token, and that leaves room for three drafts.
    assert shape(scheduler.schedule(10)) == [(0, 1, 3), (1, 1, 3)]
    assert scheduler.preemptions == 0


def test_a_full_step_preempts_nobody():
    scheduler = Scheduler(BlockManager(100, 4), 8, 8, None)
    prompt = request(0, 40)
    running(scheduler, request(1, 5, cached=4), prompt, request(2, 5, cached=4))
    assert shape(scheduler.schedule(0)) == [(1, 1, 0), (2, 1, 0), (0, 6, 0)]
    assert scheduler.preemptions == 0


def test_prompts_do_not_take_blocks_from_each_other():
    scheduler = Scheduler(BlockManager(10, 4), 4, 8, None)
    for r in (request(0, 24), request(1, 24)):
        scheduler.add(r)
    assert shape(scheduler.schedule(0)) == [(0, 8, 0)]
    assert [r.id for r in scheduler.waiting] == [1]


def test_without_a_free_slot_a_preempted_request_comes_before_the_head_of_the_queue():
    scheduler = Scheduler(BlockManager(100, 4), 2, 8, None)
    preempted = request(1, 6)
    preempted.slot = scheduler.free_slots.pop()
    running(scheduler, request(0, 5, cached=4))
    scheduler.add(preempted)
    scheduler.add(request(2, 3, priority=9))
    assert shape(scheduler.schedule(0)) == [(0, 1, 0), (1, 6, 0)]


def test_speculation_leaves_rows_to_waiting_prompts():
    scheduler = Scheduler(BlockManager(100, 4), 4, 11, None)
    running(scheduler, request(0, 5, cached=4, sl=10))
    scheduler.add(request(1, 30))
    assert shape(scheduler.schedule(10)) == [(0, 1, 5), (1, 5, 0)]


def test_the_youngest_of_the_lowest_priority_is_preempted():
    scheduler = Scheduler(BlockManager(6, 4), 4, 64, None)
    old, young, urgent = request(0, 8, 7), request(1, 8, 7), request(2, 8, 7, priority=1)
    running(scheduler, old, young, urgent)
    entries = scheduler.schedule(10)
    assert [e.request.id for e in entries] == [2, 0]
    assert scheduler.waiting == [young] and young.cached == 0 and young.table.blocks == []
    assert young.slot is not None  # its controller state stays


def test_a_waiting_request_keeps_its_place_and_nobody_overtakes():
    scheduler = Scheduler(BlockManager(4, 4), 4, 64, None)
    running(scheduler, request(0, 8, cached=7))
    for r in (request(1, 12), request(2, 2)):
        scheduler.add(r)
    assert [e.request.id for e in scheduler.schedule(0)] == [0]
    assert [r.id for r in scheduler.waiting] == [1, 2]


def test_sl_ends_at_limit_and_draft_context():
    scheduler = Scheduler(BlockManager(100, 4), 4, 64, 12)
    running(scheduler, request(0, 10, 9, sl=8, limit=14), request(1, 10, 9, sl=8), request(2, 20, 19, sl=8))
    assert shape(scheduler.schedule(10)) == [(0, 1, 2), (1, 1, 2), (2, 1, 0)]


@pytest.fixture(scope="module")
def small():
    target = build("llama", num_hidden_layers=1, hidden_size=16)
    return target, weaken(target, 0.2)


def check(engine):
    """No block is lost, none held twice, and nobody holds more than length + SL + 1, rounded up to the block."""
    scheduler = engine.scheduler
    everyone = scheduler.running + scheduler.waiting
    engine.blocks.check([r.table for r in everyone])
    for r in scheduler.running:
        assert len(r.table.blocks) <= engine.blocks.blocks_for(len(r.tokens) + 1)
        assert r.draft_cached <= len(r.tokens) and r.cached < len(r.tokens)
    slots = [r.slot for r in everyone if r.slot is not None]
    assert len(set(slots)) == len(slots)
    assert len(slots) + len(scheduler.free_slots) == 6


def test_ten_thousand_random_steps(small, monkeypatch):
    """Joins, leaves, aborts and preemptions: the invariant holds after each step, and the bound before each forward."""
    rng = random.Random(0)
    rule = DsdeRule(sl_min=1, sl_start=2, sl_limit=4)  # short drafts keep ten thousand steps short
    engine = Engine(*small, Dsde(rule), max_sequences=6, kv_blocks=24, block_size=4, max_tokens_per_step=20)
    score = engine.scorer.score

    def watched(entries, requests, drafts):
        for entry in entries:
            held = len(entry.request.table.blocks)
            assert held <= engine.blocks.blocks_for(len(entry.request.tokens) + entry.sl + 1)
        return score(entries, requests, drafts)

    monkeypatch.setattr(engine.scorer, "score", watched)
    alive: dict[int, Request] = {}
    ended = {"length": 0, "abort": 0}
    for _ in range(10_000):
        if rng.random() < 0.25 and len(alive) < 12:
            prompt = [rng.randrange(61) for _ in range(rng.randrange(1, 30))]
            params = SamplingParams(
                max_new_tokens=rng.randrange(1, 50),
                temperature=rng.choice([0.0, 0.0, 0.0, 1.0]),
                seed=rng.randrange(99),
            )
            r = engine.submit(prompt, params, priority=rng.randrange(3))
            alive[r.id] = r
        if alive and rng.random() < 0.02:
            r = alive.pop(rng.choice(list(alive)))
            engine.abort(r.id)
            ended["abort"] += 1
        for done in engine.step():
            assert done.finish_reason == "length"
            assert len(done.token_ids) == alive.pop(done.request_id).params.max_new_tokens
            ended["length"] += 1
        check(engine)
    stats = engine.stats()
    assert stats["preemptions"] > 100 and ended["abort"] > 50 and ended["length"] > 300
    while engine.has_work:
        engine.step()
    assert engine.stats()["free_blocks"] == 24


def test_a_thousand_short_requests_leave_nothing_behind(small):
    engine = Engine(*small, "dsde", max_sequences=16, block_size=8)
    prompts = [[i % 61, i % 7] for i in range(1000)]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=4))
    assert all(len(c.token_ids) == 4 for c in done)
    stats = engine.stats()
    assert stats["free_blocks"] == stats["blocks"] and not engine.has_work
    assert len(engine.scheduler.free_slots) == 16


def test_a_forward_that_fails_leaves_the_engine_as_it_was(small, monkeypatch):
    engine = Engine(*small, "dsde")
    r = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=20))
    for _ in range(3):
        engine.step()
    before = list(r.tokens)
    forward = engine.target.model.forward
    monkeypatch.setattr(
        engine.target.model, "forward", lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("full"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    assert r.tokens == before
    monkeypatch.setattr(engine.target.model, "forward", forward)
    while engine.has_work:
        engine.step()
    (clean,) = Engine(*small, "dsde").generate([[1, 2, 3]], SamplingParams(max_new_tokens=20))
    assert r.completion.token_ids == clean.token_ids
