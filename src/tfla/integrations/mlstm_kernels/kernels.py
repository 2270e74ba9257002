"""The kernels of mlstm_kernels, with the names, arguments and defaults that they have there.

All compute the mLSTM (docs/mathematics.md) by tfla's operator, and differ in the following:

- "exp" and "siging" kernels have an exponential and a sigmoid input gate (mLSTMexp and mLSTMsig).
- The gradients are exact in kernels whose name ends in `_autograd`. The others have the gradients of the paper, in
  which none passes through the denominator and the max state.
- Parallel kernels neither take nor return states.

Sequence kernels take q, k (B, NH, S, DHQK), v (B, NH, S, DHHV), the pre-activations i, f (B, NH, S) and the initial
states c (B, NH, DHQK, DHHV), n (B, NH, DHQK) and m (B, NH, 1). They return h (B, NH, S, DHHV) and, with
`return_last_states`, the last states. Step kernels take and return the same without S.

Arguments that tune a kernel (chunk and tile sizes, warps, stages, recomputation) are accepted without effect, by
kernels with ``**kwargs`` too. Any other argument that a kernel does not name is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla.integrations.arguments import reject_unknown
from tfla.integrations.mlstm_kernels.variants import KernelVariant, Result, States, compute_sequence, compute_step

Kernel = Callable[..., Result]
TUNING = (
    "chunk_size", "chunk_size_inter", "chunk_size_intra", "siz_b_L_parallel", "siz_b_L_loop", "siz_b_DH_parallel",
    "siz_b_DH_loop", "num_warps_intra", "num_warps_inter", "num_stages_intra", "num_stages_inter",
    "recompute_states_in_bw", "autocast_kernel_dtype",
)  # fmt: skip
EXP_EXACT = KernelVariant("exp", exact_gradients=True)
EXP_PAPER = KernelVariant("exp", exact_gradients=False)
EXP_PARALLEL_EXACT = KernelVariant("exp", exact_gradients=True, parallel=True)
EXP_PARALLEL_PAPER = KernelVariant("exp", exact_gradients=False, parallel=True)
SIGMOID_PAPER = KernelVariant("sigmoid", exact_gradients=False)
SIGMOID_PARALLEL_EXACT = KernelVariant("sigmoid", exact_gradients=True, parallel=True)
SIGMOID_PARALLEL_PAPER = KernelVariant("sigmoid", exact_gradients=False, parallel=True)


def chunkwise_native_autograd(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, chunk_size: int = 64, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients."""
    reject_unknown(chunkwise_native_autograd, kwargs, TUNING)
    return compute_sequence(EXP_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps)


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, chunk_size: int = 64, autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, none through the normalizer."""
    return compute_sequence(
        EXP_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def chunkwise_xl(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, chunk_size: int = 128, chunk_size_inter: int | None = None, chunk_size_intra: int | None = None,
    siz_b_L_parallel: int | None = None, siz_b_L_loop: int | None = None, siz_b_DH_parallel: int | None = None,
    siz_b_DH_loop: int | None = None, num_warps_intra: int | None = None, num_warps_inter: int | None = None,
    num_stages_intra: int | None = None, num_stages_inter: int | None = None, recompute_states_in_bw: bool = True,
    autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, none through the normalizer."""
    return chunkwise(
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_kernel_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def chunkwise_xl_siging(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, normalize: bool = True, chunk_size: int = 128, chunk_size_inter: int | None = None,
    chunk_size_intra: int | None = None, siz_b_L_parallel: int | None = None, siz_b_L_loop: int | None = None,
    siz_b_DH_parallel: int | None = None, siz_b_DH_loop: int | None = None, num_warps_intra: int | None = None,
    num_warps_inter: int | None = None, num_stages_intra: int | None = None, num_stages_inter: int | None = None,
    recompute_states_in_bw: bool = True, autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalized or not, with the gradients of the paper.

    The last states are (c, n). With `normalize=False` n is not computed, and is returned as zeros.
    """
    return compute_sequence(
        SIGMOID_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, normalize=normalize,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def parallel_autograd(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients, without states."""
    reject_unknown(parallel_autograd, kwargs, TUNING)
    return compute_sequence(EXP_PARALLEL_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps)


def parallel(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, autocast_kernel_dtype: torch.dtype = torch.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, without states."""
    reject_unknown(parallel, kwargs, TUNING)
    return compute_sequence(
        EXP_PARALLEL_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def parallel_siging_autograd(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, stable_fgate: bool = True, normalize: bool = True, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalized or not, with exact gradients, without states.

    `stable_fgate` has no effect.
    """
    reject_unknown(parallel_siging_autograd, kwargs, TUNING)
    return compute_sequence(
        SIGMOID_PARALLEL_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        normalize=normalize,
    )  # fmt: skip


def parallel_siging(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, stable_fgate: bool = True, normalize: bool = True,
    autocast_kernel_dtype: torch.dtype = torch.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalized or not, with the gradients of the paper, without states.

    `stable_fgate` has no effect.
    """
    reject_unknown(parallel_siging, kwargs, TUNING)
    return compute_sequence(
        SIGMOID_PARALLEL_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        normalize=normalize, autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor, eps: float = 1e-6,
    dtype_state: torch.dtype = torch.float32, **kwargs: Any,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute one step of mLSTMexp.

    Args:
        q, k: (B, NH, DHQK).
        v: (B, NH, DHHV).
        i, f: (B, NH, 1), pre-activations of the gates.
        c, n, m: the state before the step, (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH, 1).

    Returns:
        h (B, NH, DHHV), and the new state (c, n, m) in `dtype_state`.
    """
    reject_unknown(recurrent_step, kwargs, TUNING)
    return compute_step(EXP_EXACT, q, k, v, i, f, c, n, m, eps, dtype_state)


def recurrent_step_siging(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor, eps: float = 1e-6,
    dtype_state: torch.dtype = torch.float32, normalize: bool = True,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute one step of mLSTMsig, for which mlstm_kernels has no kernel.

    The arguments and the results are those of :func:`recurrent_step`; the returned m is 0.
    """
    return compute_step(SIGMOID_PAPER, q, k, v, i, f, c, n, m, eps, dtype_state, normalize)


def recurrent_sequence(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, dtype_state: torch.dtype = torch.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients.

    The last states are returned in `dtype_state`.

    Raises:
        ValueError: some of the initial states are given, but not all.
    """
    reject_unknown(recurrent_sequence, kwargs, TUNING)
    if len({t is None for t in (c_initial, n_initial, m_initial)}) > 1:
        raise ValueError("c_initial, n_initial, m_initial: got some of them, expected all or none")
    return compute_sequence(
        EXP_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, state_dtype=dtype_state
    )


KERNELS: dict[str, Kernel] = {
    "chunkwise--native_autograd": chunkwise_native_autograd,
    "chunkwise--native_custbw": chunkwise,
    "chunkwise--triton_limit_chunk": chunkwise,
    "chunkwise--triton_xl_chunk": chunkwise_xl,
    "chunkwise--triton_xl_chunk_siging": chunkwise_xl_siging,
    "parallel--native_autograd": parallel_autograd,
    "parallel--native_custbw": parallel,
    "parallel--native_stablef_autograd": parallel_autograd,
    "parallel--native_stablef_custbw": parallel,
    "parallel--native_siging_autograd": parallel_siging_autograd,
    "parallel--native_siging_custbw": parallel_siging,
    "parallel--triton_limit_headdim": parallel,
}
STEP_KERNELS: dict[str, Callable[..., tuple[Tensor, States]]] = {"native": recurrent_step, "triton": recurrent_step}
SEQUENCE_KERNELS: dict[str, Kernel] = {
    "native_sequence__native": recurrent_sequence,
    "native_sequence__triton": recurrent_sequence,
}


def find_kernel(argument: str, name: str, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return the kernel called `name` from `table`.

    Raises:
        ValueError: there is no such kernel; the message lists the names in `table`.
    """
    if name not in table:
        raise ValueError(f"{argument}: got {name!r}, allowed are {', '.join(map(repr, table))}")
    return table[name]


def get_available_mlstm_kernels() -> list[str]:
    """Return the names that :func:`get_mlstm_kernel` takes."""
    return list(KERNELS)


def get_available_mlstm_step_kernels() -> list[str]:
    """Return the names that :func:`get_mlstm_step_kernel` takes."""
    return list(STEP_KERNELS)


def get_available_mlstm_sequence_kernels() -> list[str]:
    """Return the names that :func:`get_mlstm_sequence_kernel` takes."""
    return list(SEQUENCE_KERNELS)


def get_mlstm_kernel(name: str) -> Kernel:
    """Return the chunkwise or parallel kernel called `name`.

    Raises:
        ValueError: there is no such kernel; the message lists those that exist.
    """
    return find_kernel("name", name, KERNELS)


def get_mlstm_step_kernel(name: str) -> Callable[..., tuple[Tensor, States]]:
    """Return the kernel for one step called `name`.

    Raises:
        ValueError: there is no such kernel; the message lists those that exist.
    """
    return find_kernel("name", name, STEP_KERNELS)


def get_mlstm_sequence_kernel(name: str) -> Kernel:
    """Return the kernel called `name` of those that compute a sequence step by step in mlstm_kernels.

    Raises:
        ValueError: there is no such kernel; the message lists those that exist.
    """
    return find_kernel("name", name, SEQUENCE_KERNELS)
