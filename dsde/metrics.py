"""Figures about finished requests: throughput, latency percentiles, accepted tokens a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .request import Completion


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of `values`, linear between ranks; NaN for none."""
    return float(np.percentile(values, q)) if len(values) else float("nan")


def summary(completions: Sequence[Completion], wall_s: float) -> dict[str, float]:
    """Summarise requests decoded together.

    Parameters
    ----------
    completions : sequence of Completion
        All requests of the run.
    wall_s : float
        Seconds from the first submission to the last completion.

    Returns
    -------
    dict
        ``requests``, ``tokens``, ``wall_s``, ``tokens_per_s`` (all tokens / all time), ``steps`` (verifications),
        ``tokens_per_step`` (emitted), ``accepted_per_step`` and ``mean_sl`` (over steps that drafted),
        ``acceptance`` (accepted / drafted), and in seconds ``ttft``, ``tpot`` (time per token after the first) and
        ``latency`` at ``_p50``, ``_p95``, ``_p99``.
    """
    steps = [s for c in completions for s in c.trace]
    drafting = [s for s in steps if s.sl > 0]
    drafted = sum(s.sl for s in drafting)
    accepted = sum(s.accepted for s in drafting)
    tokens = sum(len(c.token_ids) for c in completions)
    result: dict[str, float] = {
        "requests": len(completions),
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "steps": len(steps),
        "tokens_per_step": tokens / len(steps) if steps else 0.0,
        "accepted_per_step": accepted / len(drafting) if drafting else 0.0,
        "mean_sl": drafted / len(drafting) if drafting else 0.0,
        "acceptance": accepted / drafted if drafted else 0.0,
    }
    series = {
        "ttft": [c.ttft for c in completions if c.ttft is not None],
        "tpot": [
            (c.latency - c.ttft) / (len(c.token_ids) - 1)
            for c in completions
            if c.ttft is not None and len(c.token_ids) > 1
        ],
        "latency": [c.latency for c in completions],
    }
    for name, values in series.items():
        for q in (50, 95, 99):
            result[f"{name}_p{q}"] = percentile(values, q)
    return result
