"""The wrappers that call kernels on sequences of any length, where `mlstm_kernels.torch` has them.

They take any kernels that have the arguments of mlstm_kernels' kernels. The kernels of this library take any length
themselves and are called once, on the whole sequence. For all others the sequence is padded or split to multiples of
the chunk size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.integrations.arguments import check_float_dtype
from tfla.integrations.mlstm_kernels.kernels import KERNELS
from tfla.integrations.mlstm_kernels.variants import Result, States, check_inputs
from tfla.ops.checks import check_float, check_shape

__all__ = [
    "wrap_chunkwise__arbitrary_sequence_length",
    "wrap_chunkwise__arbitrary_sequence_length_with_padding",
    "wrap_chunkwise__pad_zeros",
]
LOGGER = logging.getLogger(__name__)
MIN_CHUNK_SIZE = 16
CLOSED_GATE, OPEN_GATE = -1e4, 1e4  # pre-activations: in every float dtype exp(-1e4) is 0 and sigmoid(1e4) is 1
TENSOR_NAMES = ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial")
Kernel = Callable[..., Any]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
OptionalStates = tuple[Tensor | None, ...]


def _takes_any_length(kernel: Kernel) -> bool:
    """Return whether `kernel` belongs to this library; a `functools.partial` of such a kernel does too."""
    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    return any(kernel is own for own in KERNELS.values())


def _check(x: Inputs, chunk_size: int) -> None:
    """Check the inputs of a kernel that may not check them itself."""
    check_inputs(*x)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size!r}, expected an int of at least 1")


def _count_steps(q: Tensor) -> int:
    """Check q and return its number of steps S."""
    check_float("q", q)
    check_shape("q", q, ("B", "NH", "S", "DHQK"))
    if not q.shape[2]:
        raise ValueError("q: got an empty sequence, expected at least one step")
    return q.shape[2]


def _pad(x: Inputs, steps: int) -> Inputs:
    """Append `steps` steps with closed input gates and open forget gates, which leave every state as it is."""
    q, k, v = (F.pad(t, (0, 0, 0, steps)) for t in x[:3])
    return q, k, v, F.pad(x[3], (0, steps), value=CLOSED_GATE), F.pad(x[4], (0, steps), value=OPEN_GATE)


def _fill_states(states: OptionalStates, x: Inputs, dtype: torch.dtype) -> States:
    """Return (c, n, m), with zeros in `dtype` for those that are None."""
    B, NH, _, DHQK = x[0].shape
    shapes = ((B, NH, DHQK, x[2].shape[-1]), (B, NH, DHQK), (B, NH, 1))
    return tuple(
        x[0].new_zeros(shape, dtype=dtype) if state is None else state
        for shape, state in zip(shapes, states, strict=True)
    )  # fmt: skip


def _cast_states(states: States, dtype: torch.dtype) -> States:
    """Return (c, n, m) in `dtype`; m is 0 where a kernel with a sigmoid input gate returned (c, n)."""
    if len(states) == 2:
        states = *states, states[1].new_zeros((*states[1].shape[:2], 1))
    return tuple(state.to(dtype) for state in states)


def _run_step_kernel(kernel: Kernel, x: Inputs, states: States, eps: float) -> tuple[Tensor, States]:
    """Call a step kernel on a sequence of one step."""
    q, k, v, i, f = x
    c, n, m = states
    h, states = kernel(q=q.squeeze(2), k=k.squeeze(2), v=v.squeeze(2), i=i, f=f, c=c, n=n, m=m, eps=eps)
    return h.unsqueeze(2), states


def _split_into_chunks(steps: int, chunk_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first step, number of steps, chunk size) of consecutive slices of a sequence.

    Each slice has as many whole chunks as fit. The chunk size halves from slice to slice. The last slice, of fewer
    steps than the least chunk size, has the chunk size 0.
    """
    start = 0
    while start < steps:
        chunk_size = chunk_size if chunk_size >= MIN_CHUNK_SIZE else 0
        count = steps - start - ((steps - start) % chunk_size if chunk_size else 0)
        if count:
            yield start, count, chunk_size
        start += count
        chunk_size //= 2


