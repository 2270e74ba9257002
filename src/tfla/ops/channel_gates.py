"""Linear attention with a gate for each key channel (GLA), by the operator of the delta rule without a correction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tfla.ops.checks import check_float, check_shape
from tfla.ops.delta_dispatch import DeltaRequest
from tfla.ops.delta_operator import compute
from tfla.ops.delta_step_dispatch import DeltaStepRequest
from tfla.ops.delta_step_dispatch import plan as plan_steps
from tfla.ops.delta_step_operators import run
from tfla.ops.gates import clamp
from tfla.ops.state import State

if TYPE_CHECKING:
    from tfla.ops.context_parallel.group import Group


def has_channel_gates(log_f: object, time: bool = True) -> bool:
    """Return whether log-gates are (B, T, H, dqk), or (B, H, dqk) without a dimension of time."""
    return isinstance(log_f, Tensor) and log_f.dim() == 3 + time


def _write_strength(log_i: Tensor | None, v: Tensor) -> Tensor | None:
    """Return exp(log_i), or None where all are 1."""
    if log_i is None:
        return None
    check_float("v", v)
    check_float("log_i", log_i)
    check_shape("log_i", log_i, tuple(v.shape[:-1]))
    return clamp(log_i).exp()


def _check_options(normalize: bool, store_dtype: torch.dtype | None) -> None:
    """Check that no option is given that this form does not have."""
    if normalize:
        raise ValueError("normalize: got True with log_f (B, T, H, dqk), expected False: n has one gate for each step")
    if store_dtype is not None:
        raise ValueError(f"store_dtype: got {store_dtype} with log_f (B, T, H, dqk), expected None")


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None, normalize: bool, state: State | None,
    return_state: bool, cu_seqlens: Tensor | None, chunk_size: int | None, scale: float | None, backend: str | None,
    kernel: str | None, store_dtype: torch.dtype | None, context_parallel: Group | None,
    state_indices: Tensor | None,
) -> Tensor | tuple[Tensor, State]:  # fmt: skip
    """Compute :func:`tfla.linear_attention` with log_f (B, T, H, dqk)."""
    _check_options(normalize, store_dtype)
    request = DeltaRequest(
        q, k, v, _write_strength(log_i, v), log_f, None, None, None, state, cu_seqlens, False, False, False, "none",
        "none", None, return_state, scale, chunk_size, backend, kernel,
    )  # fmt: skip
    return compute(request, context_parallel, state_indices)


def steps(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None, normalize: bool, state: State,
    lengths: Tensor | None, time: bool, return_state: bool, in_place: bool, scale: float | None, backend: str | None,
    state_indices: Tensor | None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Compute steps of :func:`tfla.linear_attention` with log_f (B, H, dqk), or (B, T, H, dqk) with `time`."""
    _check_options(normalize, None)
    request = DeltaStepRequest(
        q, k, v, _write_strength(log_i, v), log_f, None, None, None, state, lengths, time, False, False, False, "none",
        "none", None, return_state, in_place, scale, backend, state_indices,
    )  # fmt: skip
    return run(request, plan_steps(request))
