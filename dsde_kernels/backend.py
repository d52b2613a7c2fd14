"""Which implementation an op runs: Triton for tensors on a GPU, the torch twin for tensors on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_NAMES = ("torch", "triton")
_override: ContextVar[str | None] = ContextVar("dsde_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops inside the ``with`` block on one backend.

    Parameters
    ----------
    name : {"torch", "triton"}
        Takes precedence over the environment variable ``DSDE_BACKEND``. "triton" on CPU tensors needs Triton's
        interpreter, which is switched on by ``TRITON_INTERPRET=1`` in the environment before the first such call.

    Raises
    ------
    ValueError
        If `name` is no backend.
    """
    _check(name, "name")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def use_triton(device: torch.device) -> bool:
    """Whether the op at hand, on tensors of `device`, runs its Triton kernel; every launcher asks this.

    Raises
    ------
    ValueError
        If ``DSDE_BACKEND`` is no backend.
    RuntimeError
        If Triton is asked for on the CPU without its interpreter.
    """
    name = _override.get()
    if name is None:
        name = os.environ.get("DSDE_BACKEND")
        if not name:
            return device.type != "cpu"
        _check(name, "DSDE_BACKEND")
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "the triton backend takes CPU tensors only through Triton's interpreter: set TRITON_INTERPRET=1 before "
            "the first call, or use the torch backend"
        )
    return name == "triton"


def traced(x: Tensor) -> bool:
    """Whether the call at hand is traced (torch.compile, fake tensors): it then goes through the registered op.

    Plain calls skip torch's dispatcher, which costs as much as a small step.
    """
    return torch.compiler.is_compiling() or (isinstance(x, Tensor) and type(x) is not Tensor)


def _check(name: str, source: str) -> None:
    if name not in _NAMES:
        raise ValueError(f"{source} must be one of {', '.join(_NAMES)}; got {name!r}")
