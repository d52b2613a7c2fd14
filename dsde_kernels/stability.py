"""The DSDE rule: how stable was a sequence's KLD of late, and how long should its next draft be.

Per sequence, over the KLD values of every drafted position (accepted or not), newest last; arXiv 2509.01083:

    Var_w(n) = sum w (x - m)^2 / sum w,  m = sum w x / sum w,  w = decay^age      over the newest n values
    WVIR     = Var_w(short_window) / Var_w(long_window)
    SF       = exp(alpha * mu) - 1                              mu = mean KLD of this step's positions
    SL_hat   = ceil(SL_min + (1 - SF * WVIR) (SL_max - SL_min)) if SF * WVIR <= 1, else SL_min

Calibration (until `calibration_tokens` were drafted): SL starts at `sl_start` and doubles after a step in which
everything drafted was accepted, up to `sl_limit`. The step that completes the count still belongs to it; then, once and
for all,

    SL_max   = round(A (1 + sl_max_coefficient * mean KLD / (max KLD + 1e-6)))  within [sl_min, sl_limit]
               A = most drafts accepted in one step; mean and maximum over the phase

and SL_hat already follows the rule. The cap limits the batch's stragglers:

    SL_cap   = round(mean of SL_hat) over the sequences past calibration that drafted in this step
    SL       = min(SL_hat, SL_cap) for every sequence past calibration, also for one that sat this step out

Edge rules
* WVIR is 0 with fewer than two values and 20 where the long variance is below 1e-6.
* A KLD above 1e15 counts as 1e15, so that its square is finite.
* A step without drafts, with a KLD that is not finite, or of a sequence that failed (`ok`) changes nothing in the slot.
* Nobody past calibration drafted: SL_cap = +inf and nothing is capped.
* Both roundings go to the nearest integer, halves up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .backend import traced, use_triton
from .checks import check_device, check_ragged, check_range, check_tensor, check_vector
from .kld import FARTHEST

_CAPS = ("nearest", "floor", "ceil", None)
_EPS = 1e-6
_FLAT = 1e-6  # a long variance below this is no yardstick ...
_FLAT_WVIR = 20.0  # ... and counts as maximal instability

# A slot's row after the KLD history: four float32 numbers, then four int32 numbers in the same kind of four bytes.
NUMBERS = ("kld_sum", "kld_max", "mean_kld", "wvir", "drafted", "most_accepted", "sl", "sl_max")


@dataclass(frozen=True)
class DsdeRule:
    """Constants of the DSDE rule; the defaults are the paper's.

    Parameters
    ----------
    alpha : float
        Steepness of SF, per nat.
    decay : float in (0, 1]
        Weight of a value relative to the next newer one.
    short_window, long_window : int
        Values (drafted tokens, not steps) in the two variances.
    sl_min, sl_limit, sl_start : int
        Smallest and largest speculation length, and the first one of a request, in tokens.
    calibration_tokens : int
        Drafted tokens after which calibration ends.
    sl_max_coefficient : float
        Weight of mean KLD / max KLD in SL_max.
    cap : {"nearest", "floor", "ceil", None}
        Rounding of the batch cap; None switches the cap off.
    sl_min_fraction : float in [0, 1]
        SL_min is at least ceil(sl_min_fraction * SL_max).
    divide_by_temperature : bool
        Divide mu by the temperature of sequences that are sampled.

    Raises
    ------
    ValueError
        A field out of its range.
    """

    alpha: float = 2.0
    decay: float = 0.85
    short_window: int = 10
    long_window: int = 30
    sl_min: int = 2
    sl_limit: int = 10
    sl_start: int = 5
    calibration_tokens: int = 30
    sl_max_coefficient: float = 1.0
    cap: str | None = "nearest"
    sl_min_fraction: float = 0.0
    divide_by_temperature: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind = type(getattr(DsdeRule, name))  # of the default
            fine = type(value) is kind or (kind is float and type(value) is int)
            if name != "cap" and not (fine and abs(value) < 2**31):
                raise ValueError(f"{name} must be {kind.__name__}, and of ordinary size; got {value!r}")
        checks = (
            ("alpha", self.alpha >= 0, "not negative"),
            ("decay", 0 < self.decay <= 1, "in (0, 1]"),
            ("short_window", self.short_window >= 1, "at least 1"),
            ("long_window", self.long_window >= self.short_window, "at least short_window"),
            ("sl_min", self.sl_min >= 1, "at least 1"),
            ("sl_limit", self.sl_limit >= self.sl_min, "at least sl_min"),
            ("sl_start", self.sl_min <= self.sl_start <= self.sl_limit, "in [sl_min, sl_limit]"),
            ("calibration_tokens", self.calibration_tokens >= 1, "at least 1"),
            ("sl_max_coefficient", self.sl_max_coefficient >= 0, "not negative"),
            ("cap", self.cap in _CAPS, "one of 'nearest', 'floor', 'ceil', None"),
            ("sl_min_fraction", 0 <= self.sl_min_fraction <= 1, "in [0, 1]"),
        )
        for name, fine, wanted in checks:
            if not fine:
                raise ValueError(f"{name} must be {wanted}; got {getattr(self, name)!r}")

    def numbers(self) -> list[float]:
        """The fields as numbers, `cap` by its place among the choices: an argument for a registered op."""
        return [float(_CAPS.index(x) if name == "cap" else x) for name, x in vars(self).items()]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "DsdeRule":
        """The rule that `numbers` came from."""
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)} | {"cap": int}
        values = {name: kind(x) for (name, kind), x in zip(kinds.items(), numbers, strict=True)}
        return cls(**values | {"cap": _CAPS[values["cap"]]})

    @classmethod
    def released_code(cls) -> "DsdeRule":
        """The constants of the authors' released code, where it departs from the paper."""
        return cls(
            decay=0.9,
            calibration_tokens=100,
            sl_max_coefficient=0.5,
            cap="ceil",
            sl_min_fraction=0.1,
            divide_by_temperature=True,
        )


