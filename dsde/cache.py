"""Packed forward passes over a paged key-value store.

A step's rows, whatever sequence and phase they come from, run as one row of a [1, T] batch. The attention function
registered here with transformers writes the new keys and values into their slots and lets each sequence attend to its
own, so nothing is padded and nothing is copied while a sequence's blocks are neighbours. transformers sees no cache at
all: rolling back a rejected draft is remembering a smaller length.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from .blocks import BlockTable

ATTENTION = "dsde_packed"
# A strip of causal mask serves all drafts up to this many rows by slicing; longer chunks build their own.
_STRIP_ROWS = 64


class CannotPack(ValueError):
    """The model's attention can't be run packed and give the same result."""


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
        The model is not a decoder, keeps recurrent state, is in training mode or in float64.
    CannotPack
        Its attention bypasses transformers' interface, or does something this module does not know.
    MemoryError
        The store does not fit.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, block_size: int) -> None:
        name = type(model).__name__
        if model.training:
            raise ValueError(f"model {name} is in training mode: call model.eval() first")
        if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
            raise ValueError(f"model {name} is not a decoder whose cache can be rolled back")
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
        self._strips: dict[int | None, torch.Tensor] = {}
        parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        self._configs = list({id(m.config): m.config for m in parts}.values())
        with torch.inference_mode():
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
        """Run the segments in one pass; call it in inference mode.

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
        # Ids outside this vocabulary are a partner's with a wider one, or the -1 of a broken draft row. The draft makes
        # of them what it can; for the target they are drafts that verification rejects, whatever follows them.
        ids.clamp_(0, self.num_embeddings - 1)
        wanted = 0 if keep is None else torch.tensor(keep, device=self.device)
        return self._run(ids, positions, wanted, rows)

    def causal_mask(self, rows: int, length: int, window: int | None) -> torch.Tensor:
        """Additive mask [rows, length] for the last `rows` of `length` positions, lower-right aligned."""
        if rows > _STRIP_ROWS:
            return _mask(rows, length, length - rows, window, self.dtype, self.device)
        strip = self._strips.get(window)
        if strip is None or strip.shape[1] < length + _STRIP_ROWS:
            width = max(1024, 2 * length)
            strip = _mask(_STRIP_ROWS, width + _STRIP_ROWS, width, window, self.dtype, self.device)
            self._strips[window] = strip
        # Column `offset + j` of the strip is key j: the diagonal of its row 0 lies at its own last prefix position.
        offset = strip.shape[1] - _STRIP_ROWS - (length - rows)
        return strip[:rows, offset : offset + length]

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: int | torch.Tensor, rows: PackedRows | _Shapes
    ) -> torch.Tensor:
        with self._attention():
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
    def _attention(self) -> Iterator[None]:
        """Within it the model attends through this store; its own attention implementation comes back afterwards."""
        before = [c._attn_implementation for c in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = ATTENTION
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation

    def _allocate(self) -> None:
        """Learn each layer's shapes from one token and allocate the store for them."""
        seen = _Shapes()
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
        texts = [[(7 * i + 3 * j + 1) % self.num_embeddings for i in range(length)] for j in range(2)]
        tables = [BlockTable(list(range(j, blocks // 2 * 2, 2))) for j in range(2)]
        cut = length // 2

        def packed() -> torch.Tensor:
            parts = [
                self.forward([Segment(t[a:b], a, table) for t, table in zip(texts, tables, strict=True)])
                for a, b in ((0, cut), (cut, length))
            ]
            return torch.cat((parts[0].unflatten(0, (2, -1)), parts[1].unflatten(0, (2, -1))), 1)

        ours = self._attempt(packed).float()
        theirs = torch.cat([self.model(torch.tensor([t], device=self.device), use_cache=False).logits for t in texts])
        error = (ours - theirs.float()).norm() / theirs.float().norm()
        if not error < (1e-3 if self.dtype == torch.float32 else 0.1):
            raise self._refusal(f"packed logits differ from its own by {error:.1%}")

    def _attempt(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return run()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as cause:  # whatever a model does that was not written for a foreign attention function
            raise self._refusal(str(cause)) from cause

    def _refusal(self, reason: str) -> CannotPack:
        return CannotPack(
            f"model {type(self.model).__name__} cannot run packed on transformers' attention interface: {reason}"
        )


class _Shapes:
    """Stands in for `PackedRows` while the layers' shapes are learned."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self.windows: set[int | None] = set()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        if layer in self.shapes:
            raise ValueError(f"layer {layer} attends twice")
        self.shapes[layer] = (key.shape, value.shape)
        self.windows.add(window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class PackedRows:
    """Where the rows of one forward pass stand: what the attention function needs to know beside the tensors."""

    def __init__(self, owner: PackedModel, segments: Sequence[Segment]) -> None:
        self.owner = owner
        size = owner.block_size
        self.lengths = [len(s.ids) for s in segments]
        self.ends = [s.end for s in segments]
        # First slot of a contiguous sequence, or the slots of all its positions.
        self.places: list[int | torch.Tensor] = []
        slots: list[int] = []
        for s in segments:
            blocks = s.table.blocks
            if s.table.contiguous:
                first = blocks[0] * size
                slots.extend(range(first + s.start, first + s.end))
                self.places.append(first)
            else:
                where = [blocks[p // size] * size + p % size for p in range(s.end)]
                slots.extend(where[s.start :])
                self.places.append(torch.tensor(where, device=owner.device))
        self.slots = torch.tensor(slots, device=owner.device)
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}
        self._views: dict[int | None, list[dict[int, tuple[torch.Tensor, torch.Tensor]]]] = {}

    def masks(self, window: int | None) -> list[torch.Tensor | None]:
        """Per segment, the mask over its visible keys; None where every row sees all of them (a single row)."""
        if window not in self._masks:
            self._masks[window] = [
                None if n == 1 else self.owner.causal_mask(n, end - self.first_key(n, end, window), window)
                for n, end in zip(self.lengths, self.ends, strict=True)
            ]
        return self._masks[window]

    def visible(self, layer: int, window: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per segment, the keys and values it may see, [1, heads, length, head_dim] each."""
        if window not in self._views:
            # The views of all layers at once: a call for each layer costs more than the attention itself.
            self._views[window] = [
                self._narrow(place, self.first_key(n, end, window), end)
                for n, end, place in zip(self.lengths, self.ends, self.places, strict=True)
            ]
        keys, values = self.owner.layers[layer]
        for n, end, place, views in zip(self.lengths, self.ends, self.places, self._views[window], strict=True):
            if isinstance(place, int):
                yield views[layer]
            else:  # scattered blocks: gathered after this layer's new rows were written
                where = place[self.first_key(n, end, window) :]
                yield keys.index_select(2, where), values.index_select(2, where)

    def _narrow(self, place: int | torch.Tensor, first: int, end: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if isinstance(place, int):
            for members, keys, values in self.owner.pools:
                k = keys.narrow(3, place + first, end - first).unbind(0)
                v = values.narrow(3, place + first, end - first).unbind(0)
                views.update(zip(members, zip(k, v, strict=True), strict=True))
        return views

    @staticmethod
    def first_key(rows: int, end: int, window: int | None) -> int:
        """First position that any of the last `rows` positions before `end` may attend to."""
        return 0 if window is None else max(0, end - rows - window + 1)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new rows of a layer and let each sequence attend to its own; [1, T, H, D]."""
        keys, values = self.owner.layers[layer]
        keys.index_copy_(2, self.slots, key)
        values.index_copy_(2, self.slots, value)
        grouped = query.shape[1] != key.shape[1]
        queries = query.split(self.lengths, 2) if len(self.lengths) > 1 else (query,)
        outputs = []
        for q, (k, v), mask in zip(queries, self.visible(layer, window), self.masks(window), strict=True):
            if softcap is None and s_aux is None:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
            else:
                out = _attend(q, k, v, mask, scaling, softcap, s_aux)
            outputs.append(out)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return out.transpose(1, 2).contiguous()


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed_rows: PackedRows | _Shapes | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the paged store; the function registered with transformers.

    Parameters
    ----------
    module : Module
        The attention layer; its ``layer_idx`` names the store.
    query : Tensor [1, H, T, D]
    key, value : Tensor [1, Hkv, T, D]
        The new rows only.
    scaling, sliding_window, softcap, s_aux : optional
        As transformers' attention functions define them.
    packed_rows : PackedRows
        Passed through ``model(...)``.

    Returns
    -------
    Tensor [1, T, H, D], None

    Raises
    ------
    ValueError
        An argument that would change the result and is not known here.
    """
    # Flags that are off and the positions, which the queries and keys already carry, change nothing.
    given = sorted(k for k, v in unknown.items() if k != "position_ids" and v is not None and v is not False)
    if packed_rows is None or attention_mask is not None or dropout or given:
        raise ValueError(f"unexpected arguments of {type(module).__name__}: {given or 'mask or dropout'}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(packed_rows, _Shapes):
        return packed_rows.attend(layer, query, key, value, sliding_window), None
    return packed_rows.attend(layer, query, key, value, sliding_window, scaling, softcap, s_aux), None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Attention written out, for what the fused one lacks: capped scores (Gemma 2) and sinks (GPT-OSS)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if s_aux is not None:  # a learned score that takes part in the softmax and has no value
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1).to(scores)), 3)
    weights = torch.softmax(scores, 3, dtype=torch.float32).to(v)
    return weights[..., : k.shape[2]] @ v


def _mask(
    rows: int, length: int, first: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Additive mask: row i, standing at position ``first + i``, sees keys up to itself and at most `window` of them."""
    ahead = torch.arange(length, device=device) - torch.arange(first, first + rows, device=device)[:, None]
    hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
    return torch.zeros(rows, length, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def context_of(config: Any) -> int | None:
    """Longest sequence for which a token's key does not depend on what comes later."""
    context: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond it, transformers turns all keys of a pass by other angles
        context = rope.get(
            "original_max_position_embeddings", getattr(config, "original_max_position_embeddings", context)
        )
    return context


AttentionInterface.register(ATTENTION, packed_attention)
