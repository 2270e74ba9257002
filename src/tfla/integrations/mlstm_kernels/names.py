"""The kernels by name, with the arguments and defaults that each has in mlstm_kernels.

Arguments that tune a kernel (chunk and tile sizes, warps, stages, recomputation) are accepted without effect, by
kernels with ``**kwargs`` too; any other argument that a kernel does not name is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla.integrations.arguments import refuse_unknown
from tfla.integrations.mlstm_kernels.forms import Form, Result, States, sequence, step

Kernel = Callable[..., Result]
TUNING = (
    "chunk_size", "chunk_size_inter", "chunk_size_intra", "siz_b_L_parallel", "siz_b_L_loop", "siz_b_DH_parallel",
    "siz_b_DH_loop", "num_warps_intra", "num_warps_inter", "num_stages_intra", "num_stages_inter",
    "recompute_states_in_bw", "autocast_kernel_dtype",
)  # fmt: skip
EXACT, PAPER = Form("exp", True), Form("exp", False)
ROWS_EXACT, ROWS_PAPER = Form("exp", True, True), Form("exp", False, True)
SIGMOID, SIGMOID_ROWS_EXACT, SIGMOID_ROWS = (
    Form("sigmoid", False), Form("sigmoid", True, True), Form("sigmoid", False, True)
)  # fmt: skip


def chunkwise_native_autograd(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, chunk_size: int = 64, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients."""
    refuse_unknown(chunkwise_native_autograd, kwargs, TUNING)
    return sequence(EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps)


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, chunk_size: int = 64, autocast_kernel_dtype: torch.dtype = torch.float32,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, none through the normaliser."""
    return sequence(
        PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
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
    """Compute mLSTMexp with the gradients of the paper, none through the normaliser."""
    return sequence(
        PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_dtype=autocast_kernel_dtype,
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
    """Compute mLSTMsig, normalised or not, with the gradients of the paper; the last states are (c, n).

    Without the normaliser n is not kept and 0.
    """
    return sequence(
        SIGMOID, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, normalize=normalize,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def parallel_autograd(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients, without states."""
    refuse_unknown(parallel_autograd, kwargs, TUNING)
    return sequence(ROWS_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps)


def parallel(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, autocast_kernel_dtype: torch.dtype = torch.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with the gradients of the paper, without states."""
    refuse_unknown(parallel, kwargs, TUNING)
    return sequence(
        ROWS_PAPER, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def parallel_siging_autograd(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, stable_fgate: bool = True, normalize: bool = True, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalised or not, with exact gradients, without states.

    `stable_fgate` has no effect.
    """
    refuse_unknown(parallel_siging_autograd, kwargs, TUNING)
    return sequence(
        SIGMOID_ROWS_EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps,
        normalize=normalize,
    )  # fmt: skip


def parallel_siging(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, stable_fgate: bool = True, normalize: bool = True,
    autocast_kernel_dtype: torch.dtype = torch.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMsig, normalised or not, with the gradients of the paper, without states.

    `stable_fgate` has no effect.
    """
    refuse_unknown(parallel_siging, kwargs, TUNING)
    return sequence(
        SIGMOID_ROWS, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, normalize=normalize,
        autocast_dtype=autocast_kernel_dtype,
    )  # fmt: skip


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor, eps: float = 1e-6,
    dtype_state: torch.dtype = torch.float32, **kwargs: Any,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute one step of mLSTMexp; returns h and (c, n, m) in `dtype_state`."""
    refuse_unknown(recurrent_step, kwargs, TUNING)
    return step(EXACT, q, k, v, i, f, c, n, m, eps, dtype_state)


def recurrent_step_siging(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor, eps: float = 1e-6,
    dtype_state: torch.dtype = torch.float32, normalize: bool = True,
) -> tuple[Tensor, States]:  # fmt: skip
    """Compute one step of mLSTMsig, which mlstm_kernels lacks; returns h and (c, n, m) in `dtype_state`, m being 0."""
    return step(SIGMOID, q, k, v, i, f, c, n, m, eps, dtype_state, normalize)


def recurrent_sequence(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c_initial: Tensor | None = None,
    n_initial: Tensor | None = None, m_initial: Tensor | None = None, return_last_states: bool = False,
    eps: float = 1e-6, dtype_state: torch.dtype = torch.float32, **kwargs: Any,
) -> Result:  # fmt: skip
    """Compute mLSTMexp with exact gradients; states in `dtype_state`, given all or none."""
    refuse_unknown(recurrent_sequence, kwargs, TUNING)
    if len({t is None for t in (c_initial, n_initial, m_initial)}) > 1:
        raise ValueError("c_initial, n_initial, m_initial: got some of them, expected all or none")
    return sequence(
        EXACT, q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, state_dtype=dtype_state
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


def look_up(argument: str, name: str, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The kernel of that name.

    Raises:
        ValueError: there is none; the message names those there are.
    """
    if name not in table:
        raise ValueError(f"{argument}: got {name!r}, allowed are {', '.join(map(repr, table))}")
    return table[name]


def get_available_mlstm_kernels() -> list[str]:
    """Names for :func:`get_mlstm_kernel`."""
    return list(KERNELS)


def get_available_mlstm_step_kernels() -> list[str]:
    """Names for :func:`get_mlstm_step_kernel`."""
    return list(STEP_KERNELS)


def get_available_mlstm_sequence_kernels() -> list[str]:
    """Names for :func:`get_mlstm_sequence_kernel`."""
    return list(SEQUENCE_KERNELS)


def get_mlstm_kernel(name: str) -> Kernel:
    """A chunkwise or parallel kernel by its name; ValueError names those there are."""
    return look_up("name", name, KERNELS)


def get_mlstm_step_kernel(name: str) -> Callable[..., tuple[Tensor, States]]:
    """A kernel of one step by its name; ValueError names those there are."""
    return look_up("name", name, STEP_KERNELS)


def get_mlstm_sequence_kernel(name: str) -> Kernel:
    """A kernel that goes step by step there, by its name; ValueError names those there are."""
    return look_up("name", name, SEQUENCE_KERNELS)
