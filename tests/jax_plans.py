"""The execution of plans of launches in tests: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest
from cases import INTERPRETED

from tfla.jax import hosting, kernels, plans, step_kernels
from tfla.jax.delta import kernels as delta_kernels
from tfla.jax.delta import step_kernels as delta_step_kernels

ON_GPU = jax.default_backend() == "gpu"
MARKS = (
    [pytest.mark.interpreter]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="JAX has no GPU here")]
)
CACHED = (
    kernels.unsupported, kernels.best_chunk_size, plans.forward_plan, plans.backward_plan,
    step_kernels.unsupported, step_kernels.plan,
    delta_step_kernels.unsupported, delta_step_kernels.plan, delta_kernels.unsupported, delta_kernels._plan,
    delta_kernels._applied,
)  # fmt: skip


def forget_plans() -> None:
    for cached in CACHED:
        cached.cache_clear()
    for compiled in (
        kernels._by_batch, step_kernels.compute, delta_kernels._launch_forward, delta_kernels._launch_backward,
    ):  # fmt: skip
        compiled.clear_cache()


@contextmanager
def plans_run(monkeypatch: pytest.MonkeyPatch, architecture: int = 80) -> Iterator[None]:
    """Let plans run in the interpreter where it is on, and float32 be as exact as it can be.

    Architecture 90 needs the simulator of Hopper's kernels around it.
    """
    forget_plans()
    monkeypatch.setattr(step_kernels, "AUTOMATIC", True)
    if INTERPRETED:
        from interpreted_plan import InterpretedPlan

        monkeypatch.setattr("tfla.jax.launches.LoweredPlan", InterpretedPlan)
        monkeypatch.setattr(hosting, "PLATFORM", "cpu")
        for check in ("unsupported", "descriptors_unsupported"):
            monkeypatch.setattr(f"tfla.jax.launches.{check}", lambda: None)
        for module in (kernels, delta_kernels):
            monkeypatch.setattr(module, "present_gpu", lambda: plans.GPU(architecture, 1, "ieee"))
    with jax.default_matmul_precision("highest"):
        yield
    forget_plans()
