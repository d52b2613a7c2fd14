"""Argument checks shared by the launchers.

Shapes, dtypes and devices are attributes and are always checked. Values are read on CPU tensors only:
reading them on a GPU would make the host wait for the device.
"""

from itertools import pairwise

import torch
from torch import Tensor

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)


def check_logits(name: str, x: Tensor, rows: int | None = None, device: torch.device | None = None) -> None:
    """Raise ValueError unless `x` is a float matrix with dense rows, of `rows` rows, on `device`."""
    check_tensor(name, x)
    if x.ndim != 2 or x.shape[1] == 0 or (rows is not None and x.shape[0] != rows):
        expected = "rows" if rows is None else rows
        raise ValueError(f"{name} must have shape [{expected}, vocabulary]; got {list(x.shape)}")
    if x.dtype not in _LOGITS:
        raise ValueError(f"{name} must be float32, bfloat16 or float16; got {x.dtype}")
    # A single row may carry any row stride, a single column any column stride.
    if (x.stride(1) != 1 and x.shape[1] > 1) or (x.stride(0) < x.shape[1] and x.shape[0] > 1):
        raise ValueError(f"{name} must have contiguous rows that do not overlap; got strides {x.stride()}")
    check_device(name, x, device)


def check_vector(name: str, x: Tensor, length: int, device: torch.device, *, integer: bool) -> None:
    """Raise ValueError unless `x` is a vector of `length` numbers of the wanted kind on `device`."""
    check_tensor(name, x)
    if x.ndim != 1 or x.shape[0] != length:
        raise ValueError(f"{name} must have shape [{length}]; got {list(x.shape)}")
    if x.dtype not in _INTEGERS if integer else x.dtype != torch.float32:
        raise ValueError(f"{name} must be {'int32 or int64' if integer else 'float32'}; got {x.dtype}")
    check_device(name, x, device)


def check_tensor(name: str, x: object) -> None:
    """Raise ValueError unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")


def check_device(name: str, x: Tensor, device: torch.device | None) -> None:
    """Raise ValueError unless `x` lives on `device` (None: anywhere)."""
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}; got {x.device}")


def check_range(name: str, x: Tensor, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise ValueError if a value of a CPU tensor lies outside [low, high], or equals `low` if `open_low`."""
    if x.device.type != "cpu" or x.shape[0] == 0:
        return
    smallest, largest = (value.item() for value in torch.aminmax(x))  # NaN, if there is one
    if not ((low < smallest if open_low else low <= smallest) and largest <= high):
        got = largest if low <= smallest else smallest
        raise ValueError(f"{name} must lie in {'(' if open_low else '['}{low}, {high}]; got {got}")


def check_ragged(cu_draft: Tensor, drafts: int, max_draft: int | None = None) -> None:
    """Raise ValueError unless `cu_draft`, on the CPU, rises from 0 to `drafts`, in steps of at most `max_draft`."""
    if cu_draft.device.type != "cpu":
        return
    cu = cu_draft.tolist()
    most = drafts if max_draft is None else max_draft
    if cu[0] != 0 or cu[-1] != drafts or any(not 0 <= b - a <= most for a, b in pairwise(cu)):
        limit = "" if max_draft is None else f", in steps of at most max_draft = {max_draft}"
        raise ValueError(f"cu_draft must rise from 0 to {drafts}, the number of draft tokens{limit}; got {cu}")
