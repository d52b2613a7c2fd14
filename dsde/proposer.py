"""Draft workers: propose each sequence's own number of tokens, with a draft model or from the sequence itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import dsde_kernels as dk

from .cache import PackedModel, Segment
from .fallback import SequentialModel
from .request import Request
from .sampling import RowParams, process_rows
from .scheduler import Entry


@dataclass(frozen=True)
class Drafts:
    """A step's proposals in the ragged layout of `dsde_kernels`.

    ``tokens[i]`` are the drafts of the step's i-th verifying request. ``logits`` [N, Vd] are the draft's rows that they
    were drawn from, in the same order: behind the processors, in float32 once any of the requests has some and in the
    draft's format otherwise; None for deterministic drafts or if nobody drafts. ``threshold`` [N] are their truncation
    thresholds, None without truncation.
    """

    tokens: list[list[int]]
    logits: torch.Tensor | None = None
    threshold: torch.Tensor | None = None


class ModelProposer:
    """A draft model that shares the target's tokenizer.

    Drafting is ragged: a sequence leaves the draft batch when its own length is reached, behind an end-of-sequence id,
    or where the draft has no distribution (a row of NaN). Its first pass also catches up the tokens that the draft's
    cache lacks, and computes the step's prompt chunks, so that draft and target caches cover the same prefix.

    Parameters
    ----------
    model : PackedModel or SequentialModel
        The draft.
    vocabulary : int
        Width of the target's logits: no token beyond it is proposed.
    device : torch.device
        Where the target verifies.
    """

    def __init__(self, model: PackedModel | SequentialModel, vocabulary: int, device: torch.device) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.device = device

    def propose(self, entries: Sequence[Entry], requests: Sequence[Request], params: RowParams) -> Drafts:
        """Draft for one step.

        Parameters
        ----------
        entries : sequence of Entry
            The step, as scheduled.
        requests : sequence of Request
            Those of `entries` that verify, in order; ``params`` holds their sampling parameters.

        Returns
        -------
        Drafts
            In the order of `requests`.
        """
        params = params.to(self.model.device)
        lengths = [e.sl for e in entries if e.verifies]
        drafts: list[list[int]] = [[] for _ in requests]
        live = [i for i, k in enumerate(lengths) if k > 0]
        chunks = [c for c in map(self._chunk, entries) if c.ids]
        segments = [self._catch_up(requests[i]) for i in live] + chunks
        starts = list(itertools.accumulate(lengths, initial=0))
        processed = any(r.params.logits_processors for r in requests)
        logits: torch.Tensor | None = None
        threshold: torch.Tensor | None = None
        offset = 0
        with self.model.packed():
            while segments:
                last, end = [], 0
                for s in segments[: len(live)]:
                    end += len(s.ids)
                    last.append(end - 1)
                q = self.model.forward(segments, keep=last or [0])[:, : self.vocabulary]
                if not live:
                    break
                if processed:
                    prefixes = [[*requests[i].tokens, *drafts[i]] for i in live]
                    q = process_rows([requests[i] for i in live], prefixes, q, self.vocabulary, self.device)
                rows = params if len(live) == len(requests) else params.take(torch.tensor(live, device=q.device))
                cut = rows.threshold(q)
                step_offset = torch.full_like(rows.step, offset)
                chosen = dk.sample(q, rows.temperature, rows.seed, rows.step, step_offset, threshold=cut)
                for i, token in zip(live, chosen.tolist(), strict=True):
                    if token >= 0:
                        drafts[i].append(token)
                if logits is None:
                    logits = q.new_empty(sum(lengths), q.shape[1])
                    threshold = None if cut is None else cut.new_empty(len(logits))
                where = torch.tensor([starts[i] + offset for i in live], device=q.device)
                logits.index_copy_(0, where, q)
                if threshold is not None and cut is not None:
                    threshold.index_copy_(0, where, cut)
                offset += 1
                live = [
                    i for i in live if len(drafts[i]) == offset < lengths[i] and drafts[i][-1] not in requests[i].eos
                ]
                segments = [
                    Segment(drafts[i][-1:], len(requests[i].tokens) + offset - 1, requests[i].table) for i in live
                ]
        drafted = [start + j for start, d in zip(starts, drafts, strict=False) for j in range(len(d))]
        if logits is not None and len(drafted) < len(logits):
            logits = logits[drafted]
            threshold = None if threshold is None else threshold[drafted]
        return Drafts(
            drafts,
            None if logits is None else logits.to(self.device),
            None if threshold is None else threshold.to(self.device),
        )

    def cached_after(self, entry: Entry) -> int:
        """Leading tokens that the draft's cache holds once `entry` was proposed for, rejections and ends aside."""
        request = entry.request
        if request.pending > 1:
            return max(request.draft_cached, self._chunk(entry).end)
        # A last draft was never fed back; where a broken row cut them short, all were, and verification ends earlier.
        return len(request.tokens) + entry.sl - 1 if entry.sl else request.draft_cached

    @staticmethod
    def _catch_up(request: Request) -> Segment:
        return Segment(request.tokens[request.draft_cached :], request.draft_cached, request.table)

    def _chunk(self, entry: Entry) -> Segment:
        """The draft's part of a prompt chunk; empty for a decoding sequence and beyond the draft's context."""
        request = entry.request
        end = request.cached + entry.rows if request.pending > 1 else 0
        if self.model.context is not None:
            end = min(end, self.model.context)
        return Segment(request.tokens[request.draft_cached : end], request.draft_cached, request.table)


class NgramProposer:
    """Prompt lookup: the sequence's last tokens, where they occurred before, say what comes next.

    The longest match of up to three tokens wins, and of equally long ones the most recent. Drafts are deterministic: q
    is 1 at the proposed token. A match near the end gives fewer drafts than were scheduled, no match gives none, and
    nothing is proposed behind an end-of-sequence id.
    """

    _LONGEST = 3

    def propose(self, entries: Sequence[Entry], requests: Sequence[Request], params: RowParams) -> Drafts:
        """Draft for one step; arguments and result as `ModelProposer.propose`."""
        lengths = [e.sl for e in entries if e.verifies]
        found = [self._lookup(r.tokens, k) for r, k in zip(requests, lengths, strict=True)]
        for request, tokens in zip(requests, found, strict=True):
            end = next((i for i, token in enumerate(tokens) if token in request.eos), len(tokens))
            del tokens[end + 1 :]
        return Drafts(found)

    def cached_after(self, entry: Entry) -> int:
        """There is no draft cache."""
        return 0

    def _lookup(self, tokens: Sequence[int], k: int) -> list[int]:
        text = "".join(map(chr, tokens)) if k else ""  # str.rfind is the fast search that Python has
        for n in range(min(self._LONGEST, len(text) - 1), 0, -1):
            found = text.rfind(text[-n:], 0, len(text) - 1)
            if found >= 0:
                return list(tokens[found + n : found + n + k])
        return []
