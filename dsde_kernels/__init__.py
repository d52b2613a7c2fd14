"""Verification ops for lossless dynamic speculative decoding.

Notation: p is the target's distribution, q the draft's; B sequences with k_i >= 0 drafts each, N drafts in all.
"""

from . import ops as ops  # registers them with torch.library
from .backend import use_backend
from .kld import kl_divergence
from .sampling import sample, truncation_threshold
from .stability import DsdeRule, StabilityState, speculation_lengths, stability_update
from .verify import StepResult, Verification, dsde_step, verify

__all__ = [
    "DsdeRule",
    "StabilityState",
    "StepResult",
    "Verification",
    "dsde_step",
    "kl_divergence",
    "sample",
    "speculation_lengths",
    "stability_update",
    "truncation_threshold",
    "use_backend",
    "verify",
]
