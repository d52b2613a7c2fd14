"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (index // 4, offset, step, stream)        the number at `index` is output word index % 4

A number depends on its key and counter only, never on the batch row, the neighbours or the run. `step` counts the
verifications of one request, so no (seed, step, offset, stream, index) is used twice.

    uniform      u = min((word + 1/2) * 2^-32, 1 - 2^-24)      strictly inside (0, 1), also in float32
    exponential  e = -log1p(-u)                                from 2^-33 to 16.6

With u small, e = u to rounding, so the small end, which decides a race, is as fine as 2^-32. -log(u) would not do:
float32 has nothing between 1 - 2^-24 and 1, so that form cannot go below 2^-24 and never draws rare tokens.

The twin keeps 32-bit words in int64 and writes [R, n/4] counters ten rounds long: about 100 passes over n/4 elements.
"""

import torch
from torch import Tensor

DRAFT, ACCEPT, RESAMPLE = 0, 1, 2  # streams

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments
_MASK = 0xFFFFFFFF
_LARGEST = 1 - 2.0**-24


def philox_torch(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10.

    Parameters
    ----------
    counter, key : int64 tensors of words in [0, 2^32), of shapes that broadcast together

    Returns
    -------
    Four int64 tensors of words in [0, 2^32), of the broadcast shape.
    """
    # even, odd: words (0, 2) and (1, 3). Odd words are only ever xor-ed, so their high halves may hold rubbish;
    # the mask at the end of a round removes it, and the sign bits that >> drags in.
    # The first two rounds keep their operands' small shapes: most of the counter is constant along a row.
    e0, o0, e1, o1 = counter
    rounds = torch.arange(10, device=key[0].device)[(...,) + (None,) * key[0].ndim]
    keys = (((k + rounds * w) & _MASK).unbind() for k, w in zip(key, (_W0, _W1), strict=True))
    for k0, k1 in zip(*keys, strict=True):
        p0, p1 = e0 * _M0, e1 * _M1
        e0, e1 = _round(p1, o0, k0), _round(p0, o1, k1)
        o0, o1 = p1, p0
    return e0, o0 & _MASK, e1, o1 & _MASK


def _round(product: Tensor, odd: Tensor, key: Tensor) -> Tensor:
    return ((product >> 32) ^ (odd ^ key)).bitwise_and_(_MASK)


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
    index = torch.arange(blocks, device=seed.device)[None]
    counter = (index, offset & _MASK, step & _MASK, torch.full_like(index[:, :1], stream))
    words = philox_torch(counter, (seed & _MASK, (seed >> 32) & _MASK))
    out = torch.empty(seed.shape[0], blocks, 4, dtype=torch.float32, device=seed.device)
    for i, word in enumerate(words):
        out[:, :, i] = word
    return out.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST).flatten(1)[:, :count]


def exponential_torch(seed: Tensor, step: Tensor, offset: Tensor, stream: int, count: int) -> Tensor:
    """Standard exponential numbers; arguments and shape as `uniform_torch`."""
    return uniform_torch(seed, step, offset, stream, count).neg_().log1p_().neg_()
