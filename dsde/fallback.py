"""For models that attend by themselves (Bloom, Falcon): their own cache, one sequence at a time."""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

from .blocks import BlockTable
from .cache import CannotPack, PackedModel, Segment, context_of


class SequentialModel:
    """The interface of `PackedModel` on top of a model's own attention and cache.

    Exact and slower: every sequence takes a forward pass of its own, and its keys and values lie outside the paged
    store. The attributes are those of `PackedModel`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.context: int | None = context_of(model.config.get_text_config())
        self.num_embeddings: int = model.get_input_embeddings().num_embeddings
        self.device: torch.device = model.device
        self.seconds = 0.0
        self._caches: WeakKeyDictionary[BlockTable, DynamicCache] = WeakKeyDictionary()
        # Older releases of transformers 5 call this argument past_key_values.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        with self.packed():
            self.vocabulary = self.forward([Segment([0], 0, BlockTable())]).shape[1]
        self.seconds = 0.0

    def forward(self, segments: Sequence[Segment], keep: Sequence[int] | None = None) -> torch.Tensor:
        """Run the segments one after the other; arguments and result as `PackedModel.forward`."""
        start = time.perf_counter()
        logits = torch.cat([self._run(s) for s in segments])
        self.seconds += time.perf_counter() - start
        return logits if keep is None else logits[torch.tensor(keep, device=self.device)]

    @contextlib.contextmanager
    def packed(self) -> Iterator[None]:
        """As `PackedModel.packed`; nothing of the model is changed."""
        with torch.inference_mode():
            yield

    def _run(self, segment: Segment) -> torch.Tensor:
        if segment.start == 0:
            self._caches[segment.table] = DynamicCache()
        cache = self._caches[segment.table]
        ahead = cache.get_seq_length() - segment.start
        if ahead > 0:
            cache.crop(-ahead)  # rejected drafts
        ids = torch.tensor([segment.ids], device=self.device).clamp_(0, self.num_embeddings - 1)
        mask = torch.ones(1, segment.end, dtype=torch.long, device=self.device)
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **{self._cache_name: cache})
        logits: torch.Tensor = output.logits[0]
        return logits


def load(model: PreTrainedModel, num_slots: int, block_size: int) -> PackedModel | SequentialModel:
    """Wrap a model for the engine: packed if it can be, else sequential with a warning.

    Parameters
    ----------
    model, num_slots, block_size
        As for `PackedModel`.

    Raises
    ------
    ValueError
        The model is in training mode, is no decoder, or its cache can't be rolled back.
    """
    try:
        return PackedModel(model, num_slots, block_size)
    except CannotPack as cause:
        warnings.warn(f"{cause}; it runs one sequence at a time: exact, but slower", stacklevel=3)
        return SequentialModel(model)
