"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (index // 4, offset, step, stream)        the number at `index` is output word index % 4

A number depends on its key and counter only, never on the batch row, the neighbours or the run. `step` counts the
verifications of one request, so no (seed, step, offset, stream, index) is used twice.

    uniform      u = min((word + 1/2) * 2^-32, 1 - 2^-24)      strictly inside (0, 1), also in float32
    exponential  e = -log1p(-u)                                from 2^-33 to 16.6

With u small, e = u to rounding, so the small end, which decides a race, is as fine as 2^-32. -log(u) would not do:
float32 has nothing between 1 - 2^-24 and 1, so that form cannot go below 2^-24 and never draws rare tokens.

The twin keeps 32-bit words in int64: ten rounds of six passes over n/2 of them.
"""

import torch
from torch import Tensor

DRAFT, ACCEPT, RESAMPLE = 0, 1, 2  # streams

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments
_MASK = 0xFFFFFFFF
_LARGEST = 1 - 2.0**-24
_COUNTERS = 2**14  # at a time: half a megabyte of words


def philox_torch(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10.

    Parameters
    ----------
    counter, key : int64 tensors of words in [0, 2^32), of shapes that broadcast together

    Returns
    -------
    Four int64 tensors of words in [0, 2^32), of the broadcast shape.
    """
    # Both halves of a round in one [2, ...] tensor: `even` holds words 0 and 2; words 1 and 3 are the low halves of
    # `odd`, in swapped order. They are only ever xor-ed, so their high halves may hold rubbish, as may the sign bits
    # that >> drags in: the mask at the end of a round removes both.
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    even = torch.stack([counter[0].expand(shape), counter[2].expand(shape)])
    odd = torch.stack([counter[3].expand(shape), counter[1].expand(shape)])
    constants = torch.tensor([[_M0, _M1], [_W0, _W1]], device=even.device).view(2, 2, *(1,) * len(shape))
    multiplier, increment = constants.unbind()
    keys = torch.stack(key) + increment * torch.arange(10, device=even.device).view(10, 1, *(1,) * len(shape))
    for round_key in keys.unbind():
        product = even * multiplier
        even = (product >> 32).bitwise_xor_(odd).flip(0).bitwise_xor_(round_key).bitwise_and_(_MASK)
        odd = product
    odd = odd & _MASK
    return even[0], odd[1], even[1], odd[0]


def uniform_torch(seed: Tensor, step: Tensor, offset: Tensor, stream: int, count: int) -> Tensor:
    """Uniform numbers strictly inside (0, 1) for the indices 0 ... count - 1.

    Parameters
    ----------
    seed, step, offset : [R] integer
    stream : DRAFT, ACCEPT or RESAMPLE

    Returns
    -------
    [R, count] float32
    """
    seed, step, offset = (x.long()[:, None] for x in (seed, step, offset))
    blocks = (count + 3) // 4
    key = (seed & _MASK, (seed >> 32) & _MASK)
    row = (offset & _MASK, step & _MASK, torch.full((1, 1), stream, device=seed.device))
    out = torch.empty(seed.shape[0], blocks, 4, dtype=torch.float32, device=seed.device)
    # A few columns at a time: the words are eight times as large as the numbers, and they stay in cache.
    width = max(_COUNTERS // max(seed.shape[0], 1), 64)
    for start in range(0, blocks, width):
        index = torch.arange(start, min(start + width, blocks), device=seed.device)[None]
        for i, word in enumerate(philox_torch((index, *row), key)):
            out[:, start : start + width, i] = word
    return out.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST).flatten(1)[:, :count]


def exponential_torch(seed: Tensor, step: Tensor, offset: Tensor, stream: int, count: int) -> Tensor:
    """Standard exponential numbers; arguments and shape as `uniform_torch`."""
    return uniform_torch(seed, step, offset, stream, count).neg_().log1p_().neg_()
