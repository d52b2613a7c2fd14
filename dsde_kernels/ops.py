"""The ops as torch.library knows them, for torch.compile, export and fake tensors.

``torch.ops.dsde_kernels.*`` take and return plain tensors: a state comes as its table, which is changed, and its
weights; a rule as its numbers. The public functions call them where they are traced.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kld import run_kl_divergence
from .launch import nothing_kept
from .sampling import run_sample, run_truncation_threshold
from .stability import DsdeRule, StabilityState, run_speculation_lengths, run_stability_update
from .verify import Inputs, Verification, run_dsde_step, run_verify

_INPUTS = (
    "Tensor target_logits, Tensor? draft_logits, Tensor draft_tokens, Tensor cu_draft, Tensor temperature, "
    "Tensor seed, Tensor step, int max_draft, Tensor? target_threshold, Tensor? draft_threshold"
)
_STATE = "Tensor(a!) table, Tensor weights, Tensor slots"
_VERIFICATION = ", ".join(["Tensor"] * len(Verification._fields))


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register `run` as an op, and `fake` for tensors without data."""
    changes = {"table"} if "(a!)" in schema else set()

    def op(*arguments: Any) -> Any:
        with nothing_kept():
            return run(*arguments)

    torch.library.custom_op(f"dsde_kernels::{name}", op, mutates_args=changes, schema=schema).register_fake(fake)
    return run


def _rows(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


def _lengths(*arguments: Any) -> tuple[Tensor, Tensor]:
    table, _, slots, *_ = arguments
    return slots.new_empty(slots.shape, dtype=torch.int32), table.new_empty(())


def _update(table: Tensor, weights: Tensor, slots: Tensor, *rest: Any) -> Tensor:
    kld, cu_draft, num_accepted, rule, temperature, ok = rest
    arguments = (kld, cu_draft, num_accepted, DsdeRule.from_numbers(rule), temperature, ok)
    return run_stability_update(StabilityState.of(table, weights), slots, *arguments)


def _next(table: Tensor, weights: Tensor, slots: Tensor, rule: list[float], proposed: Tensor | None) -> Any:
    return run_speculation_lengths(StabilityState.of(table, weights), slots, DsdeRule.from_numbers(rule), proposed)


def _step(*arguments: Any) -> Any:
    *inputs, table, weights, slots, rule = arguments
    return run_dsde_step(Inputs(*inputs), StabilityState.of(table, weights), slots, DsdeRule.from_numbers(rule))


kl_divergence = _register(
    "kl_divergence",
    "(Tensor target_logits, Tensor draft_logits, Tensor? temperature) -> Tensor",
    run_kl_divergence,
    _rows,
)
truncation_threshold = _register(
    "truncation_threshold",
    "(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> Tensor",
    run_truncation_threshold,
    _rows,
)
sample = _register(
    "sample",
    "(Tensor logits, Tensor temperature, Tensor seed, Tensor step, Tensor offset, Tensor? threshold) -> Tensor",
    run_sample,
    lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64),
)
stability_update = _register(
    "stability_update",
    f"({_STATE}, Tensor kld, Tensor cu_draft, Tensor num_accepted, float[] rule, Tensor? temperature, Tensor? ok)"
    " -> Tensor",
    _update,
    lambda *x: x[2].new_empty(x[2].shape, dtype=torch.bool),  # as slots
)
speculation_lengths = _register(
    "speculation_lengths",
    "(Tensor table, Tensor weights, Tensor slots, float[] rule, Tensor? proposed) -> (Tensor, Tensor)",
    _next,
    _lengths,
)
verify = _register(
    "verify",
    f"({_INPUTS}) -> ({_VERIFICATION})",
    lambda *x: tuple(run_verify(Inputs(*x))),
    lambda *x: tuple(Verification.empty(Inputs(*x))),
)
dsde_step = _register(
    "dsde_step",
    f"({_INPUTS}, {_STATE}, float[] rule) -> ({_VERIFICATION}, Tensor, Tensor)",
    lambda *x: tuple(_step(*x)),
    lambda *x: (*Verification.empty(Inputs(*x[:-4])), *_lengths(*x[-4:])),
)
