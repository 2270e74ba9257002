"""The mixers of the language model beside the mLSTM, as :mod:`tfla.nn.mixers` has them, by name."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tfla.jax.gates import widen
from tfla.jax.nn.attention import Attention
from tfla.jax.nn.layers import projection
from tfla.jax.nn.recurrent import Options, RecurrentMixer, Run, by_heads, input_projection
from tfla.jax.nn.rotary import rotate_both
from tfla.nn.config import ModelConfig
from tfla.nn.layers import input_std

STEP_SIZES = (1e-3, 1e-1)  # softplus(dt_bias) is drawn log-uniformly from these at first
SMALLEST_STEP = 1e-30  # whose logarithm is finite, with a gradient of 0
RANK, TEMPERATURE = 16, 16.0  # of GLA's gates


class GatedNorm(nnx.Module):
    """An RMSNorm of the last dim with an output gate: w * RMS(h) * activation(gate), in float32 or float64.

    Args:
        dim: size of the last dim of h.
        eps: epsilon of the norm.
        param_dtype: dtype of the weight.
        activation: the activation of the gate, "silu" or "sigmoid".
        gate_first: w * RMS(h * activation(gate)) instead, as in Mamba-2.
    """

    def __init__(
        self, dim: int, eps: float, param_dtype: Any, activation: Literal["silu", "sigmoid"] = "silu",
        gate_first: bool = False,
    ) -> None:  # fmt: skip
        self.eps, self.activation, self.gate_first = eps, activation, gate_first
        self.weight = nnx.Param(jnp.ones(dim, param_dtype))

    def __call__(self, h: Array, gate: Array | None = None) -> Array:
        """Return the gated norm of h (..., dim) in h's dtype; gate has h's shape, None is no gate."""
        wide = widen(h)
        factor = 1 if gate is None else getattr(jax.nn, self.activation)(widen(gate))
        if self.gate_first:
            wide = wide * factor
        wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + self.eps) * widen(self.weight[...])
        return (wide if self.gate_first else wide * factor).astype(h.dtype)


class DecayParameters(nnx.Module):
    """A rate and a bias of the gates -exp(A_log) softplus(f + dt_bias).

    Args:
        shape: (heads,), or (heads, dqk) with gates by channel, of dt_bias.
        param_dtype: dtype of the weights.
        rngs: the source of the initial weights.
        rates: exp(A_log) is drawn uniformly from this range at first.
    """

    def __init__(
        self, shape: tuple[int, ...], param_dtype: Any, rngs: nnx.Rngs, rates: tuple[float, float] = (1.0, 16.0)
    ) -> None:
        low, high = map(math.log, STEP_SIZES)
        rate = jax.random.uniform(rngs.params(), shape[:1], param_dtype, *rates)
        size = jnp.exp(jax.random.uniform(rngs.params(), shape, param_dtype, low, high))
        self.A_log = nnx.Param(jnp.log(jnp.maximum(rate, 1e-4)))
        self.dt_bias = nnx.Param(size + jnp.log(-jnp.expm1(-size)))  # the inverse of softplus

    def __call__(self) -> tuple[Array, Array]:
        """Return A_log and dt_bias."""
        return self.A_log[...], self.dt_bias[...]


class LowRankProjection(nnx.Module):
    """A linear layer whose weight is a product of two, with a bias if requested."""

    def __init__(
        self, in_features: int, rank: int, out_features: int, dtype: Any, param_dtype: Any, rngs: nnx.Rngs,
        bias: bool = False,
    ) -> None:  # fmt: skip
        self.down = projection(in_features, rank, input_std(in_features), dtype, param_dtype, rngs)
        self.up = projection(rank, out_features, input_std(rank), dtype, param_dtype, rngs, bias)

    def __call__(self, x: Array) -> Array:
        """Return the output (..., out_features) for x (..., in_features)."""
        return self.up(self.down(x))


class DeltaNet(RecurrentMixer):
    """DeltaNet's mixer, :class:`tfla.nn.mixers.delta_net.DeltaNet`."""

    name = "delta_net"

    def add_weights(self, config: ModelConfig, options: Options) -> None:
        """Run :meth:`RecurrentMixer.add_weights`."""
        self.beta_proj = input_projection(config.d_model, self.num_heads, options)
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps, self.param_dtype)

    def mix(self, x: Array, run: Run) -> Array:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self.queries_keys_values(x, run)
        h = run.delta_rule(q, k, v, self.beta_proj(x))
        return self.out_proj(_joined(self.norm(h)))


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet's mixer, :class:`tfla.nn.mixers.gated_delta_net.GatedDeltaNet`."""

    name = "gated_delta_net"

    def add_weights(self, config: ModelConfig, options: Options) -> None:
        """Run :meth:`RecurrentMixer.add_weights`."""
        super().add_weights(config, options)
        d, heads = config.d_model, self.num_heads
        self.decay_proj = input_projection(d, heads, options)
        self.decay = DecayParameters((heads,), *options[1:], (0.0, 16.0))
        self.gate_proj = input_projection(d, heads * self.head_dim, options)

    def mix(self, x: Array, run: Run) -> Array:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self.queries_keys_values(x, run)
        h = run.delta_rule(q, k, v, self.beta_proj(x), self.decay_proj(x), self.decay())
        return self.out_proj(_joined(self.norm(h, by_heads(self.gate_proj(x), self.head_dim))))


