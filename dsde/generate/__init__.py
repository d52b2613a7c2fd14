"""A drop-in for transformers: `patch` a model's `generate`, or give a `Decoder` as ``custom_generate``.

transformers prepares the call as ever (configuration, attention mask, logits processors, stopping criteria); the tokens
come from `dsde.engine.Engine`, so that batches, left padding, stop strings and every sampling option meet per-sequence
draft lengths.
"""

from .decoder import Decoder
from .patch import Patch, patch

__all__ = ["Decoder", "Patch", "patch"]
