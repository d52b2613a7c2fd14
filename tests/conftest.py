"""Fixtures for every test."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the first one


@pytest.fixture(scope="session")
def device() -> str:
    """Where the ops run: a GPU where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(20250901)
