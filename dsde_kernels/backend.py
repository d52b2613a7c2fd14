"""Which implementation an op runs: the torch twin is the only one yet."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_NAMES = ("torch", "triton")
_override: ContextVar[str | None] = ContextVar("dsde_backend", default=None)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the ops inside the ``with`` block on one backend.

    Parameters
    ----------
    name : {"torch", "triton"}
        Takes precedence over the environment variable ``DSDE_BACKEND``.

    Raises
    ------
    ValueError
        If `name` is no backend.
    NotImplementedError
        If `name` is "triton": only the torch backend is available yet.
    """
    _check(name, "name")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def require_backend() -> None:
    """Raise unless the backend that the caller asked for exists; every launcher calls this before its twin."""
    if _override.get() is None and (name := os.environ.get("DSDE_BACKEND")):
        _check(name, "DSDE_BACKEND")


def _check(name: str, source: str) -> None:
    if name not in _NAMES:
        raise ValueError(f"{source} must be one of {', '.join(_NAMES)}; got {name!r}")
    if name == "triton":
        raise NotImplementedError(f"{source} asks for the triton backend; only the torch backend is available yet")
