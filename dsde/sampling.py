"""Per-row sampling arguments of a step, and the logits processors: shared by draft and target so that both agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import dsde_kernels as dk

from .request import LogitsProcessor, Request, Stateless, drop_frames


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters of some requests as tensors, one value a request.

    ``temperature`` [B] f32, ``seed`` [B] int64, ``step`` [B] int64 (verifications so far); ``truncation`` holds top_k,
    top_p, min_p [B], or None where no request truncates.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    step: torch.Tensor
    truncation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> RowParams:
        """Collect the parameters of `requests`."""
        params = [r.params for r in requests]
        truncation = None
        if any(p.truncates for p in params):
            truncation = (
                torch.tensor([p.top_k or 0 for p in params], device=device),
                torch.tensor([p.top_p or 1.0 for p in params], dtype=torch.float32, device=device),
                torch.tensor([p.min_p or 0.0 for p in params], dtype=torch.float32, device=device),
            )
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([r.seed for r in requests], device=device),
            torch.tensor([r.step for r in requests], device=device),
            truncation,
        )

    def to(self, device: torch.device) -> RowParams:
        """The same parameters on another device."""
        if self.temperature.device == device:
            return self
        return RowParams(
            self.temperature.to(device),
            self.seed.to(device),
            self.step.to(device),
            None if self.truncation is None else tuple(t.to(device) for t in self.truncation),  # type: ignore[arg-type]
        )

    def take(self, rows: torch.Tensor) -> RowParams:
        """The parameters of a selection (or repetition) of rows."""
        return RowParams(
            self.temperature[rows],
            self.seed[rows],
            self.step[rows],
            None if self.truncation is None else tuple(t[rows] for t in self.truncation),  # type: ignore[arg-type]
        )

    def threshold(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Truncation thresholds of `logits` [B, V], None where nothing is truncated."""
        if self.truncation is None:
            return None
        top_k, top_p, min_p = self.truncation
        return dk.truncation_threshold(logits, self.temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def process_rows(
    owners: Sequence[Request],
    prefixes: Sequence[Sequence[int]],
    logits: torch.Tensor,
    vocabulary: int,
    device: torch.device,
) -> torch.Tensor:
    """Run the requests' logits processors on the rows of a step.

    Parameters
    ----------
    owners : sequence of Request, R
        Whose row it is. If one of its processors raises or returns another shape, the row becomes NaN. The request's
        ``cause`` becomes the exception of the first such row, None without one: drafting stops at such a row of the
        draft, and the request ends only if verification comes to need a target row like that.
    prefixes : sequence of sequences of int, R
        The exact prefix of each row.
    logits : Tensor [R, <= vocabulary]
        Rows of target or draft; unchanged.
    vocabulary, device : int, torch.device
        Of the target. Processors see its width, where tokens that a narrower draft lacks have -inf, and its device.

    Returns
    -------
    Tensor [R, logits.shape[1]] f32
        On the device of `logits`; float32 whatever the model computes in, as in transformers.
    """
    block = torch.full((len(logits), vocabulary), float("-inf"), device=device)
    block[:, : logits.shape[1]] = logits
    failed: dict[int, Exception] = {}
    tensors: dict[int, torch.Tensor] = {}  # prefixes that a processor looks at
    for place in range(max(len(r.params.logits_processors) for r in owners)):
        groups: dict[int, tuple[LogitsProcessor, list[int]]] = {}  # requests may share processors
        for row, owner in enumerate(owners):
            if place < len(owner.params.logits_processors) and row not in failed:
                processor = owner.params.logits_processors[place]
                groups.setdefault(id(processor), (processor, []))[1].append(row)
        for processor, group in groups.values():
            together = isinstance(processor, Stateless)
            calls = [group] if together else [[row] for row in group]
            while calls:
                rows = calls.pop(0)
                if together:
                    prefix = torch.empty(len(rows), 0, dtype=torch.long, device=device)
                elif rows[0] in tensors:
                    prefix = tensors[rows[0]]
                else:
                    prefix = tensors[rows[0]] = torch.tensor([prefixes[rows[0]]], device=device)
                try:
                    result = processor(prefix, block[rows])
                    if result.shape != (len(rows), vocabulary):
                        raise ValueError(f"logits of shape {(len(rows), vocabulary)} became {tuple(result.shape)}")
                    block[rows] = result.to(block)
                except Exception as cause:  # user code: only this request may suffer
                    if len(rows) > 1:  # whichever it was
                        calls += [[row] for row in rows]
                        continue
                    block[rows] = float("nan")
                    drop_frames(cause)
                    failed[rows[0]] = cause
    for owner in owners:
        owner.cause = None
    for row in sorted(failed, reverse=True):
        owners[row].cause = failed[row]
    return block[:, : logits.shape[1]].to(logits.device)
