"""Layers that the blocks of the language model share, as in :mod:`tfla.nn.layers`. Equation numbers are the paper's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tfla.jax.gates import widen
from tfla.nn.layers import CLOSED_GATE


class Frozen(nnx.Variable[Array]):
    """A weight that is not trained; `nnx.grad` and `nnx.Optimizer` with ``wrt=nnx.Param`` leave it out."""


def projection(
    in_features: int, out_features: int, std: float, dtype: Any, param_dtype: Any, rngs: nnx.Rngs, bias: bool = False
) -> nnx.Linear:
    """Return a linear layer whose weights are drawn from N(0, std^2), if requested with a bias of zeros."""
    return nnx.Linear(
        in_features, out_features, use_bias=bias, kernel_init=nnx.initializers.normal(std), dtype=dtype,
        param_dtype=param_dtype, rngs=rngs,
    )  # fmt: skip


def rms_norm(features: int, eps: float, param_dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Return an RMSNorm with a weight per channel."""
    return nnx.RMSNorm(features, epsilon=eps, param_dtype=param_dtype, rngs=rngs)


class GatePreactivation(nnx.Module):
    """The pre-activations of a gate: x (..., d_model) -> softcap(W x + b) (..., heads), equations (5) and (110).

    They are computed and returned in float32 or float64. Weights start at 0, and the biases of the heads are equally
    spaced.

    Args:
        d_model: width of x.
        num_heads: number of heads.
        bias_range: initial bias of the first and of the last head.
        cap: c of equation (110).
        param_dtype: dtype of the weights.
        trainable: False keeps the weights as they are (:class:`Frozen`).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        bias_range: tuple[float, float],
        cap: float,
        param_dtype: Any,
        trainable: bool,
    ) -> None:
        kind = nnx.Param if trainable else Frozen
        self.cap = cap
        self.kernel = kind(jnp.zeros((d_model, num_heads), param_dtype))
        self.bias = kind(jnp.linspace(*bias_range, num_heads, dtype=param_dtype))

    def __call__(self, x: Array) -> Array:
        """Return the pre-activations (..., heads) of x (..., d_model)."""
        x, kernel, bias = widen(x), widen(self.kernel[...]), widen(self.bias[...])
        return soft_cap(x @ kernel + bias, self.cap)


class HeadNorm(nnx.Module):
    """NORM of equation (8): h (..., heads, head_dim) normalized per head, times a weight per channel; no bias.

    It is computed and returned in float32 or float64.

    Args:
        num_heads: number of heads.
        head_dim: channels of a head.
        eps: epsilon of the norm.
        kind: "layer" for LayerNorm, "rms" for RMSNorm.
        param_dtype: dtype of the weight.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, kind: str, param_dtype: Any) -> None:
        self.eps, self.kind = eps, kind
        self.weight = nnx.Param(jnp.ones(num_heads * head_dim, param_dtype))

    def __call__(self, h: Array) -> Array:
        """Return the normalized h (..., heads, head_dim)."""
        h = widen(h)
        if self.kind == "layer":
            h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + self.eps)
        return h * widen(self.weight[...]).reshape(h.shape[-2:])


def soft_cap(x: Array, cap: float) -> Array:
    """Return cap * tanh(x / cap), equation (110), in the shape and dtype of x: close to x near 0, within +-cap."""
    return cap * jnp.tanh(x / cap)


def reset_forget_gate(f: Array, document_start: Array) -> Array:
    """Close the forget gate f (B, T, heads) where document_start (B, T) is True, so that no state reaches the token."""
    return jnp.where(document_start[..., None], CLOSED_GATE, f)
