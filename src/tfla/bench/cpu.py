"""The command `tfla bench cpu`, which times the operator on this machine's CPU, beside attention and mlstm_kernels.

Each time is compared with the roofline at the rate of a matrix product. All implementations are timed in turn in one
run, so that a slow moment of the machine affects all of them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tfla
from tfla._util import outputs
from tfla._util.errors import UserError
from tfla._util.files import write_json
from tfla._util.options import check_count, check_threads
from tfla.measure.machine import installed_version
from tfla.measure.problem import Problem
from tfla.measure.roofline import backward_flops, forward_flops
from tfla.ops.tuned import cpu_name
from tfla.tune.plan import check_memory, memory_of

H, DQK, DHV = 4, 128, 256
LARGEST = 2**31 - 1  # the largest length and the largest number of samples
LONG = 8.0  # seconds; a call that takes longer is timed once
Call = Callable[[], Any]


@dataclass
class CpuBench:
    """Options of `tfla bench cpu`."""

    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    """Steps of the sequences, T."""
    repeats: int = 15
    """Samples of a call."""
    attention_up_to: int = 65536
    """Longest T for attention: it is quadratic, minutes at 65536."""
    memory: bool = True
    """Also measure peak memory, in a process of its own."""
    threads: int = field(default_factory=torch.get_num_threads)
    """CPU threads."""
    out: Path | None = None
    """Write the rows as JSON here."""

    def check(self) -> None:
        """Raise UserError where a value is out of range, or the file cannot be written."""
        if not self.lengths:
            raise UserError("lengths: got none, expected one or more")
        for T in self.lengths:
            check_count("lengths", T, 1, LARGEST)
            check_memory(Problem(1, T, H, DQK, DHV, dtype="float32"), memory_of("cpu"), "lengths")
        check_count("repeats", self.repeats, 1, LARGEST)
        check_threads(self.threads)
        if self.out is not None:
            outputs.check_file("out", self.out)


def inputs(T: int, grad: bool = True) -> list[Tensor]:
    """Return random q, k, v, i, f of one sequence, with the gates of a model at the start of training."""
    q, k, v = (torch.randn(1, T, H, d) for d in (DQK, DQK, DHV))
    i, f = torch.randn(1, T, H) - 2, torch.randn(1, T, H) + 4.5
    return [x.requires_grad_(grad) for x in (q, k, v, i, f)]


def both(run: Callable[..., Tensor], xs: list[Tensor], cotangent: Tensor) -> tuple[Call, Call]:
    """Return a call of the forward alone, and one of forward and backward."""

    def forward() -> None:
        with torch.no_grad():
            run(*xs)

    return forward, lambda: torch.autograd.grad(run(*xs), xs, cotangent)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal softmax attention, q, k, v (B, H, T, d)."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def implementations(T: int, config: CpuBench) -> dict[str, tuple[Call, Call] | str]:
    """Return the two calls of each implementation by name, or why it cannot run."""
    xs = inputs(T)
    dh = torch.randn(1, T, H, DHV)
    found: dict[str, tuple[Call, Call] | str] = {}
    found["tfla mLSTMexp"] = both(lambda *a: tfla.mlstm(*a), xs, dh)
    found["tfla mLSTMsig"] = both(lambda *a: tfla.mlstm(*a, input_gate="sigmoid"), xs, dh)
    if config.attention_up_to >= T:
        qkv = [torch.randn(1, 8, T, 128, requires_grad=True) for _ in range(3)]
        found["attention 8 x 128"] = both(attention, qkv, torch.randn(1, 8, T, 128))
    try:
        from mlstm_kernels.torch.chunkwise.native import mlstm_chunkwise__native_custbw as baseline
    except ImportError as error:
        found["mlstm_kernels native_custbw"] = f"not installed ({error.name})"
    else:
        heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in xs]
        found["mlstm_kernels native_custbw"] = both(baseline, heads_first, dh.transpose(1, 2).contiguous())
    return found


def gemm_rate(size: int = 2048) -> float:
    """Measure the FLOP/s of one large float32 matrix product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    start = time.perf_counter()
    torch.mm(a, b)
    return 2 * size**3 / (time.perf_counter() - start)


