"""What the README shows works: its code runs, its commands and files exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from dsde.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_own_models_load():
    _, code = blocks("python")
    code = code.replace("path/or/id", "dsde/demo/weights/target").replace("small/one", "dsde/demo/weights/draft")
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)


def test_quick_start_runs():
    code, _ = blocks("python")
    assert len([line for line in code.splitlines() if line]) == 6
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert targets
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, flags=re.MULTILINE)] == []


def test_commands_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dsde").symlink_to(ROOT / "dsde")
    commands = re.findall(r"^\.venv/bin/python -m dsde (.*)$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    assert [main(shlex.split(command)) for command in commands] == [0, 0]


def test_file_tree_is_what_there_is():
    (tree,) = (b for b in blocks("") if "engine.py" in b)
    folder, paths = ROOT, []
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            paths.append(folder)
        else:
            paths.append(folder / name)
    assert [p for p in paths if not p.exists()] == []
    modules = {p for p in (ROOT / "dsde").glob("*.py") if not p.name.startswith("__")}
    packages = {p.parent for p in (*ROOT.glob("*/__init__.py"), *ROOT.glob("dsde/*/__init__.py"))}
    assert sorted((modules | packages) - set(paths)) == []


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [t for t in links if "://" not in t and not (ROOT / t).exists()] == []
