"""The ahead-of-time check itself; `.ci/run` runs it whole."""

import json
import os
import subprocess
import sys

import pytest

from dsde_kernels import aot


def test_the_step_compiles_without_a_gpu_and_fits():
    # In a process of its own: in this one the kernels are defined for the interpreter.
    case = "'sm_90', 'bf16', 'dsde_step in one launch'"
    code = f"import json; from dsde_kernels import aot; print(json.dumps(aot.compile_case({case})))"
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    result = json.loads(run.stdout)
    assert result["kernel"] == "dsde_step in one launch"
    assert aot.fits(result)


@pytest.mark.parametrize("name", ["spills", "stack", "registers"])
def test_what_does_not_fit(name):
    fine = {"registers": 128, "spills": 0, "stack": 0}
    assert aot.fits(fine)
    assert not aot.fits(fine | {name: 129})
