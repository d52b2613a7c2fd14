"""Triton kernel of `stability.stability_update`, and the parts of the rule that the fused step shares with it.

A slot is 4 * (long_window + 8) bytes, read and written once.
"""

# mypy: allow-incomplete-defs
# ruff: noqa: ANN201, ANN202  (jit functions have neither return types nor short-circuits)

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .kld import FARTHEST as _FARTHEST
from .kld_kernel import INF
from .rng_kernel import row_at
from .stability import _EPS, _FLAT, _FLAT_WVIR, NUMBERS, DsdeRule, StabilityState

EPS, FLAT, FLAT_WVIR = tl.constexpr(_EPS), tl.constexpr(_FLAT), tl.constexpr(_FLAT_WVIR)
FARTHEST = tl.constexpr(_FARTHEST)
# Places in a slot, behind the history.
KLD_SUM, KLD_MAX, MEAN_KLD, LAST_WVIR, DRAFTED, MOST_ACCEPTED, SL, SL_MAX = map(tl.constexpr, range(len(NUMBERS)))
SLOT_NUMBERS = tl.constexpr(len(NUMBERS))


@triton.jit
def _variance(history, count, weights, age, WINDOW: tl.constexpr):
    """Var_w of the newest `count` values."""
    weight = tl.load(weights + WINDOW - 1 - age, mask=(age >= 0) & (age < count), other=0.0)
    whole = tl.sum(weight, 0)
    mean = tl.div_rn(tl.sum(weight * history, 0), whole)
    return tl.div_rn(tl.sum((history - mean) * (history - mean) * weight, 0), whole)


@triton.jit
def _expm1(x):
    """exp(x) - 1 of x >= 0; by its series where the difference would cancel."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return tl.where(x < 0.1, series, tl.exp(x) - 1)


@triton.jit
def update_slot(table, slot, weights, kld, k, accepted, ok, temperature, RULE: tl.constexpr):
    """Take the k values at `kld` into a slot. Its uncapped length, whether it is past calibration, whether it voted."""
    WINDOW: tl.constexpr = RULE.long_window
    sum_new, max_new = 0.0, 0.0
    proposed = ok & (k > 0)
    for j in range(k):  # in order: the rounding of a tree would depend on its width
        value = tl.load(kld + j)
        proposed = proposed & (value < INF)
        value = tl.minimum(value, FARTHEST)
        sum_new += value
        max_new = tl.maximum(max_new, value)

    row = row_at(table, slot, WINDOW + SLOT_NUMBERS)
    place = tl.arange(0, triton.next_power_of_2(WINDOW))
    source = place + k  # in the history with the new values behind it
    history = tl.load(row + source, mask=source < WINDOW, other=0.0)
    new = tl.load(kld + source - WINDOW, mask=(source >= WINDOW) & (place < WINDOW), other=0.0)
    history += tl.minimum(new, FARTHEST)
    floats = row + WINDOW
    integers = floats.to(tl.pointer_type(tl.int32), bitcast=True)
    kld_sum = tl.load(floats + KLD_SUM) + sum_new
    kld_max = tl.maximum(tl.load(floats + KLD_MAX), max_new)
    before, most_accepted = tl.load(integers + DRAFTED), tl.load(integers + MOST_ACCEPTED)
    sl, sl_max = tl.load(integers + SL), tl.load(integers + SL_MAX)
    was_past = before >= RULE.calibration_tokens

    drafted = before + k
    done = drafted >= RULE.calibration_tokens
    most_accepted = tl.maximum(most_accepted, accepted)
    if done & (before < RULE.calibration_tokens):
        ratio = tl.div_rn(tl.div_rn(kld_sum, drafted.to(tl.float32)), kld_max + EPS)
        raw = most_accepted.to(tl.float32) * (1.0 + RULE.sl_max_coefficient * ratio)
        sl_max = tl.minimum(tl.maximum(tl.floor(raw + 0.5), RULE.sl_min * 1.0), RULE.sl_limit * 1.0).to(tl.int32)

    age = WINDOW - 1 - place
    short = _variance(history, drafted, weights, age, WINDOW)
    long = _variance(history, drafted, weights + WINDOW, age, WINDOW)
    wvir = tl.where(drafted < 2, 0.0, tl.where(long < FLAT, FLAT_WVIR, tl.div_rn(short, long)))
    mu = tl.div_rn(sum_new, k.to(tl.float32))
    scaled = mu
    if RULE.divide_by_temperature:
        scaled = tl.div_rn(mu, tl.where(temperature == 0, 1.0, temperature))
    # Finite also where exp would overflow, so that 0 * WVIR stays 0.
    x = _expm1(tl.minimum(RULE.alpha * scaled, 80.0)) * wvir
    lowest = tl.maximum(tl.ceil(RULE.sl_min_fraction * sl_max.to(tl.float32)), RULE.sl_min * 1.0)
    ideal = tl.ceil(lowest + tl.maximum(1.0 - x, 0.0) * (sl_max.to(tl.float32) - lowest)).to(tl.int32)
    doubled = tl.where(accepted == k, tl.minimum(2 * sl, RULE.sl_limit), sl)

    tl.debug_barrier()  # the history moves: every thread has read before one writes
    if proposed:
        sl = tl.where(done, ideal, doubled)
        tl.store(row + place, history, mask=place < WINDOW)
        tl.store(floats + KLD_SUM, kld_sum)
        tl.store(floats + KLD_MAX, kld_max)
        tl.store(floats + MEAN_KLD, mu)
        tl.store(floats + LAST_WVIR, wvir)
        tl.store(integers + DRAFTED, drafted)
        tl.store(integers + MOST_ACCEPTED, most_accepted)
        tl.store(integers + SL, sl)
        tl.store(integers + SL_MAX, sl_max)
    return sl, tl.where(proposed, done, was_past), proposed


@triton.jit(do_not_specialize_on_alignment=["slots", "kld", "cu_draft", "num_accepted", "temperature"])
def update_kernel(
    table, slots, weights,  # [capacity, window + 8], [B], [2, WINDOW]
    kld, cu_draft, num_accepted, temperature, ok,  # [N], [B+1], [B], [B] or None, [B] or None
    proposed,  # [B]
    RULE: tl.constexpr,
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
        RULE,
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
        with torch.cuda.device_of(proposed):
            update_kernel[(slots.shape[0],)](
                state.table, slots.contiguous(), state.weights,
                kld.contiguous(), cu_draft.contiguous(), num_accepted.contiguous(),
                None if temperature is None else temperature.contiguous(),
                None if ok is None else ok.contiguous(),
                proposed, rule,
                num_warps=launch.WARPS, enable_fp_fusion=False,  # as many as the fused step: sums in the same order
            )  # fmt: skip
    return proposed
