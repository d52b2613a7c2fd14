"""What a draft model proposes: each row's logits and threshold, and where drafting stops."""

from __future__ import annotations

import pytest
import torch

from dsde import Engine, SamplingParams
from dsde.request import Request
from dsde.sampling import RowParams
from dsde.scheduler import Entry
from tests.dsde.models import VOCAB


def propose(engine):
    """The proposals of a step that is then left out."""
    with torch.inference_mode():
        entries = engine.scheduler.schedule(engine.controller.sl_limit)
        requests = [e.request for e in entries if e.verifies]
        params = RowParams.of(requests, engine.target.device)
        return requests, params, engine.proposer.propose(entries, requests, params)


@pytest.mark.parametrize("processed", [False, True])
def test_rows_that_stop_at_different_ends(tiny, processed):
    """Each proposal's logits are the draft's own at that prefix, and its threshold is theirs."""
    target, draft = tiny("llama")
    engine = Engine(target, draft, "static-5")
    for i, eos in enumerate([range(0, VOCAB, 2), (), range(0, VOCAB, 4)] * 6):
        add = [lambda prefix, x: x + 1] if processed and i % 4 == 1 else ()
        params = SamplingParams(
            40, 1.0 + i / 10, top_k=9 + i, top_p=0.9 - i / 40, seed=i, eos=eos, logits_processors=add
        )
        engine.submit(torch.arange(1, 4 + i).tolist(), params)
    engine.step()
    requests, params, drafts = propose(engine)
    counts = [len(d) for d in drafts.tokens]
    assert len(requests) >= 4 and 1 <= min(counts[:-1]) < max(counts) == 5 and len(set(counts)) > 2, counts
    assert len(drafts.logits) == len(drafts.threshold) == sum(counts)
    row = 0
    for i, (request, tokens) in enumerate(zip(requests, drafts.tokens, strict=True)):
        for j, token in enumerate(tokens):
            with torch.inference_mode():
                own = draft(torch.tensor([[*request.tokens, *tokens[:j]]])).logits[0, -1:]
            own = own + len(request.params.logits_processors)
            got = drafts.logits[row : row + 1]
            torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4)
            threshold = params.take(torch.tensor([i])).threshold(got)
            torch.testing.assert_close(drafts.threshold[row : row + 1], threshold, rtol=1e-6, atol=0)
            assert (token in request.eos) <= (j == len(tokens) - 1)
            row += 1


def test_prompt_lookup_proposes_nothing_behind_an_end(tiny):
    target, _ = tiny("llama")
    engine = Engine(target, "ngram", "static-5")
    text = [7, 8, 9, 10, 11, 12, 7, 8]
    requests = [
        Request(i, text, SamplingParams(), frozenset(eos), seed=0, limit=99)
        for i, eos in enumerate([(), [10], [9, 10]])
    ]
    drafts = engine.proposer.propose([Entry(r, len(text), 4) for r in requests], requests, None)
    assert drafts.tokens == [[9, 10, 11, 12], [9, 10], [9]]


@pytest.mark.parametrize("controller", ["static-4", "dsde"])
@pytest.mark.parametrize("broken_from", [0, 12])
def test_drafting_stops_where_the_draft_has_no_distribution(tiny, broken_from, controller):
    target, draft = tiny("llama")
    engine = Engine(target, draft, controller)
    forward = engine.draft.forward

    def broken(segments, keep):
        logits = forward(segments, keep)
        places = torch.tensor([p for s in segments for p in range(s.start, s.end)])[keep]
        return logits.masked_fill((places >= broken_from)[:, None], float("nan"))

    engine.draft.forward = broken
    least = []

    def watch(prefix, logits):
        least.append(int(prefix.min()))
        return logits

    params = SamplingParams(20, logits_processors=[watch])
    done, other = engine.generate([[1, 2, 3], [4, 5, 6, 7]], params)
    plain = Engine(target, controller="off").generate([[1, 2, 3], [4, 5, 6, 7]], SamplingParams(20))
    assert [done.token_ids, other.token_ids] == [c.token_ids for c in plain]
    assert min(least) >= 0
    # The token at position `broken_from` is the last that can be drafted.
    ends = [3 + sum(s.accepted + 1 for s in done.trace[:i]) for i in range(len(done.trace))]
    assert all(end + step.sl <= max(end, broken_from + 1) for end, step in zip(ends, done.trace, strict=True))
    assert (sum(s.sl for s in done.trace) > 0) == (broken_from > 0)
