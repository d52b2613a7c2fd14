"""DSDE: lossless speculative decoding with per-sequence, per-step draft lengths (arXiv 2509.01083).

The names below are imported at their first use, so that ``python -m dsde --help`` needn't wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .controllers import Controller, Dsde, Static
    from .engine import Engine
    from .generate.decoder import Decoder
    from .generate.patch import patch
    from .request import Completion, Request, SamplingParams, Stateless, StepTrace

__all__ = [
    "Completion",
    "Controller",
    "Decoder",
    "Dsde",
    "Engine",
    "Request",
    "SamplingParams",
    "Stateless",
    "Static",
    "StepTrace",
    "patch",
]

_HOMES = {
    "controllers": ("Controller", "Dsde", "Static"),
    "engine": ("Engine",),
    "generate": ("Decoder", "patch"),
    "request": ("Completion", "Request", "SamplingParams", "Stateless", "StepTrace"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
