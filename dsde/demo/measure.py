"""What the draft is worth: losses, cost and acceptance, `python -m dsde.demo.measure [--folder DIR]`."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dsde.demo import corpus, pair

WINDOW = 512


@torch.inference_mode()
def loss(model: LlamaForCausalLM, ids: Tensor) -> float:
    """Return the mean loss on a row of tokens, in nats, read in separate windows of `WINDOW` tokens.

    Parameters
    ----------
    model : LlamaForCausalLM
        The model.
    ids : Tensor
        `[tokens]`; what doesn't fill the last window is left out.
    """
    rows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    losses = [
        F.cross_entropy(model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        for batch in tqdm(rows.split(2), desc="held-out loss", mininterval=5)
    ]
    return statistics.fmean(value.item() for value in losses)


@torch.inference_mode()
def step_ms(models: tuple[LlamaForCausalLM, ...], context: int = 128, steps: int = 60) -> list[float]:
    """Return each model's median time for one token of one sequence, in milliseconds.

    The models take turns, so that whatever else the machine does meets all of them.
    """
    prefix, token = torch.zeros(1, context, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    caches = [model(input_ids=prefix)[pair.CACHE] for model in models]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(steps):
        for model, cache, taken in zip(models, caches, times, strict=True):
            start = time.perf_counter()
            model(input_ids=token, **{pair.CACHE: cache})
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def continuations(target: LlamaForCausalLM, prompts: list[Tensor], tokens: int, temperature: float) -> list[Tensor]:
    """Return each prompt `[tokens]` with the target's continuation up to end-of-text, greedy at temperature 0."""
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    end, width = target.config.eos_token_id, max(map(len, prompts))
    padded = torch.stack([F.pad(prompt, (width - len(prompt), 0), value=end) for prompt in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()
    rows = target.generate(padded, attention_mask=mask, max_new_tokens=tokens, **sampling)
    lengths = [int((row[width:] != end).long().cumprod(0).sum()) + 1 for row in rows]
    return [row[width - len(p) : width + n] for row, p, n in zip(rows, prompts, lengths, strict=True)]


@torch.inference_mode()
def overlap(target: LlamaForCausalLM, draft: LlamaForCausalLM, text: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Compare the two distributions of each token of `text[start:]`.

    Returns
    -------
    agree : Tensor
        `[tokens]` bool, whether both have the same argmax: a greedy draft would be accepted.
    shared : Tensor
        `[tokens]` float, the sum of min(p, q): the probability that a draft sampled at temperature 1 is accepted.
    """
    p, q = (model(input_ids=text[None]).logits[0, start - 1 : -1] for model in (target, draft))
    return p.argmax(-1) == q.argmax(-1), torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)


def emitted_per_step(agree: Tensor, length: int) -> float:
    """Return the tokens per verification of greedy decoding that always drafts `length` tokens.

    Greedy drafting on a known continuation needs no draft run: a step emits the agreements that follow, at most
    `length` of them, and one token of the target's own.
    """
    position, steps = 0, 0
    while position < len(agree):
        run = agree[position : position + length].tolist()
        position += (run.index(False) if False in run else len(run)) + 1
        steps += 1
    return position / steps


def loops(text: Tensor, tail: int = 64, longest: int = 24) -> bool:
    """Return whether the last `tail` tokens of `text` repeat one piece of at most `longest` tokens."""
    end = text[-tail:]
    return any(torch.equal(end[period:], end[:-period]) for period in range(1, longest + 1))


def acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[pair.Prompt],
    tokens: int = 128,
) -> dict[str, Any]:
    """Measure how often the draft is right on the target's continuations of `prompts`.

    Returns
    -------
    dict
        For greedy continuations: the rate at which both models' argmax agree, overall and by nature of the prompt,
        tokens per step at a fixed draft length of 4, and the share of continuations that end in a loop. For
        continuations sampled at temperature 1: the mean of sum min(p, q).
    """
    ids = [tokenizer(prompt.text, return_tensors="pt")["input_ids"][0] for prompt in prompts]
    starts = [len(row) for row in ids]
    greedy, sampled = (continuations(target, ids, tokens, temperature) for temperature in (0.0, 1.0))
    agree = [overlap(target, draft, text, start)[0] for text, start in zip(greedy, starts, strict=True)]
    shared = [overlap(target, draft, text, start)[1] for text, start in zip(sampled, starts, strict=True)]
    by_nature = {
        nature: _mean([row for row, prompt in zip(agree, prompts, strict=True) if prompt.nature == nature])
        for nature in pair.NATURES
        if any(prompt.nature == nature for prompt in prompts)
    }
    return {
        "prompts": len(prompts),
        "new_tokens": tokens,
        "greedy_agreement": _mean(agree),
        "greedy_agreement_by_nature": by_nature,
        "greedy_tokens_per_step_at_4": round(statistics.fmean(emitted_per_step(row, 4) for row in agree), 2),
        "greedy_continuations_that_loop": round(statistics.fmean(map(loops, greedy)), 3),
        "sum_min_p_q_temperature_1": _mean(shared),
    }


def _mean(rows: list[Tensor]) -> float:
    """Return the mean over all tokens of all rows."""
    return round(torch.cat(rows).float().mean().item(), 3)


def measure(folder: Path = pair.WEIGHTS, prompts: int = 48) -> dict[str, Any]:
    """Return what the card says about a finished pair, except how it was trained."""
    torch.manual_seed(0)
    target, draft, tokenizer = pair.load_pair(folder=folder)
    held_out = torch.tensor([token for text in corpus.held_out_texts() for token in tokenizer(text)["input_ids"]])
    times = step_ms((target, draft))
    return {
        "parameters": {name: model.num_parameters() for name, model in (("target", target), ("draft", draft))},
        "loss_held_out": {
            name: round(loss(model, held_out), 4) for name, model in (("target", target), ("draft", draft))
        },
        "held_out_tokens": len(held_out),
        "step_ms": {"target": round(times[0], 2), "draft": round(times[1], 2), "ratio": round(times[0] / times[1], 1)},
        "threads": torch.get_num_threads(),
        "acceptance": acceptance(target, draft, tokenizer, pair.held_out_prompts(folder)[:prompts]),
    }


def write_card(card: dict[str, Any], folder: Path) -> None:
    """Measure the pair in `folder`, add that to `card` and write it next to the weights."""
    card["measured"] = measure(folder)
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")


def main() -> None:
    """Measure again and update the card."""
    parser = argparse.ArgumentParser(prog="python -m dsde.demo.measure", description="Measure a model pair anew.")
    parser.add_argument("--folder", type=Path, default=pair.WEIGHTS, help="folder of target/, draft/ and card.json")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_card(json.loads((options.folder / "card.json").read_text()), options.folder)


if __name__ == "__main__":
    main()
