"""Plans of launches that run in Triton's interpreter, as a callback of a function of JAX, where there is no GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax_cases import to_torch

from tfla.backends.gpu.planning import Allocate, Copy, Fill, Launch, Plan, Resize, Rows, ScaledColumns, SumOf
from tfla.backends.gpu.replay import resized
from tfla.jax.inputs import vary, varying_axes

LOCK = threading.Lock()  # the interpreter is one for all threads


class InterpretedPlan:
    """In place of `tfla.jax.launches.LoweredPlan`. Allocated memory is full of NaN, so that reading it shows."""

    ran: ClassVar[list[str]] = []  # the names of kernels that ran

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        results = [self.plan.meta[n] for n in self.plan.results]
        shapes = [jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(str(x.dtype).removeprefix("torch."))) for x in results]
        there = [x for x in given if x is not None]
        axes = frozenset().union(*map(varying_axes, there))
        return [vary(x, axes) for x in jax.pure_callback(self.run, shapes, *there)]

    def run(self, *given: Any) -> list[Any]:
        left = [to_torch(np.asarray(x)) for x in given]
        values = {n: left.pop(0) for n, there in enumerate(self.plan.given) if there}
        inputs = {n: x.clone() for n, x in values.items() if n not in self.plan.results}
        for step in self.plan.steps:
            if isinstance(step, Allocate):
                values[step.result] = torch.zeros(step.shape, dtype=step.dtype)
                if step.dtype.is_floating_point:
                    values[step.result].fill_(torch.nan)
            elif isinstance(step, Fill):
                values[step.target].zero_()
            elif isinstance(step, Copy):
                values[step.target].copy_(values[step.source])
            elif isinstance(step, Resize):
                values[step.result] = resized(step.shape, values[step.source])
            elif isinstance(step, Rows):
                values[step.result] = values[step.source][step.start : step.stop]
            elif isinstance(step, SumOf):
                values[step.result] = values[step.source][step.row].sum(0)
            elif isinstance(step, ScaledColumns):
                columns = [values[n] * f for n, f in zip(step.sources, step.factors, strict=True)]
                values[step.result] = torch.cat(columns, 1)
            else:
                assert isinstance(step, Launch), "the interpreter runs kernels without TMA descriptors"
                self.ran.append(step.kernel.__name__)
                arguments = [*[None if n < 0 else values[n] for n in step.read], *step.numbers]
                with LOCK:
                    step.kernel[step.grid](*arguments, num_warps=step.num_warps, **step.constants)
        assert all(torch.equal(x, values[n]) for n, x in inputs.items()), "a kernel has written an input"
        return [values[n].numpy() for n in self.plan.results]
