"""The JAX kernels of mlstm_kernels, with the names, arguments and defaults that they have there.

All compute the mLSTM (docs/mathematics.md) by tfla's operator, and differ in the following:

- "siging" kernels have a sigmoid input gate (mLSTMsig), the others an exponential one (mLSTMexp).
- The gradients are exact in kernels whose name ends in `_autograd`. The others have the gradients of the paper, in
  which none passes through the denominator and the max state.
- Parallel kernels neither take nor return states.

Sequence kernels take q, k (B, NH, S, DHQK), v (B, NH, S, DHHV), the pre-activations i, f (B, NH, S) and the initial
states c (B, NH, DHQK, DHHV), n (B, NH, DHQK) and m (B, NH) or (B, NH, 1). They return h (B, NH, S, DHHV) and, with
`return_last_states`, the last states, with m (B, NH). Step kernels take and return the same without S, with m
(B, NH, 1).

Arguments that tune a kernel are accepted without effect, by kernels with ``**kwargs`` too. Any other argument that a
kernel does not name is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from tfla.integrations.arguments import reject_unknown
from tfla.integrations.mlstm_kernels.kernels import (
    EXP_EXACT,
    EXP_PAPER,
    EXP_PARALLEL_EXACT,
    EXP_PARALLEL_PAPER,
    SIGMOID_PAPER,
    SIGMOID_PARALLEL_EXACT,
    SIGMOID_PARALLEL_PAPER,
    TUNING,
    find_kernel,
)
from tfla.integrations.mlstm_kernels_jax.variants import Result, States, compute_sequence, compute_step

Kernel = Callable[..., Result]


def chunkwise_autograd(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    m_initial: Array | None = None, return_last_states: bool = False, eps: float = 1e-6, chunk_size: int = 64,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients."""
    reject_unknown(chunkwise_autograd, kwargs, TUNING)
    return compute_sequence(EXP_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps)


def chunkwise(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    m_initial: Array | None = None, return_last_states: bool = False, eps: float = 1e-6, chunk_size: int = 64,
    autocast_kernel_dtype: Any = jnp.float32,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, none through the normalizer."""
    return compute_sequence(
        EXP_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def chunkwise_xl(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    m_initial: Array | None = None, return_last_states: bool = False, eps: float = 1e-6, chunk_size: int = 128,
    autocast_kernel_dtype: Any = jnp.float32,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, none through the normalizer."""
    return compute_sequence(
        EXP_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def chunkwise_xl_siging(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, normalize: bool = True, chunk_size: int = 128,
    autocast_kernel_dtype: Any = jnp.float32,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalized or not, with the gradients of the paper."""
    return compute_sequence(
        SIGMOID_PAPER, q, k, v, i, f, c_initial, n_initial, None, return_last_states, eps, normalize=normalize,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def parallel_autograd(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    m_initial: Array | None = None, return_last_states: bool = False, eps: float = 1e-6, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients, without states."""
    reject_unknown(parallel_autograd, kwargs, TUNING)
    return compute_sequence(EXP_PARALLEL_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps)


def parallel(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    m_initial: Array | None = None, return_last_states: bool = False, eps: float = 1e-6,
    autocast_kernel_dtype: Any = jnp.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, without states."""
    reject_unknown(parallel, kwargs, TUNING)
    return compute_sequence(
        EXP_PARALLEL_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def parallel_siging_autograd(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, stable_fgate: bool = True, normalize: bool = True,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalized or not, with exact gradients, without states.

    `stable_fgate` has no effect.
    """
    reject_unknown(parallel_siging_autograd, kwargs, TUNING)
    return compute_sequence(
        SIGMOID_PARALLEL_EXACT, q, k, v, i, f, c_initial, n_initial, None, return_last_states, eps, normalize=normalize
    )


def parallel_siging(
    q: Array, k: Array, v: Array, i: Array, f: Array, c_initial: Array | None = None, n_initial: Array | None = None,
    return_last_states: bool = False, eps: float = 1e-6, stable_fgate: bool = True, normalize: bool = True,
    autocast_kernel_dtype: Any = jnp.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalized or not, with the gradients of the paper, without states.

    `stable_fgate` has no effect.
    """
    reject_unknown(parallel_siging, kwargs, TUNING)
    return compute_sequence(
        SIGMOID_PARALLEL_PAPER, q, k, v, i, f, c_initial, n_initial, None, return_last_states, eps,
        normalize=normalize, autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def recurrent_step(
    q: Array, k: Array, v: Array, i: Array, f: Array, c: Array, n: Array, m: Array, eps: float = 1e-6, **kwargs: Any
) -> tuple[Array, States]:
    """Compute one step of mLSTMexp; the new state has the dtype of the old one."""
    reject_unknown(recurrent_step, kwargs, TUNING)
    return compute_step(q, k, v, i, f, c, n, m, eps, None)


def recurrent_step_in_dtype(
    q: Array, k: Array, v: Array, i: Array, f: Array, c: Array, n: Array, m: Array, eps: float = 1e-6,
    dtype_state: Any = jnp.float32, **kwargs: Any,
) -> tuple[Array, States]:  # fmt: skip
    """Compute one step of mLSTMexp; the new state is in `dtype_state`."""
    reject_unknown(recurrent_step_in_dtype, kwargs, TUNING)
    return compute_step(q, k, v, i, f, c, n, m, eps, dtype_state)


KERNELS: dict[str, Kernel] = {
    "chunkwise--native_autograd": chunkwise_autograd,
    "chunkwise--triton_limit_chunk": chunkwise,
    "chunkwise--triton_xl_chunk": chunkwise_xl,
    "chunkwise--triton_xl_chunk_siging": chunkwise_xl_siging,
    "parallel--native_autograd": parallel_autograd,
    "parallel--native_custbw": parallel,
    "parallel--native_stablef_autograd": parallel_autograd,
    "parallel--native_stablef_custbw": parallel,
    "parallel--native_siging_autograd": parallel_siging_autograd,
    "parallel--native_siging_custbw": parallel_siging,
}
STEP_KERNELS: dict[str, Callable[..., tuple[Array, States]]] = {
    "native": recurrent_step,
    "triton": recurrent_step_in_dtype,
}


def get_available_mlstm_kernels() -> list[str]:
    """Return the names that :func:`get_mlstm_kernel` takes."""
    return list(KERNELS)


def get_available_mlstm_step_kernels() -> list[str]:
    """Return the names that :func:`get_mlstm_step_kernel` takes."""
    return list(STEP_KERNELS)


def get_mlstm_kernel(name: str) -> Kernel:
    """Return the chunkwise or parallel kernel called `name`.

    Raises:
        ValueError: there is no such kernel; the message lists those that exist.
    """
    return find_kernel("name", name, KERNELS)


def get_mlstm_step_kernel(name: str) -> Callable[..., tuple[Array, States]]:
    """Return the kernel for one step called `name`.

    Raises:
        ValueError: there is no such kernel; the message lists those that exist.
    """
    return find_kernel("name", name, STEP_KERNELS)
