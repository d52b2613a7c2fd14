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
        preempted = self.preemptions
        # Every decoding sequence is sure of its row and its block, before anyone speculates.
        for request in [r for r in self.running if r.pending == 1]:
            self._make_room(request)
        decoding = [r for r in self.running if r.pending == 1]
        prompts = [r for r in self.running if r.pending > 1]
        budget = self.max_tokens_per_step - len(decoding)
        spare = budget // 2 if prompts or self.waiting else budget  # speculation leaves rows to prompts
        entries = []
        for request in decoding:
            sl = self._lookahead(request, min(sl_limit, spare))
            self.blocks.reserve(request.table, len(request.tokens) + sl + 1)
            entries.append(Entry(request, 1, sl))
            budget -= sl
            spare -= sl
        for request in prompts:
            if budget > 0:
                entries.append(Entry(request, min(request.pending, budget)))
                budget -= entries[-1].rows
        # Whoever was preempted just now would only take the blocks back.
        if self.preemptions == preempted:
            entries += self._admit(budget)
        return entries

    def _make_room(self, request: Request) -> None:
        """Reserve the block of a decoding sequence's next token, if need be by preempting from the back."""
        while request in self.running and not self.blocks.reserve(request.table, len(request.tokens) + 1):
            self._preempt(self.running[-1])

    def _lookahead(self, request: Request, most: int) -> int:
        """Drafts for a decoding sequence: what it asks for, within rows, blocks, its limit and the draft's context."""
        length = len(request.tokens)
        bounds = [
            request.sl,
            most,
            self.blocks.room(request.table) - length - 1,
            request.limit - length - 1,  # one token always comes from the target
        ]
        if self.draft_context is not None:
            bounds.append(self.draft_context - length)
        return max(0, min(bounds))

    def _admit(self, budget: int) -> list[Entry]:
        entries = []
        while budget > 0:
            # Preempted requests keep their slot. Without a free one, they come before the head of the queue.
            ready = self.waiting if self.free_slots else [r for r in self.waiting if r.slot is not None]
            # The whole prompt gets its blocks at once, so that prompts never take them from each other.
            if not ready or not self.blocks.reserve(ready[0].table, len(ready[0].tokens) + 1):
                break
            request = ready[0]
            self.waiting.remove(request)
            if request.slot is None:
                request.slot = self.free_slots.pop()
            self.running.append(request)
            entries.append(Entry(request, min(request.pending, budget)))
            budget -= entries[-1].rows
        return entries

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.trim(request.table, 0)
        request.cached = request.draft_cached = 0
        self.preemptions += 1
        self.add(request)
