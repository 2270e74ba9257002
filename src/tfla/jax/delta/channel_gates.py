"""Linear attention with a gate for each key channel (GLA) on JAX, by the delta rule without a correction."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from tfla.jax import checks
from tfla.jax.choice import Offsets
from tfla.jax.delta import api
from tfla.jax.delta import steps as delta_steps
from tfla.jax.delta.checks import check_arrays
from tfla.jax.delta.inputs import DeltaArrays
from tfla.jax.gates import clamp
from tfla.jax.packed_parts import Parts
from tfla.jax.state import State
from tfla.ops.channel_gates import check_options

PLAIN = False, False, "none", "none", None  # no read before the decay, no activations


def has_channel_gates(log_f: object, time: bool = True) -> bool:
    """Return whether log-gates are (B, T, H, dqk), or (B, H, dqk) without a dim of time."""
    return checks.is_array(log_f) and log_f.ndim == 3 + time  # type: ignore[attr-defined]


def _arrays(q: Array, k: Array, v: Array, log_f: Array, log_i: Array | None) -> DeltaArrays:
    """Return the arrays of the delta rule, with exp(log_i) as write strengths."""
    beta = None
    if log_i is not None:
        checks.check_float("v", v)
        checks.check_float("log_i", log_i)
        checks.check_shape("log_i", log_i, tuple(v.shape[:-1]))
        beta = jnp.exp(clamp(jnp.asarray(log_i)))
    return DeltaArrays(q, k, v, beta, log_f, None, None, None, None, None)


def check_call(
    q: Array, k: Array, v: Array, log_f: Array, log_i: Array | None, normalize: bool, store_dtype: Any
) -> None:
    """Check the arrays of a call, and the options that have to be left out with log_f (B, T, H, dqk)."""
    check_options(normalize, store_dtype)
    check_arrays(_arrays(q, k, v, log_f, log_i))


def linear_attention(
    q: Array, k: Array, v: Array, log_f: Array, log_i: Array | None, normalize: bool, state: State | None,
    return_state: bool, cu_seqlens: Offsets | None, chunk_size: int | None, scale: float | None, backend: str | None,
    kernel: str | None, store_dtype: Any, context_parallel: str | None,
) -> Array | tuple[Array, State]:  # fmt: skip
    """Compute :func:`tfla.jax.linear_attention` with log_f (B, T, H, dqk)."""
    scale = checks.check_scale(scale)
    check_options(normalize, store_dtype)
    x = _arrays(q, k, v, log_f, log_i)
    further = cu_seqlens, chunk_size, backend, kernel, context_parallel
    prepared = api.prepare(x, state, return_state, False, *PLAIN, scale, *further)
    return api.run(return_state, Parts.to_join(return_state, q, cu_seqlens, context_parallel), *prepared)


def steps(
    q: Array, k: Array, v: Array, log_f: Array, log_i: Array | None, normalize: bool, state: State,
    lengths: Array | None, time: bool, return_state: bool, in_place: bool, scale: float | None, backend: str | None,
    state_indices: Array | None,
) -> tuple[Array, State]:  # fmt: skip
    """Compute steps of :func:`tfla.jax.linear_attention` with log_f (B, H, dqk), or (B, T, H, dqk) with `time`."""
    checks.check_static(normalize=normalize)
    scale = checks.check_scale(scale)
    check_options(normalize, None)
    x = _arrays(q, k, v, log_f, log_i)
    further = return_state, in_place, backend, state_indices
    return delta_steps.run(x, time, state, lengths, False, *PLAIN, scale, *further)
