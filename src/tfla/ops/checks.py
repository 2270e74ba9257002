"""The checks of the arguments of public operators.

Each raises ValueError or TypeError, whose message names the argument, what was given and what is allowed.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from tfla._util.shapes import check_input_shapes, check_shape, state_parts
from tfla.backends.base import Gates, packed_bounds
from tfla.ops.autocast import autocast_dtype
from tfla.ops.gates import INPUT_GATES
from tfla.ops.state import State
from tfla.ops.transforms import forward_mode, needs_dispatcher

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STORE_DTYPES = (None, torch.float32, torch.bfloat16)


def check_float(name: str, x: object) -> None:
    """Check that an argument is a tensor of a float dtype that the operators support."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a tensor")
    if hasattr(x, "device_mesh"):  # where q is one, only local tensors are checked
        raise TypeError(f"{name}: got a DTensor, expected a plain tensor, as q is")
    if x.is_nested:
        raise TypeError(f"{name}: got a nested tensor, expected a plain one: packed sequences take cu_seqlens")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, expected torch.strided")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: got dtype {x.dtype}, expected a float dtype: {', '.join(map(_name, FLOATS))}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_input_gate(input_gate: object) -> None:
    """Check the name of an input gate."""
    if not isinstance(input_gate, str) or input_gate not in INPUT_GATES:
        raise ValueError(f"input_gate: got {input_gate!r}, allowed are {', '.join(map(repr, INPUT_GATES))}")


def named_gates(i: Tensor | None, f: Tensor, gates: Gates) -> dict[str, Tensor]:
    """Return the gates to check by the names that they have for the caller; of all gates log_i alone may be None."""
    if gates != "log":
        return {"i": i, "f": f}  # type: ignore[dict-item]
    return {"log_f": f} if i is None else {"log_i": i, "log_f": f}


def check_inputs(q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], time: bool) -> None:
    """Check shapes, dtypes and devices of one call.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), or without T.
        gates: (B, T, H) or (B, H), by name.
        time: whether tensors have the dimension T.
    """
    for name, x in {"q": q, "k": k, "v": v, **gates}.items():
        check_float(name, x)
    check_input_shapes(q, k, v, gates, time)
    for name, x in {"k": k, "v": v}.items():
        check_dtype_of_q(name, x, q)
    for name, x in {"k": k, "v": v, **gates}.items():
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, expected that of q, {q.device}")


def check_dtype_of_q(name: str, x: Tensor, q: Tensor) -> None:
    """Check that a tensor has the dtype of q; autocast casts all dtypes but float64 to one, so that they may differ."""
    if x.dtype != q.dtype and (autocast_dtype(q.device.type) is None or torch.float64 in (x.dtype, q.dtype)):
        raise TypeError(f"{name}: got dtype {x.dtype}, expected that of q, {q.dtype}")


def check_state(state: object, sequences: int, q: Tensor, v: Tensor, normalize: bool, name: str) -> State:
    """Check type, shapes, dtypes and devices of a state for the given number of sequences, and return it."""
    if not isinstance(state, State):
        raise TypeError(f"{name}: got {type(state).__name__}, expected tfla.State")
    for part, x, shape in state_parts(state, sequences, q, v, normalize, name, "a tensor"):
        check_float(part, x)
        check_shape(part, x, shape)
        if x.device != q.device:
            raise ValueError(f"{part}: got device {x.device}, expected that of q, {q.device}")
    return state


def check_step_state(state: object, indices: object, q: Tensor, v: Tensor, normalize: bool) -> State:
    """Check the state of decoding steps, with indices a pool of any number of states, and the indices; return it."""
    rows = q.shape[0]
    if indices is not None and isinstance(state, State):
        check_pool(state, "state")
        rows = state.C.shape[0]
    found = check_state(state, rows, q, v, normalize, "state")
    if indices is not None:
        check_state_indices(indices, q.shape[0], found)
    return found


