"""Fixtures of the decode loop's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from dsde.demo.pair import load_pair
from tests.dsde.models import build, weaken


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], tuple[PreTrainedModel, PreTrainedModel]]:
    """``tiny(family) -> (target, draft)``, built once."""
    built: dict[str, tuple[PreTrainedModel, PreTrainedModel]] = {}

    def get(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
        if family not in built:
            target = build(family)
            built[family] = target, weaken(target)
        return built[family]

    return get


@pytest.fixture
def pair(tiny):
    """Target and draft for tests that patch the target."""
    target, draft = tiny("llama")
    yield target, draft
    assert "generate" not in vars(target)  # every test leaves the model as it was


@pytest.fixture(scope="session")
def embedded() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft of the embedded pair."""
    return load_pair()[:2]


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors run best, and reproducibly, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
