"""The demonstration: the same prompts by plain decoding, fixed drafts and DSDE, timed in turn and compared."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from dsde import Completion, Engine, SamplingParams
from dsde.metrics import summary
from dsde.models import best_device

MODES = ("off", "static-4", "dsde")
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Task:
    """What to decode.

    Attributes
    ----------
    name : str
        What the models are, for the report.
    target, draft : PreTrainedModel
        The pair.
    prompts : sequence of list of int
        Token ids.
    max_new_tokens : int
        Tokens to generate for each prompt.
    rounds : int
        Timed runs of each mode and batch size; the report gives medians.
    singly : int, optional
        How many of the prompts are decoded one at a time; None takes all.
    threads : int, optional
        Threads of torch, where OMP_NUM_THREADS doesn't say otherwise; None leaves torch's choice.
    """

    name: str
    target: Any
    draft: Any
    prompts: Sequence[list[int]]
    max_new_tokens: int
    rounds: int
    singly: int | None = None
    threads: int | None = None


def embedded_pair(prompts: int | None = None, max_new_tokens: int | None = None) -> Task:
    """Return the task for the pair that the package brings and held-out text of its kind."""
    from dsde.demo import pair

    target, draft, tokenizer = pair.load_pair(torch.float32)
    ids = [tokenizer(text).input_ids for text in pair.prompts(prompts or 16)]
    # One prompt of each nature is decoded alone. The matrices are so small that more threads only wait for each other.
    singly, threads = len(pair.NATURES), 1
    return Task(
        "embedded pair", *_place(target, draft), ids, max_new_tokens or 96, rounds=3, singly=singly, threads=threads
    )


def packaged_llm(prompts: int | None = None, max_new_tokens: int | None = None) -> Task:
    """Return the task for SmolLM2-135M-Instruct on chat prompts; ValueError if its packages are missing."""
    from dsde.demo import smollm

    target, draft, tokenizer = smollm.load_pair(torch.float32)
    ids = smollm.prompts(prompts or 8, tokenizer)
    name = "SmolLM2-135M-Instruct, the draft is the target without four of its layers"
    return Task(name, *_place(target, draft), ids, max_new_tokens or 32, rounds=1)


def demonstrate(task: Task) -> tuple[dict[str, Any], list[Completion]]:
    """Decode the task's prompts greedily by every mode, all together and `task.singly` of them one at a time.

    The modes take turns within a round, so a machine that slows down or speeds up does so for all of them.

    Parameters
    ----------
    task : Task
        Models, prompts and lengths.

    Returns
    -------
    result : dict
        Conditions, one row of figures for each batch size and mode, and whether every run gave the tokens that
        transformers' own greedy ``generate`` gives.
    completions : list of Completion
        Those of the last DSDE run with all prompts together.
    """
    if task.threads is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(task.threads)
    params = SamplingParams(max_new_tokens=task.max_new_tokens)
    # Batch size to its prompts.
    batches = {len(task.prompts): task.prompts, 1: task.prompts[: task.singly]}
    runs: dict[tuple[int, str], list[tuple[list[Completion], float]]] = {(b, m): [] for b in batches for m in MODES}
    total = len(task.prompts) + len(MODES) * task.rounds * sum(map(len, batches.values()))
    with tqdm(total=total, unit="prompt", desc="reference") as bar:
        reference = [_reference(task, prompt, bar) for prompt in task.prompts]
        for mode in MODES:
            bar.set_description("warm-up")
            _decode(task, mode, 2, SamplingParams(max_new_tokens=_WARM_UP_TOKENS), task.prompts[:2])
        for _ in range(task.rounds):
            for batch, mode in runs:
                bar.set_description(f"{mode}, batch {batch}")
                runs[batch, mode].append(_decode(task, mode, batch, params, batches[batch]))
                bar.update(len(batches[batch]))
    rows = []
    for (batch, mode), timed in runs.items():
        plain = runs[batch, "off"]
        rows.append(
            {
                "batch": batch,
                "mode": mode,
                "prompts": len(batches[batch]),
                **_median_round(timed),
                "ratio_to_off": statistics.median(p[1] / t[1] for t, p in zip(timed, plain, strict=True)),
                "identical": sum(
                    c.token_ids == expected for done, _ in timed for c, expected in zip(done, reference, strict=False)
                ),
                "decoded": len(timed) * len(batches[batch]),
            }
        )
    result = {
        "models": task.name,
        "target_parameters": task.target.num_parameters(),
        "draft_parameters": task.draft.num_parameters(),
        "prompts": len(task.prompts),
        "prompt_tokens": sum(map(len, task.prompts)),
        "max_new_tokens": task.max_new_tokens,
        "rounds": task.rounds,
        "environment": environment(task.target),
        "rows": rows,
        "identical": all(row["identical"] == row["decoded"] for row in rows),
    }
    return result, runs[len(task.prompts), "dsde"][-1][0]


def environment(model: Any) -> dict[str, Any]:
    """Hardware, threads, number format and versions that a figure was measured with."""
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else _cpu_name()
    return {
        "device": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def report(result: dict[str, Any]) -> str:
    """Return the result of `demonstrate` as the text to print."""
    env = result["environment"]
    lines = [
        "",
        f"{result['models']}: target {result['target_parameters'] / 1e6:.1f} M parameters, "
        f"draft {result['draft_parameters'] / 1e6:.1f} M",
        f"{result['prompts']} prompts, {result['prompt_tokens']} tokens, at batch 1 the first "
        f"{min(row['prompts'] for row in result['rows'])}; greedy, at most {result['max_new_tokens']} new tokens each; "
        f"median of {result['rounds']} round{'s' * (result['rounds'] > 1)}",
        f"{env['device']}, {env['cores']} cores, torch threads: {env['threads']}, {env['dtype']}; "
        f"Python {env['python']}, torch {env['torch']}, transformers {env['transformers']}",
        "",
        "| batch | mode     | tokens/s | vs off | drafted/step | accepted/step | latency p50, ms | p99, ms |",
        "|------:|:---------|---------:|-------:|-------------:|--------------:|----------------:|--------:|",
    ]
    lines += [
        f"| {row['batch']:5} | {row['mode']:8} | {row['tokens_per_s']:8.1f} | {row['ratio_to_off']:5.2f}x "
        f"| {row['mean_sl']:12.2f} | {row['accepted_per_step']:13.2f} "
        f"| {1e3 * row['latency_p50']:15.0f} | {1e3 * row['latency_p99']:7.0f} |"
        for row in result["rows"]
    ]
    same, decoded = (sum(row[key] for row in result["rows"]) for key in ("identical", "decoded"))
    verdict = "all outputs identical" if result["identical"] else "OUTPUTS DIFFER"
    lines += ["", f"{verdict}: {same} of {decoded} are the tokens of transformers' greedy generate"]
    if env["device"] == _cpu_name():
        lines.append("A CPU run: it times the CPU backend.")
    return "\n".join(lines)


def _place(target: Any, draft: Any) -> tuple[Any, Any]:
    return target.to(best_device()), draft.to(best_device())


def _reference(task: Task, prompt: list[int], bar: tqdm) -> list[int]:
    """What transformers itself decodes, one prompt at a time."""
    ids = torch.tensor([prompt], device=task.target.device)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        output = task.target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=task.max_new_tokens, pad_token_id=0
        )
    bar.update()
    return output[0, len(prompt) :].tolist()


def _decode(
    task: Task, mode: str, batch: int, params: SamplingParams, prompts: Sequence[list[int]]
) -> tuple[list[Completion], float]:
    """Decode the prompts `batch` at a time in an engine of their own; returns them and the seconds it took."""
    engine = Engine(task.target, task.draft, mode, max_sequences=batch)
    start = time.perf_counter()
    if batch == 1:
        # One after the other, so that latency is a request's own time and not its time in the queue.
        completions = [c for prompt in prompts for c in engine.generate([prompt], params)]
    else:
        completions = engine.generate(prompts, params)
    return completions, time.perf_counter() - start


def _median_round(timed: Sequence[tuple[list[Completion], float]]) -> dict[str, float]:
    """Figures of the round whose time is the median (the lower one of two)."""
    ranked = sorted(timed, key=lambda run: run[1])
    return summary(*ranked[(len(ranked) - 1) // 2])


def _cpu_name() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
