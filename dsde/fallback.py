"""For models that attend by themselves (Bloom, Falcon): their own cache, one sequence at a time."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

from .blocks import BlockTable
from .cache import (
    CannotPack,
    CannotRollBack,
    PackedModel,
    Segment,
    context_of,
    difference_from_own,
    positions,
    probe_text,
    takes,
)


class SequentialModel:
    """The interface of `PackedModel` on top of a model's own attention and cache.

    Exact and slower: every sequence takes a forward pass of its own, and its keys and values lie outside the paged
    store. The attributes are those of `PackedModel`.

    Raises
    ------
    CannotRollBack
        The model keeps no cache, or one that does not continue a rolled back text as its own forward pass would.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.context: int | None = context_of(model.config.get_text_config())
        self.num_embeddings: int = model.get_input_embeddings().num_embeddings
        self.device: torch.device = model.device
        self.seconds = 0.0
        self._caches: WeakKeyDictionary[BlockTable, DynamicCache] = WeakKeyDictionary()
        # Older releases of transformers 5 call this argument past_key_values.
        self._cache_name = "cache" if takes(model, "cache") else "past_key_values"
        self.vocabulary = self._probe()
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

    def _probe(self) -> int:
        """Compare a short text, after another beginning was rolled back, with the model's own forward pass."""
        text, table = probe_text(self.num_embeddings, min(8, self.context or 8)), BlockTable()
        cut = len(text) // 2
        try:
            with self.packed():
                begun = self.forward([Segment(text[:cut], 0, table), Segment(text[:cut][::-1], cut, table)])[:cut]
                logits = torch.cat((begun, self.forward([Segment(text[cut:], cut, table)])))
            difference = difference_from_own(self.model, [text], logits[None])
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as cause:  # whatever a model does that is given a cache it does not know
            raise CannotRollBack(self.model, f": {cause}") from cause
        if difference:
            raise CannotRollBack(self.model, f": its {difference}")
        return logits.shape[1]

    def _run(self, segment: Segment) -> torch.Tensor:
        if segment.start == 0:
            self._caches[segment.table] = DynamicCache()
        cache = self._caches[segment.table]
        ahead = cache.get_seq_length() - segment.start
        if ahead > 0:
            cache.crop(-ahead)  # rejected drafts
        ids = torch.tensor([segment.ids], device=self.device).clamp_(max=self.num_embeddings - 1)
        mask = torch.ones(1, segment.end, dtype=torch.long, device=self.device)
        inputs = {self._cache_name: cache, **positions(self.model, segment.start, segment.end)}
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **inputs)
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
        sequential = SequentialModel(model)
        warnings.warn(f"{cause}; it runs one sequence at a time: exact, but slower", stacklevel=3)
        return sequential
