"""What every launcher shares: sizes of the Triton kernels, and their workspace.

A row of V logits is split over ceil(V / (TILE * TILES)) programs, by V alone and never by the batch, so that the order
in which numbers are added does not depend on the neighbours.
"""

import torch
from torch import Tensor

# Logits in one step of a program's loop: 8 a thread, which is one 16-byte load in half precision, and leaves the
# running sums of the pair loop in registers; with at most 128 of them a thread, two programs share a multiprocessor.
TILE = 2048
WARPS = 8
# Steps of that loop. 16,384 logits a program: 10 programs for a row of 152k, enough for a small batch to spread out,
# and 64 KB a row pair in half precision, against which start-up and the record of 36 bytes hardly count.
TILES = 8
# The threshold search reads its row many times from the cache, in one program: more threads shorten the row.
SEARCH_TILE = 4096
SEARCH_WARPS = 16

_buffers: dict[tuple, Tensor] = {}


def splits(vocabulary: int) -> int:
    """Programs that share one row."""
    return -(-vocabulary // (TILE * TILES))


def workspace(device: torch.device, counters: int, floats: int) -> tuple[Tensor, Tensor]:
    """At least `counters` int32 zeros and `floats` float32 numbers of scratch, for the current stream of `device`.

    Allocated once per size (rounded up to a power of two) and kept, so that captured graphs stay valid. Kernels leave
    the counters at zero.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return (
        _buffer(device, stream, torch.int32, 1 << counters.bit_length()),
        _buffer(device, stream, torch.float32, 1 << floats.bit_length()),
    )


def _buffer(device: torch.device, stream: int, dtype: torch.dtype, size: int) -> Tensor:
    key = (device, stream, dtype, size)
    buffer = _buffers.get(key)
    if buffer is None:
        buffer = _buffers[key] = torch.zeros(size, dtype=dtype, device=device)
    return buffer
