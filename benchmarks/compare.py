"""Versions of this library side by side on one GPU: first right, then times, kernel by kernel.

python benchmarks/compare.py DIR [DIR ...]    each a checkout, or a folder with its src, of which the name is shown

Every version compiles, and is compared with the chunkwise backend in float64, in processes that run side by side; then
each is timed alone, one after another: what a call takes after a rest, without the host's part, and of a forward and
backward the microseconds of each kernel in its order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

SETUPS = {  # T, tokens, heads, dqk, dhv
    "fig4": (8192, 65536, 16, 128, 256),
    "long": (65536, 65536, 16, 128, 256),
    "square": (8192, 65536, 32, 128, 128),
    "narrow": (8192, 32768, 64, 64, 64),
    "wide": (8192, 65536, 8, 256, 512),
    "w512": (8192, 65536, 8, 512, 512),
}
GATES = ("sigmoid", "exp")
SAMPLES, REST, LIMIT = 20, 0.004, 300  # calls, seconds before each, seconds that a process may take
AT_ONCE = 12  # processes, of up to 4 GiB of GPU memory
RIGHT = 1e-2  # relative error in bfloat16, or a third more than the Triton backend's, where denominators are small


def setup(name: str, gate: str, tokens: int | None = None) -> tuple[Callable[..., list], ...]:
    """forward(**options) and forward_backward(**options), which return results."""
    import torch

    import tfla

    T, N, H, K, V = SETUPS[name]
    N = tokens or N
    T = min(T, N)
    torch.manual_seed(0)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": (), "dh": (V,)}
    x = {n: torch.randn(N // T, T, H, *s, device="cuda") for n, s in shapes.items()}
    x["f"] += 3
    x = {n: (t if n in "if" else t.bfloat16()).requires_grad_(n != "dh") for n, t in x.items()}

    def forward(dtype: torch.dtype | None = None, **options: str) -> list[torch.Tensor]:
        leaves = [x[n] if dtype is None else x[n].detach().to(dtype).requires_grad_() for n in "qkvif"]
        return [tfla.mlstm(*leaves, input_gate=gate, **options), *leaves]

    def both(**options: str) -> list[torch.Tensor]:
        h, *leaves = forward(**options)
        return [h.detach(), *torch.autograd.grad(h, leaves, x["dh"].to(h.dtype))]

    return forward, both


def check(name: str, gate: str) -> None:
    """Raises if results are not right, or not the same twice."""
    import torch

    _, both = setup(name, gate, tokens=4000)
    found, again, other = both(), both(), both(backend="triton")
    truth = both(dtype=torch.float64, backend="chunkwise")
    assert all(map(torch.equal, found, again)), f"{name} {gate}: other bits the second time"
    for what, a, b, c in zip(("h", "dq", "dk", "dv", "di", "df"), found, other, truth, strict=True):
        error, others = (float((x.double() - c).norm() / c.norm()) for x in (a, b))
        assert error <= max(RIGHT, 1.3 * others), (
            f"{name} {gate}: {what} is off by {error:.1e}, Triton's by {others:.1e}"
        )
    setup(name, gate)[1]()  # compiles what these sizes take


def milliseconds(call: Callable[[], object]) -> float:
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    samples = []
    for _ in range(SAMPLES):
        time.sleep(REST)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # the GPU is busy for 2 ms, in which the host enqueues the call
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return median(samples)


def kernels(call: Callable[[], object], calls: int = 4) -> str:
    """Microseconds of each, in their order."""
    import torch
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(calls):
            call()
            torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    each = len(events) // calls
    times = (sum(events[n + each * i].time_range.elapsed_us() for i in range(calls)) / calls for n in range(each))
    return " ".join(f"{e.name} {t:.0f}" for e, t in zip(events, times, strict=False))


def measure(version: str) -> None:
    import torch

    for name in SETUPS:
        for gate in GATES:
            forward, both = setup(name, gate)
            with torch.no_grad():
                alone = milliseconds(forward)
            line = f"{version:12} {name:7} {gate:8} {alone:.3f} {milliseconds(both):.3f}  {kernels(both)}"
            print(line, flush=True)
            del forward, both
            torch.cuda.empty_cache()


def run(folder: str, *what: str) -> bool:
    """In a process of its own; whether it did what it should."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(folder, 'src').resolve()}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        return (
            subprocess.run([sys.executable, __file__, "--one", *what], env=environment, timeout=LIMIT).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return False


def main(folders: list[str]) -> int:
    for folder in folders:
        if not Path(folder, "src", "tfla").is_dir():
            raise SystemExit(f"compare: got {folder}, which has no src/tfla; it takes checkouts of this library")
    jobs = [(folder, name, gate) for folder in folders for name in SETUPS for gate in GATES]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        right = list(pool.map(lambda job: run(*job), jobs))
    print(
        f"{sum(right)} of {len(jobs)} checks passed\n\n{'':30}forward, forward + backward, ms; kernels, us", flush=True
    )
    timed = [run(folder, Path(folder).name) for folder in folders]
    return 0 if all(right + timed) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        check(*sys.argv[2:]) if len(sys.argv) == 4 else measure(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]) if sys.argv[1:] else __doc__)
