"""The log-gates that the operator reads, computed from the pre-activations of a model, as in tfla.ops.gates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tfla.ops.gates import LOG_GATE_MAX, LOG_GATE_MIN


def widen(x: Array) -> Array:
    """Return x in float64 or else float32."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def clamp(log_gate: Array) -> Array:
    """Return a log-gate clamped to the allowed range, in float64 or else float32; NaN stays NaN."""
    return jnp.clip(widen(log_gate), LOG_GATE_MIN, LOG_GATE_MAX)


def log_sigmoid(x: Array) -> Array:
    """Return log(sigmoid(x)), with a gradient that is finite for infinite x too."""
    x = jnp.clip(x, LOG_GATE_MIN * 2, -LOG_GATE_MIN * 2)
    return jax.nn.log_sigmoid(x)


def log_gates(i: Array, f: Array, gates: str) -> tuple[Array, Array]:
    """Return the clamped log_i and log_f, in float64 or else float32.

    Args:
        i, f: the gates, any shape and float dtype.
        gates: what they are: "exp" pre-activations of mLSTMexp, (6), (7); "sigmoid" those of mLSTMsig, (22); "log"
            log-gates.
    """
    i, f = widen(i), widen(f)
    return clamp(log_sigmoid(i) if gates == "sigmoid" else i), clamp(f if gates == "log" else log_sigmoid(f))
