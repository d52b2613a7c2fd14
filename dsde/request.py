"""What a user asks for and what comes back: sampling parameters, the request in flight, the completion."""

from __future__ import annotations

import contextlib
import math
import operator
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from .blocks import BlockTable

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
StoppingCriterion = Callable[[torch.Tensor], bool]


@dataclass(frozen=True, eq=False)
class Stateless:
    """A logits processor that looks at the logits only, and at each row by itself.

    Unlike others, which are called for one position at a time, it is called for all rows of a step at once, those of
    other requests with the same `Stateless` included.

    Parameters
    ----------
    processor : callable
        ``processor(prefix [R, 0] int64, logits [R, V] f32) -> logits [R, V]``; the prefix is empty.
    """

    processor: LogitsProcessor

    def __call__(self, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Process rows [R, V]."""
        return self.processor(prefix, logits)


_TINY = 1e-30


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Parameters
    ----------
    max_new_tokens : int
        Most tokens to generate; the request may end earlier at the model's context limit.
    temperature : float
        0 decodes greedily (lowest id on ties); above 0 the logits are divided by it.
    top_k, top_p, min_p : optional
        Truncation, applied to target and draft alike, in this order and after the temperature, as transformers does.
    seed : int, optional
        64-bit seed of the request's random streams; None derives one from the engine's seed and the request's id. Noise
        is keyed by the request's own steps, so under DSDE's batch cap, where neighbours shape the steps, the same seed
        gives the same distribution but not the same tokens in another batch.
    stop : sequence of str
        The request ends with the token that completes one of these; needs an engine with a tokenizer.
    eos : sequence of int, optional
        Ids that end the request; None takes the target's generation config, ``()`` ends on none.
    logits_processors : sequence of callable
        Called in order as ``processor(prefix [1, n] int64, logits [1, V] f32) -> logits [1, V]`` with the exact prefix
        of each position, on target and draft logits, before temperature and truncation. One in a `Stateless` gets many
        rows at a time.
    stopping_criteria : sequence of callable
        Called as ``criterion(prefix [1, n] int64) -> bool`` after every committed token; True ends the request there.
    keep_logits : bool
        Keep the target's raw logits of each generated token, before processors, in the completion.

    Raises
    ------
    ValueError
        A value outside its range; the message names the argument and what arrived.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    eos: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    stopping_criteria: Sequence[StoppingCriterion] = ()
    keep_logits: bool = False

    def __post_init__(self) -> None:
        self._whole("max_new_tokens", 1, 2**31 - 1)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not (is_number(value) or (value is None and name != "temperature")):
                raise ValueError(f"{name} must be a number, got {value!r}")
        # The kernels compute in float32: what is no ordinary number there is refused here.
        if self.temperature != 0 and not _TINY <= self.temperature <= 1 / _TINY:
            raise ValueError(f"temperature must be 0 or in [{_TINY}, {1 / _TINY}], got {self.temperature!r}")
        if self.top_k is not None:
            self._whole("top_k", 1, 2**31 - 1)
        if self.top_p is not None and not _TINY <= self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], at least {_TINY}, got {self.top_p!r}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**63 - 1)
        self._sequence("stop", "non-empty strings", lambda s: isinstance(s, str) and s)
        self._sequence("logits_processors", "callables", callable)
        self._sequence("stopping_criteria", "callables", callable)
        if self.eos is not None:
            self._sequence("eos", "ints", lambda _: True)
            self._set("eos", tuple(whole("eos", token, 0, 2**63 - 1) for token in self.eos))

    def _whole(self, name: str, low: int, high: int) -> None:
        self._set(name, whole(name, getattr(self, name), low, high))

    def _sequence(self, name: str, what: str, allowed: Callable[[Any], Any]) -> None:
        values = getattr(self, name)
        if not isinstance(values, Sequence) or isinstance(values, str) or not all(map(allowed, values)):
            raise ValueError(f"{name} must be a sequence of {what}, got {values!r}")
        self._set(name, tuple(values))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the class is frozen for others

    @property
    def truncates(self) -> bool:
        """Whether any token is cut from the distribution before sampling."""
        return self.temperature > 0 and (
            self.top_k is not None or (self.top_p or 1.0) < 1.0 or (self.min_p is not None and self.min_p > 0)
        )


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int, also from numpy or torch; ValueError if it is none or lies outside [low, high]."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        with contextlib.suppress(TypeError):  # a tensor that is no integer
            number = operator.index(value)
            if low <= number <= high:
                return number
    raise ValueError(f"{name} must be an int in [{low}, {high}], got {value!r}")


def is_number(value: Any) -> bool:
    """Whether it can be compared and made a float; numpy's numbers can."""
    return isinstance(value, Real)


def drop_frames(error: BaseException | None) -> None:
    """Take its traceback from an error, and from those it came of: the frames would keep engine and logits alive.

    A note (from Python 3.11 on) says where it was raised.
    """
    if error is not None and error.__traceback__ is not None:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        if hasattr(error, "add_note"):
            error.add_note(f"raised at {frame.f_code.co_filename}:{line}")
        error.__traceback__ = None
        drop_frames(error.__cause__)
        drop_frames(error.__context__)


@dataclass(frozen=True)
class StepTrace:
    """One verification step of one request: what was drafted, what was kept, and the signal.

    ``sl`` drafts were proposed and ``accepted`` of them became output (fewer than verification accepted where the
    request ended inside the block); ``kld`` is their mean KL(p||q) in nats and ``wvir`` the
    variance ratio after the step, None where nothing was drafted or the controller does not compute it.
    """

    step: int
    sl: int
    accepted: int
    kld: float | None
    wvir: float | None


@dataclass(frozen=True)
class Completion:
    """The end of a request.

    ``logprobs[i]`` is log p of ``token_ids[i]`` under the target's distribution after processors, temperature and
    truncation (at temperature 1 for greedy requests); ``logits`` [generated, V] are the raw rows behind it, None unless
    asked for, or if no token came.
    ``finish_reason`` is "stop" (end-of-sequence id, stop string or criterion), "length", "abort" or "error", the last
    with the reason in ``error``. ``ttft`` and ``latency`` are seconds since submission; ``ttft`` is None if no token
    came.
    """

    request_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    logits: torch.Tensor | None
    finish_reason: str
    error: str | None
    trace: list[StepTrace]
    ttft: float | None
    latency: float


@dataclass(eq=False)
class Request:
    """A request in flight, with its per-sequence metadata.

    ``tokens`` is the prompt and everything committed since. ``cached`` and ``draft_cached`` count the leading tokens
    whose keys and values the target and the draft hold. ``step`` counts the verifications of this request: it keys the
    random streams, so no noise is ever used twice. ``sl`` is the speculation length the controller wants next.
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    eos: frozenset[int]
    seed: int
    limit: int  # the length at which the request ends: prompt + max_new_tokens or the context, whichever is less
    priority: int = 0
    deadline: float = math.inf
    on_tokens: Callable[[Request, list[int]], Any] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    trace: list[StepTrace] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    slot: int | None = None
    sl: int = 0
    cached: int = 0
    draft_cached: int = 0
    step: int = 0
    cause: Exception | None = None  # why it failed, or during a step would at its first row; without traceback
    error: str | None = None
    completion: Completion | None = None
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def pending(self) -> int:
        """Tokens that the target has not seen: 1 while decoding, more while (re)computing the prompt."""
        return len(self.tokens) - self.cached

    @property
    def order(self) -> tuple[float, float, int]:
        """Sort key of service: priority (high first), then earliest deadline, then arrival."""
        return (-self.priority, self.deadline, self.id)

    def fail(self, cause: Exception | None) -> None:
        """Mark the request as failed; the engine ends it with "error" after the step, and `cause` stays here."""
        self.cause = cause
        drop_frames(cause)
        no_value = "the logits at the next position are NaN or hold no finite value"
        self.error = no_value if cause is None else f"{type(cause).__name__}: {cause}"

    def finish(self, reason: str) -> Completion:
        """Freeze the request into its completion."""
        start = self.submitted
        self.completion = Completion(
            request_id=self.id,
            prompt_ids=self.prompt_ids,
            token_ids=self.tokens[len(self.prompt_ids) :],
            logprobs=self.logprobs,
            logits=torch.stack(self.logits) if self.logits else None,
            finish_reason=reason,
            error=self.error,
            trace=self.trace,
            ttft=None if self.first_token is None else self.first_token - start,
            latency=time.perf_counter() - start,
        )
        return self.completion
