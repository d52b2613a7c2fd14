"""Triton kernel of `stability.stability_update`, and the parts of the rule that the fused step shares with it.

A slot is 4 * (long_window + 8) bytes, read and written once.
"""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201, ANN202  (jit functions have neither return types nor short-circuits)

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kld_kernel import INF
from .rng_kernel import row_at
from .stability import _EPS, _FLAT, _FLAT_WVIR, DsdeRule, StabilityState

EPS, FLAT, FLAT_WVIR = tl.constexpr(_EPS), tl.constexpr(_FLAT), tl.constexpr(_FLAT_WVIR)
NUMBERS = tl.constexpr(8)  # of a slot, behind the history: four float32, four int32


def rule_arguments(rule: DsdeRule) -> dict:
    """The rule as constants of the compiler: a process has few rules, and a launch few arguments."""
    return {
        "ALPHA": rule.alpha,
        "COEFFICIENT": rule.sl_max_coefficient,
        "FRACTION": rule.sl_min_fraction,
        "SL_MIN": rule.sl_min,
        "SL_LIMIT": rule.sl_limit,
        "CALIBRATION": rule.calibration_tokens,
        "WINDOW": rule.long_window,
        "WINDOW_BLOCK": triton.next_power_of_2(rule.long_window),
        "DIVIDE": rule.divide_by_temperature,
    }


@triton.jit
def _variance(history, count, weights, age, WINDOW: tl.constexpr):
    """Var_w of the newest `count` values."""
    weight = tl.load(weights + WINDOW - 1 - age, mask=(age >= 0) & (age < count), other=0.0)
    whole = tl.sum(weight, 0)
    mean = tl.div_rn(tl.sum(weight * history, 0), whole)
    return tl.div_rn(tl.sum((history - mean) * (history - mean) * weight, 0), whole)


