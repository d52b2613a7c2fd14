"""The kernels on this machine's GPU: first their tests, then their microbenchmarks.

    python -m bench.gpu --out DIR [--shapes small|default|full] [--tests PATH ...] [--only EXPRESSION]

Runs the kernel tests; if one fails, or none ran, it prints no speed and exits with 1. Then it runs
`bench/test_kernels.py` and appends one JSON line for each case to DIR/kernels.jsonl, with what it was measured with and
the sizes that the kernels were launched with (the constants of `dsde_kernels/launch.py`).
Without a GPU it says so and times the torch twins on the small shapes: no figure of such a run is one of a kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from bench.environment import environment
from dsde_kernels import launch

ROOT = Path(__file__).parents[1]


def run_tests(paths: list[str], folder: Path) -> tuple[int, int]:
    """Pytest's exit code, and the number of tests that passed."""
    report = folder / "tests.xml"
    code = _pytest([*paths, f"--junitxml={report}"])
    if not report.exists():
        return code, 0
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    return code, sum(not any(child.tag in ("failure", "error", "skipped") for child in case) for case in cases)


def run_benchmarks(shapes: str, only: str, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Pytest's exit code, and a row for each case."""
    report = folder / "benchmarks.json"
    arguments = [
        "bench/test_kernels.py",
        f"--benchmark-json={report}",
        "--benchmark-quiet",
        *(["-k", only] * bool(only)),
    ]
    code = _pytest(arguments, {"DSDE_BENCH": shapes})
    if not report.exists() or not report.read_text(encoding="utf-8"):
        return code, []
    cases = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    return code, [case["extra_info"] | {"rounds": case["stats"]["rounds"]} for case in cases]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a case."""
    lines = ["| task | V | B | K | drafts | dtype | logits | what | wall, us | device, us | GB/s | of copy |"]
    lines.append("|:--|--:|--:|--:|:--|:--|:--|:--|--:|--:|--:|--:|")
    for row in rows:
        cells = [str(row[k]) for k in ("task", "V", "B", "K", "layout", "dtype", "logits", "name")]
        cells += [f"{row['wall_us']:.1f}", "" if row["device_us"] is None else f"{row['device_us']:.1f}"]
        cells += [f"{row['gb_s']:.1f}", f"{row['share_of_copy']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _pytest(arguments: list[str], variables: dict[str, str] | None = None) -> int:
    """Run pytest on this repository in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | (variables or {}), check=False).returncode


def main() -> int:
    """Test, measure, print and write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="folder of kernels.jsonl")
    parser.add_argument("--shapes", choices=("small", "default", "full"), default="default" if gpu else "small")
    parser.add_argument("--tests", nargs="+", default=["tests/dsde_kernels"], help="what must pass; kept in the rows")
    parser.add_argument("--only", default="", help="pytest's -k for the benchmarks")
    options = parser.parse_args()

    if not gpu:
        print("No GPU here: this times the torch twins, the CPU backend. It is no measurement of the kernels.")
    with tempfile.TemporaryDirectory() as name:
        code, passed = run_tests(options.tests, Path(name))
        if code or not passed:
            print(f"No speeds: {passed} tests passed, and pytest's exit code is {code}.", file=sys.stderr)
            return 1
        code, rows = run_benchmarks(options.shapes, options.only, Path(name))
    conditions = environment(torch.empty(0, device="cuda" if gpu else "cpu"))
    del conditions["dtype"]  # each case has its own
    conditions |= {"launch": {name: value for name, value in vars(launch).items() if name.isupper()}}
    conditions |= {"tests": options.tests, "tests_passed": passed}
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "kernels.jsonl").open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"bench": "kernels", **row, "environment": conditions}) + "\n")
    print("\n" + ", ".join(f"{k} {v}" for k, v in conditions.items()) + "\n\n" + table(rows))
    print(f"\n{'On a GPU' if gpu else 'No GPU: all of this times the CPU backend'}.")
    return 1 if code or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