class StabilityState:
    """What the rule remembers of each sequence, one slot a sequence.

    A slot is one row of a float32 table, so an update reads and writes a single run of memory: the KLD history, oldest
    first, then a few numbers, of which the integers share the storage as int32. The attributes below are views of it.

    Parameters
    ----------
    capacity : int
        Number of slots.
    rule : DsdeRule
    device : torch.device or str

    Attributes
    ----------
    sl : [capacity] int32
        Uncapped next speculation length: start value or its doublings in calibration, SL_hat afterwards.
    sl_max : [capacity] int32
        SL_max; `sl_limit` until calibration ends.
    wvir, mean_kld : [capacity] float32
        WVIR and mu of the last step with drafts.
    drafted : [capacity] int32
        Drafted tokens so far; calibration ends at ``rule.calibration_tokens``.
    """

    def __init__(self, capacity: int, rule: DsdeRule, device: torch.device | str = "cpu") -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
            raise ValueError(f"capacity must be an int >= 0; got {capacity!r}")
        if not isinstance(rule, DsdeRule):
            raise ValueError(f"rule must be a DsdeRule; got {type(rule).__name__}")
        window = rule.long_window
        start = torch.zeros(window + len(NUMBERS))
        start.view(torch.int32)[-2:] = torch.tensor([rule.sl_start, rule.sl_limit])
        self._start = start.to(device)
        age = torch.arange(window - 1, -1, -1)
        weight = rule.decay ** age.float()
        weights = torch.stack((weight * (age < rule.short_window), weight)).to(device)  # of the two variances
        self._hold(self._start.repeat(capacity, 1), weights)

    def _hold(self, table: Tensor, weights: Tensor) -> None:
        self.table, self.weights = table, weights
        _, _, self.mean_kld, self.wvir = table[:, -8:-4].unbind(-1)
        self.drafted, _, self.sl, self.sl_max = table.view(torch.int32)[:, -4:].unbind(-1)

    @classmethod
    def of(cls, table: Tensor, weights: Tensor) -> "StabilityState":
        """A state on the storage of another one, which a registered op gets as tensors."""
        state = cls.__new__(cls)
        state._hold(table, weights)
        return state

    def reset(self, slots: Tensor) -> None:
        """Set `slots` ([n] int64 or int32) to the start of a request."""
        check_slots(self, slots)
        self.table[slots.long()] = self._start


def _weighted_variances(history: Tensor, count: Tensor, weights: Tensor) -> Tensor:
    """Var_w of the newest values of `history` [B, long_window] under each row of `weights` [2, long_window]: [2, B]."""
    age = torch.arange(history.shape[1] - 1, -1, -1, device=history.device)
    weight = weights[:, None] * (age < count[:, None])
    total = weight.sum(-1)
    mean = (weight * history).sum(-1).div_(total)
    return (history - mean[..., None]).square_().mul_(weight).sum(-1).div_(total)


