"""Linear attention with a gate for each key channel (GLA), by the operator of the delta rule without a correction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tfla.ops.checks import check_flags, check_float, check_shape
from tfla.ops.delta_dispatch import DeltaRequest
from tfla.ops.delta_operator import compute
from tfla.ops.delta_step_dispatch import DeltaStepRequest
from tfla.ops.delta_step_operators import compute as compute_steps
from tfla.ops.gates import clamp
from tfla.ops.state import State
from tfla.ops.transforms import is_distributed

if TYPE_CHECKING:
    from tfla.ops.context_parallel.group import Group

PER_STEP = ("q", "k", "v", "log_f", "log_i")  # the tensors of a call that have steps


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


def check_options(normalize: bool, store_dtype: object) -> None:
    """Check that no option is given that this form does not have."""
    check_flags(normalize=normalize)
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
    check_options(normalize, store_dtype)
    if is_distributed(q):
        from tfla.ops import sharded

        sharded.check_no_indices(state_indices)

        def locally(local: dict[str, Any], own: State | None) -> Tensor | tuple[Tensor, State]:
            return linear_attention(  # type: ignore[call-arg]
                *[local[name] for name in PER_STEP], normalize, own, return_state, local["cu_seqlens"], chunk_size,
                scale, backend, kernel, store_dtype, context_parallel, None,
            )  # fmt: skip

        given = dict(zip((*PER_STEP, "cu_seqlens"), (q, k, v, log_f, log_i, cu_seqlens), strict=True))
        return sharded.call_with_state(given, state, locally)
    request = DeltaRequest(
        q=q, k=k, v=v, beta=_write_strength(log_i, v), log_f=log_f, read_key=None, A_log=None, dt_bias=None,
        state=state, cu_seqlens=cu_seqlens, correct=False, read_before_decay=False, normalize_qk=False,
        beta_activation="none", gate_activation="none", lower_bound=None, return_state=return_state, scale=scale,
        chunk_size=chunk_size, backend=backend, kernel=kernel,
    )  # fmt: skip
    return compute(request, context_parallel, state_indices)


def steps(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None, normalize: bool, state: State,
    lengths: Tensor | None, time: bool, return_state: bool, in_place: bool, scale: float | None, backend: str | None,
    state_indices: Tensor | None,
) -> tuple[Tensor, State]:  # fmt: skip
    """Compute steps of :func:`tfla.linear_attention` with log_f (B, H, dqk), or (B, T, H, dqk) with `time`."""
    check_options(normalize, None)
    if is_distributed(q):
        from tfla.ops import sharded

        def locally(local: dict[str, Any], own: Any) -> tuple[Tensor, State]:
            return steps(  # type: ignore[call-arg]
                *[local[name] for name in PER_STEP], normalize, own, local["lengths"], time, return_state, in_place,
                scale, backend, None,
            )  # fmt: skip

        given = dict(zip((*PER_STEP, "lengths"), (q, k, v, log_f, log_i, lengths), strict=True))
        return sharded.run_steps(given, state, state_indices, locally, time=time, return_state=return_state)
    request = DeltaStepRequest(
        q=q, k=k, v=v, beta=_write_strength(log_i, v), log_f=log_f, read_key=None, A_log=None, dt_bias=None,
        state=state, lengths=lengths, time=time, correct=False, read_before_decay=False, normalize_qk=False,
        beta_activation="none", gate_activation="none", lower_bound=None, return_state=return_state,
        in_place=in_place, scale=scale, backend=backend, state_indices=state_indices,
    )  # fmt: skip
    return compute_steps(request)
