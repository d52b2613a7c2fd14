"""The examples of docs/api.md run, and it names everything public."""

from __future__ import annotations

import re
from pathlib import Path

import dsde

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_examples_run():
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", API, flags=re.DOTALL | re.MULTILINE))
    exec(compile(code, "docs/api.md", "exec"), {})


def test_every_public_name_is_there():
    assert [name for name in dsde.__all__ if f"`{name}" not in API] == []
