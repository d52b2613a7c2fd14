"""What a figure was measured with: hardware, versions, git revision; and the process's memory."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from dsde.demo.run import environment as model_environment


def environment(placed: Any) -> dict[str, Any]:
    """What a figure was measured with.

    Parameters
    ----------
    placed : model or Tensor
        Where and in which number format it was measured: only its `device` and `dtype` are read.

    Returns
    -------
    dict
        Device, cores, threads, number format, versions and git revision ("+" behind it if the tree is changed).
    """
    return model_environment(placed) | {"revision": _git("describe", "--always", "--dirty=+", "--exclude=*")}


def resident_mib() -> float:
    """Resident set of this process in MiB (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status holds no VmRSS line")


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