def stability_update_torch(
    state: StabilityState,
    slots: Tensor,
    kld: Tensor,
    cu_draft: Tensor,
    num_accepted: Tensor,
    rule: DsdeRule,
    temperature: Tensor | None,
    ok: Tensor | None,
) -> Tensor:
    window, drafts = rule.long_window, kld.shape[0]
    if not drafts:
        return torch.zeros_like(slots, dtype=torch.bool)
    first, k = cu_draft[:-1, None], cu_draft[1:] - cu_draft[:-1]
    column = torch.arange(int(k.max()), device=k.device)
    new = kld[(first + column).clamp_(max=drafts - 1)].masked_fill_(column >= k[:, None], 0.0)  # [B, most k]
    proposed = (k > 0) & (new < torch.inf).all(-1)  # NaN is not below infinity either
    new.clamp_(max=FARTHEST)
    total = new.cumsum(-1)[:, -1]  # in order: the rounding of a sum would depend on the width, so on the batch
    if ok is not None:
        proposed &= ok

    slots = slots.long()
    before = state.table.index_select(0, slots)
    kld_sum, kld_max, *_ = before[:, window:].unbind(-1)
    *_, count, most_accepted, sl, sl_max = before.view(torch.int32)[:, window:].unbind(-1)

    # The last `window` of the values that are there: history, then the k new ones.
    newest = torch.arange(window, device=k.device) + k[:, None]
    history = torch.cat((before[:, :window], new), 1).gather(1, newest)
    mu = total / k
    drafted = count + k
    # Sum, maximum and most accepted run on after calibration, but are read only when it ends.
    kld_sum = kld_sum + total
    kld_max = torch.maximum(kld_max, new.amax(-1))
    most_accepted = torch.maximum(most_accepted, num_accepted)
    done = drafted >= rule.calibration_tokens
    ends = done & (count < rule.calibration_tokens)
    if ends.any():
        ratio = kld_sum / drafted / (kld_max + _EPS)
        raw = most_accepted * (1 + rule.sl_max_coefficient * ratio)
        sl_max = torch.where(ends, (raw + 0.5).floor_().clamp_(rule.sl_min, rule.sl_limit).int(), sl_max)

    short, long = _weighted_variances(history, drafted, state.weights)
    wvir = (short / long).masked_fill_(long < _FLAT, _FLAT_WVIR).masked_fill_(drafted < 2, 0.0)
    scaled = mu
    if rule.divide_by_temperature and temperature is not None:
        scaled = mu / temperature.masked_fill(temperature == 0, 1.0)
    # Finite also where exp would overflow, so that 0 * WVIR stays 0; far beyond 1 either way.
    x = (rule.alpha * scaled).clamp_(max=80.0).expm1_().mul_(wvir)
    sl_min: Tensor | int = rule.sl_min
    if rule.sl_min_fraction:
        sl_min = (rule.sl_min_fraction * sl_max).ceil_().clamp_(min=rule.sl_min)
    ideal = (sl_min + (1 - x).clamp_(min=0.0) * (sl_max - sl_min)).ceil_()
    doubled = torch.where(num_accepted == k, (2 * sl).clamp_(max=rule.sl_limit), sl)
    sl = torch.where(done, ideal.int(), doubled)

    floats = torch.stack((kld_sum, kld_max, mu, wvir), 1)
    integers = torch.stack((drafted.int(), most_accepted.int(), sl, sl_max), 1)
    after = torch.cat((history, floats, integers.view(torch.float32)), 1)
    state.table.index_copy_(0, slots, torch.where(proposed[:, None], after, before))
    return proposed


def speculation_lengths_torch(
    state: StabilityState, slots: Tensor, rule: DsdeRule, proposed: Tensor | None
) -> tuple[Tensor, Tensor]:
    sl = state.sl[slots]
    if rule.cap is None:
        return sl, torch.full((), torch.inf, device=sl.device)
    past = state.drafted[slots] >= rule.calibration_tokens
    voters = past if proposed is None else past & proposed
    mean = (sl * voters).sum() / voters.sum()  # nobody: 0 / 0
    if rule.cap == "nearest":
        cap = (mean + 0.5).floor_()
    else:
        cap = mean.floor_() if rule.cap == "floor" else mean.ceil_()
    cap.nan_to_num_(nan=torch.inf)
    return torch.where(past, sl.minimum(cap), sl).int(), cap


def check_state(state: StabilityState, slots: Tensor, rule: DsdeRule, sequences: int | None = None) -> None:
    """Raise ValueError unless `state` fits `rule` and `slots` are places in it, one for each of `sequences`."""
    if not isinstance(rule, DsdeRule):
        raise ValueError(f"rule must be a DsdeRule; got {type(rule).__name__}")
    if not isinstance(state, StabilityState):
        raise ValueError(f"state must be a StabilityState; got {type(state).__name__}")
    width = state.table.shape[1]
    if width != rule.long_window + len(NUMBERS):
        raise ValueError(
            f"state must be built for the rule's long_window of {rule.long_window}; got one for {width - len(NUMBERS)}"
        )
    check_slots(state, slots, sequences)


def check_slots(state: StabilityState, slots: Tensor, sequences: int | None = None) -> None:
    """Raise ValueError unless `slots` are different places of `state`, one for each of `sequences`."""
    check_tensor("slots", slots)
    check_vector("slots", slots, slots.numel() if sequences is None else sequences, state.table.device, integer=True)
    if slots.device.type == "cpu":
        places, capacity = slots.tolist(), state.table.shape[0]
        if len(set(places)) < len(places) or any(not 0 <= x < capacity for x in places):
            raise ValueError(f"slots must differ and lie in [0, {capacity}); got {places}")


