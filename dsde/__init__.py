"""DSDE: lossless speculative decoding with per-sequence, per-step draft lengths (arXiv 2509.01083)."""

from .controllers import Controller, Dsde, Static
from .engine import Engine
from .generate import Decoder, patch
from .request import Completion, Request, SamplingParams, StepTrace

__all__ = [
    "Completion",
    "Controller",
    "Decoder",
    "Dsde",
    "Engine",
    "Request",
    "SamplingParams",
    "Static",
    "StepTrace",
    "patch",
]
