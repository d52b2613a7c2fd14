"""Memory benchmark: many short requests through one engine; blocks come back and the process does not grow.

    python -m bench.memory [--requests N] [--out FILE.jsonl]

Prints the resident set after each tenth of the requests. The first tenths touch the key-value pool for the first time;
from then on the line should be flat: the exit code is 1 if the second half grows by more than `MOST_GROWTH` MiB or a
block is missing at the end.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from bench.environment import environment, resident_mib
from dsde import Engine, SamplingParams
from dsde.demo.pair import load_pair, prompts

MOST_GROWTH = 8.0
"""MiB that the second half of the requests may add: what the allocator of a flat process still moves."""


def main() -> int:
    """Run the requests, print what is held after each tenth and return the exit code."""
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
    faults = []
    if result["growth_mib_second_half"] > MOST_GROWTH:
        faults.append(f"the second half grew by {result['growth_mib_second_half']} MiB, more than {MOST_GROWTH}")
    if result["free_blocks"] != result["blocks"]:
        faults.append(f"{result['free_blocks']} of {result['blocks']} blocks are free")
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