def check_offsets(cu_seqlens: object, q: Tensor, name: str = "q") -> None:
    """Check the offsets of packed sequences of ``q``, apart from their device and their values."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: got {got}, expected an int32 or int64 tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, expected (sequences + 1,)")
    if q.shape[0] != 1:
        raise ValueError(f"{name}: got batch {q.shape[0]}, expected 1 with cu_seqlens: sequences are packed along time")


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """Check the offsets of packed sequences.

    Their values are checked on a CPU only: reading them from a GPU would make the host wait. In a traced call the
    operator checks them.
    """
    check_offsets(cu_seqlens, q)
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens: got device {cu_seqlens.device}, expected that of q, {q.device}")
    if cu_seqlens.device.type == "cpu" and not needs_dispatcher((cu_seqlens,)):
        packed_bounds(cu_seqlens, q.shape[1])


def check_store_dtype(store_dtype: object) -> None:
    """Check the dtype of the states that are stored for the backward."""
    if store_dtype is not None and not isinstance(store_dtype, torch.dtype):
        raise TypeError(f"store_dtype: got {type(store_dtype).__name__}, expected a torch.dtype or None")
    if store_dtype not in STORE_DTYPES:
        raise ValueError(f"store_dtype: got {store_dtype}, allowed are {', '.join(map(str, STORE_DTYPES))}")


def check_scale(scale: object) -> float | None:
    """Check the scale and return it as a float, or None."""
    if scale is None or (type(scale) is float and -math.inf < scale < math.inf):
        return scale
    if isinstance(scale, Tensor):
        if scale.requires_grad or (not torch.compiler.is_compiling() and forward_mode((scale,))):
            raise TypeError(
                "scale: got a tensor that requires a gradient, expected a number, which has none: multiply q by the "
                "tensor and pass scale=1.0"
            )
        if scale.dim() or scale.dtype not in (*FLOATS, torch.int32, torch.int64):
            got = f"shape {tuple(scale.shape)}" if scale.dim() else f"dtype {scale.dtype}"
            raise TypeError(f"scale: got a tensor of {got}, expected a number or None")
        if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(scale):
            raise TypeError("scale: got a tensor that vmap maps over, expected a number: multiply q by it instead")
        scale = scale.item()
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | torch.SymFloat | torch.SymInt):
        raise TypeError(f"scale: got {type(scale).__name__}, expected a number or None")
    scale = float(scale)
    if not -math.inf < scale < math.inf:  # a comparison, since torch.compile cannot trace math.isfinite
        raise ValueError(f"scale: got {scale}, expected a finite number")
    return scale


def check_flags(**flags: object) -> None:
    """Check options that are True or False; the integers 0 and 1 are accepted too."""
    for name, flag in flags.items():
        if type(flag) is not bool and not (isinstance(flag, numbers.Integral) and flag in (0, 1)):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")


def check_chunk_size(chunk_size: object) -> None:
    """Check the distance between stored states."""
    if chunk_size is None:
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int | torch.SymInt):
        raise TypeError(f"chunk_size: got {type(chunk_size).__name__}, expected an int or None")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: got {chunk_size}, expected at least 1")


LONGEST_STEPS = 32  # T of one call of several decoding steps


def check_few_steps(v: Tensor, return_state: bool, lengths: object, in_place: bool) -> None:
    """Check the number of decoding steps, and that options of the new state are given only if it is returned."""
    if not 1 <= v.shape[1] <= LONGEST_STEPS:
        raise ValueError(
            f"v: got T = {v.shape[1]}, expected from 1 to {LONGEST_STEPS}; operators over whole sequences take more"
        )
    for name, given in {"lengths": lengths is not None, "in_place": in_place}.items():
        if given and not return_state:
            raise ValueError(f"{name}: got it with return_state=False, expected it with a state to return")


def check_lengths(lengths: object, v: Tensor, name: str = "v") -> None:
    """Check the lengths of decoding steps of ``v``, (B,).

    Their values are checked on a CPU only: reading them from a GPU would make the host wait. In a traced call the
    operator checks them.
    """
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths: got {got}, expected an int32 or int64 tensor")
    check_shape("lengths", lengths, (v.shape[0],))
    if lengths.device != v.device:
        raise ValueError(f"lengths: got device {lengths.device}, expected that of {name}, {v.device}")
    if lengths.device.type == "cpu" and not needs_dispatcher((lengths,)):
        check_values_of_lengths(lengths, v.shape[1])


def check_values_of_lengths(lengths: Tensor, T: int) -> None:
    """Check that the lengths of decoding steps are from 0 to T, which reads their values."""
    if not lengths.numel():
        return
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > T:
        raise ValueError(f"lengths: got values from {low} to {high}, expected from 0 to T = {T}")


def check_pool(pool: State, name: str, q: object = None, v: object = None) -> None:
    """Check that the parts of a pool of states are float tensors with equally many rows on one device.

    Kernels would access rows that are not there. With q and v, tensors (B, T, H, ...), C has their heads and head dims;
    other dimensions are checked with the states of a call.
    """
    check_float(f"{name}.C", pool.C)
    if pool.C.dim() != 4:
        raise ValueError(f"{name}.C: got shape {tuple(pool.C.shape)}, expected (rows, H, dqk, dhv)")
    if isinstance(q, Tensor) and isinstance(v, Tensor) and q.dim() == v.dim() == 4:
        of_C = pool.C.shape[0], v.shape[2], q.shape[3], v.shape[3]
        for part, x, shape in (("C", pool.C, of_C), ("n", pool.n, of_C[:3]), ("m", pool.m, of_C[:2])):
            if x is not None:
                check_float(f"{name}.{part}", x)
                check_shape(f"{name}.{part}", x, shape)
    for part, x in {"n": pool.n, "m": pool.m}.items():
        if x is not None:
            check_float(f"{name}.{part}", x)
            check_shape(f"{name}.{part}", x, (pool.C.shape[0], *x.shape[1:]))
            if x.device != pool.C.device:
                raise ValueError(f"{name}.{part}: got device {x.device}, expected that of {name}.C, {pool.C.device}")


def check_state_indices(indices: object, batch: int, state: State) -> None:
    """Check the rows of a pool of states, (B,).

    Their values are checked on a CPU only: reading them from a GPU would make the host wait. In a traced call the
    operator checks them.
    """
    if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
        got = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"state_indices: got {got}, expected an int32 or int64 tensor")
    check_shape("state_indices", indices, (batch,))
    if indices.device != state.C.device:
        raise ValueError(f"state_indices: got device {indices.device}, expected that of the state, {state.C.device}")
    if indices.device.type == "cpu" and not needs_dispatcher((indices,)):
        check_values_of_indices(indices, state.C.shape[0])


def check_values_of_indices(indices: Tensor, rows: int, name: str = "state_indices") -> None:
    """Check that indices of states are -1 or rows of the pool, each at most once, which reads their values."""
    given = indices.tolist()
    found: set[int] = set()
    for index in given:
        if not -1 <= index < rows:
            allowed = f"-1 or from 0 to {rows - 1}, a row of the state" if rows else "-1: the state has no rows"
            raise ValueError(f"{name}: got {index}, expected {allowed}")
        if index >= 0 and index in found:
            raise ValueError(f"{name}: got {index} more than once, expected each row of the state at most once")
        found.add(index)


def check_in_place(
    state: State,
    dtypes: Mapping[str, torch.dtype],
    recorded: bool,
    transformed: bool,
    by: str,
    state_name: str = "state",
) -> None:
    """Check that parts of a state can be overwritten: no gradients, no transform, the right dtypes, no overlap.

    Args:
        state: the state.
        dtypes: the dtypes of the new parts that are written, by name.
        recorded: whether gradients are recorded.
        transformed: whether a transform is active.
        by: the argument that asks for it, and what it is.
        state_name: the name of the state for the caller.
    """
    if transformed:
        raise ValueError(f"{by} while a transform or forward-mode AD is active, expected it outside")
    if recorded:
        raise ValueError(f"{by} while gradients are recorded, expected it under torch.no_grad()")
    name = by.split(":")[0]
    for part, dtype in dtypes.items():
        t: Tensor = getattr(state, part)
        if t.dtype != dtype:
            raise TypeError(f"{state_name}.{part}: got dtype {t.dtype}, expected {dtype} to be overwritten in place")
        if any(step == 0 and n > 1 for step, n in zip(t.stride(), t.shape, strict=True)):
            raise ValueError(
                f"{state_name}.{part}: got strides {t.stride()}, expected no 0: {name} overwrites each number"
            )
        if part != "C" and t.numel() and not t[0].is_contiguous():
            raise ValueError(
                f"{state_name}.{part}: got strides {t.stride()}, expected the dimensions after the first dense"
            )


def is_empty_batch(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Return whether x (B, T, ...) has no sequence, so that processes that share the steps have nothing to exchange."""
    return cu_seqlens is None and isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == 0
