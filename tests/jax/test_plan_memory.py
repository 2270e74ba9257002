"""The most memory of forward and backward of the delta rule on a Hopper GPU, by count, from JAX beside PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import INTERPRETED
from jax_plans import forget_plans

from tfla.backends import DELTA_BACKENDS
from tfla.backends.delta import DeltaSpec
from tfla.jax import plans
from tfla.jax.delta import kernels

pytest.importorskip("tfla.backends.hopper.delta_backward", exc_type=ImportError)
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the count is that of compiled kernels")
SCRIPT = Path(__file__).parents[1] / "backends" / "peak_memory.py"
# The most that JAX may take as a multiple of PyTorch. With gates by channel the scans of a plan have two states of a
# slice more: zeros to start from, and an end that nothing reads. Those of GLA are of 8 MiB each.
MOST = {"gdn": 1.005, "kda": 1.005, "gla": 1.008}


class NotLowered:
    """The replacement of `tfla.jax.launches.LoweredPlan`."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan


def peak_bytes(plan: Any) -> int:
    """Return the bytes of tensors that a plan makes which are alive at once, each from its first use to its last."""
    from tfla.backends.gpu import planning

    memory: dict[int, int] = {}  # the tensor that each descriptor, or rows, are of
    used: dict[int, list[int]] = {}
    for i, step in enumerate(plan.steps):
        if isinstance(step, planning.Describe | planning.Rows):
            source = step.base if isinstance(step, planning.Describe) else step.source
            memory[step.result] = memory.get(source, source)
        elif isinstance(step, planning.Launch):
            for n in step.read:
                used.setdefault(memory.get(n, n), []).append(i)
        elif isinstance(step, planning.SumOf | planning.Tiles):
            for n in (step.source, step.result):
                used.setdefault(n, []).append(i)
        elif isinstance(step, planning.Fill):
            used.setdefault(memory.get(step.target, step.target), []).append(i)
        else:
            assert isinstance(step, planning.Allocate), step
    for n in plan.results:
        used.setdefault(n, [len(plan.steps) - 1]).append(len(plan.steps))
    made = {n: (at[0], at[-1], plan.meta[n].nbytes) for n, at in used.items() if n >= len(plan.given)}
    return max(sum(size for first, last, size in made.values() if first <= i <= last) for i in range(len(plan.steps)))


def measure(model: str, H: int, K: int, V: int) -> int:
    """Return the peak of forward and backward beyond the inputs."""
    B, T = 8, 8192

    def tokens(*shape: int, dtype: str = "bfloat16") -> tuple[tuple[int, ...], str]:
        return (B, T, H, *shape), dtype

    gates = tokens(dtype="float32") if model == "gdn" else tokens(K)
    given = (tokens(K), tokens(K), tokens(V), tokens(dtype="float32"), gates, *[None] * 5)
    options = DeltaSpec(
        scale=1.0, correct=model != "gla", read_before_decay=False, chunk_size=1 << 30, kernel="fused", save=True,
        final_state=False,
    )  # fmt: skip
    spec = kernels.KernelSpec("hopper", plans.GPU(90, 132, "tf32"), options, None)  # type: ignore[arg-type]
    forward = kernels._plan(spec, None, given, True).plan
    h, _, *saved = plans.result_signature(forward)
    backward = kernels._plan(spec, None, (*given, *saved, h, None), False).plan
    kept = sum(forward.meta[n].nbytes for n in forward.results)
    return max(peak_bytes(forward), kept + peak_bytes(backward))


def test_jax_takes_what_pytorch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    answer = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    monkeypatch.setattr(type(DELTA_BACKENDS["hopper"]), "unsupported", lambda self, x: None)
    monkeypatch.setattr("tfla.backends.gpu.side_by_side.compile_kernel", lambda *args, **options: None)
    monkeypatch.setattr("tfla.jax.launches.LoweredPlan", NotLowered)
    forget_plans()
    for shape, counted in json.loads(answer.stdout).items():
        model, *sizes = shape.split()
        taken = measure(model, *map(int, sizes))
        assert counted["results"] < taken <= MOST[model] * counted["peak"], shape
    forget_plans()


def test_count() -> None:
    from tfla.backends.gpu.planning import Allocate, Describe, Launch, LaunchPlan, Rows, SumOf

    def launch(*read: int) -> Launch:
        return Launch(None, None, (1,), read, (), {}, 4)

    meta = {n: torch.empty(n, dtype=torch.int8, device="meta") for n in (10, 100, 1000)}
    allocated = [Allocate(n, (n,), torch.int8) for n in (10, 100, 1000)]
    taken = [Rows(2, 10, 0, 5), Describe(3, 2, None)]
    steps = (*allocated, *taken, launch(0, 10), launch(100), launch(3, -1), SumOf(1000, 100, 0))
    assert peak_bytes(LaunchPlan((True,) * 2, steps, (100,), meta)) == 1100
    assert peak_bytes(LaunchPlan((True,) * 2, steps[:-1], (100,), meta)) == 110
