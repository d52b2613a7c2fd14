"""Drop-in benchmark: the patched `generate` against transformers' plain and assisted one, in one run.

    python -m bench.generate [--llm] [--rounds N] [--prompts N] [--temperature T] [--out FILE.jsonl] ...   (see --help)

Everybody is called as ``model.generate(...)`` with the same prompts, the same options and the same pair: at batch 1
plain, assisted (transformers' default schedule) and patched, at larger batches plain and patched, since assisted
generation takes no batch. Competitors take turns within a round; a ratio is the median over rounds of the ratio within
a round. Greedy outputs are compared token for token. `--llm` takes SmolLM2-135M-Instruct and a draft that lacks four of
its layers: a check on a real model, whose draft is too dear to speed anything up.

Figures of a CPU run time the CPU backend.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from bench.decode import Run, compare
from bench.environment import environment
from dsde.demo import pair, smollm
from dsde.generate import Patch


def padded(ids: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    """Left-padded prompts and their mask."""
    width = max(map(len, ids))
    return {
        "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in ids]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids]),
    }


def caller(target: Any, ids: Sequence[list[int]], batch: int, options: dict[str, Any], patch: Patch | None) -> Run:
    """Decode all prompts, `batch` at a time, through ``target.generate``; patched if there is a patch."""
    groups = [padded(ids[i : i + batch]) for i in range(0, len(ids), batch)]

    def run() -> tuple[list[list[int]], dict[str, float]]:
        outputs = []
        if patch is not None:
            patch.install()
        try:
            for group in groups:
                new = target.generate(**group, **options)[:, group["input_ids"].shape[1] :]
                outputs += new.tolist()
        finally:
            if patch is not None:
                patch.undo()
        return outputs, {}

    return run


def main() -> None:
    """Run the comparison, print it, and append JSON lines to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm", action="store_true", help="SmolLM2-135M-Instruct instead of the embedded pair")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="small matrices gain nothing from more")
    parser.add_argument("--out", help="append the rows as JSON lines")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

    if arguments.llm:
        target, draft, tokenizer = smollm.load_pair()
        ids = smollm.prompts(arguments.prompts, tokenizer)
    else:
        target, draft, tokenizer = pair.load_pair()
        ids = [tokenizer(text).input_ids for text in pair.prompts(arguments.prompts)]
    # Fixed lengths: everybody makes the same number of tokens.
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "pad_token_id": 0, "eos_token_id": []}
    options["do_sample"] = arguments.temperature > 0
    if arguments.temperature > 0:
        options |= {"temperature": arguments.temperature, "top_k": 0}
    longest = max(map(len, ids)) + arguments.max_new_tokens + 32
    rows = []
    for batch in arguments.batches:
        room = {"max_sequences": batch, "kv_blocks": batch * -(-longest // 32)}
        runs = {"plain": caller(target, ids, batch, options, None)}
        if batch == 1:
            runs["assisted"] = caller(target, ids, batch, options | {"assistant_model": draft}, None)
        for controller in ("static-4", "dsde"):
            patched = Patch(target, draft, controller=controller, **room)
            runs[f"patched, {controller}"] = caller(target, ids, batch, options, patched)
        rows += compare(batch, runs, arguments.rounds)

    conditions = environment(target) | vars(arguments)
    print("\n" + ", ".join(f"{k} {v}" for k, v in conditions.items() if k != "out") + "\n")
    print("| batch | model.generate | tokens/s | vs plain | vs assisted | identical |")
    print("|--:|:--|--:|--:|--:|:--|")
    for row in rows:
        ratios = {row["name"]: 1.0, **row["ratio_to"]}
        assisted = f"{ratios['assisted']:.2f}x" if "assisted" in ratios else ""
        identical = "sampled" if arguments.temperature else row["identical"]
        print(
            f"| {row['batch']} | {row['name']} | {row['tokens_per_s']:.1f} | {ratios['plain']:.2f}x | {assisted} "
            f"| {identical} |"
        )
    if arguments.out:
        with open(arguments.out, "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"bench": "generate", **row, "environment": conditions}) + "\n")


if __name__ == "__main__":
    main()
