"""Training text and prompts: the source of Python's own standard library.

Every machine that runs this project has the text, its licence (PSF-2.0) is permissive, and it mixes code with prose.
Nothing of it is copied into the repository: the files are read where this interpreter keeps them, by `sysconfig`.

`HELD_OUT` names files that no training run sees. All of them exist in Python 3.10 to 3.13, and a machine that lacks one
(some distributions split the library) skips it, so lists that come from here are deterministic for a given Python.
"""

import importlib
import random
import sysconfig
from pathlib import Path

HELD_OUT = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "cmd.py",
    "collections/__init__.py",
    "colorsys.py",
    "csv.py",
    "email/utils.py",
    "filecmp.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "html/parser.py",
    "http/cookies.py",
    "json/decoder.py",
    "logging/handlers.py",
    "netrc.py",
    "pprint.py",
    "queue.py",
    "reprlib.py",
    "sched.py",
    "shelve.py",
    "statistics.py",
    "textwrap.py",
    "timeit.py",
    "urllib/robotparser.py",
    "zipapp.py",
)
"""Files never trained on, relative to the standard library's folder."""

# Installed packages are not the standard library; test suites are missing on many machines and are another kind of
# text; the rest is generated.
INSTALLED = {"site-packages", "dist-packages"}
TESTS = {"test", "tests", "idle_test"}
GENERATED = {"__pycache__", "encodings", "pydoc_data", "stringprep.py"}
SKIPPED = frozenset(INSTALLED | TESTS | GENERATED)


def library() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def held_out_files() -> list[str]:
    """Return the entries of `HELD_OUT` that this machine has, in order."""
    return [name for name in HELD_OUT if (library() / name).is_file()]


def training_files() -> list[str]:
    """Return the files to train on, relative to `library`, sorted; disjoint from `HELD_OUT`."""
    names = (path.relative_to(library()) for path in library().rglob("*.py"))
    return sorted(
        name.as_posix() for name in names if SKIPPED.isdisjoint(name.parts) and name.as_posix() not in HELD_OUT
    )


def read(name: str) -> str:
    """Return the text of one library file."""
    return (library() / name).read_text(encoding="utf-8", errors="replace")


def training_texts(seed: int = 0) -> list[str]:
    """Return the training documents in a seeded random order.

    Besides the source files these are the language reference's topics, the longest prose that Python carries; they are
    taken from the module that holds them as Python strings, because its source is quoted and escaped.
    """
    texts = [text for name in training_files() if (text := read(name).strip())]
    texts += importlib.import_module("pydoc_data.topics").topics.values()
    random.Random(seed).shuffle(texts)
    return texts


def held_out_texts() -> list[str]:
    """Return the held-out documents in the order of `held_out_files`."""
    return [read(name) for name in held_out_files()]
