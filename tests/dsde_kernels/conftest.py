"""Fixtures of the kernel tests."""

from types import SimpleNamespace

import pytest
import torch

from dsde_kernels import launch


@pytest.fixture
def triton_backend(monkeypatch, device):
    """Triton kernels: compiled on a GPU, where plain tensors are then made as well, interpreted on the CPU."""
    monkeypatch.setenv("DSDE_BACKEND", "triton")
    if device == "cpu":
        _patch_once_a_launch(monkeypatch)
    with torch.device(device):
        yield


def _patch_once_a_launch(monkeypatch):
    """Half of the interpreter's time: it patches the language anew for every call of a helper."""
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, {}

    def patch_once(function):
        outermost = not scopes
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch(function)

        def restore():
            while outermost and scopes:
                scopes.popitem()[1].restore()

        return SimpleNamespace(restore=restore)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


@pytest.fixture
def small_tiles(monkeypatch):
    """Two tiles of 32 logits a program, so that small vocabularies cross tiles and programs."""
    monkeypatch.setattr(launch, "TILE", 32)
    monkeypatch.setattr(launch, "TILES", 2)
    monkeypatch.setattr(launch, "RACE_TILES", 1)
    monkeypatch.setattr(launch, "SEARCH_TILE", 32)
