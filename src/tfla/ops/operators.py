"""The operator over whole sequences, registered as `tfla::attend` and `tfla::attend_backward`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tfla.backends import BACKENDS, Inputs
from tfla.backends.base import Grads, Outputs, Spec, packed_bounds
from tfla.ops import differentiable, flops
from tfla.ops.registration import DifferentiableOperator
from tfla.ops.state import State


def _check(x: Inputs) -> None:
    """Check the values of cu_seqlens on a CPU, which a call that is traced cannot read."""
    if x.cu_seqlens is not None and x.cu_seqlens.device.type == "cpu":
        packed_bounds(x.cu_seqlens, x.v.shape[1])


def _shapes(x: Inputs, backend: str, spec: Spec) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes and dtypes of :class:`Outputs`."""
    N, H, K, V = x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3]
    save, final_state, normalize = spec.save, spec.final_state, spec.normalize
    rows = BACKENDS[backend].stored_states(x, spec.chunk_size, spec.kernel) if save else 0

    def new(wanted: bool, *shape: int, dtype: torch.dtype = x.acc_dtype) -> Tensor:
        return x.q.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        x.v.new_empty(x.v.shape),
        new(final_state, N, H, K, V),
        new(final_state and normalize, N, H, K),
        new(final_state and normalize, N, H),
        new(save and normalize, *x.v.shape[:3]),
        new(save, rows, H, K, V, dtype=spec.store_dtype or x.acc_dtype),
        new(save and normalize, rows, H, K),
    )


def _gradients(x: Inputs, g: Grads) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, log_i, log_f and of the initial C, n, m.

    The true initial state is exp(m) C and exp(m) n, hence dm = <C, dC> + <n, dn> of each head.
    """
    dm = None
    if x.m is not None and x.C is not None and x.n is not None:
        dm = (x.C * g.C).sum((-2, -1)) + (x.n * g.n).sum(-1)
    return *g, dm


def _num_read(spec: Spec) -> int:
    """Return how many results a call reads: h, and of the final state C, or C, n and m."""
    return (4 if spec.normalize else 2) if spec.final_state else 1


def _results(spec: Spec, out: Sequence[Tensor]) -> Tensor | tuple[Tensor, State]:
    """Return h, or h and the final state, whose m carries no gradient."""
    if not spec.final_state:
        return out[0]
    if not spec.normalize:
        return out[0], State(out[1])
    return out[0], State(out[1], out[2], out[3].detach())


attend = DifferentiableOperator(
    "attend", inputs=Inputs, spec=Spec, outputs=Outputs, backend_before="kernel", cotangents=("dh", "dC", "dn"),
    saved=("h", "d", "chunk_C", "chunk_n"), backends=BACKENDS, check=_check, shapes=_shapes, gradients=_gradients,
    num_read=_num_read, results=_results, differentiable=differentiable.attend,
    flops=(flops.attend_flops, flops.attend_backward_flops),
)  # fmt: skip
