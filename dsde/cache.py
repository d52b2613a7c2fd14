"""Packed forward passes over a paged key-value store.

A step's rows, whatever sequence and phase they come from, run as one row of a [1, T] batch. The attention function
(attention.py) writes the new keys and values into their slots and lets each sequence attend to its
own, so nothing is padded and nothing is copied while a sequence's blocks are neighbours. transformers sees no cache at
all: rolling back a rejected draft is remembering a smaller length.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from . import attention
from .attention import Masks, PackedRows, Shapes
from .blocks import BlockTable


class CannotPack(ValueError):
    """The model's attention can't be run packed and give the same result."""


class CannotRollBack(ValueError):
    """The cache of `model` can't forget its last tokens and give the same result."""

    def __init__(self, model: PreTrainedModel, reason: str = "") -> None:
        super().__init__(f"model {type(model).__name__} is not a decoder whose cache can be rolled back{reason}")
        self.model = model


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence: ``ids`` stand at positions ``start``, ``start + 1``, ..."""

    ids: Sequence[int]
    start: int
    table: BlockTable

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.ids)


class PackedModel:
    """A causal language model that runs packed segments against its own paged key-value store.

    Parameters
    ----------
    model : PreTrainedModel
        Any decoder whose attention goes through transformers' attention interface; used as it is, on its device.
    num_slots : int
        Token positions in the store (blocks x block size).
    block_size : int
        Token positions a block.

    Attributes
    ----------
    vocabulary : int
        Width of the logits.
    context : int or None
        Longest sequence that the model can take.
    seconds : float
        Time spent inside the model's forward since construction (wall time; launch time only on a GPU).

    Raises
    ------
    ValueError
        The model is in training mode or in float64.
    CannotRollBack
        It is not a decoder, or keeps recurrent state.
    CannotPack
        Its attention bypasses transformers' interface, or does something this module does not know.
    MemoryError
        The store does not fit.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, block_size: int) -> None:
        name = type(model).__name__
        if model.training:
            raise ValueError(f"model {name} is in training mode: call model.eval() first")
        if model.config.is_encoder_decoder or keeps_state(model):
            raise CannotRollBack(model)
        if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"model {name} must be in float32, bfloat16 or float16, got {model.dtype}")
        self.model = model
        self.config = model.config.get_text_config()
        self.num_slots = num_slots
        self.block_size = block_size
        self.context: int | None = context_of(self.config)
        self.num_embeddings: int = model.get_input_embeddings().num_embeddings
        self.seconds = 0.0
        # Per layer: keys and values [1, heads, num_slots, head_dim]; layers of one shape share an allocation.
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pools: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        self.masks = Masks(model.dtype, model.device)
        parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        self._configs = list({id(m.config): m.config for m in parts}.values())
        self._allocate()
        self._probe()
        self.seconds = 0.0

    @property
    def device(self) -> torch.device:
        """Where the model and its store live."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's number format."""
        return self.model.dtype

    def forward(self, segments: Sequence[Segment], keep: Sequence[int] | None = None) -> torch.Tensor:
        """Run the segments in one pass; to be called within `packed`.

        Parameters
        ----------
        segments : sequence of Segment
            Their tables must hold a block for every position.
        keep : sequence of int, optional
            Rows of the packed batch whose logits are wanted, None for all.

        Returns
        -------
        Tensor [len(keep), V]
            Raw logits in the model's dtype.
        """
        rows = PackedRows(self, segments)
        ids = torch.tensor([i for s in segments for i in s.ids], device=self.device)
        positions = torch.tensor([p for s in segments for p in range(s.start, s.end)], device=self.device)
        # Ids outside this vocabulary are a partner's with a wider one. The draft makes of them what it can; for the
        # target they are drafts that verification rejects, whatever follows them.
        ids.clamp_(max=self.num_embeddings - 1)
        wanted = 0 if keep is None else torch.tensor(keep, device=self.device)
        return self._run(ids, positions, wanted, rows)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: int | torch.Tensor, rows: PackedRows | Shapes
    ) -> torch.Tensor:
        start = time.perf_counter()
        logits: torch.Tensor = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            packed_rows=rows,
        ).logits[0]
        self.seconds += time.perf_counter() - start
        return logits

    @contextlib.contextmanager
    def packed(self) -> Iterator[None]:
        """Within it `forward` may be called: the model attends through this store, and gradients are off.

        Its own attention implementation comes back afterwards.
        """
        before = [c._attn_implementation for c in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = attention.NAME
            with torch.inference_mode():
                yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation

    def _allocate(self) -> None:
        """Learn each layer's shapes from one token and allocate the store for them."""
        seen = Shapes()
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        self.vocabulary = self._attempt(lambda: self._run(zero, zero, 0, seen)).shape[1]
        if sorted(seen.shapes) != list(range(self.config.num_hidden_layers)):
            raise self._refusal(f"{len(seen.shapes)} of {self.config.num_hidden_layers} layers attend through it")
        groups: dict[tuple[torch.Size, torch.Size], list[int]] = {}
        for layer, shapes in seen.shapes.items():
            groups.setdefault(shapes, []).append(layer)
        for (key, value), members in groups.items():
            try:
                keys, values = (
                    torch.zeros(len(members), 1, s[1], self.num_slots, s[3], dtype=self.dtype, device=self.device)
                    for s in (key, value)
                )
            except RuntimeError as cause:  # torch's own memory errors are of this type
                raise MemoryError(f"no memory for a key-value store of {self.num_slots} positions: {cause}") from cause
            self.pools.append((members, keys, values))
            self.layers.update((layer, (keys[i], values[i])) for i, layer in enumerate(members))
        self._check_windows(seen.windows)

    def _check_windows(self, windows: set[int | None]) -> None:
        """Refuse attention that is limited by the mask alone: this module builds its own from `sliding_window`."""
        kinds = set(getattr(self.config, "layer_types", None) or [])
        strange = sorted(kinds - {"full_attention", "sliding_attention"})
        if strange:
            raise self._refusal(f"layers of type {', '.join(strange)}")
        window = getattr(self.config, "sliding_window", None)
        slides = window is not None and ("sliding_attention" in kinds or not kinds)
        if window is not None and slides and windows == {None} and (self.context is None or window < self.context):
            raise self._refusal("it keeps its sliding window to itself")

    def _probe(self) -> None:
        """Compare two short sequences, packed and cut in two, with the model's own forward pass."""
        blocks = self.num_slots // self.block_size
        length = min(12, blocks // 2 * self.block_size, self.context or 12)
        if length < 2:
            return  # a store this small holds nothing worth comparing
        texts = [probe_text(self.num_embeddings, length, j) for j in range(2)]
        tables = [BlockTable(list(range(j, blocks // 2 * 2, 2))) for j in range(2)]
        cut = length // 2

        def ours() -> torch.Tensor:
            parts = [
                self.forward([Segment(t[a:b], a, table) for t, table in zip(texts, tables, strict=True)])
                for a, b in ((0, cut), (cut, length))
            ]
            return torch.cat((parts[0].unflatten(0, (2, -1)), parts[1].unflatten(0, (2, -1))), 1)

        difference = difference_from_own(self.model, texts, self._attempt(ours))
        if difference:
            raise self._refusal(f"packed {difference}")

    def _attempt(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            with self.packed():
                return run()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as cause:  # whatever a model does that was not written for a foreign attention function
            raise self._refusal(str(cause)) from cause

    def _refusal(self, reason: str) -> CannotPack:
        return CannotPack(
            f"model {type(self.model).__name__} cannot run packed on transformers' attention interface: {reason}"
        )


def keeps_state(model: PreTrainedModel) -> bool:
    """Whether a decoder's cache has layers that cannot forget their last tokens."""
    return getattr(model, "_is_stateful", False) or not DynamicCache(config=model.config).is_croppable


def probe_text(vocabulary: int, length: int, number: int = 0) -> list[int]:
    """Ids to try a model with."""
    return [(7 * i + 3 * number + 1) % vocabulary for i in range(length)]


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward pass has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters


def positions(model: PreTrainedModel, start: int, end: int) -> dict[str, torch.Tensor]:
    """The argument that ``model.generate`` gives to models that take it; some count otherwise by themselves."""
    if not takes(model, "position_ids"):
        return {}
    return {"position_ids": torch.arange(start, end, device=model.device)[None]}


def difference_from_own(model: PreTrainedModel, texts: Sequence[Sequence[int]], logits: torch.Tensor) -> str | None:
    """Say by how much `logits` [sequences, length, V] miss the model's own forward pass, None if they don't."""
    ids = torch.tensor(texts, device=model.device)
    places = positions(model, 0, ids.shape[1])
    with torch.inference_mode():
        own = torch.cat([model(row[None], use_cache=False, **places).logits for row in ids]).float()
    error = (logits.float() - own).norm() / own.norm()
    if error < (1e-3 if model.dtype == torch.float32 else 0.1):
        return None
    return f"logits differ from its own by {error:.1%}"


def context_of(config: Any) -> int | None:
    """Longest sequence for which a token's key does not depend on what comes later."""
    context: int | None = getattr(config, "max_position_embeddings", None)
    if context is not None and context < 1:  # XLNet's way to say that there is no limit
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond it, transformers turns all keys of a pass by other angles
        context = rope.get(
            "original_max_position_embeddings", getattr(config, "original_max_position_embeddings", context)
        )
    return context
