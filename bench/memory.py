"""Memory benchmark: many short requests through one engine; blocks come back and the process does not grow.

    python -m bench.memory [--requests N] [--out FILE.jsonl]

Prints the resident set after each tenth of the requests. The first tenths touch the key-value pool for the first time;
from then on the line should be flat.
"""

from __future__ import annotations

import argparse
import json

import torch

from bench.environment import environment, resident_mib
from dsde import Engine, SamplingParams
from dsde.demo.pair import load_pair, prompts


def main() -> None:
    """Run the requests and print what is held after each tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--out", help="append the result as a JSON line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target, draft, tokenizer = load_pair(torch.float32)
    texts = [tokenizer(text).input_ids for text in prompts(16)]
    engine = Engine(target, draft, "dsde", max_sequences=16)
    params = SamplingParams(max_new_tokens=options.max_new_tokens)
    resident = []
    for tenth in range(10):
        count = options.requests * (tenth + 1) // 10 - options.requests * tenth // 10
        engine.generate([texts[i % len(texts)][: 4 + i % 24] for i in range(count)], params)
        resident.append(round(resident_mib(), 1))
        print(f"{(tenth + 1) * 10:3} %  {resident[-1]:8.1f} MiB resident", flush=True)
    stats = engine.stats()
    result = {
        "bench": "memory",
        "requests": options.requests,
        "resident_mib": resident,
        "growth_mib_second_half": round(resident[-1] - resident[4], 1),
        "free_blocks": stats["free_blocks"],
        "blocks": stats["blocks"],
        "environment": environment(target),
    }
    print(json.dumps(result))
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
