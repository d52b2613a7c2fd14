"""Traces on disk: one JSON line per request and verification step."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .request import Completion, StepTrace

_FIELDS = {field.name for field in dataclasses.fields(StepTrace)}
_COUNTS = ("request", "step", "sl", "accepted")
_SIGNALS = ("kld", "wvir")


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number (from 1) and object of each line that is not blank.

    Raises
    ------
    ValueError
        The file is no UTF-8 text, or a line is no JSON object; the message gives ``file`` or ``file:line``.
    OSError
        The file cannot be read.
    """
    with open(path, encoding="utf-8-sig") as file:
        lines = enumerate(file, 1)
        while True:
            try:
                number, line = next(lines)
            except StopIteration:
                return
            except UnicodeDecodeError:
                raise ValueError(f"{path}: not UTF-8 text") from None
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from None
            except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
                raise ValueError(f"{path}:{number}: JSON that cannot be read ({error})") from None
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
        No steps, or a line with other fields or values of another type; the message gives ``file:line``.
    """
    steps: dict[int, list[StepTrace]] = {}
    for number, record in read_jsonl(path):
        if set(record) != _FIELDS | {"request"}:
            raise ValueError(f"{path}:{number}: expected the fields request, {', '.join(sorted(_FIELDS))}")
        for name in _COUNTS:
            if type(record[name]) is not int or not 0 <= record[name] < 2**31:
                raise ValueError(f"{path}:{number}: {name} must be a whole number >= 0, got {_short(record[name])}")
        for name in _SIGNALS:
            if record[name] is not None and type(record[name]) is not float:
                raise ValueError(f"{path}:{number}: {name} must be a float or null, got {_short(record[name])}")
        steps.setdefault(record.pop("request"), []).append(StepTrace(**record))
    if not steps:
        raise ValueError(f"{path}: the trace holds no steps")
    return steps


def _short(value: Any) -> str:
    return textwrap.shorten(json.dumps(value), 40, placeholder="...")