def wrap_chunkwise__arbitrary_sequence_length(
    mlstm_chunkwise_kernel: Kernel, mlstm_sequence_kernel: Kernel, mlstm_step_kernel: Kernel, q: Tensor, k: Tensor,
    v: Tensor, f: Tensor, i: Tensor, c_initial: Tensor | None = None, n_initial: Tensor | None = None,
    m_initial: Tensor | None = None, return_last_states: bool = True, eps: float = 1e-6,
    autocast_kernel_dtype: torch.dtype = torch.bfloat16, chunk_size: int = 64,
    dtype_state: torch.dtype = torch.float32, enable_logging: bool = False,
) -> Result:  # fmt: skip
    """Call the chunkwise kernel on as many whole chunks as fit, and the sequence kernel on the steps that remain.

    Chunks have `chunk_size` steps, then half as many, and so on down to 16. A kernel of this library gets all steps in
    one call. For a sequence of one step the step kernel is called.

    Args:
        q, k: (B, NH, S, DHQK).
        v: (B, NH, S, DHHV).
        f, i: (B, NH, S), pre-activations of the gates.
        c_initial, n_initial, m_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH, 1); zeros if None.
        dtype_state: the dtype of the last states.
        return_last_states: also return the last states.
        eps, autocast_kernel_dtype: passed to the kernels.
        enable_logging: log at level DEBUG which kernel is called for which steps.

    Returns:
        h (B, NH, S, DHHV); with `return_last_states` also (c, n, m).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    x, initial = (q, k, v, i, f), (c_initial, n_initial, m_initial)
    check_float_dtype("dtype_state", dtype_state)
    if _count_steps(q) == 1 or _takes_any_length(mlstm_chunkwise_kernel):
        return wrap_chunkwise__arbitrary_sequence_length_with_padding(
            mlstm_chunkwise_kernel, mlstm_sequence_kernel, mlstm_step_kernel, q, k, v, f, i, *initial,
            return_last_states, eps, autocast_kernel_dtype, chunk_size, dtype_state,
        )  # fmt: skip
    _check(x, chunk_size)
    states = _fill_states(initial, x, dtype_state)
    outputs = []
    for start, steps, size in _split_into_chunks(q.shape[2], chunk_size):
        if enable_logging:
            LOGGER.debug("%s for steps %d to %d", f"chunks of {size}" if size else "single steps", start, start + steps)
        inputs = (t[:, :, start : start + steps].contiguous() for t in x)
        options: dict[str, Any] = {"return_last_states": True, "eps": eps}
        if size:
            options |= {"chunk_size": size, "autocast_kernel_dtype": autocast_kernel_dtype}
        kernel = mlstm_chunkwise_kernel if size else mlstm_sequence_kernel
        h, states = kernel(**dict(zip(TENSOR_NAMES, (*inputs, *states), strict=True)), **options)
        states = _cast_states(states, dtype_state)
        outputs.append(h)
    h = torch.cat(outputs, 2)
    return (h, states) if return_last_states else h


def wrap_chunkwise__arbitrary_sequence_length_with_padding(
    mlstm_chunkwise_kernel: Kernel, mlstm_sequence_kernel: Kernel, mlstm_step_kernel: Kernel, q: Tensor, k: Tensor,
    v: Tensor, f: Tensor, i: Tensor, c_initial: Tensor | None = None, n_initial: Tensor | None = None,
    m_initial: Tensor | None = None, return_last_states: bool = True, eps: float = 1e-6,
    autocast_kernel_dtype: torch.dtype = torch.bfloat16, chunk_size: int = 64,
    dtype_state: torch.dtype = torch.float32,
) -> Result:  # fmt: skip
    """Call the chunkwise kernel on the sequence, padded to a multiple of `chunk_size` where the kernel needs that.

    `mlstm_sequence_kernel` has no effect. For a sequence of one step the step kernel is called. The other arguments,
    the results and the errors are those of :func:`wrap_chunkwise__arbitrary_sequence_length`.
    """
    x: Inputs = (q, k, v, i, f)
    states: OptionalStates = (c_initial, n_initial, m_initial)
    check_float_dtype("dtype_state", dtype_state)
    S = _count_steps(q)
    if S == 1:
        h, last = _run_step_kernel(mlstm_step_kernel, x, _fill_states(states, x, dtype_state), eps)
    else:
        if not _takes_any_length(mlstm_chunkwise_kernel):
            _check(x, chunk_size)
            x, states = _pad(x, -S % chunk_size), _fill_states(states, x, dtype_state)
        h, last = mlstm_chunkwise_kernel(
            **dict(zip(TENSOR_NAMES, (*x, *states), strict=True)), chunk_size=chunk_size, return_last_states=True,
            autocast_kernel_dtype=autocast_kernel_dtype, eps=eps,
        )  # fmt: skip
        h = h if h.shape[2] == S else h[:, :, :S]
    return (h, _cast_states(last, dtype_state)) if return_last_states else h


def wrap_chunkwise__pad_zeros(
    mlstm_chunkwise_kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor,
    c_initial: Tensor | None = None, n_initial: Tensor | None = None, m_initial: Tensor | None = None,
    return_last_states: bool = False, eps: float = 1e-6, autocast_kernel_dtype: torch.dtype = torch.bfloat16,
    chunk_size: int = 64, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Call the chunkwise kernel for training, without last states, on the sequence padded where the kernel needs that.

    `kwargs` are passed to the kernel. The other arguments, h and the errors are those of
    :func:`wrap_chunkwise__arbitrary_sequence_length`.
    """
    if return_last_states:
        raise ValueError("return_last_states: got True, expected False: this wrapper returns h alone")
    x: Inputs = (q, k, v, i, f)
    S = _count_steps(q)
    if not _takes_any_length(mlstm_chunkwise_kernel):
        _check(x, chunk_size)
        x = _pad(x, -S % chunk_size)
    h: Tensor = mlstm_chunkwise_kernel(
        **dict(zip(TENSOR_NAMES, (*x, c_initial, n_initial, m_initial), strict=True)), return_last_states=False,
        eps=eps, autocast_kernel_dtype=autocast_kernel_dtype, chunk_size=chunk_size, **kwargs,
    )  # fmt: skip
    return h if h.shape[2] == S else h[:, :, :S]
