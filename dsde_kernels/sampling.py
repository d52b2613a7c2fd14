"""Draw tokens by an exponential race, and the thresholds of top-k, top-p and min-p.

Race: with p the softmax of the kept logits after temperature and e_v independent exponential numbers, the index of the
smallest e_v / p_v has the distribution p. It is written as argmax of p_v / e_v: a token without probability scores 0
and cannot win.

Edge rules
* Temperature 0 takes the argmax of the raw logits, lowest id on ties, whatever the threshold; it draws no number.
* A row with NaN, +inf or no finite logit, or none above its threshold, gives token -1; other rows are untouched.
* Tokens that tie with the truncation threshold are all kept.
"""

import torch
from torch import Tensor

from . import rng
from .backend import traced, use_triton
from .checks import check_logits, check_range, check_vector
from .rows import argmax, log_softmax


def race_torch(weights: Tensor, seed: Tensor, step: Tensor, offset: Tensor, stream: int) -> Tensor:
    """Draw one index a row with probability proportional to `weights` [R, V] float32, which is overwritten."""
    noise = rng.exponential_torch(seed, step, offset, stream, weights.shape[1])
    return argmax(weights.div_(noise))


def sample_torch(
    logits: Tensor, temperature: Tensor, seed: Tensor, step: Tensor, offset: Tensor, threshold: Tensor | None
) -> Tensor:
    tokens = argmax(logits)
    finite = logits.gather(1, tokens[:, None])[:, 0].abs() < torch.inf
    rows = temperature.nonzero()[:, 0]
    if rows.shape[0]:
        p = log_softmax(logits[rows], temperature[rows], None if threshold is None else threshold[rows]).exp_()
        finite[rows] &= p[:, 0] == p[:, 0]
        tokens[rows] = race_torch(p, seed[rows], step[rows], offset[rows], rng.DRAFT)
    return tokens.masked_fill_(~finite, -1)


@torch.no_grad()
def sample(
    logits: Tensor, temperature: Tensor, seed: Tensor, step: Tensor, offset: Tensor, threshold: Tensor | None = None
) -> Tensor:
    """Draw one token a row from the softmax of `logits` after temperature and truncation (draft stream).

    Parameters
    ----------
    logits : [R, V] float32, bfloat16 or float16
        Raw logits, any row stride >= V. Not changed.
    temperature : [R] float32
        0 takes the argmax (lowest id on ties).
    seed, step, offset : [R] int32 or int64
        Name the random numbers of a row: the request's seed, its verification count, the drafted position in the step.
    threshold : [R] float32, optional
        From `truncation_threshold`: token v takes part iff ``logits[r, v] >= threshold[r]``.

    Returns
    -------
    [R] int64
        Token ids in [0, V); -1 where the row holds NaN, +inf or no finite logit.

    Raises
    ------
    ValueError
        Wrong shape, dtype or device, or a temperature below 0 (read on CPU tensors only).
    """
    run = torch.ops.dsde_kernels.sample if traced(logits) else run_sample
    return run(logits, temperature, seed, step, offset, threshold)


def run_sample(
    logits: Tensor, temperature: Tensor, seed: Tensor, step: Tensor, offset: Tensor, threshold: Tensor | None
) -> Tensor:
    check_logits("logits", logits)
    rows, device = logits.shape[0], logits.device
    check_vector("temperature", temperature, rows, device, integer=False)
    check_vector("seed", seed, rows, device, integer=True)
    check_vector("step", step, rows, device, integer=True)
    check_vector("offset", offset, rows, device, integer=True)
    if threshold is not None:
        check_vector("threshold", threshold, rows, device, integer=False)
    check_range("temperature", temperature, 0.0, torch.finfo(torch.float32).max)
    if use_triton(device):
        from .sampling_kernel import sample_triton

        return sample_triton(logits, temperature, seed, step, offset, threshold)
    return sample_torch(logits, temperature, seed, step, offset, threshold)


def truncation_threshold_torch(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    vocabulary = logits.shape[1]
    greedy = temperature == 0
    x = logits.float().sort(-1, descending=True).values
    # In sorted order each rule keeps a prefix, so the rules combine by `and` and only the prefix length matters.
    z = (x - x[:, :1]).div_(temperature.masked_fill(greedy, 1.0)[:, None])
    keep = torch.ones_like(x, dtype=torch.bool)
    if top_k is not None:
        k = top_k.long().clamp(max=vocabulary)
        kth = x.gather(1, (k - 1).clamp_(min=0)[:, None])
        keep &= (x >= kth) | (k <= 0)[:, None]
    if top_p is not None:
        p = z.masked_fill(~keep, -torch.inf).softmax(-1)
        before = p.cumsum(-1).sub_(p)
        keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    if min_p is not None:
        keep &= z.exp_() >= min_p[:, None]
    kept = keep.sum(-1)
    threshold = x.gather(1, (kept - 1).clamp_(min=0)[:, None])[:, 0]
    return threshold.masked_fill_(greedy | (kept == vocabulary), -torch.inf)


@torch.no_grad()
def truncation_threshold(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Raw-logit threshold of top-k, top-p and min-p: token v is kept iff ``logits[r, v] >= threshold[r]``.

    Applied in the order of transformers: temperature, top-k, top-p on what top-k left (renormalised), min-p.

    Parameters
    ----------
    logits : [R, V] float32, bfloat16 or float16
        Raw logits, any row stride >= V. Not changed.
    temperature : [R] float32
        Greedy rows (0) get -inf.
    top_k : [R] int32 or int64, optional
        Keep the k largest logits; <= 0 keeps all.
    top_p : [R] float32 in (0, 1], optional
        Keep the fewest tokens whose probabilities reach top_p; 1 keeps all.
    min_p : [R] float32 in [0, 1], optional
        Keep tokens with at least min_p times the largest probability; 0 keeps all.

    Returns
    -------
    [R] float32
        -inf where nothing is cut off. Tokens that tie with the last kept one are kept as well.

    Raises
    ------
    ValueError
        Wrong shape, dtype or device; temperature, top_p or min_p out of range (read on CPU tensors only).
    """
    run = torch.ops.dsde_kernels.truncation_threshold if traced(logits) else run_truncation_threshold
    return run(logits, temperature, top_k, top_p, min_p)


def run_truncation_threshold(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    check_logits("logits", logits)
    rows, device = logits.shape[0], logits.device
    check_vector("temperature", temperature, rows, device, integer=False)
    check_range("temperature", temperature, 0.0, torch.finfo(torch.float32).max)
    if top_k is not None:
        check_vector("top_k", top_k, rows, device, integer=True)
    if top_p is not None:
        check_vector("top_p", top_p, rows, device, integer=False)
        check_range("top_p", top_p, 0.0, 1.0, open_low=True)
    if min_p is not None:
        check_vector("min_p", min_p, rows, device, integer=False)
        check_range("min_p", min_p, 0.0, 1.0)
    if use_triton(device):
        from .threshold_kernel import truncation_threshold_triton

        return truncation_threshold_triton(logits, temperature, top_k, top_p, min_p)
    return truncation_threshold_torch(logits, temperature, top_k, top_p, min_p)
