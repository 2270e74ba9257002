"""Compares versions of this library on one GPU: correctness first, then times, kernel by kernel, then host times.

    python benchmarks/compare.py [--setups NAME,NAME] [--time-only] FOLDER [FOLDER ...]

Each FOLDER is a checkout of the repository, or a folder that has its src; its name stands before its times. All
versions are first compiled and checked against the chunkwise backend in float64, in processes that run side by side.
Then each version is timed alone, one after another. A row has the GPU's milliseconds of a forward and of a forward and
backward that start after a pause, while the GPU is still busy, so that they hold no host time; then the microseconds of
each kernel of a forward and backward in their order. A host row has the microseconds that the host takes to enqueue a
call, of small shapes, in a loop of such calls.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

SETUPS = {  # T, tokens, heads, dqk, dhv
    "fig4": (8192, 65536, 16, 128, 256),
    "long": (65536, 65536, 16, 128, 256),
    "square": (8192, 65536, 32, 128, 128),
    "small_head": (8192, 32768, 64, 64, 64),
    "wide": (8192, 65536, 8, 256, 512),
    "w512": (8192, 65536, 8, 512, 512),
}
HOST_SETUPS = {"one short sequence": (128, 128, 4, 128, 256), "one sequence": (1024, 1024, 4, 128, 256)}
GATES = ("sigmoid", "exp")
SAMPLES, PAUSE, LIMIT = 20, 0.004, 300  # calls, seconds before each, seconds that a process may take
HOST_CALLS, HOST_ROUNDS = 40, 25  # calls in a row, fewer than fill the queue of launches; rounds of them
AT_ONCE = 12  # processes, of up to 4 GiB of GPU memory
TOLERANCE = 1e-2  # relative error in bfloat16, or a third more than the Triton backend's, where denominators are small


def inputs(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return random inputs on the GPU: q, k, v and dh in bfloat16, gates in float32."""
    import torch

    T, tokens, H, K, V = sizes
    torch.manual_seed(0)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": (), "dh": (V,)}
    x = {n: torch.randn(tokens // T, T, H, *s, device="cuda") for n, s in shapes.items()}
    x["f"] += 3
    return {n: (t if n in "if" else t.bfloat16()).requires_grad_(n != "dh") for n, t in x.items()}


def setup(sizes: tuple[int, ...], gate: str) -> tuple[Callable[..., list], ...]:
    """Return forward(**options) and forward_backward(**options), which return results."""
    import torch

    import tfla

    x = inputs(sizes)

    def forward(dtype: torch.dtype | None = None, **options: str) -> list[torch.Tensor]:
        leaves = [x[n] if dtype is None else x[n].detach().to(dtype).requires_grad_() for n in "qkvif"]
        return [tfla.mlstm(*leaves, input_gate=gate, **options), *leaves]

    def both(**options: str) -> list[torch.Tensor]:
        h, *leaves = forward(**options)
        return [h.detach(), *torch.autograd.grad(h, leaves, x["dh"].to(h.dtype))]

    return forward, both


def decoding_step(gate: str) -> Callable[[], object]:
    """Return a call that decodes one step of one sequence from the state that the last call returned."""
    import torch

    import tfla

    x = inputs((1, 1, 4, 128, 256))
    state = tfla.State.zeros(1, 4, 128, 256, normalize=gate == "exp", device="cuda")

    @torch.no_grad()
    def step() -> torch.Tensor:
        nonlocal state
        h, state = tfla.mlstm_steps(*(x[n] for n in "qkvif"), state, input_gate=gate)
        return h

    return step


def check(name: str, gate: str) -> None:
    """Raise an AssertionError if results are wrong, or not the same twice."""
    import torch

    T, _, *sizes = SETUPS[name]
    _, both = setup((min(T, 4000), 4000, *sizes), gate)
    first, second, truth = both(), both(), both(dtype=torch.float64, backend="chunkwise")
    assert all(map(torch.equal, first, second)), f"{name} {gate}: other bits the second time"
    names = ("h", "dq", "dk", "dv", "di", "df")
    errors = [float((x.double() - y).norm() / y.norm()) for x, y in zip(first, truth, strict=True)]
    if max(errors) > TOLERANCE:
        for what, error, x, y in zip(names, errors, both(backend="triton"), truth, strict=True):
            allowed = max(TOLERANCE, 1.3 * float((x.double() - y).norm() / y.norm()))
            assert error <= allowed, f"{name} {gate}: {what} is off by {error:.1e}, allowed is {allowed:.1e}"
    setup(SETUPS[name], gate)[1]()  # compiles the kernels of the timed sizes


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of calls on the GPU."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    samples = []
    for _ in range(SAMPLES):
        time.sleep(PAUSE)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # keeps the GPU busy for 2 ms, in which the host enqueues the call
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return median(samples)


def kernels(call: Callable[[], object], calls: int = 4) -> str:
    """Return the microseconds of each kernel, in their order."""
    import torch
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(calls):
            call()
            torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    each = len(events) // calls
    times = (sum(events[n + each * i].time_range.elapsed_us() for i in range(calls)) / calls for n in range(each))
    return " ".join(f"{e.name} {t:.0f}" for e, t in zip(events, times, strict=False))


def host_microseconds(call: Callable[[], object]) -> float:
    """Return the median over rounds of what the host takes for a call."""
    import torch

    samples = []
    for _ in range(3 + HOST_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        samples.append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    return median(samples[3:])


def measure(version: str, names: list[str]) -> None:
    """Print the rows of one version."""
    import torch

    for name in names:
        for gate in GATES:
            forward, both = setup(SETUPS[name], gate)
            with torch.no_grad():
                alone = milliseconds(forward)
            line = f"{version:8} {name:10} {gate:8} {alone:.3f} {milliseconds(both):.3f}  {kernels(both)}"
            print(line, flush=True)
            del forward, both
            torch.cuda.empty_cache()
    for gate in GATES:
        rows = {"decoding step": host_microseconds(decoding_step(gate))}
        for name, sizes in HOST_SETUPS.items():
            forward, both = setup(sizes, gate)
            with torch.no_grad():
                rows[f"forward, {name}"] = host_microseconds(forward)
            rows[f"forward + backward, {name}"] = host_microseconds(both)
        line = "; ".join(f"{name} {us:.1f}" for name, us in rows.items())
        print(f"{version:8} host us    {gate:8} {line}", flush=True)


def run(folder: str, *arguments: str) -> bool:
    """Run this file in a process with the version in `folder` and return whether it succeeded."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(folder, 'src').resolve()}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, __file__, "--one", *arguments]
    try:
        return subprocess.run(command, env=environment, timeout=LIMIT, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", default=",".join(SETUPS), help="names with commas between (default: %(default)s)")
    parser.add_argument("--time-only", action="store_true", help="compile and check nothing first")
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    options = parser.parse_args()
    names = options.setups.split(",")
    if unknown := sorted(set(names) - set(SETUPS)):
        parser.error(f"--setups: got {unknown[0]!r}, allowed are {', '.join(SETUPS)}")
    for folder in options.folders:
        if not Path(folder, "src", "tfla").is_dir():
            parser.error(f"FOLDER: got {folder}, which has no src/tfla; it has to be a checkout of this library")
    checks = [] if options.time_only else [(f, "check", n, g) for f in options.folders for n in names for g in GATES]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        passed = list(pool.map(lambda job: run(*job), checks))
    print(f"{sum(passed)} of {len(checks)} checks passed" if checks else "no checks", end="\n\n")
    print(f"{'':28}forward, forward + backward, ms; kernels, us", flush=True)
    timed = [run(folder, "measure", Path(folder).absolute().name, *names) for folder in options.folders]
    return 0 if all(passed + timed) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        what, *rest = sys.argv[2:]
        check(*rest) if what == "check" else measure(rest[0], rest[1:])
    else:
        sys.exit(main())
