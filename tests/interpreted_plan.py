"""Plans of launches that run in Triton's interpreter, as a callback of a function of JAX, where there is no GPU."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax_cases import to_torch

from tfla.backends.gpu.planning import (
    AddTiles,
    Allocate,
    Copy,
    Describe,
    Fill,
    Gather,
    Launch,
    LaunchPlan,
    Places,
    Resize,
    Rows,
    ScaledColumns,
    Step,
    SumOf,
    Tiles,
)
from tfla.backends.gpu.replay import add_tiles, resized, some_tiles
from tfla.jax.inputs import vary, varying_axes

LOCK = threading.Lock()  # the interpreter is one for all threads


class InterpretedPlan:
    """The replacement of `tfla.jax.launches.LoweredPlan`. Allocated memory is full of NaN, so that reads of it show."""

    ran: ClassVar[list[str]] = []  # the names of kernels that ran

    def __init__(self, plan: LaunchPlan, axis: str | None = None) -> None:
        self.plan, self.axis = plan, axis

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        values = {n: x for n, x in enumerate(given) if x is not None}
        axes = frozenset().union(*map(varying_axes, values.values()))
        steps = [*self.plan.steps]
        while steps:
            count = next((n for n, step in enumerate(steps) if isinstance(step, Gather | Places)), len(steps))
            self.call_back(steps[:count], values, axes)
            for step in steps[count : count + 1]:
                if isinstance(step, Gather):
                    values[step.result] = jax.lax.all_gather(values[step.source], self.axis)
                else:
                    assert isinstance(step, Places)
                    values[step.result] = vary(jax.lax.axis_index(self.axis)[None], axes)
            del steps[: count + 1]
        return [values[n] for n in self.plan.results]

    def call_back(self, steps: list[Step], values: dict[int, Any], axes: frozenset[str]) -> None:
        """Add what steps make to the values, as the results of one callback, and replace what they write."""
        there = [*values]
        made = [n for n in self.plan.meta if n in {getattr(step, "result", None) for step in steps}]
        inputs = set(range(len(self.plan.given))) - set(self.plan.results)
        kept = [n for n in (*there, *made) if n not in inputs]
        like = {n: self.plan.meta[n] for n in kept}
        shapes = [
            jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(str(x.dtype).removeprefix("torch."))) for x in like.values()
        ]

        def run(*given: Any) -> list[Any]:
            found = {n: to_torch(np.asarray(x)) for n, x in zip(there, given, strict=True)}
            before = {n: found[n].clone() for n in there if n in inputs}
            self.run(steps, found)
            assert all(torch.equal(x, found[n]) for n, x in before.items()), "a kernel has written an input"
            return [_to_numpy(found[n]) for n in kept]

        found = jax.pure_callback(run, shapes, *values.values())
        values.update(zip(kept, (vary(x, axes) for x in found), strict=True))

    def run(self, steps: list[Step], values: dict[int, Any]) -> None:
        """Run steps on tensors by number, and add those that they make."""
        for step in steps:
            if isinstance(step, Allocate):
                values[step.result] = torch.zeros(step.shape, dtype=step.dtype)
                if step.dtype.is_floating_point:
                    values[step.result].fill_(torch.nan)
            elif isinstance(step, Fill):
                values[step.target].fill_(step.value)
            elif isinstance(step, Copy):
                values[step.target].copy_(values[step.source])
            elif isinstance(step, Resize):
                values[step.result] = resized(step.shape, values[step.source])
            elif isinstance(step, Rows):
                values[step.result] = values[step.source][step.start : step.stop]
            elif isinstance(step, Tiles):
                values[step.result] = some_tiles(step.rows, step.start, step.stop, values[step.source])
            elif isinstance(step, AddTiles):
                add_tiles(step.row, step.start, step.stop, values[step.target], values[step.source])
            elif isinstance(step, SumOf):
                values[step.result] = values[step.source][step.row].sum(0)
            elif isinstance(step, ScaledColumns):
                columns = [values[n] * f for n, f in zip(step.sources, step.factors, strict=True)]
                values[step.result] = torch.cat(columns, 1)
            elif isinstance(step, Describe):  # those of the simulator of Hopper's kernels
                values[step.result] = copy.copy(step.descriptor)
                values[step.result].base = values[step.base]
            else:
                assert isinstance(step, Launch)
                self.ran.append(step.kernel.__name__)
                arguments = [*[None if n < 0 else values[n] for n in step.read], *step.numbers]
                with LOCK:
                    step.kernel[step.grid](*arguments, num_warps=step.num_warps, **step.constants)


def _to_numpy(x: torch.Tensor) -> Any:
    """Return a tensor as an array of NumPy, which has bfloat16 from JAX alone."""
    return x.view(torch.int16).numpy().view(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
