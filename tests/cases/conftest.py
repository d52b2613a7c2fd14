"""The cases use the decode loop's fixtures."""

from tests.dsde.conftest import _one_thread, tiny

__all__ = ["_one_thread", "tiny"]