@torch.no_grad()
def stability_update(
    state: StabilityState,
    slots: Tensor,
    kld: Tensor,
    cu_draft: Tensor,
    num_accepted: Tensor,
    rule: DsdeRule,
    temperature: Tensor | None = None,
    ok: Tensor | None = None,
) -> Tensor:
    """Take one verified step into the slots of its sequences (in place) and compute their uncapped next lengths.

    Parameters
    ----------
    state : StabilityState
        Built for the same `rule`; its slots `slots` are changed.
    slots : [B] int32 or int64
        A different slot for each sequence.
    kld : [N] float32
        KLD of each drafted position, nats.
    cu_draft : [B+1] int32 or int64
        Sequence i owns the positions ``cu_draft[i]`` to ``cu_draft[i+1] - 1``.
    num_accepted : [B] int32 or int64
        Drafts that were kept.
    rule : DsdeRule
    temperature : [B] float32, optional
        Read only if ``rule.divide_by_temperature``; None counts as 1, and so does 0.
    ok : [B] bool, optional
        Sequences that did not fail; None: all.

    Returns
    -------
    proposed : [B] bool
        Sequences whose slot took the step: they drafted something, all of it with a finite KLD, and are `ok`.

    Raises
    ------
    ValueError
        Wrong shape, dtype or device.
    """
    if traced(kld):
        arguments = (slots, kld, cu_draft, num_accepted, rule.numbers(), temperature, ok)
        return torch.ops.dsde_kernels.stability_update(state.table, state.weights, *arguments)
    return run_stability_update(state, slots, kld, cu_draft, num_accepted, rule, temperature, ok)


def run_stability_update(
    state: StabilityState,
    slots: Tensor,
    kld: Tensor,
    cu_draft: Tensor,
    num_accepted: Tensor,
    rule: DsdeRule,
    temperature: Tensor | None,
    ok: Tensor | None,
) -> Tensor:
    check_state(state, slots, rule)
    rows, device = slots.shape[0], state.table.device
    check_tensor("kld", kld)
    check_vector("kld", kld, kld.numel(), device, integer=False)
    check_vector("cu_draft", cu_draft, rows + 1, device, integer=True)
    check_vector("num_accepted", num_accepted, rows, device, integer=True)
    check_ragged(cu_draft, kld.numel())
    check_range("num_accepted", num_accepted, 0, kld.numel())
    if temperature is not None:
        check_vector("temperature", temperature, rows, device, integer=False)
        check_range("temperature", temperature, 0.0, torch.finfo(torch.float32).max)
    if ok is not None:
        check_tensor("ok", ok)
        check_device("ok", ok, device)
        if ok.dtype != torch.bool or ok.shape != (rows,):
            raise ValueError(f"ok must be bool of shape [{rows}]; got {ok.dtype} of shape {list(ok.shape)}")
    if use_triton(device):
        from .stability_kernel import stability_update_triton

        return stability_update_triton(state, slots, kld, cu_draft, num_accepted, rule, temperature, ok)
    return stability_update_torch(state, slots, kld, cu_draft, num_accepted, rule, temperature, ok)


@torch.no_grad()
def speculation_lengths(
    state: StabilityState, slots: Tensor, rule: DsdeRule, proposed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Next speculation length of each sequence of a batch under the batch cap.

    Parameters
    ----------
    state : StabilityState
    slots : [B] int32 or int64
    rule : DsdeRule
    proposed : [B] bool, optional
        Sequences that drafted in this step, as `stability_update` returns it: only they enter the mean. None: all.

    Returns
    -------
    next_sl : [B] int32
        min(SL_hat, SL_cap) past calibration; the start value or its doublings before.
    sl_cap : 0-d float32
        +inf where no sequence takes part or the rule has no cap.

    Raises
    ------
    ValueError
        Wrong shape, dtype or device.
    """
    if traced(slots):
        return torch.ops.dsde_kernels.speculation_lengths(state.table, state.weights, slots, rule.numbers(), proposed)
    return run_speculation_lengths(state, slots, rule, proposed)


def run_speculation_lengths(
    state: StabilityState, slots: Tensor, rule: DsdeRule, proposed: Tensor | None
) -> tuple[Tensor, Tensor]:
    check_state(state, slots, rule)
    if proposed is not None:
        check_tensor("proposed", proposed)
        check_device("proposed", proposed, slots.device)
        if proposed.dtype != torch.bool or proposed.shape != slots.shape:
            raise ValueError(
                f"proposed must be bool of shape {list(slots.shape)}; got {proposed.dtype} of {list(proposed.shape)}"
            )
    return speculation_lengths_torch(state, slots, rule, proposed)
