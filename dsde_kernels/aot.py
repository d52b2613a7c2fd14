"""Compile every kernel ahead of time, without a GPU, and print what each needs.

    python -m dsde_kernels.aot [--target sm_90 ...]

One JSON line a kernel, dtype and target: registers and spills a thread, bytes of shared memory a program, bytes of
stack a thread. Exit code 1 on a spill, a stack frame or more than `launch.REGISTERS` registers.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from . import launch
from .stability import DsdeRule

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
_VOCABULARY, _MAX_DRAFT = 151_936, 10
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# Sizes and strides: divisible by 16 in the usual vocabularies; those named "unaligned" are compiled for any.
_SIZES = ("vocabulary", "shared", "stride", "target_stride", "draft_stride")


def cases(dtype: str) -> dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """Kernel, types of its pointers, constants and options of each case, for logits of `dtype`."""
    from .kld_kernel import kl_kernel
    from .sampling_kernel import sample_kernel
    from .stability_kernel import update_kernel
    from .threshold_kernel import _PASSES, threshold_kernel
    from .verify_kernel import draw_kernel, verify_kernel

    logits, f32, i32, i64 = f"*{dtype}", "*fp32", "*i32", "*i64"
    keys = {"temperature": f32, "seed": i64, "step": i64}
    stream = {"SPLIT": launch.splits(_VOCABULARY), "TILE": launch.TILE, "TILES": launch.TILES}
    parts = launch.race_parts(_VOCABULARY)
    race = {"PARTS": parts, "TILE": launch.TILE, "TILES": launch.RACE_TILES, "RULE": DsdeRule()}
    pair = {"target": logits, "draft": logits}
    verify = {**pair, **keys, "cu_draft": i32, "decisions": f32, "counters": i32}
    verify |= {"tokens": i64, "kld": f32, "logprobs": f32, "ok": "*i1"}
    state = {"table": f32, "slots": i64, "weights": f32, "next_sl": i32, "sl_cap": f32}
    decide = {"draft_tokens": i64, "num_accepted": i32, "accept_prob": f32, "records": f32}
    two = {**race, **stream, "COLUMNS": triton.next_power_of_2(_MAX_DRAFT + 1)}
    one = {**two, "PARTS": 1}
    truncated = {"target_threshold": f32, "draft_threshold": f32}
    one_hot = {name: kind for name, kind in (verify | decide).items() if name != "draft"}
    draw = verify | state | {"races": f32}
    plain = {"num_warps": launch.WARPS, "enable_fp_fusion": False}
    limited = plain | {"maxnreg": launch.REGISTERS}  # AMD's compiler ignores it
    found: dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]] = {
        "kl_divergence": (
            kl_kernel, pair | {"temperature": f32, "out": f32, "records": f32, "counters": i32}, stream, plain
        ),
        "sample": (
            sample_kernel,
            {"logits": logits, **keys, "offset": i64, "threshold": f32, "tokens": i64, "races": f32, "counters": i32},
            race, plain,
        ),
        "truncation_threshold": (
            threshold_kernel,
            {"logits": logits, "temperature": f32, "top_k": i32, "top_p": f32, "min_p": f32, "out": f32},
            {"PASSES": _PASSES[_DTYPES[dtype]], "TILE": launch.SEARCH_TILE},
            plain | {"num_warps": launch.SEARCH_WARPS},
        ),
        "verify": (verify_kernel, verify | decide, two, plain),
        "verify, one-hot drafts": (verify_kernel, one_hot, two, plain),
        "verify, unaligned": (verify_kernel, verify | decide, two, plain),
        "verify, truncated": (verify_kernel, verify | decide | truncated, two, limited),
        "verify, truncated, unaligned": (verify_kernel, verify | decide | truncated, two, limited),
        "draw": (draw_kernel, draw, race, plain),
        "draw, unaligned": (draw_kernel, draw, race, plain),
        "dsde_step in one launch": (verify_kernel, verify | decide | state, one, limited),
        "dsde_step in one launch, truncated": (verify_kernel, verify | decide | state | truncated, one, limited),
    }  # fmt: skip
    if dtype == "fp32":  # takes no logits
        update = {"table": f32, "slots": i64, "weights": f32, "kld": f32, "cu_draft": i32, "num_accepted": i32}
        update |= {"temperature": f32, "ok": "*i1", "proposed": "*i1"}
        found["stability_update"] = update_kernel, update, {"RULE": DsdeRule()}, plain
    return found


def compile_case(target: str, dtype: str, name: str) -> dict:
    """Compile one case and read its needs."""
    kernel, pointers, constants, options = cases(dtype)[name]
    sizes = (*_SIZES, "sequences", "max_draft")
    signature, values, hints = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in pointers or argument in sizes:
            signature[argument] = pointers.get(argument, "i32")
            if argument in pointers or (argument in _SIZES and not name.endswith("unaligned")):
                hints[place,] = [["tt.divisibility", 16]]
        else:  # a constant, or a pointer that this case lacks
            signature[argument] = "constexpr"
            values[place,] = constants.get(argument)
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    needs = _amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _nvidia(compiled.asm["cubin"])
    return {"kernel": name, "dtype": dtype, "target": target, **needs, "shared": compiled.metadata.shared}


def fits(needs: dict) -> bool:
    return needs["spills"] == needs["stack"] == 0 and needs["registers"] <= launch.REGISTERS


def _nvidia(cubin: bytes) -> dict:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout))
    return {"registers": int(usage["REG"]), "spills": int(usage["LOCAL"]), "stack": int(usage["STACK"])}


def _amd(assembly: str) -> dict:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])  # type: ignore[index]

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count"),
        # Of scalar registers, into lanes of a vector register and not into memory: printed, not judged.
        "scalar_spills": number("sgpr_spill_count"),
        "stack": number("private_segment_fixed_size"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsde_kernels.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    targets = parser.parse_args(arguments).target
    os.environ["TRITON_INTERPRET"] = "0"
    work = [(target, dtype, name) for target in targets for dtype in _DTYPES for name in cases(dtype)]
    all_fit = True
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(compile_case, *zip(*work, strict=True)):
            print(json.dumps(result), flush=True)
            all_fit &= fits(result)
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
