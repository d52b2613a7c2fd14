"""Per-row sampling arguments of a step, and the logits processors: shared by draft and target so that both agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import dsde_kernels as dk

from .request import Request, describe


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


def process_logits(request: Request, prefix: torch.Tensor, logits: torch.Tensor, vocabulary: int) -> None:
    """Run the request's logits processors on one position, in place.

    Parameters
    ----------
    request : Request
        Whose processors; if one raises or returns another shape, ``cause`` says so and the row becomes NaN. A drafted
        row is then rejected, and the request ends only if verification comes to need a target row like that.
    prefix : Tensor [1, n] int64
        The exact prefix of the position.
    logits : Tensor [<= vocabulary]
        The position's row, of target or draft.
    vocabulary : int
        Width that processors see; tokens that a narrower draft lacks have -inf.
    """
    row = logits.new_full((1, vocabulary), float("-inf"))
    row[0, : len(logits)] = logits
    try:
        for processor in request.params.logits_processors:
            row = processor(prefix, row)
        logits.copy_(row.view(vocabulary)[: len(logits)])
    except Exception as cause:  # user code: only this request may suffer
        request.cause = describe(cause)
        logits.fill_(float("nan"))
