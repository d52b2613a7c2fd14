"""Decode benchmark: this engine against transformers, on the embedded pair, in one run.

    python -m bench.decode [--rounds N] [--prompts N] [--max-new-tokens N] [--temperature T] [--out FILE.jsonl]

At batch 1 the rivals are transformers' `generate` and its assisted generation with the same pair (its default draft
length schedule); at the larger batch its `generate` on the left-padded batch. Every competitor decodes the same prompts
in float32 on the same threads; they take turns within a round, and a ratio is the median over rounds of the ratio
within a round, so a machine that drifts does so for all. Every other figure is the median over rounds too. Greedy
outputs are compared token for token, in every round.

`overhead` is the share of the engine's step that is not a model's forward pass: schedule, draft sampling, verify,
adapt, commit. Figures of a CPU run time the CPU backend.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tqdm import tqdm

from bench.environment import environment
from dsde import Engine, SamplingParams
from dsde.demo.pair import load_pair, prompts
from dsde.metrics import summary

Run = Callable[[], tuple[list[list[int]], dict[str, float]]]


def own(pair: tuple[Any, Any], controller: str, batch: int, ids: Sequence[list[int]], params: SamplingParams) -> Run:
    """Our engine, `batch` requests at a time."""
    engine = Engine(*pair, controller, max_sequences=batch)

    def run() -> tuple[list[list[int]], dict[str, float]]:
        before, start = engine.stats(), time.perf_counter()
        # At batch 1 the requests follow each other, so that none waits in the queue.
        groups = [[p] for p in ids] if batch == 1 else [ids]
        done = [c for group in groups for c in engine.generate(group, params)]
        figures = summary(done, time.perf_counter() - start)
        spent = {k: engine.stats()[k] - before[k] for k in before}
        return [c.token_ids for c in done], {
            "overhead": 1 - (spent["target_seconds"] + spent["draft_seconds"]) / spent["seconds"],
            "step_ms": 1e3 * spent["seconds"] / spent["steps"],
            **{k: figures[k] for k in ("mean_sl", "accepted_per_step", "latency_p50", "latency_p99")},
        }

    return run


def rival(target: Any, draft: Any | None, batch: int, ids: Sequence[list[int]], params: SamplingParams) -> Run:
    """The `generate` of transformers: plain, or assisted if there is a draft; left-padded if batch > 1."""
    options: dict[str, Any] = {"max_new_tokens": params.max_new_tokens, "pad_token_id": 0, "eos_token_id": []}
    options["do_sample"] = params.temperature > 0
    if params.temperature > 0:
        options |= {"temperature": params.temperature, "top_k": 0}
    if draft is not None:
        options["assistant_model"] = draft

    def run() -> tuple[list[list[int]], dict[str, float]]:
        outputs = []
        for start in range(0, len(ids), batch):
            group = ids[start : start + batch]
            width = max(map(len, group))
            padded = torch.tensor([[0] * (width - len(p)) + p for p in group], device=target.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group], device=target.device)
            with torch.inference_mode():
                outputs += target.generate(padded, attention_mask=mask, **options)[:, width:].tolist()
        return outputs, {}

    return run


def compare(batch: int, runs: dict[str, Run], rounds: int) -> list[dict[str, Any]]:
    """Time the competitors in turns; one row each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    identical = dict.fromkeys(runs, True)
    outputs = {}
    reference = next(iter(runs))
    for turn in tqdm(range(rounds + 1), desc=f"batch {batch}", unit="round"):  # round 0 warms up
        for name, run in runs.items():
            start = time.perf_counter()
            outputs[name], measured = run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
                figures[name].append(measured)
            identical[name] &= outputs[name] == outputs[reference]
    return [
        {
            "batch": batch,
            "name": name,
            "tokens_per_s": sum(map(len, outputs[name])) / statistics.median(seconds[name]),
            "ratio_to": {
                other: round(statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True)), 3)
                for other in runs
                if other != name
            },
            "identical": identical[name],
            **{key: statistics.median(f[key] for f in figures[name]) for key in figures[name][0]},
        }
        for name in runs
    ]


def _line(row: dict[str, Any], sampled: bool) -> str:
    """Return a row of the table; a cell without a figure stays empty."""
    ratios = {**row["ratio_to"], row["name"]: 1.0}
    cells = [
        str(row["batch"]),
        row["name"],
        f"{row['tokens_per_s']:.1f}",
        *(f"{ratios[n]:.2f}x" if n in ratios else "" for n in ("transformers", "transformers, assisted", "off")),
        *(f"{row[k]:.2f}" if k in row else "" for k in ("mean_sl", "accepted_per_step")),
        *(f"{1e3 * row[k]:.0f}" if k in row else "" for k in ("latency_p50", "latency_p99")),
        f"{row['overhead']:.1%}" if "overhead" in row else "",
        "sampled" if sampled else str(row["identical"]),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the comparison, print it, and append JSON lines to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16, help="also the larger batch")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="small matrices gain nothing from more")
    parser.add_argument("--out", help="append the rows as JSON lines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

    target, draft, tokenizer = load_pair(torch.float32)
    ids = [tokenizer(text).input_ids for text in prompts(options.prompts)]
    params = SamplingParams(options.max_new_tokens, options.temperature, eos=())
    conditions = environment(target) | vars(options)
    print(", ".join(f"{k} {v}" for k, v in conditions.items() if k != "out"), flush=True)
    controllers = ("off", "static-2", "static-4", "dsde")
    rows = []
    for batch in (1, options.prompts):
        runs: dict[str, Run] = {"transformers": rival(target, None, batch, ids, params)}
        if batch == 1:
            runs["transformers, assisted"] = rival(target, draft, 1, ids, params)
        runs |= {name: own((target, draft), name, batch, ids, params) for name in controllers}
        rows += compare(batch, runs, options.rounds)

    print(
        "\n| batch | competitor | tokens/s | vs transformers | vs assisted | vs off | drafted/step | accepted/step ",
        end="",
    )
    print("| latency p50, ms | p99, ms | overhead | identical |")
    print("|--:|:--|" + "--:|" * 9 + ":--|")
    for row in rows:
        print(_line(row, sampled=options.temperature > 0))
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"bench": "decode", **row, "environment": conditions}) + "\n")


if __name__ == "__main__":
    main()
