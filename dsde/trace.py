"""Traces on disk: one JSON line per request and verification step."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .request import Completion, StepTrace

_FIELDS = {field.name for field in dataclasses.fields(StepTrace)}


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number (from 1) and object of each line that is not blank.

    Raises
    ------
    ValueError
        A line that is no JSON object; the message gives ``file:line``.
    OSError
        The file cannot be read.
    """
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: expected a JSON object, got {line.strip()[:40]}")
            yield number, record


def write_trace(path: str | os.PathLike[str], completions: Iterable[Completion]) -> None:
    """Write the steps of each completion as JSON lines: request, step, sl, accepted, kld, wvir."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for completion in completions:
            for step in completion.trace:
                file.write(json.dumps({"request": completion.request_id, **dataclasses.asdict(step)}) + "\n")


def read_trace(path: str | os.PathLike[str]) -> dict[int, list[StepTrace]]:
    """Read what `write_trace` wrote.

    Returns
    -------
    dict
        Request id to its steps in order.

    Raises
    ------
    ValueError
        No steps, or a line with other fields; the message gives ``file:line``.
    """
    steps: dict[int, list[StepTrace]] = {}
    for number, record in read_jsonl(path):
        if set(record) != _FIELDS | {"request"}:
            raise ValueError(f"{path}:{number}: expected the fields request, {', '.join(sorted(_FIELDS))}")
        steps.setdefault(record.pop("request"), []).append(StepTrace(**record))
    if not steps:
        raise ValueError(f"{path}: the trace holds no steps")
    return steps
