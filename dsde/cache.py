"""Packed forward passes over a paged key-value store.

A step's rows, whatever sequence and phase they come from, run as one row of a [1, T] batch. The attention function
registered here with transformers writes the new keys and values into their slots and lets each sequence attend to its
own, so nothing is padded and nothing is copied while a sequence's blocks are neighbours. transformers sees no cache at
all: rolling back a rejected draft is remembering a smaller length.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
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
    """The model does not attend through transformers' attention interface."""


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
    seconds : float
        Time spent inside the model's forward since construction (wall time; launch time only on a GPU).

    Raises
    ------
    ValueError
        The model is not a decoder, keeps recurrent state, or is in training mode.
    CannotPack
        The model bypasses the attention interface.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, block_size: int) -> None:
        name = type(model).__name__
        if model.training:
            raise ValueError(f"model {name} is in training mode: call model.eval() first")
        if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
            raise ValueError(f"model {name} is not a decoder whose cache can be rolled back")
        self.model = model
        self.config = model.config.get_text_config()
        self.num_slots = num_slots
        self.block_size = block_size
        self.context: int | None = getattr(self.config, "max_position_embeddings", None)
        self.num_embeddings: int = model.get_input_embeddings().num_embeddings
        self.seconds = 0.0
        self._store: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._strips: dict[int | None, torch.Tensor] = {}
        parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        self._configs = list({id(m.config): m.config for m in parts}.values())
        self._probe()

    @property
    def device(self) -> torch.device:
        """Where the model and its store live."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's number format."""
        return self.model.dtype

    def forward(self, segments: Sequence[Segment], keep: Sequence[int] | None = None) -> torch.Tensor:
        """Run the segments in one pass.

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
        start = time.perf_counter()
        logits: torch.Tensor = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else torch.tensor(keep, device=self.device),
            packed_rows=rows,
        ).logits[0]
        self.seconds += time.perf_counter() - start
        return logits

    @contextlib.contextmanager
    def packed(self) -> Iterator[None]:
        """Within it the model attends through this store; its own attention implementation comes back afterwards."""
        before = [(c, c._attn_implementation) for c in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = ATTENTION
            with torch.inference_mode():
                yield
        finally:
            for config, implementation in before:
                config._attn_implementation = implementation

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, ``[1, heads, num_slots, head_dim]`` each; allocated when first seen.

        Slots of one head are neighbours, so a contiguous sequence is a single `narrow` of each.
        """
        if layer not in self._store:
            self._store[layer] = (
                key.new_empty(1, key.shape[1], self.num_slots, key.shape[3]),
                value.new_empty(1, value.shape[1], self.num_slots, value.shape[3]),
            )
        return self._store[layer]

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

    def _probe(self) -> None:
        """Run one token, so that a model that attends by itself is refused here and the store takes its memory now."""
        name, cause = type(self.model).__name__, None
        try:
            with self.packed():
                self.vocabulary = self.forward([Segment([0], 0, BlockTable([0]))]).shape[1]
        except Exception as error:  # whatever a model does that was not written for a foreign attention function
            cause = error
        if cause is not None or len(self._store) != self.config.num_hidden_layers:
            raise CannotPack(
                f"model {name} cannot run packed: {len(self._store)} of {self.config.num_hidden_layers} layers attend "
                f"through transformers' attention interface" + (f" ({cause})" if cause is not None else "")
            ) from cause
        self.seconds = 0.0


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

    def masks(self, window: int | None) -> list[torch.Tensor | None]:
        """Per segment, the mask over its visible keys; None where every row sees all of them (a single row)."""
        if window not in self._masks:
            self._masks[window] = [
                None if n == 1 else self.owner.causal_mask(n, end - self.first_key(n, end, window), window)
                for n, end in zip(self.lengths, self.ends, strict=True)
            ]
        return self._masks[window]

    @staticmethod
    def first_key(rows: int, end: int, window: int | None) -> int:
        """First position that any of the last `rows` positions before `end` may attend to."""
        return 0 if window is None else max(0, end - rows - window + 1)


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
    packed_rows: PackedRows | None = None,
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
        raise ValueError(
            f"attention of {type(module).__name__} cannot run packed: unexpected arguments {given or 'mask or dropout'}"
        )
    owner = packed_rows.owner
    keys, values = owner.store(module.layer_idx, key, value)  # type: ignore[arg-type]
    keys.index_copy_(2, packed_rows.slots, key)
    values.index_copy_(2, packed_rows.slots, value)
    outputs = []
    masks = packed_rows.masks(sliding_window)
    grouped = query.shape[1] != key.shape[1]
    rows = zip(query.split(packed_rows.lengths, 2), packed_rows.ends, packed_rows.places, masks, strict=True)
    for q, end, place, mask in rows:
        first = packed_rows.first_key(q.shape[2], end, sliding_window)
        if isinstance(place, int):
            k, v = keys.narrow(2, place + first, end - first), values.narrow(2, place + first, end - first)
        else:
            k, v = keys.index_select(2, place[first:]), values.index_select(2, place[first:])
        if softcap is None and s_aux is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
        else:
            out = _attend(q, k, v, mask, scaling, softcap, s_aux)
        outputs.append(out)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return out.transpose(1, 2), None


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


AttentionInterface.register(ATTENTION, packed_attention)
