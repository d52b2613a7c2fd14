"""Lookahead scheduler: who runs in the next step, with how many rows and how many drafts.

Before a step every sequence holds blocks for its length + SL + 1 positions; after it the unused tail goes back. When
blocks run out, speculation shrinks first, then the last request in the order of service is preempted: it keeps its
tokens, and its keys and values are computed again when it returns.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from .blocks import BlockManager
from .request import Request


@dataclass
class Entry:
    """One request's part of a step.

    ``rows`` of its pending tokens are computed; if that is all of them, the request also drafts ``sl`` tokens and is
    verified (``verifies``). Otherwise this is a chunk of a prompt.
    """

    request: Request
    rows: int
    sl: int = 0

    @property
    def verifies(self) -> bool:
        """Whether the step reaches the end of the request's tokens."""
        return self.rows == self.request.pending


class Scheduler:
    """Decides each step's entries and owns the queues.

    Parameters
    ----------
    blocks : BlockManager
        The pool of KV blocks.
    max_sequences : int
        Most requests that hold a slot (running or preempted).
    max_tokens_per_step : int
        Most rows in one target forward pass.
    draft_context : int, optional
        Longest sequence that the draft model can take.
    """

    def __init__(
        self, blocks: BlockManager, max_sequences: int, max_tokens_per_step: int, draft_context: int | None
    ) -> None:
        if max_tokens_per_step < max_sequences:
            raise ValueError(
                f"max_tokens_per_step must be >= max_sequences ({max_sequences}) so that every sequence can advance, "
                f"got {max_tokens_per_step}"
            )
        self.blocks = blocks
        self.max_tokens_per_step = max_tokens_per_step
        self.draft_context = draft_context
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free_slots = list(range(max_sequences - 1, -1, -1))
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request, new or preempted, by its order of service."""
        insort(self.waiting, request, key=lambda r: r.order)

    def remove(self, request: Request) -> None:
        """Forget a request in whatever state; its blocks and slot go back."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.blocks.trim(request.table, 0)
        if request.slot is not None:
            self.free_slots.append(request.slot)
            request.slot = None

    def schedule(self, sl_limit: int) -> list[Entry]:
        """Choose the step's entries and reserve their blocks.

        Parameters
        ----------
        sl_limit : int
            Most drafts for one sequence; each request asks for its own ``sl`` within it.

        Returns
        -------
        list of Entry
            In order of service; requests that join in this step come last.
        """
        self.running.sort(key=lambda r: r.order)
        budget = self.max_tokens_per_step
        # Decoding comes before prefill: every decoding sequence is sure of one row.
        owed = sum(1 for r in self.running if r.pending == 1)
        entries: list[Entry] = []
        preempted = self.preemptions
        for request in list(self.running):
            if request not in self.running:  # preempted for one before it
                continue
            decoding = request.pending == 1
            owed -= decoding
            entry = self._fit(request, budget - owed, sl_limit)
            while entry is None and self.running[-1] is not request:
                self._preempt(self.running[-1])
                entry = self._fit(request, budget - owed, sl_limit)
            if entry is None:
                if budget - owed > 0:  # no block to be had, and nobody behind to take it from
                    self._preempt(request)
                continue
            entries.append(entry)
            budget -= entry.rows + entry.sl
        # Whoever was preempted just now would only take the blocks back.
        if self.preemptions == preempted:
            entries += self._admit(budget)
        return entries

    def _admit(self, budget: int) -> list[Entry]:
        entries = []
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if request.slot is None and not self.free_slots:
                break
            # The whole prompt must fit, so that admission alone never causes a preemption.
            if self.blocks.room(request.table) < len(request.tokens) + 1:
                break
            self.waiting.pop(0)
            if request.slot is None:
                request.slot = self.free_slots.pop()
            self.running.append(request)
            entry = self._fit(request, budget, 0)
            assert entry is not None
            entries.append(entry)
            budget -= entry.rows
        return entries

    def _fit(self, request: Request, budget: int, sl_limit: int) -> Entry | None:
        """The largest entry within `budget` rows for which blocks can be reserved, None if there is none."""
        if budget <= 0:
            return None
        entry = Entry(request, min(request.pending, budget))
        length = len(request.tokens)
        if request.pending == 1:
            entry.sl = max(
                0,
                min(
                    request.sl,
                    sl_limit,
                    budget - 1,
                    request.limit - length - 1,  # one token always comes from the target
                    self.blocks.room(request.table) - length - 1,
                    sl_limit if self.draft_context is None else self.draft_context - length,
                ),
            )
        end = length + entry.sl + 1 if entry.verifies else request.cached + entry.rows
        return entry if self.blocks.reserve(request.table, end) else None

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.trim(request.table, 0)
        request.cached = request.draft_cached = 0
        self.preemptions += 1
        self.add(request)
