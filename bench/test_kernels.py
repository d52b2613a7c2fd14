"""Microbenchmarks of the ops and of what others use instead, each rival in the same run.

    [DSDE_BENCH=small|default|full] python -m pytest bench/test_kernels.py [-k "B64 and bf16"] [--benchmark-json FILE]

`default` varies one property at a time around V 151936, B 64, K 4, uniform, bf16, normal; `full` is the product of all;
`small` is for a CPU, where it is also what runs unless something else is asked for. A shape that does not fit in memory
is skipped, with the reason printed.

pytest-benchmark's own figures are wall-clock times from the call until the device is idle, launches included. On a GPU
`extra_info` adds `device_us`, the median between two CUDA events with the launches queued beforehand (except those of a
rival that waits for the device on its way), and the throughput is that of it. Before every round L2 is filled with
what no case reads, and holds nothing that has still to be written back.

Throughput counts effective bytes, the least that the task can do with: U * (1 + r / (2K + 1)) for a verification, with
U one read of N+B target and N draft rows, r the share of sequences whose outcome was a rejection, K = N/B; one read of
the rows that the KL divergence (2N), sampling (N) and the truncation threshold (N) need. A rival's is the same formula
on its own outcome.

Without a GPU the ops' torch twins are timed: such figures time the CPU backend and say nothing about the kernels.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from bench import rivals
from bench.rivals import Batch
from dsde_kernels import (
    DsdeRule,
    StabilityState,
    dsde_step,
    kl_divergence,
    launch,
    sample,
    truncation_threshold,
    use_backend,
    verify,
)
from dsde_kernels.backend import use_triton

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ROUNDS = 30 if GPU else 5


class Shape(NamedTuple):
    """One batch: vocabulary, sequences, most drafts, how many each has, number format, distribution of the logits."""

    V: int
    B: int
    K: int
    layout: str
    dtype: str
    logits: str

    def __str__(self) -> str:
        return f"V{self.V}-B{self.B}-K{self.K}-{self.layout}-{self.dtype}-{self.logits}"

    def lengths(self) -> list[int]:
        """Drafts of each sequence; a ragged batch runs through K, K-1, ..., 0."""
        return [self.K if self.layout == "uniform" else self.K - i % (self.K + 1) for i in range(self.B)]


CHOICES: dict[str, tuple[Any, ...]] = {
    "V": (32000, 49152, 50257, 128256, 151936, 262144),  # 50257 is odd: most rows start between two vectors
    "B": (1, 8, 64, 256),
    "K": (1, 4, 8),
    "layout": ("uniform", "ragged"),
    "dtype": ("bf16", "fp32"),
    "logits": ("normal", "peaked", "close"),
}
ANCHOR = Shape(151936, 64, 4, "uniform", "bf16", "normal")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def shapes(choice: str) -> list[Shape]:
    if choice == "full":
        product = (Shape(*values) for values in itertools.product(*CHOICES.values()))
        return [shape for shape in product if shape.B > 1 or shape.layout == "uniform"]
    if choice == "small":
        small = Shape(32000, 8, 4, "uniform", "fp32", "normal")
        return [small, small._replace(B=1), small._replace(layout="ragged", dtype="bf16", logits="close")]
    if choice != "default":
        raise ValueError(f"DSDE_BENCH must be small, default or full; got {choice!r}")
    varied = (ANCHOR._replace(**{field: x}) for field, xs in CHOICES.items() for x in xs)
    return list(dict.fromkeys((ANCHOR, *varied)))


OPS = ("dsde_step", "one_launch", "verify", "kl_divergence", "sample", "truncation_threshold")
TASKS = {
    "verification": ("dsde_step", "one_launch", "verify", "eager", "compiled", "transformers", "flashinfer", "vllm"),
    "KL divergence": ("kl_divergence", "kl_eager"),
    "sampling": ("sample", "sample_eager"),
    "truncation": ("truncation_threshold", "threshold_sort"),
}
CASES = [
    (shape, task, name)
    for shape in shapes(os.environ.get("DSDE_BENCH") or ("default" if GPU else "small"))
    for task, names in TASKS.items()
    for name in names
]


@pytest.mark.parametrize(("shape", "task", "name"), CASES, ids=[f"{name}-{shape}" for shape, _, name in CASES])
def test_kernels(benchmark, copy_rate, monkeypatch, shape, task, name):
    rows = 2 * sum(shape.lengths()) + shape.B
    # The logits and a copy of some rows; twins and rivals hold float32 matrices as well.
    needed = rows * shape.V * (2 * DTYPES[shape.dtype].itemsize + (0 if GPU and name in OPS else 12))
    if needed > free_bytes():
        pytest.skip(f"{shape} needs {needed / 2**30:.1f} GiB, {free_bytes() / 2**30:.1f} GiB may be used")
    batch = make_batch(shape)
    if reason := rivals.unfit(name, batch):
        pytest.skip(reason)
    if name == "one_launch":  # `dsde_step`, but the program that decides also draws, whatever the vocabulary
        if not GPU:
            pytest.skip("the torch twin has no launches")
        monkeypatch.setattr(launch, "RACE_TILES", 1 << 20)
    run = prepare(name, batch)
    benchmark.group = f"{task}, {shape}"
    with use_backend("triton" if GPU else "torch"):
        outcome = first_call(name, run)
        benchmark.pedantic(wait_for(run), setup=wait_for(flush), rounds=ROUNDS, warmup_rounds=2)
        device_s = event_seconds(run) if GPU else None
        backend = "triton" if use_triton(DEVICE) else "torch twin"
    wall_s = benchmark.stats.stats.median
    useful, r = effective_bytes(task, shape, batch, outcome)
    rate = useful / (wall_s if device_s is None else device_s)
    benchmark.extra_info |= {
        "name": name,
        "task": task,
        **shape._asdict(),
        "backend": backend if name in OPS else "rival",
        "note": "on a GPU" if GPU else "times the CPU backend",
        "device": torch.cuda.get_device_name() if GPU else "cpu",
        "rejected": r,
        "effective_bytes": round(useful),
        "wall_us": 1e6 * wall_s,
        "device_us": None if device_s is None else 1e6 * device_s,
        "gb_s": rate / 1e9,
        "copy_gb_s": copy_rate / 1e9,
        "share_of_copy": rate / copy_rate,
    }


@lru_cache(maxsize=1)
def make_batch(shape: Shape) -> Batch:
    """Logits of the shape's distribution, and drafts drawn from them."""
    make_batch.cache_clear()
    rivals.forget_compiled()
    lengths = torch.tensor(shape.lengths(), device=DEVICE)
    N, B = int(lengths.sum()), shape.B
    cu = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    owner = torch.repeat_interleave(torch.arange(B, device=DEVICE), lengths)
    rows = torch.arange(N, device=DEVICE) + owner
    random = torch.Generator(DEVICE).manual_seed(20250901)

    def normal(count: int, scale: float) -> torch.Tensor:
        x = torch.empty(count, shape.V, dtype=DTYPES[shape.dtype], device=DEVICE)
        return x.normal_(0, scale, generator=random)

    target = normal(N + B, 2.0)
    if shape.logits == "close":  # most drafts pass
        draft = normal(N, 0.3).add_(target[rows])
    else:
        draft = normal(N, 2.0)
    if shape.logits == "peaked":  # one token holds most of the mass, the same one on both sides
        top = torch.randint(shape.V, (N + B, 1), device=DEVICE, generator=random)
        target.scatter_(1, top, 20.0)
        draft.scatter_(1, top[rows], 20.0)
    column = torch.arange(N, device=DEVICE) - cu[owner]
    zeros = torch.zeros_like(owner)
    with use_backend("triton" if GPU else "torch"):
        tokens = sample(draft, torch.ones(N, device=DEVICE), owner, zeros, column)
    bonus = cu[1:] + torch.arange(B, device=DEVICE)
    return Batch(target, draft, tokens, cu.int(), shape.lengths(), owner, column, rows, cu[:-1], bonus)


