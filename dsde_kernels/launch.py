"""What every launcher shares: sizes of the Triton kernels, and their workspace.

A row of V logits is split over programs by V alone and never by the batch, so that the order in which numbers are added
does not depend on the neighbours.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# Logits in one step of a program's loop: 8 a thread, which is one 16-byte load in half precision, and leaves the
# running sums of the pair loop in registers. Small programs wait for few others at each of the loop's reductions.
TILE = 1024
WARPS = 4
# Registers a thread, at most: four programs share a multiprocessor then. Without a limit ptxas takes 72 to 80 for the
# plain pass over a pair of rows; where thresholds or the last draw are part of it, it takes more than 128, or aims at
# fewer and spills. AMD's compiler, which needs fewer, has no such option.
REGISTERS = 128
LIMIT = {} if torch.version.hip else {"maxnreg": REGISTERS}
# Steps of the loop over a pair of rows: 16,384 logits, so that a row of 152k has 10 programs, enough for a small batch
# to spread out, and 64 KB in half precision, against which start-up and the record of 36 bytes hardly count.
TILES = 16
# Steps of the race, where the random numbers cost ten times what reading costs: a row of 152k has 38 programs. A row
# that fits into one (4,096 logits) is raced by the program that decided, in the same launch; others take a second one.
# By instruction counts of the compiled loop one program would need about 100 us for 152k logits; not yet measured.
RACE_TILES = 4
# The threshold search reads its row many times from the cache, in one program: more threads shorten the row.
SEARCH_TILE = 4096
SEARCH_WARPS = 16

_buffers: dict[tuple, Tensor] = {}
_keeps: ContextVar[bool] = ContextVar("dsde_keeps_workspace", default=True)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Launches inside the ``with`` block get a workspace of their own.

    torch.compile's graph trees run an op once with their own memory pool before they capture it, and take back what
    was allocated there: a buffer that is kept would be one of theirs.
    """
    token = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(token)


def splits(vocabulary: int) -> int:
    """Programs that share one row."""
    return -(-vocabulary // (TILE * TILES))


def race_parts(vocabulary: int) -> int:
    """Programs that share the race of one row."""
    return -(-vocabulary // (TILE * RACE_TILES))


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros, which kernels leave at zero."""
    return _workspace(device, "counters", count, torch.int32, torch.zeros)


def scratch(device: torch.device, name: str, count: int) -> Tensor:
    """At least `count` float32 numbers."""
    return _workspace(device, name, count, torch.float32, torch.empty)


def _workspace(device: torch.device, name: str, count: int, dtype: torch.dtype, make: Callable[..., Tensor]) -> Tensor:
    """The buffer of that name of the current thread and stream, allocated once per size, which is a power of two.

    A graph that is being captured gets its own, which it zeroes itself if need be: graphs may be replayed in any order,
    and at the same time.
    """
    size = 1 << count.bit_length()
    stream = 0
    if not _keeps.get() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return make(size, dtype=dtype, device=device)
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    key = (threading.get_ident(), device, stream, name, size)
    if key not in _buffers:
        _buffers[key] = make(size, dtype=dtype, device=device)
    return _buffers[key]
