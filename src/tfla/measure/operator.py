"""The call of `tfla.mlstm` that is measured."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

import tfla
from tfla.backends import Inputs
from tfla.measure.problem import Problem, Work
from tfla.ops.dispatch import choose


def mlstm(
    problem: Problem, gate: Literal["exp", "sigmoid"], backend: str | None = None, kernel: str | None = None,
    packed: bool = False,
) -> Work:  # fmt: skip
    """Return a call of `tfla.mlstm`, with facts on the backend and kernel that run and the bytes of stored states.

    Args:
        problem: the sizes, dtype and device.
        gate: the input gate.
        backend: the backend; None leaves the choice to the operator.
        kernel: the kernel; None leaves the choice to the operator.
        packed: whether the sequences are packed, with exponentially distributed lengths.
    """
    inputs, cu_seqlens = [*problem.qkv(), *problem.gates()], None
    if packed:
        inputs, cu_seqlens = problem.packed(inputs)
    q, k, v, i, f = inputs
    x = Inputs(q, k, v, i, f, None, None, None, cu_seqlens)
    chosen, kernel_run, chunk_size = choose(x, gate == "exp", backend, kernel, problem.chunk_size)
    state = problem.H * problem.dqk * (problem.dhv + (gate == "exp")) * 4

    def run(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        return tfla.mlstm(
            q, k, v, i, f, input_gate=gate, chunk_size=problem.chunk_size, backend=backend, kernel=kernel,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip

    facts = {
        "implementation": f"{chosen.name} {kernel_run}",
        "details": {k: str(d) for k, d in chosen.details(x, chunk_size, kernel_run).items()},
        "state_bytes": chosen.stored_states(x, chunk_size, kernel_run) * state,
    }
    return Work(run, [q, k, v, i, f], facts)
