"""The activations of q, k, beta and the gates of published models, those of tfla.ops.delta_activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from tfla.jax.gates import clamp, widen
from tfla.ops.delta_activations import EPS


def normalized(x: Array) -> Array:
    """Return x / sqrt(|x|^2 + 1e-6) over the last dim, in the dtype of x."""
    wide = widen(x)
    return (wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + EPS)).astype(x.dtype)


def write_strength(beta: Array, activation: str) -> Array:
    """Return beta, sigmoid(beta) or 2 sigmoid(beta), in float64 or else float32."""
    factor = {"none": None, "sigmoid": 1.0, "2sigmoid": 2.0}[activation]
    return widen(beta) if factor is None else factor * jax.nn.sigmoid(widen(beta))


def log_gate(f: Array, activation: str, A_log: Array | None, dt_bias: Array | None, lower_bound: float) -> Array:
    """Return the clamped log-gates of pre-activations f (..., H) or (..., H, dqk), in float64 or else float32.

        "softplus": -exp(A_log) softplus(f + dt_bias)      "sigmoid": lower_bound sigmoid(exp(A_log) (f + dt_bias))

    Args:
        f: pre-activations, (B, T, H) or (B, T, H, dqk).
        activation: the activation; "none" takes f as log-gates.
        A_log: (H,), or None, which is 0.
        dt_bias: (H,) or (H, dqk), or None, which is 0.
        lower_bound: the smallest log-gate of "sigmoid".
    """
    if activation == "none":
        return clamp(f)

    def of_heads(x: Array) -> Array:  # (H,) or (H, dqk), beside f
        return (widen(x)[:, None] if f.ndim == 4 and x.ndim == 1 else widen(x))[None, None]

    x = widen(f) if dt_bias is None else widen(f) + of_heads(dt_bias)
    rate = jnp.ones((), x.dtype) if A_log is None else jnp.exp(of_heads(A_log))
    if activation == "softplus":
        return clamp(-rate * jax.nn.softplus(x))
    return clamp(lower_bound * jax.nn.sigmoid(rate * x))
