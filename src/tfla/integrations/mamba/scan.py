"""The functions that compute Mamba-2 over whole sequences, by tfla's linear attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import tfla
from tfla.integrations.mamba.terms import (
    check_devices,
    check_operands,
    common_dtype,
    compute_output,
    log_input_gate,
    scale_by_dt,
    step_sizes,
)
from tfla.ops.autocast import without_autocast
from tfla.ops.checks import check_chunk_size, check_cu_seqlens, check_float, check_shape
from tfla.ops.gates import cast


def check_dt_limit(dt_limit: Sequence[float]) -> tuple[float, float]:
    """Check dt_limit and return it as a pair of floats (min, max)."""
    pair = dt_limit if isinstance(dt_limit, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(n, float | int) for n in pair) or not pair[0] <= pair[1]:
        raise ValueError(f"dt_limit: got {dt_limit}, expected a pair (min, max) with min <= max")
    return float(pair[0]), float(pair[1])


def check_sequence_ids(seq_idx: Tensor, x: Tensor, name: str = "x") -> None:
    """Check seq_idx against x (batch, seqlen, ...); messages call x by `name`, its name in the caller."""
    if not isinstance(seq_idx, Tensor) or seq_idx.dtype not in (torch.int32, torch.int64):
        got = f"dtype {seq_idx.dtype}" if isinstance(seq_idx, Tensor) else type(seq_idx).__name__
        raise TypeError(f"seq_idx: got {got}, expected an int32 or int64 tensor")
    check_shape("seq_idx", seq_idx, tuple(x.shape[:2]))
    check_devices(x, {"seq_idx": seq_idx}, name)


def _clamp_dt(dt: Tensor, dt_limit: tuple[float, float], positive: bool) -> tuple[Tensor, bool]:
    """Return dt clamped to its limits, and whether the result may be negative.

    Args:
        positive: whether dt is positive before it is clamped, as it is after softplus.
    """
    low, high = dt_limit
    # A limit without effect is left out: without both, nothing is launched.
    low_bound = None if low == -math.inf or (positive and low <= 0) else low
    high_bound = None if high == math.inf else high
    may_be_negative = high < 0 if positive else low < 0
    return (dt if low_bound is high_bound is None else dt.clamp(low_bound, high_bound)), may_be_negative


def _expand_initial_states(initial_states: Tensor, sequences: int, shape: tuple[int, ...]) -> Tensor:
    """Check the initial states and return them as (sequences, nheads, dstate, headdim), the operator's layout.

    One state that is given for several packed sequences belongs to the first of them, as in mamba_ssm. The others start
    from zeros.

    Args:
        shape: (nheads, headdim, dstate).
    """
    check_float("initial_states", initial_states)
    rows = 1 if sequences > 1 and initial_states.shape[0] == 1 else sequences
    check_shape("initial_states", initial_states, (rows, *shape))
    states = initial_states.transpose(-1, -2)
    return states if rows == sequences else F.pad(states, (0, 0, 0, 0, 0, 0, 0, sequences - 1))


def _first_steps(cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """Return at which steps a packed sequence starts, (seqlen,) bool."""
    found = torch.zeros(seqlen + 1, dtype=torch.bool, device=cu_seqlens.device)  # empty sequences may start at the end
    return found.index_fill(0, cu_seqlens[:-1].long().clamp(0, seqlen), True)[:seqlen]


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Compute Mamba-2 over whole sequences.

    The function stands in for ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``. For each head, from
    h_{-1} = 0 or the initial state,

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T        y_t = (C_t^T h_t + D x_t) silu(z_t)

    Args:
        x: (batch, seqlen, nheads, headdim).
        dt: (batch, seqlen, nheads), any float dtype. dt_bias is added, softplus is taken with dt_softplus, and the
            result is clamped to dt_limit. It may be negative if the lower limit is.
        A: (nheads,), usually negative.
        B, C: (batch, seqlen, ngroups, dstate), where ngroups divides nheads. If the dtypes of x, B and C differ, the
            scan is computed in the narrowest dtype to which all of them convert without rounding.
        chunk_size: accepted without effect; tfla chooses the distance between stored states itself.
        D: (nheads,) or (nheads, headdim), or None for no skip connection.
        z: (batch, seqlen, nheads, headdim), or None for no output gate.
        dt_bias: (nheads,) or None.
        initial_states: (batch, nheads, headdim, dstate); zeros if None.
        seq_idx: (batch, seqlen) int, the index of the sequence to which a step belongs. The state is set to zero where
            the index changes, and also before the first step if its index is not 0.
        cu_seqlens: (sequences + 1,) int, for batch 1: the first step of each packed sequence and, last, seqlen. No
            state passes from one sequence to the next, with or without seq_idx. initial_states may then have a row for
            each sequence, which starts from it whatever seq_idx is; a single row belongs to the first sequence.
        dt_softplus: take softplus of dt + dt_bias.
        dt_limit: the least and the greatest dt.
        return_final_states: also return the state after the last step, (batch, nheads, headdim, dstate).
        return_varlen_states: also return the state after each packed sequence, (sequences, nheads, headdim, dstate), as
            the last result. It has a gradient here.

    Returns:
        out (batch, seqlen, nheads, headdim) in the dtype of x, or a tuple of it and the requested states. States are
        float32, or float64 where x, B or C is.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_float("x", x)
    check_shape("x", x, ("batch", "seqlen", "nheads", "headdim"))
    check_operands(x, B, C, D, z)
    batch, seqlen, nheads, headdim = x.shape
    check_float("dt", dt)
    check_shape("dt", dt, (batch, seqlen, nheads))
    for name, t in {"A": A, **({} if dt_bias is None else {"dt_bias": dt_bias})}.items():
        check_float(name, t)
        check_shape(name, t, (nheads,))
    check_devices(
        x, {"B": B, "C": C, "D": D, "z": z, "dt": dt, "A": A, "dt_bias": dt_bias, "initial_states": initial_states}
    )
    check_chunk_size(chunk_size)
    limit = check_dt_limit(dt_limit)
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("cu_seqlens: got None, expected a tensor with return_varlen_states")
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"x: got batch {batch}, expected 1 with cu_seqlens: sequences are packed along time")
        check_cu_seqlens(cu_seqlens, x)
    dt, dt_may_be_negative = _clamp_dt(step_sizes(dt, dt_bias, dt_softplus), limit, dt_softplus)
    log_f = dt * cast(A, dt.dtype)
    if seq_idx is not None:
        check_sequence_ids(seq_idx, x)
        starts = torch.diff(seq_idx, dim=1, prepend=torch.zeros_like(seq_idx[:, :1])) != 0
        if cu_seqlens is not None and initial_states is not None and initial_states.shape[0] > 1:
            starts = starts & ~_first_steps(cu_seqlens, seqlen)
        log_f = log_f.masked_fill(starts[..., None], -math.inf)
    state = None
    if initial_states is not None:
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = tfla.State(_expand_initial_states(initial_states, sequences, (nheads, headdim, B.shape[-1])))
    dtype = common_dtype(x, B, C)
    v, log_i = (scale_by_dt(x, dt), None) if dt_may_be_negative else (x, log_input_gate(dt))
    inputs = cast(C, dtype), cast(B, dtype), cast(v, dtype), log_f, log_i
    with without_autocast(x.device.type):
        if not (return_final_states or return_varlen_states):  # saves the operator the final state
            y = tfla.linear_attention(*inputs, scale=1.0, initial_state=state, cu_seqlens=cu_seqlens)
            assert isinstance(y, Tensor)
            return compute_output(y, x, D, z)
        y, last = tfla.linear_attention(
            *inputs, scale=1.0, initial_state=state, return_state=True, cu_seqlens=cu_seqlens
        )
        results: tuple[Tensor, ...] = (compute_output(y, x, D, z),)
    states = last.C.transpose(-1, -2)
    if return_final_states:
        results += (states if cu_seqlens is None else _state_after_the_last_step(states, cu_seqlens, seqlen),)
    if return_varlen_states:
        results += (states,)
    return results


def _state_after_the_last_step(states: Tensor, cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """Return the state of the sequence that has step seqlen - 1, after which sequences without steps may come."""
    # A comparison on the device: the host does not wait for the offsets.
    return states.index_select(0, (cu_seqlens[1:-1] < seqlen).sum().view(1))


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Compute Mamba-2 without states or limits of dt.

    The function stands in for ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan``. The arguments, the result and the
    errors are those of :func:`mamba_chunk_scan_combined`. dt may be negative.
    """
    no_limits = -math.inf, math.inf
    y = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus=dt_softplus, dt_limit=no_limits
    )  # fmt: skip
    assert isinstance(y, Tensor)
    return y


