"""Where a request ends inside a block of committed tokens."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from .request import Request


def cut_at_end(request: Request, emitted: list[int]) -> list[int]:
    """The emitted tokens up to the request's limit and its first end-of-sequence id, which is kept."""
    emitted = emitted[: request.limit - len(request.tokens)]
    ends = [i for i, token in enumerate(emitted) if token in request.eos]
    return emitted[: ends[0] + 1] if ends else emitted


def cut_at_stop(request: Request, start: int, tokenizer: PreTrainedTokenizerBase | None, device: torch.device) -> bool:
    """Cut the request's tokens behind the first from `start` on that ends it.

    Runs user code (tokenizer, stopping criteria); what that raises passes through.

    Parameters
    ----------
    request : Request
        Its tokens from `start` on are new and already cut by `cut_at_end`; log-probabilities and kept logits follow.
    start : int
        Position of the first new token.
    tokenizer : PreTrainedTokenizerBase, optional
        Needed if the request has stop strings.
    device : torch.device
        Where criteria get their prefix.

    Returns
    -------
    bool
        Whether the request has ended, by end-of-sequence id, stop string or criterion.
    """
    params = request.params
    for length in range(start + 1, len(request.tokens) + 1):
        if request.tokens[length - 1] in request.eos:
            return True  # the last one: nothing is committed behind an end
        if not (params.stop or params.stopping_criteria):
            continue
        prefix = torch.tensor([request.tokens[:length]], device=device)
        text = _tail(request, length, tokenizer) if params.stop else ""
        if any(s in text for s in params.stop) or any(bool(c(prefix)) for c in params.stopping_criteria):
            surplus = len(request.tokens) - length
            if surplus:
                del request.tokens[-surplus:], request.logprobs[-surplus:], request.logits[-surplus:]
            return True
    return False


def _tail(request: Request, length: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The end of the text generated up to `length`, long enough to hold any stop string."""
    assert tokenizer is not None
    # A byte-level token may hold one byte of a four-byte character; the margin covers a broken one at the left.
    window = 4 * max(len(s) for s in request.params.stop) + 4
    generated = request.tokens[max(len(request.prompt_ids), length - window) : length]
    text: str = tokenizer.decode(generated, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
