"""Row-wise helpers of the torch twins: log-probabilities of raw logits, and sums that do not depend on the batch."""

import torch
from torch import Tensor


def log_softmax(logits: Tensor, temperature: Tensor | None = None, threshold: Tensor | None = None) -> Tensor:
    """Log-probabilities ``[R, V]`` float32 after temperature ``[R]`` and truncation (keep v iff logit[v] >= threshold).

    A row with NaN or without a finite logit comes back with NaN. One new matrix is held, whatever is asked for.
    """
    if temperature is None and threshold is None:
        return torch.log_softmax(logits, -1, dtype=torch.float32)
    # The maximum goes first: logit / T alone overflows at very small temperatures.
    z = logits - logits.amax(-1, keepdim=True).float()
    if temperature is not None:
        z.div_(temperature[:, None])
    if threshold is not None:
        z.masked_fill_(logits < threshold[:, None], -torch.inf)
    return torch.log_softmax(z, -1, out=z)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension of ``[R, V]``, bit-identical for a row alone or among others.

    Torch splits the sum of one long row over threads, which changes its rounding; a row shown twice is summed whole.
    """
    return x.expand(2, -1).sum(-1)[:1] if x.shape[0] == 1 else x.sum(-1)