def chunk_state_varlen(
    B: Tensor, x: Tensor, dt: Tensor, dA_cumsum: Tensor, cu_seqlens: Tensor, chunk_states: Tensor
) -> Tensor:
    """Compute the state after each packed sequence.

    The function stands in for ``mamba_ssm.ops.triton.ssd_chunk_state.chunk_state_varlen``. The state after a sequence
    is computed from the state at the start of the chunk in which the sequence ends, and from the steps of the sequence
    in that chunk. The state after an empty sequence is zero.

    Args:
        B: (seqlen, ngroups, dstate), where ngroups divides nheads.
        x: (seqlen, nheads, headdim).
        dt: (nheads, nchunks, chunk_size), to which bias, softplus and limits have been applied already. The number of
            steps, nchunks chunk_size, is at least seqlen.
        dA_cumsum: (nheads, nchunks, chunk_size), cumulative sums of dt A from the start of each chunk.
        cu_seqlens: (sequences + 1,) int, the first step of each packed sequence and, last, seqlen.
        chunk_states: (nchunks, nheads, headdim, dstate), the states at the starts of the chunks.

    Returns:
        states (sequences, nheads, headdim, dstate) in the dtype of chunk_states. They have a gradient here.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    for name, t in {"dt": dt, "dA_cumsum": dA_cumsum, "chunk_states": chunk_states, "x": x}.items():
        check_float(name, t)
    check_shape("x", x, ("seqlen", "nheads", "headdim"))
    check_operands(x, B, B, None, None)
    seqlen, nheads, headdim = x.shape
    check_shape("dt", dt, (nheads, "nchunks", "chunk_size"))
    _, nchunks, chunk_size = dt.shape
    if nchunks * chunk_size < seqlen:
        raise ValueError(f"dt: got {nchunks} chunks of {chunk_size} steps, expected at least the {seqlen} steps of x")
    check_shape("dA_cumsum", dA_cumsum, (nheads, nchunks, chunk_size))
    check_shape("chunk_states", chunk_states, (nchunks, nheads, headdim, B.shape[-1]))
    check_devices(x, {"B": B, "dt": dt, "dA_cumsum": dA_cumsum, "chunk_states": chunk_states})
    check_cu_seqlens(cu_seqlens, x[None])
    # Each sequence is split in two where its last chunk starts, without reading an offset on the host. Only the result
    # of the second part is used, which starts from the state of that chunk.
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    last_chunk = (end - 1).div(chunk_size, rounding_mode="floor").clamp(min=0)
    split = torch.maximum(begin, last_chunk * chunk_size)
    initial = torch.where((begin < split)[:, None, None, None], chunk_states[last_chunk], 0.0).transpose(-1, -2)
    states = torch.stack((torch.zeros_like(initial), initial), 1).flatten(0, 1)
    offsets = torch.cat((cu_seqlens[:1], torch.stack((split, end), 1).flatten()))
    log_f = torch.diff(dA_cumsum, dim=-1, prepend=torch.zeros_like(dA_cumsum[..., :1]))
    log_f, dt = (t.flatten(1).t()[:seqlen] for t in (log_f, step_sizes(dt, None, False)))
    dtype = common_dtype(x, B)
    k = cast(B, dtype)[None]
    v = cast(scale_by_dt(x, dt), dtype)
    with without_autocast(x.device.type):
        _, last = tfla.linear_attention(
            k, k, v[None], log_f[None], scale=1.0, initial_state=tfla.State(states), return_state=True,
            cu_seqlens=offsets,
        )  # fmt: skip
    return cast(last.C[1::2].transpose(-1, -2), chunk_states.dtype)
