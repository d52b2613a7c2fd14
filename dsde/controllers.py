"""SL adapters: who drafts how much in the next step.

A controller sees only the past: it writes each request's next ``sl`` after a verification, so whatever it does, the
output keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

import dsde_kernels as dk

from .request import Request, whole


@runtime_checkable
class Controller(Protocol):
    """What the engine asks of an SL adapter.

    Attributes
    ----------
    sl_limit : int
        Longest speculation it ever asks for; 0 means that no draft model is needed.
    """

    sl_limit: int

    def bind(self, capacity: int, device: torch.device) -> None:
        """Called once by the engine: `capacity` slots are in use at most, logits live on `device`."""

    def start(self, request: Request) -> None:
        """A request enters a slot: set its first ``sl``."""

    def verify(self, requests: Sequence[Request], **inputs: Any) -> dk.Verification | dk.StepResult:
        """Verify the step's drafts; `inputs` are the arguments of `dsde_kernels.verify`."""

    def observe(self, requests: Sequence[Request], result: Any) -> None:
        """After verification: set the ``sl`` of each request's next step."""

    def wvir(self, requests: Sequence[Request]) -> list[float] | None:
        """Variance ratios for the trace, None if the controller keeps none."""


class Static:
    """The same speculation length for every sequence and step; 0 is plain autoregressive decoding."""

    def __init__(self, sl: int) -> None:
        self.sl_limit = whole("controller: a static speculation length", sl, 0, 2**31 - 1)

    def bind(self, capacity: int, device: torch.device) -> None:
        pass

    def start(self, request: Request) -> None:
        request.sl = self.sl_limit

    def verify(self, requests: Sequence[Request], **inputs: Any) -> dk.Verification:
        return dk.verify(**inputs)

    def observe(self, requests: Sequence[Request], result: dk.Verification) -> None:
        pass

    def wvir(self, requests: Sequence[Request]) -> None:
        return None


class Dsde:
    """DSDE (arXiv 2509.01083): SL from the stability of the KL divergence, capped by the batch mean.

    The rule's state lives beside the logits, and the update is fused with verification in `dsde_kernels.dsde_step`.
    """

    def __init__(self, rule: dk.DsdeRule | None = None) -> None:
        self.rule = rule or dk.DsdeRule()
        self.sl_limit = self.rule.sl_limit

    def bind(self, capacity: int, device: torch.device) -> None:
        if hasattr(self, "state"):
            raise ValueError("controller: this Dsde object serves another engine; its state is of that one's requests")
        self.state = dk.StabilityState(capacity, self.rule, device)

    def start(self, request: Request) -> None:
        self.state.reset(self._slots([request]))
        request.sl = self.rule.sl_start

    def verify(self, requests: Sequence[Request], **inputs: Any) -> dk.StepResult:
        return dk.dsde_step(**inputs, state=self.state, slots=self._slots(requests), rule=self.rule)

    def observe(self, requests: Sequence[Request], result: dk.StepResult) -> None:
        for request, sl in zip(requests, result.next_sl.tolist(), strict=True):
            request.sl = sl

    def wvir(self, requests: Sequence[Request]) -> list[float]:
        values: list[float] = self.state.wvir[self._slots(requests)].tolist()
        return values

    def _slots(self, requests: Sequence[Request]) -> torch.Tensor:
        return torch.tensor([r.slot for r in requests], device=self.state.sl.device)


def named(name: str | Controller) -> Controller:
    """The controller of that name: "off", "static-K" or "dsde"; a controller passes through.

    Raises
    ------
    ValueError
        An unknown name, or an object that lacks a part of the protocol.
    """
    if isinstance(name, Controller) and not isinstance(name, type):
        return name
    if not isinstance(name, str):
        raise ValueError(f"controller must be a name or an object with the protocol of Controller, got {name!r}")
    if name == "off":
        return Static(0)
    if name == "dsde":
        return Dsde()
    kind, _, k = name.partition("-")
    if kind == "static" and k.isdecimal():
        return Static(int(k))
    raise ValueError(f'controller must be "off", "static-K" or "dsde", got {name!r}')