def prepare(name: str, batch: Batch) -> Callable[[], Any]:
    """The op or rival as a call without arguments; verifiers return what was accepted."""
    if name in ("kl_divergence", "kl_eager"):  # the rows that a caller has at hand, copied outside the clock
        target, divergence = batch.target[batch.rows], kl_divergence if name in OPS else rivals.kl_eager
        return lambda: divergence(target, batch.draft)
    if name not in OPS:
        return lambda: getattr(rivals, name)(batch)
    B, N = len(batch.lengths), len(batch.tokens)
    seed = torch.arange(B, device=DEVICE)
    inputs = (batch.target, batch.draft, batch.tokens, batch.cu)
    numbers: dict[str, Any] = {"seed": seed, "step": torch.zeros_like(seed), "max_draft": max(batch.lengths)}
    numbers["temperature"] = torch.ones(B, device=DEVICE)
    if name in ("dsde_step", "one_launch"):
        rule = DsdeRule()
        state = StabilityState(B, rule, DEVICE)
        return lambda: dsde_step(*inputs, **numbers, state=state, slots=seed, rule=rule).num_accepted
    if name == "verify":
        return lambda: verify(*inputs, **numbers).num_accepted
    ones, zeros = torch.ones(N, device=DEVICE), torch.zeros_like(batch.owner)
    if name == "truncation_threshold":
        top_k, top_p = torch.full_like(zeros, rivals.TOP_K), torch.full_like(ones, rivals.TOP_P)
        return lambda: truncation_threshold(batch.draft, ones, top_k, top_p)
    return lambda: sample(batch.draft, ones, batch.owner, zeros, batch.column)


