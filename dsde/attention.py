"""Attention of packed rows: the function registered with transformers, and what it needs to know beside the tensors.

Every sequence of a packed batch attends to its own keys in the paged store. They are read in place while its blocks are
neighbours; scattered ones are gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

if TYPE_CHECKING:
    from .cache import PackedModel, Segment

NAME = "dsde_packed"
# A strip of causal mask serves all drafts up to this many rows by slicing; longer chunks build their own.
_STRIP_ROWS = 64


class Shapes:
    """Stands in for `PackedRows` while the layers' shapes are learned."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self.windows: set[int | None] = set()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Note the layer's shapes; returns zeros [1, T, H, D]."""
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
                None if n == 1 else self.owner.masks.causal(n, end - self.first_key(n, end, window), window)
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
                out = _written_out(q, k, v, mask, scaling, softcap, s_aux)
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
    packed_rows: PackedRows | Shapes | None = None,
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
    if isinstance(packed_rows, Shapes):
        return packed_rows.attend(layer, query, key, value, sliding_window), None
    return packed_rows.attend(layer, query, key, value, sliding_window, scaling, softcap, s_aux), None


def _written_out(
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


class Masks:
    """Additive causal masks, with or without a sliding window, cut out of strips that are built once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._strips: dict[int | None, torch.Tensor] = {}

    def causal(self, rows: int, length: int, window: int | None) -> torch.Tensor:
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


def _mask(
    rows: int, length: int, first: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Additive mask: row i, standing at position ``first + i``, sees keys up to itself and at most `window` of them."""
    ahead = torch.arange(length, device=device) - torch.arange(first, first + rows, device=device)[:, None]
    hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
    return torch.zeros(rows, length, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


AttentionInterface.register(NAME, packed_attention)