class KimiDeltaAttention(RecurrentMixer):
    """Kimi Linear's mixer, :class:`tfla.nn.mixers.kda.KimiDeltaAttention`."""

    name = "kda"

    def add_weights(self, config: ModelConfig, options: Options) -> None:
        """Run :meth:`RecurrentMixer.add_weights`."""
        d, heads, rank = config.d_model, self.num_heads, self.head_dim
        self.beta_proj = input_projection(d, heads, options)
        self.decay_proj = LowRankProjection(d, rank, heads * self.qk_head_dim, *options)
        self.decay = DecayParameters((heads, self.qk_head_dim), *options[1:])
        self.gate_proj = LowRankProjection(d, rank, heads * self.head_dim, *options)
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps, self.param_dtype, "sigmoid")

    def mix(self, x: Array, run: Run) -> Array:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self.queries_keys_values(x, run)
        f = by_heads(self.decay_proj(x), self.qk_head_dim)
        h = run.delta_rule(q, k, v, self.beta_proj(x), f, self.decay())
        return self.out_proj(_joined(self.norm(h, by_heads(self.gate_proj(x), self.head_dim))))


class GatedLinearAttention(RecurrentMixer):
    """GLA's mixer, :class:`tfla.nn.mixers.gla.GatedLinearAttention`."""

    name = "gla"
    has_convolution = False

    def add_weights(self, config: ModelConfig, options: Options) -> None:
        """Run :meth:`RecurrentMixer.add_weights`."""
        d, heads = config.d_model, self.num_heads
        self.decay = LowRankProjection(d, RANK, heads * self.qk_head_dim, *options, bias=True)
        self.gate_proj = input_projection(d, heads * self.head_dim, options)
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps, self.param_dtype)

    def mix(self, x: Array, run: Run) -> Array:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self.queries_keys_values(x, run)
        log_f = by_heads(jax.nn.log_sigmoid(widen(self.decay(x))) / TEMPERATURE, self.qk_head_dim)
        h = run.linear_attention(q, k, v, log_f)
        return self.out_proj(_joined(self.norm(h, by_heads(self.gate_proj(x), self.head_dim))))


class Retention(RecurrentMixer):
    """RetNet's mixer, :class:`tfla.nn.mixers.retnet.Retention`."""

    name = "retnet"
    has_convolution = False
    has_position = True

    def add_weights(self, config: ModelConfig, options: Options) -> None:
        """Run :meth:`RecurrentMixer.add_weights`."""
        self.gate_proj = input_projection(config.d_model, self.num_heads * self.head_dim, options)
        self.norm = GatedNorm(self.head_dim, config.head_norm_eps, self.param_dtype)

    def mix(self, x: Array, run: Run) -> Array:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self.queries_keys_values(x, run)
        q, k = rotate_both(q, k, run.position())
        head = jnp.arange(self.num_heads, dtype=jnp.promote_types(v.dtype, jnp.float32))
        log_f = jnp.broadcast_to(jnp.log1p(-jnp.exp2(-5 - head)), v.shape[:-1])
        h = run.linear_attention(q, k, v, log_f)
        return self.out_proj(_joined(self.norm(h, by_heads(self.gate_proj(x), self.head_dim))))


class Mamba2(RecurrentMixer):
    """Mamba-2's mixer, :class:`tfla.nn.mixers.mamba2.Mamba2`."""

    name = "mamba2"
    convolution_bias = True

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        heads = config.mamba_expand * config.d_model // config.mamba_head_dim
        super().__init__(config, num_heads=heads, num_qk_heads=1, **options)

    def add_weights(self, config: ModelConfig, options: Options) -> None:
        """Run :meth:`RecurrentMixer.add_weights`."""
        d, width = config.d_model, self.num_heads * self.head_dim
        self.gate_proj = input_projection(d, width, options)
        self.dt_proj = input_projection(d, self.num_heads, options)
        self.decay = DecayParameters((self.num_heads,), *options[1:])
        self.D = nnx.Param(jnp.ones(self.num_heads, self.param_dtype))
        self.norm = GatedNorm(width, config.head_norm_eps, self.param_dtype, gate_first=True)

    def mix(self, x: Array, run: Run) -> Array:
        """Run :meth:`RecurrentMixer.mix`."""
        q, k, v = self.queries_keys_values(x, run)
        A_log, dt_bias = map(widen, self.decay())
        dt = jax.nn.softplus(widen(self.dt_proj(x)) + dt_bias)
        log_i = jnp.log(jnp.maximum(dt, SMALLEST_STEP))
        h = run.linear_attention(q, k, v, -jnp.exp(A_log) * dt, log_i=log_i, scale=1.0)
        h = h + (v * self.D[...][:, None]).astype(h.dtype)
        return self.out_proj(self.norm(_joined(h), self.gate_proj(x)))


def _joined(x: Array) -> Array:
    """Return (..., heads, dim) as (..., heads dim)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


MIXERS: dict[str, type[RecurrentMixer | Attention]] = {
    mixer.name: mixer
    for mixer in (Mamba2, Retention, GatedLinearAttention, DeltaNet, GatedDeltaNet, KimiDeltaAttention, Attention)
}