@triton.jit
def update_slot(
    table, slot, weights,
    kld, k, accepted, ok, temperature,
    ALPHA: tl.constexpr, COEFFICIENT: tl.constexpr, FRACTION: tl.constexpr, SL_MIN: tl.constexpr,
    SL_LIMIT: tl.constexpr, CALIBRATION: tl.constexpr, WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    """Take the k values at `kld` into a slot. Its uncapped length, whether it is past calibration, whether it voted."""
    sum_new, max_new = 0.0, 0.0
    for j in range(k):  # in order: the rounding of a tree would depend on its width
        value = tl.load(kld + j)
        sum_new += value
        max_new = tl.maximum(max_new, value)
    proposed = ok & (k > 0) & (sum_new < INF)

    row = row_at(table, slot, WINDOW + NUMBERS)
    place = tl.arange(0, WINDOW_BLOCK)
    source = place + k  # in the history with the new values behind it
    history = tl.load(row + source, mask=source < WINDOW, other=0.0)
    history += tl.load(kld + source - WINDOW, mask=(source >= WINDOW) & (place < WINDOW), other=0.0)
    floats = row + WINDOW
    integers = floats.to(tl.pointer_type(tl.int32), bitcast=True)
    kld_sum = tl.load(floats) + sum_new
    kld_max = tl.maximum(tl.load(floats + 1), max_new)
    before, most_accepted = tl.load(integers + 4), tl.load(integers + 5)
    sl, sl_max = tl.load(integers + 6), tl.load(integers + 7)
    was_past = before >= CALIBRATION

    drafted = before + k
    done = drafted >= CALIBRATION
    most_accepted = tl.maximum(most_accepted, accepted)
    if done & (before < CALIBRATION):
        ratio = tl.div_rn(tl.div_rn(kld_sum, drafted.to(tl.float32)), kld_max + EPS)
        raw = most_accepted.to(tl.float32) * (1.0 + COEFFICIENT * ratio)
        sl_max = tl.minimum(tl.maximum(tl.floor(raw + 0.5), SL_MIN * 1.0), SL_LIMIT * 1.0).to(tl.int32)

    age = WINDOW - 1 - place
    short = _variance(history, drafted, weights, age, WINDOW)
    long = _variance(history, drafted, weights + WINDOW, age, WINDOW)
    wvir = tl.where(drafted < 2, 0.0, tl.where(long < FLAT, FLAT_WVIR, tl.div_rn(short, long)))
    mu = tl.div_rn(sum_new, k.to(tl.float32))
    scaled = mu
    if DIVIDE:
        scaled = tl.div_rn(mu, tl.where(temperature == 0, 1.0, temperature))
    # Finite also where exp would overflow, so that 0 * WVIR stays 0.
    x = tl.maximum(tl.exp(tl.minimum(ALPHA * scaled, 80.0)) - 1.0, 0.0) * wvir
    lowest = tl.maximum(tl.ceil(FRACTION * sl_max.to(tl.float32)), SL_MIN * 1.0)
    ideal = tl.ceil(lowest + tl.maximum(1.0 - x, 0.0) * (sl_max.to(tl.float32) - lowest)).to(tl.int32)
    doubled = tl.where(accepted == k, tl.minimum(2 * sl, SL_LIMIT), sl)

    tl.debug_barrier()  # the history moves: every thread has read before one writes
    if proposed:
        sl = tl.where(done, ideal, doubled)
        tl.store(row + place, history, mask=place < WINDOW)
        tl.store(floats, kld_sum)
        tl.store(floats + 1, kld_max)
        tl.store(floats + 2, mu)
        tl.store(floats + 3, wvir)
        tl.store(integers + 4, drafted)
        tl.store(integers + 5, most_accepted)
        tl.store(integers + 6, sl)
        tl.store(integers + 7, sl_max)
    return sl, tl.where(proposed, done, was_past), proposed


@triton.jit(do_not_specialize_on_alignment=["slots", "kld", "cu_draft", "num_accepted", "temperature"])
def update_kernel(
    table, slots, weights,  # [capacity, window + NUMBERS], [B], [2, WINDOW]
    kld, cu_draft, num_accepted, temperature, ok,  # [N], [B+1], [B], [B] or None, [B] or None
    proposed,  # [B]
    ALPHA: tl.constexpr, COEFFICIENT: tl.constexpr, FRACTION: tl.constexpr, SL_MIN: tl.constexpr,
    SL_LIMIT: tl.constexpr, CALIBRATION: tl.constexpr, WINDOW: tl.constexpr, WINDOW_BLOCK: tl.constexpr,
    DIVIDE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    first = tl.load(cu_draft + i)
    t = 1.0
    if temperature is not None:
        t = tl.load(temperature + i)
    fine = i >= 0
    if ok is not None:
        fine = tl.load(ok + i) != 0
    _sl, _past, took = update_slot(
        table, tl.load(slots + i), weights,
        kld + first, (tl.load(cu_draft + i + 1) - first).to(tl.int32), tl.load(num_accepted + i).to(tl.int32), fine, t,
        ALPHA, COEFFICIENT, FRACTION, SL_MIN, SL_LIMIT, CALIBRATION, WINDOW, WINDOW_BLOCK, DIVIDE,
    )  # fmt: skip
    tl.store(proposed + i, took)


def stability_update_triton(
    state: StabilityState,
    slots: Tensor,
    kld: Tensor,
    cu_draft: Tensor,
    num_accepted: Tensor,
    rule: DsdeRule,
    temperature: Tensor | None,
    ok: Tensor | None,
) -> Tensor:
    proposed = torch.empty(slots.shape, dtype=torch.bool, device=slots.device)
    if slots.shape[0]:
        update_kernel[(slots.shape[0],)](
            state.table, slots.contiguous(), state.weights,
            kld.contiguous(), cu_draft.contiguous(), num_accepted.contiguous(),
            None if temperature is None else temperature.contiguous(),
            None if ok is None else ok.contiguous(),
            proposed, **rule_arguments(rule), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return proposed
