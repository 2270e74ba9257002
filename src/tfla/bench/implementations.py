"""The implementations of this library that the benchmarks time, beside the operator over sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

import tfla
from tfla.measure.problem import Problem, Work


def step(
    problem: Problem, gate: Literal["exp", "sigmoid"], in_place: bool = False, state_dtype: str = "float32"
) -> Work:
    """Return a call of `tfla.mlstm_step`, or with T > 1 of `tfla.mlstm_steps`, from a state that is not zero."""
    inputs = [*problem.qkv(), *problem.gates()]
    C = problem.randn(problem.B, problem.H, problem.dqk, problem.dhv, dtype=state_dtype)
    state = tfla.State(C)
    if gate == "exp":
        state = tfla.State(C, C[..., 0].float().contiguous(), torch.zeros_like(inputs[3][:, 0]))
    run: Callable[..., Any] = tfla.mlstm_steps
    if problem.T == 1:
        run, inputs = tfla.mlstm_step, [t[:, 0] for t in inputs]
    return Work(lambda *x: run(*x, state, input_gate=gate, in_place=in_place)[0], inputs)


def mamba2(problem: Problem, groups: int) -> Work:
    """Return a call of Mamba-2 through mamba_ssm's interface.

    dqk is the size of the state, and each group of heads has one B and C.
    """
    from tfla.integrations.mamba import mamba_chunk_scan_combined

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return mamba_chunk_scan_combined(x, dt, A, B, C, 256)  # type: ignore[return-value]

    return Work(run, problem.ssd(groups))


def copy_state(problem: Problem, dtype: str = "float32") -> Work:
    """Return a copy of the states on the device, as a bound: a step has to read and write them too."""
    C = problem.randn(problem.B, problem.H, problem.dqk, problem.dhv, dtype=dtype)
    target = torch.empty_like(C)
    return Work(target.copy_, [C])