def timed(call: Call) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(T: int, config: CpuBench, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time all implementations at one length.

    Returns:
        one row for each implementation and direction, with the seconds and their ratio to the roofline at the rate of
        matrix products that are timed in between.
    """
    runs: dict[tuple[str, str], Call] = {}
    rows: list[dict[str, Any]] = []
    for name, calls in implementations(T, config).items():
        if isinstance(calls, str):
            rows.append({"T": T, "name": name, "error": calls})
        else:
            runs |= {(name, "forward"): calls[0], (name, "forward + backward"): calls[1]}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    rates = [gemm_rate() for _ in range(3)][1:]
    for key, call in list(runs.items()):  # warm-up; a call that is too long to repeat keeps this one sample
        progress(f"T {T}: warm-up {key[0]}, {key[1]}")
        try:
            took = timed(call)
        except Exception as error:  # the error of an implementation is its row
            rows.append(
                {"T": T, "name": key[0], "direction": key[1], "error": f"{type(error).__name__}: {error}"[:200]}
            )
            del runs[key], seconds[key]
            continue
        if took > LONG:
            seconds[key].append(took)
            del runs[key]
    for repeat in range(config.repeats):
        for key, call in runs.items():
            progress(f"T {T}: {repeat + 1}/{config.repeats} {key[0]}, {key[1]}")
            rates.append(gemm_rate())
            seconds[key].append(timed(call))
    rate = statistics.median(rates)
    flops = {"forward": forward_flops(T, H, DQK, DHV)}
    flops["forward + backward"] = flops["forward"] + backward_flops(T, H, DQK, DHV)
    for (name, direction), took_all in seconds.items():
        took, roofline = statistics.median(took_all), flops[direction] / rate
        rows.append(
            {"T": T, "name": name, "direction": direction, "seconds": took, "min": min(took_all), "max": max(took_all),
             "samples": len(took_all), "floor_seconds": roofline, "ratio": took / roofline, "gemm_flops": rate}
        )  # fmt: skip
    return rows


def peak_memory(T: int) -> int:
    """Measure the bytes that forward and backward of mLSTMexp need beyond inputs, output and gradients.

    It runs in a new process, on Linux only.
    """
    code = f"from tfla.bench.cpu import _peak_memory; print(_peak_memory({T}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def _resident(key: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(key))


def _peak_memory(T: int) -> int:
    """Do the work of :func:`peak_memory` in this process."""
    torch.autograd.grad(tfla.mlstm(*(small := inputs(256))).sum(), small)  # so that libraries are loaded
    xs, dh = inputs(T), torch.randn(1, T, H, DHV)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    h = tfla.mlstm(*xs)
    grads = torch.autograd.grad(h, xs, dh)
    results = h.nbytes + sum(g.nbytes for g in grads)
    return max(0, _resident("VmHWM") - before - results)


def environment(config: CpuBench) -> dict[str, Any]:
    """Return the machine, the versions and the shape, which are stored with the results."""
    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": config.threads, "date": date.today().isoformat(),
        "versions": {name: installed_version(name) for name in ("tfla", "torch", "mlstm_kernels")},
        "shape": {"B": 1, "H": H, "dqk": DQK, "dhv": DHV, "dtype": "float32"},
    }  # fmt: skip


def row_text(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    head = f"{row['T']:>6}  {row['name']:<28}{row.get('direction', ''):<20}"
    if "error" in row:
        return head + row["error"]
    return head + f"{row['seconds'] * 1e3:>9.1f} ms {row['ratio']:>7.2f} x roofline"


def run(config: CpuBench) -> dict[str, Any]:
    """Run the benchmark: print each row when it is measured, write all rows to the file, and return them."""
    from tqdm import tqdm

    config.check()
    torch.set_num_threads(config.threads)
    result: dict[str, Any] = {"environment": environment(config), "config": asdict(config), "rows": [], "memory": []}
    result["config"]["out"] = str(config.out) if config.out else None
    for T in config.lengths:
        with tqdm(bar_format="{desc}", leave=False) as bar:
            rows = measure(T, config, bar.set_description_str)
        for row in rows:
            print(row_text(row), flush=True)
        result["rows"] += rows
        if config.memory and Path("/proc/self/clear_refs").exists():
            extra = peak_memory(T)
            result["memory"].append({"T": T, "name": "tfla mLSTMexp", "extra_bytes": extra})
            print(f"{T:>6}  peak memory beyond inputs, output, gradients: {extra / 2**20:.0f} MiB", flush=True)
        if config.out is not None:
            write_json(config.out, result)
    return result
