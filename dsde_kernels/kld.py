"""Token-wise KL divergence between target p and draft q.

    KL(p || q) = sum_v p_v (log p_v - log q_v)        nats, one value a row

over the target's vocabulary, after temperature, without truncation (so that it stays finite). The DSDE paper
(arXiv 2509.01083) reads its stability signals off this value; the direction is the one of the authors' code.

Edge rules
* 0 log 0 = 0. Where q is exactly 0 (logit -inf, or no such column) it counts as 1e-8; so does a q below exp(-1e15),
  which is how masks of large finite numbers show. The KLD of a sound pair of rows thus lies in [0, 1e15].
* Draft columns beyond the target's vocabulary are ignored: q is normalised over the columns both have.
* Never negative: rounding and the floor of q could take it slightly below 0.
* A row with NaN, +inf or no finite logit on either side gives NaN.
"""

import math

import torch
from torch import Tensor

from .backend import traced, use_triton
from .checks import check_logits, check_range, check_vector
from .rows import log_softmax, row_sum

LOG_FLOOR = math.log(1e-8)
FARTHEST = 1e15  # nats


def kl_from_log_probs_torch(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [R] of log-probabilities [R, Vt] and [R, <= Vt]; both matrices are overwritten."""
    shared = log_q.shape[1]
    log_p.clamp_(min=-200.0)  # exp(-200) is 0 in float32: keeps 0 * -inf out without changing the sum
    torch.threshold_(log_q, -FARTHEST, LOG_FLOOR)  # keeps NaN
    difference = torch.sub(log_p[:, :shared], log_q, out=log_q)
    draft_lacks = log_p[:, shared:] - LOG_FLOOR if shared < log_p.shape[1] else None
    p = log_p.exp_()
    kl = row_sum(difference.mul_(p[:, :shared]))
    if draft_lacks is not None:
        kl += row_sum(draft_lacks.mul_(p[:, shared:]))
    return kl.clamp_(min=0.0)


def kl_divergence_torch(target_logits: Tensor, draft_logits: Tensor, temperature: Tensor | None) -> Tensor:
    log_q = log_softmax(draft_logits[:, : target_logits.shape[1]], temperature)
    return kl_from_log_probs_torch(log_softmax(target_logits, temperature), log_q)


@torch.no_grad()
def kl_divergence(target_logits: Tensor, draft_logits: Tensor, temperature: Tensor | float | None = None) -> Tensor:
    """KL(p || q) of each row, p = softmax(target / T), q = softmax(draft / T), in nats.

    Parameters
    ----------
    target_logits : [R, Vt] float32, bfloat16 or float16
        Raw logits, any row stride >= Vt. Not changed.
    draft_logits : [R, Vd] float32, bfloat16 or float16
        Columns beyond Vt are ignored; columns that it lacks have q = 0.
    temperature : float or [R] float32, optional
        None is 1; so is 0, the temperature at which greedy rows are compared.

    Returns
    -------
    [R] float32
        NaN where a row of either side holds NaN, +inf or no finite logit.

    Raises
    ------
    ValueError
        Wrong shape, dtype or device, or a temperature below 0 (read on CPU tensors only).
    """
    if isinstance(temperature, (int, float)):
        if isinstance(temperature, bool) or not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be a finite number >= 0; got {temperature}")
        check_logits("target_logits", target_logits)
        rows, device = target_logits.shape[0], target_logits.device
        temperature = None if temperature in (0, 1) else torch.full((rows,), float(temperature), device=device)
    run = torch.ops.dsde_kernels.kl_divergence if traced(target_logits) else run_kl_divergence
    return run(target_logits, draft_logits, temperature)


def run_kl_divergence(target_logits: Tensor, draft_logits: Tensor, temperature: Tensor | None) -> Tensor:
    check_logits("target_logits", target_logits)
    rows, device = target_logits.shape[0], target_logits.device
    check_logits("draft_logits", draft_logits, rows, device)
    if temperature is not None:
        check_vector("temperature", temperature, rows, device, integer=False)
        check_range("temperature", temperature, 0.0, torch.finfo(torch.float32).max)
    if use_triton(device):
        from .kld_kernel import kl_divergence_triton

        return kl_divergence_triton(target_logits, draft_logits, temperature)
    if temperature is not None:
        temperature = temperature.masked_fill(temperature == 0, 1.0)
    return kl_divergence_torch(target_logits, draft_logits, temperature)
