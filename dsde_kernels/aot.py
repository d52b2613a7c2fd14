"""Compile every kernel ahead of time, without a GPU, and print what each needs.

    python -m dsde_kernels.aot [--target sm_90 ...]

One JSON line a kernel, dtype and target: registers and spills a thread, bytes of shared memory a program, bytes of
stack a thread. Exit code 1 on a spill, a stack frame or more than LIMIT registers.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
LIMIT = 128  # registers a thread: two programs of eight warps share a multiprocessor
_VOCABULARY, _MAX_DRAFT = 151_936, 10
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cases(dtype: str) -> Iterator[tuple[str, Any, dict, dict, int]]:
    """Name, kernel, types of its arguments, constants and warps of each kernel, for logits of `dtype`."""
    from .kld_kernel import kl_kernel
    from .sampling_kernel import sample_kernel
    from .stability_kernel import rule_arguments, update_kernel
    from .threshold_kernel import _PASSES, threshold_kernel
    from .verify_kernel import verify_kernel

    logits, f32, i32, i64 = f"*{dtype}", "*fp32", "*i32", "*i64"
    split = {"SPLIT": launch.splits(_VOCABULARY), "TILE": launch.TILE, "TILES": launch.TILES}
    rule = rule_arguments(DsdeRule())
    keys = {"seed": i64, "step": i64}

    yield (
        "kl_divergence",
        kl_kernel,
        {"target": logits, "draft": logits, "temperature": f32, "out": f32, "records": f32, "counters": i32},
        split,
        launch.WARPS,
    )
    sample = {"logits": logits, "temperature": f32, **keys, "offset": i64, "threshold": f32, "tokens": i64}
    yield "sample", sample_kernel, {**sample, "records": f32, "counters": i32}, split, launch.WARPS
    yield (
        "truncation_threshold",
        threshold_kernel,
        {"logits": logits, "temperature": f32, "top_k": i32, "top_p": f32, "min_p": f32, "out": f32},
        {"PASSES": _PASSES[_DTYPES[dtype]], "TILE": launch.SEARCH_TILE},
        launch.SEARCH_WARPS,
    )
    if dtype == "fp32":  # takes no logits
        update = {"table": f32, "slots": i64, "weights": f32, "kld": f32, "cu_draft": i32, "num_accepted": i32}
        update |= {"temperature": f32, "ok": "*i1", "proposed": "*i1"}
        yield "stability_update", update_kernel, update, rule, 1

    verify = {"target": logits, "draft": logits, "draft_tokens": i64, "cu_draft": i32, "temperature": f32, **keys}
    verify |= {"tokens": i64, "num_accepted": i32, "kld": f32, "accept_prob": f32, "logprobs": f32, "ok": "*i1"}
    verify |= {"records": f32, "counters": i32}
    state = {"table": f32, "slots": i64, "weights": f32, "next_sl": i32, "sl_cap": f32}
    thresholds = {"target_threshold": f32, "draft_threshold": f32}
    constants = {**split, **rule, "CAP": 0, "COLUMNS": triton.next_power_of_2(_MAX_DRAFT + 1)}
    yield "verify", verify_kernel, verify, constants, launch.WARPS
    yield "dsde_step", verify_kernel, verify | state, constants, launch.WARPS
    yield "dsde_step, truncated", verify_kernel, verify | state | thresholds, constants, launch.WARPS
    one_hot = {name: kind for name, kind in verify.items() if name != "draft"}
    yield "dsde_step, one-hot drafts", verify_kernel, one_hot | state, constants, launch.WARPS


def compile_case(target: str, dtype: str, number: int) -> dict:
    """Compile one case and read its needs."""
    name, kernel, types, constants, warps = list(cases(dtype))[number]
    places = {argument: i for i, argument in enumerate(kernel.arg_names)}
    signature, values = {}, {}
    for argument in kernel.arg_names:
        if argument in types:
            signature[argument] = types[argument]
        elif argument in constants or not argument.islower() or _is_pointer(argument):
            signature[argument] = "constexpr"
            values[places[argument],] = constants.get(argument)
        else:
            signature[argument] = "i32"  # sizes and strides
    aligned = ("*", "vocabulary", "shared", "stride", "target_stride", "draft_stride")
    hints = {
        (places[argument],): [["tt.divisibility", 16]]
        for argument, kind in signature.items()
        if kind.startswith(aligned[0]) or argument in aligned
    }
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=hints)
    compiled = triton.compile(
        source, target=GPUTarget(*TARGETS[target]), options={"num_warps": warps, "enable_fp_fusion": False}
    )
    needs = _amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _nvidia(compiled.asm["cubin"])
    return {"kernel": name, "dtype": dtype, "target": target, **needs, "shared": compiled.metadata.shared}


def fits(needs: dict) -> bool:
    return needs["spills"] == needs["stack"] == 0 and needs["registers"] <= LIMIT


def _is_pointer(argument: str) -> bool:
    return argument in (
        "draft", "target_threshold", "draft_threshold", "table", "slots", "weights", "next_sl", "sl_cap"
    )  # fmt: skip


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
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "stack": number("private_segment_fixed_size"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsde_kernels.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    targets = parser.parse_args(arguments).target
    os.environ["TRITON_INTERPRET"] = "0"
    work = [
        (target, dtype, number) for target in targets for dtype in _DTYPES for number in range(len(list(cases(dtype))))
    ]
    all_fit = True
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(compile_case, *zip(*work, strict=True)):
            print(json.dumps(result), flush=True)
            all_fit &= fits(result)
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
