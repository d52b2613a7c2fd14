"""The rules that the twins are tested by, on the kernels: the tests small enough for the interpreter."""

import pytest

pytestmark = pytest.mark.usefixtures("triton_backend", "small_tiles")
