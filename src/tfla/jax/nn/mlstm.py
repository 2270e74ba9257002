"""The mLSTM layer as a module of `flax.nnx`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tfla.jax import kernels
from tfla.jax.api import mlstm
from tfla.jax.choice import KERNELS, Offsets
from tfla.jax.gates import widen
from tfla.jax.nn.layers import GatePreactivation, HeadNorm, projection, reset_forget_gate
from tfla.jax.state import State
from tfla.jax.steps import mlstm_step
from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import input_std, output_std
from tfla.ops.gates import InputGate


class MLSTM(nnx.Module):
    """The mLSTM layer: projections, the mLSTM operator, a norm over each head, and an output gate, (1)-(8).

    This is :class:`tfla.nn.MLSTM` on arrays of JAX. The backend of the config counts as None where JAX cannot run it:
    "hopper" and "triton" without a GPU, and a backend that only PyTorch has.

    Args:
        config: a config with mixer "mlstm_exp" or "mlstm_sig".
        rngs: the source of the initial weights.
        dtype: dtype of activations and of products with weights; None is that of x and the weights.
        param_dtype: dtype of the weights.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, or has another mixer.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32
    ) -> None:
        check_config(config, "mlstm_exp", "mlstm_sig")
        d, heads = config.d_model, config.num_heads
        self.num_heads, self.qk_head_dim, self.head_dim = heads, config.qk_head_dim, config.head_dim
        self.input_gate_kind: InputGate = "exp" if config.mixer == "mlstm_exp" else "sigmoid"
        self.chunk_size = config.chunk_size
        self.configured_backend = config.backend
        self.param_dtype = param_dtype
        std = input_std(d)
        options = (dtype, param_dtype, rngs)
        self.q_proj = projection(d, heads * self.qk_head_dim, std, *options)
        self.k_proj = projection(d, heads * self.qk_head_dim, std, *options)
        self.v_proj = projection(d, d, std, *options)
        self.output_gate = projection(d, d, std, *options)
        bias, cap = config.input_gate_bias, config.gate_soft_cap
        self.input_gate = GatePreactivation(d, heads, (bias, bias), cap, param_dtype, config.input_gate_trainable)
        self.forget_gate = GatePreactivation(d, heads, config.forget_gate_bias, cap, param_dtype, True)
        self.head_norm = HeadNorm(heads, self.head_dim, config.head_norm_eps, config.head_norm, param_dtype)
        self.out_proj = projection(d, d, output_std(d, config.num_blocks), *options)

    def __call__(
        self,
        x: Array,
        state: State | None = None,
        *,
        document_start: Array | None = None,
        cu_seqlens: Offsets | None = None,
        return_state: bool = False,
        context_parallel: str | None = None,
    ) -> tuple[Array, State | None]:
        """Mix whole sequences.

        Args:
            x: (B, T, d_model), any float dtype.
            state: the state before the first token; None is the start of a document.
            document_start: (B, T) bool, True at the first token of each document.
            cu_seqlens: (num_sequences + 1,) int, for B = 1: the offsets of the packed sequences, from 0 to T.
            return_state: whether to return the state after the last token.
            context_parallel: the mesh axis over which the sequence is divided, as in :func:`tfla.jax.mlstm`.

        Returns:
            the mixed sequences (B, T, d_model), and the state after the last token, or None without return_state.
        """
        q, k, v, i, f = self._inputs(x)
        if document_start is not None:
            f = reset_forget_gate(f, document_start)
        options: dict[str, Any] = {
            "input_gate": self.input_gate_kind,
            "initial_state": state,
            "cu_seqlens": cu_seqlens,
            "chunk_size": self.chunk_size,
            "backend": self._backend(),
            "context_parallel": context_parallel,
        }
        if not return_state:
            return self._output(x, mlstm(q, k, v, i, f, **options)), None
        h, new = mlstm(q, k, v, i, f, return_state=True, **options)
        return self._output(x, h), new

    def step(self, x: Array, state: State) -> tuple[Array, State]:
        """Mix one token of each sequence.

        Args:
            x: the token's activations, (B, d_model).
            state: the state so far.

        Returns:
            the output (B, d_model), and the state after the token.
        """
        h, new = mlstm_step(*self._inputs(x), state, input_gate=self.input_gate_kind, backend=self._backend())
        return self._output(x, h), new

    def _backend(self) -> str | None:
        """Return the backend of the config where JAX can have it, else None."""
        name = self.configured_backend
        if name in kernels.BACKENDS and kernels.present_gpu() is None:
            return None
        return name if name in KERNELS else None

    def initial_state(self, batch_size: int) -> State:
        """Return a state of zeros for `batch_size` sequences: float64 if the weights are float64, else float32."""
        dtype = jnp.float64 if self.param_dtype == jnp.float64 else jnp.float32
        return State.zeros(
            batch_size, self.num_heads, self.qk_head_dim, self.head_dim,
            normalize=self.input_gate_kind == "exp", dtype=dtype,
        )  # fmt: skip

    def _inputs(self, x: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return q, k, v (..., heads, dim) and the gate pre-activations i, f (..., heads), equation (5)."""
        q, k, v = (
            y.reshape(*y.shape[:-1], self.num_heads, y.shape[-1] // self.num_heads)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        return q, k, v, self.input_gate(x), self.forget_gate(x)

    def _output(self, x: Array, h: Array) -> Array:
        """Apply equation (8) and the output projection: x (..., d_model), h (..., heads, dhv) -> (..., d_model)."""
        gate = jax.nn.sigmoid(widen(self.output_gate(x)))
        norm = self.head_norm(h)
        return self.out_proj((gate * norm.reshape(gate.shape)).astype(h.dtype))
