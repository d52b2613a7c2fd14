"""Target worker: scores every drafted position and the bonus position in one packed forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cache import PackedModel, Segment
from .fallback import SequentialModel
from .proposer import Drafts
from .request import Request
from .sampling import process_rows
from .scheduler import Entry


class Scorer:
    """Runs the target on the step's pending tokens and drafts."""

    def __init__(self, model: PackedModel | SequentialModel) -> None:
        self.model = model

    def score(
        self, entries: Sequence[Entry], requests: Sequence[Request], drafts: Drafts
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Target logits in the ragged layout of `dsde_kernels`.

        Parameters
        ----------
        entries : sequence of Entry
            The step, as scheduled.
        requests : sequence of Request
            Those of `entries` that verify, in order.
        drafts : Drafts
            Their proposals.

        Returns
        -------
        logits : Tensor [N + B, Vt]
            For each request its drafted positions, then its bonus position; after its processors. Float32 once any of
            the requests has some, else in the model's number format.
        raw : list of Tensor [k_i + 1, Vt] or None
            For each request that keeps logits, its rows as the model gave them.
        """
        segments: list[Segment] = []
        keep: list[int] = []
        row = 0
        proposals = iter(drafts.tokens)
        for entry in entries:
            request = entry.request
            ids = request.tokens[request.cached : request.cached + entry.rows]
            if entry.verifies:
                ids = ids + next(proposals)
                keep.extend(range(row + entry.rows - 1, row + len(ids)))
            segments.append(Segment(ids, request.cached, request.table))
            row += len(ids)
        with self.model.packed():
            logits = self.model.forward(segments, keep=keep or [0])
        processed = any(r.params.logits_processors for r in requests)
        raw: list[torch.Tensor | None] = []
        owners: list[Request] = []
        prefixes: list[list[int]] = []
        for request, tokens in zip(requests, drafts.tokens, strict=True):
            rows = logits[len(owners) : len(owners) + len(tokens) + 1]
            raw.append(rows if request.params.keep_logits else None)
            owners += [request] * len(rows)
            if processed:
                prefixes += [[*request.tokens, *tokens[:j]] for j in range(len(rows))]
        if processed:
            logits = process_rows(owners, prefixes, logits, logits.shape[1], logits.device)
        return logits, raw
