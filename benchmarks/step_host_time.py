"""Measures the host time of a decoding step without a GPU: all of a call but its launch, by version.

    python benchmarks/step_host_time.py FOLDER ...

Each FOLDER is a checkout of the repository, from commit b41a177 on; it has a process, and the processes take turns, on
one core. Triton's interpreter stands for the GPU when the launches of a step are recorded. In the recorded steps a
function that does nothing then takes the place of the launch. A line has microseconds of a step of mLSTMsig and of
mLSTMexp with one sequence, 4 heads of 128 x 256: the 5 % and the 50 % quantile of samples of 40 steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, SAMPLES, STEPS = 3, 300, 40


def recorded_steps() -> list[Any]:
    """Return the recorded launches of the calls of this process; the version of b41a177 keeps them elsewhere."""
    try:
        from tfla.ops.step_dispatch import _PLANS

        return [plan.replay for plan in _PLANS.entries.values()]
    except ImportError:
        from tfla.ops.steps import _KNOWN  # type: ignore[attr-defined]

        return [known for (known,) in _KNOWN.found.values()]


def decoding_step(gate: str) -> Callable[[], None]:
    """Return a call that decodes one step from the state that the last call returned."""
    import torch

    import tfla

    sizes = {"q": (128,), "k": (128,), "v": (256,), "i": (), "f": ()}
    x = {name: torch.randn(1, 1, 4, *size) for name, size in sizes.items()}
    x = {name: t if name in "if" else t.half() for name, t in x.items()}
    state = tfla.State.zeros(1, 4, 128, 256, normalize=gate == "exp")

    def step() -> None:
        nonlocal state
        _, state = tfla.mlstm_steps(*x.values(), state, input_gate=gate, backend="triton")  # type: ignore

    return step


def measure() -> None:
    """Print the times of the version that this process imports."""
    import torch

    with torch.no_grad():
        steps = {gate: decoding_step(gate) for gate in ("sigmoid", "exp")}
        for step in steps.values():
            step()
        for recorded in recorded_steps():
            recorded.address = torch.Tensor.data_ptr
            nothing = lambda stream, hooks_active, args: None  # noqa: E731
            names = [name for name in ("steps", "direct_steps") if hasattr(recorded, name)]
            for name in names:
                steps_of_call = getattr(recorded, name)
                without = [
                    (nothing if isinstance(rest, list) else fn, *read, rest) for fn, *read, rest in steps_of_call
                ]
                setattr(recorded, name, without)
        times: dict[str, list[float]] = {gate: [] for gate in steps}
        for _ in range(SAMPLES):
            for gate, step in steps.items():
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step()
                times[gate].append((time.perf_counter() - begin) / STEPS * 1e6)
    for gate, found in times.items():
        found.sort()
        print(f"{gate} {found[SAMPLES // 20]:.1f} {found[SAMPLES // 2]:.1f}", end="   ")
    print(flush=True)


def main(folders: list[str]) -> None:
    """Measure each version in turn, each in its own process."""
    if not folders:
        sys.exit(__doc__)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # for the processes too
    for _ in range(ROUNDS):
        for folder in folders:
            options = {
                "TRITON_INTERPRET": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(folder, "src").resolve()),
            }
            print(f"{Path(folder).absolute().name:20}", end=" ", flush=True)
            subprocess.run([sys.executable, __file__, "--one"], env={**os.environ, **options}, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure()
    else:
        main(sys.argv[1:])
