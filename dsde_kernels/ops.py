"""The ops as torch.library knows them, for torch.compile, export and fake tensors.

``torch.ops.dsde_kernels.*`` take and return plain tensors: a state comes as its table, which is changed, and its
weights; a rule as its numbers. The public functions call them where they are traced.
"""

# ruff: noqa: ARG001, ARG005  (a fake implementation takes what its op takes)

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .kld import run_kl_divergence
from .sampling import run_sample, run_truncation_threshold
from .stability import DsdeRule, StabilityState, run_stability_update, speculation_lengths_torch
from .verify import run_dsde_step, run_verify


def _register(fake: Callable, mutates: tuple[str, ...] = ()) -> Callable:
    """Decorator: register a function under its name, with an implementation for tensors without data."""

    def register(function: Callable) -> Callable:
        op = torch.library.custom_op(f"dsde_kernels::{function.__name__}", function, mutates_args=mutates)
        op.register_fake(fake)
        return function

    return register


def _rows(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@_register(_rows)
def kl_divergence(target_logits: Tensor, draft_logits: Tensor, temperature: Tensor | None) -> Tensor:
    return run_kl_divergence(target_logits, draft_logits, temperature)


@_register(_rows)
def truncation_threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    return run_truncation_threshold(logits, temperature, top_k, top_p, min_p)


@_register(lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.int64))
def sample(
    logits: Tensor, temperature: Tensor, seed: Tensor, step: Tensor, offset: Tensor, threshold: Tensor | None
) -> Tensor:
    return run_sample(logits, temperature, seed, step, offset, threshold)


@_register(lambda table, weights, slots, *_: slots.new_empty(slots.shape, dtype=torch.bool), mutates=("table",))
def stability_update(
    table: Tensor,
    weights: Tensor,
    slots: Tensor,
    kld: Tensor,
    cu_draft: Tensor,
    num_accepted: Tensor,
    rule: Sequence[float],
    temperature: Tensor | None,
    ok: Tensor | None,
) -> Tensor:
    state = StabilityState.of(table, weights)
    return run_stability_update(state, slots, kld, cu_draft, num_accepted, DsdeRule.from_numbers(rule), temperature, ok)


def _fake_lengths(table: Tensor, weights: Tensor, slots: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return slots.new_empty(slots.shape, dtype=torch.int32), slots.new_empty((), dtype=torch.float32)


@_register(_fake_lengths)
def speculation_lengths(
    table: Tensor, weights: Tensor, slots: Tensor, rule: Sequence[float], proposed: Tensor | None
) -> tuple[Tensor, Tensor]:
    return speculation_lengths_torch(StabilityState.of(table, weights), slots, DsdeRule.from_numbers(rule), proposed)


def _fake_verification(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    *_: object,
) -> tuple[Tensor, ...]:
    (drafts,), (sequences,) = draft_tokens.shape, temperature.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return target_logits.new_empty(shape, dtype=dtype)

    return (
        empty(sequences, max_draft + 1, dtype=torch.int64),
        empty(sequences, dtype=torch.int32),
        empty(drafts),
        empty(drafts),
        empty(sequences, max_draft + 1),
        empty(sequences, dtype=torch.bool),
    )


@_register(_fake_verification)
def verify(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None,
    draft_threshold: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = (target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft)
    return run_verify(*arguments, target_threshold, draft_threshold)


def _fake_step(*arguments: Any) -> tuple[Tensor, ...]:
    return *_fake_verification(*arguments), *_fake_lengths(*arguments[-4:])


@_register(_fake_step, mutates=("table",))
def dsde_step(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_tokens: Tensor,
    cu_draft: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    max_draft: int,
    target_threshold: Tensor | None,
    draft_threshold: Tensor | None,
    table: Tensor,
    weights: Tensor,
    slots: Tensor,
    rule: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = (target_logits, draft_logits, draft_tokens, cu_draft, temperature, seed, step, max_draft)
    state = StabilityState.of(table, weights)
    return run_dsde_step(*arguments, target_threshold, draft_threshold, state, slots, DsdeRule.from_numbers(rule))