def first_call(name: str, run: Callable[[], Any]) -> Any:
    """The outcome; skips what torch.compile cannot compile here."""
    if name != "compiled":
        return run()
    try:
        return run()
    except (BackendCompilerFailed, InductorError) as error:
        pytest.skip(f"torch.compile does not work here: {str(error).splitlines()[0]}")


def effective_bytes(task: str, shape: Shape, batch: Batch, outcome: Any) -> tuple[float, float | None]:
    """Least traffic of the task, and the share of sequences that rejected a draft."""
    N, B = len(batch.tokens), shape.B
    row = shape.V * DTYPES[shape.dtype].itemsize
    if task != "verification":
        return float(row * (2 * N if task == "KL divergence" else N)), None
    r = (outcome < torch.tensor(batch.lengths, device=DEVICE)).float().mean().item()
    return row * (2 * N + B) * (1 + r / (2 * N / B + 1)), r


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def wait_for(call: Callable[[], Any]) -> Callable[[], None]:
    """The call, and the wait until the device has done it."""

    def run() -> None:
        call()
        synchronize()

    return run


@lru_cache(maxsize=1)
def l2_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    """Two buffers, each of four times the size of L2."""
    size = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return torch.zeros(size, dtype=torch.int32, device=DEVICE), torch.zeros(size, dtype=torch.int32, device=DEVICE)


def flush() -> None:
    """Overwrite L2, then read it full, so that no write-back is left to the next kernel; nothing to do on a CPU."""
    if GPU:
        written, read = l2_buffers()
        written.zero_()
        read.sum()


def event_seconds(run: Callable[[], Any]) -> float:
    """Median time on the device. A pause before the first event lets the launches queue up behind it."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in events:
        flush()
        torch.cuda._sleep(1_000_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


@pytest.fixture(scope="session")
def copy_rate() -> float:
    """Bytes a second read and written by the device's own copy."""
    source = torch.ones((1 << 30) if GPU else (1 << 28), dtype=torch.uint8, device=DEVICE)
    to = torch.empty_like(source)
    if GPU:
        to.copy_(source)
        return 2 * source.numel() / event_seconds(lambda: to.copy_(source))
    seconds = []
    for _ in range(ROUNDS + 1):  # the first touches the memory
        start = time.perf_counter()
        to.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / statistics.median(seconds[1:])


@lru_cache(maxsize=1)
def free_bytes() -> int:
    """Memory that a case may take: nine tenths of what a GPU has free at first, half of the machine's on a CPU."""
    if GPU:
        return torch.cuda.mem_get_info()[0] * 9 // 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
