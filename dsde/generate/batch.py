"""The batch that transformers prepared, as prompts without padding, and the results as a batch again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from ..request import Completion, Request
from .rows import Row


def left_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, positions: Any) -> list[int]:
    """How many ids at the left of each row [B, n] are padding.

    Raises
    ------
    ValueError
        The mask is anything but left padding, a row is empty, or the positions of the text don't count from 0.
    """
    width = input_ids.shape[1]
    if not input_ids.numel():
        raise ValueError(f"input_ids must hold a row or more of at least one token, got {tuple(input_ids.shape)}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
    starts = (mask != 0).int().argmax(1, keepdim=True)
    places = torch.arange(width, device=input_ids.device)
    text = places >= starts
    if not torch.equal(mask, text.to(mask.dtype)):
        raise ValueError("attention_mask must be 0 at left padding only and 1 at one token or more in each row")
    if positions is None:
        return starts[:, 0].tolist()
    # Multimodal models have a plane for each of their axes, which are all alike where there is only text.
    if positions.shape[-1] != width or ((positions.to(places) - (places - starts)) * text).any():
        raise ValueError("position_ids must count the tokens of each row from 0")
    return starts[:, 0].tolist()


class ColumnStream:
    """Feeds a streamer as plain decoding does: the prompt, then one token of every row at a time, then the end."""

    def __init__(self, streamer: Any, input_ids: torch.Tensor, pad: int) -> None:
        self.streamer = streamer
        self.input_ids = input_ids
        self.pad = pad
        self.sent = 0

    def start(self) -> None:
        """The prompt, as it was given."""
        self.streamer.put(self.input_ids.cpu())

    def update(self, requests: Sequence[Request]) -> None:
        """Send the columns that are complete: each row holds a token there, or has ended."""
        new = [r.tokens[len(r.prompt_ids) :] for r in requests]
        longest = max(map(len, new))
        complete = min((len(t) for r, t in zip(requests, new, strict=True) if r.completion is None), default=longest)
        for column in range(self.sent, complete):
            self.streamer.put(torch.tensor([t[column] if column < len(t) else self.pad for t in new]))
        self.sent = complete

    def end(self) -> None:
        """No more tokens."""
        self.streamer.end()


def assemble(input_ids: torch.Tensor, completions: Sequence[Completion], pad: int) -> torch.Tensor:
    """Prompts and generated tokens, rows that ended earlier filled with `pad`; [B, n + longest]."""
    width = input_ids.shape[1]
    longest = max(len(c.token_ids) for c in completions)
    sequences = torch.full((len(completions), width + longest), pad, device=input_ids.device)
    sequences[:, :width] = input_ids
    for row, completion in zip(sequences, completions, strict=True):
        row[width : width + len(completion.token_ids)] = sequences.new_tensor(completion.token_ids)
    return sequences


def full_output(
    sequences: torch.Tensor,
    completions: Sequence[Completion],
    rows: Sequence[Row],
    processors: Any,
    config: Any,
    pad: int,
) -> GenerateDecoderOnlyOutput:
    """The dictionary form, with raw logits and processed scores of each step where `config` asks for them.

    After the end of a row its logits and scores are 0 at `pad` and -inf elsewhere.
    """
    width = sequences.shape[1] - max(len(c.token_ids) for c in completions)
    logits, scores = [], []
    for row, completion, ids in zip(rows, completions, sequences, strict=True):
        assert completion.logits is not None
        raw = completion.logits.float()
        ended = raw.new_full((sequences.shape[1] - width - len(raw), raw.shape[1]), -torch.inf)
        ended[:, pad] = 0
        logits.append(torch.cat((raw, ended)))
        if config.output_scores:
            own = [row.processor(p) for p in processors]
            # Processors see a request's own tokens and put the padding in front themselves.
            prompt = row.padding.shape[1]
            done = []
            for step, line in enumerate(raw):
                score = line[None].clone()
                for process in own:
                    score = process(ids[None, prompt : width + step], score)
                done.append(score)
            scores.append(torch.cat((*done, ended)))
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(torch.stack(scores, 1)) if config.output_scores else None,
        logits=tuple(torch.stack(logits, 1)) if config.output_logits else None,
    )
