"""The public operators for decoding: one step, or a few steps in one call, from a given state to the next."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from tfla.ops import channel_gates
from tfla.ops.channel_gates import has_channel_gates
from tfla.ops.checks import check_input_gate, check_scale
from tfla.ops.dispatch import Request
from tfla.ops.gates import InputGate
from tfla.ops.state import State
from tfla.ops.step_dispatch import plan
from tfla.ops.step_operators import run
from tfla.ops.transforms import is_distributed


def _run(request: Request) -> tuple[Tensor, State]:
    """Run a call as planned, or the same call on the local tensors of DTensors."""
    if is_distributed(request.q):
        return _run_sharded(request)
    return run(request, plan(request))


def _run_sharded(request: Request) -> tuple[Tensor, State]:
    """Run a call on the local tensors of DTensors."""
    from tfla.ops import sharded

    def local(given: dict[str, Any], state: Any) -> tuple[Tensor, State]:
        q, k, v, i, f, lengths = given.values()
        return _run(request._replace(q=q, k=k, v=v, i=i, f=f, state=state, lengths=lengths))

    assert request.state is not None
    return sharded.run_steps(
        sharded.named(request, "lengths"), request.state, request.state_indices, local, time=request.time,
        return_state=request.return_state,
    )  # fmt: skip


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    input_gate: InputGate = "exp",
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Compute one step of :func:`mlstm`, for decoding.

    On an NVIDIA GPU the step is one kernel if no gradients are recorded. With m_t = max(log_f_t + m_{t-1}, log_i_t),
    (1), the stored state is

        C_t = exp(log_f_t + m_{t-1} - m_t) C_{t-1} + exp(log_i_t - m_t) k_t v_t^T        n_t likewise, of k_t alone
        h_t = scale C_t^T q_t / max(abs(scale n_t^T q_t), exp(-m_t))

    and for the sigmoid input gate that of :func:`mlstm`, without m and the denominator.

    Args:
        q, k, v: (B, Hq, dqk), (B, Hq, dqk), (B, H, dhv), as one step of :func:`mlstm`.
        i, f: (B, H), pre-activations, any float dtype.
        state: :meth:`State.zeros`, or the state that :func:`mlstm` or the last step returned. C and n may be bfloat16
            or float16, and the new ones then are too; the arithmetic is in float32, or in float64 if q is float64.
        input_gate, scale: as in :func:`mlstm`.
        in_place: overwrite ``state.C``, by far the largest part of the state, with the new C. The new n and m are new
            tensors, because every program of a head reads the old ones. Gradients must not be recorded.
        state_indices: (B,) int32 or int64: ``state`` is a pool of any number of states, of which sequence b has row
            ``state_indices[b]``. The kernel reads and overwrites the rows where they are, n and m included, and the
            returned state is the pool. A sequence at -1 has no state: its h is 0, and it writes nothing. Each row may
            occur once. On a CPU, values that do not fit are an error, in compiled functions too; on a GPU they are not
            read on the host, so that the call does not wait for the device: h is NaN for an index out of range, and the
            result for a row that occurs twice is undefined. Gradients must not be recorded.
        backend: the name of the backend whose kernel is used; None, or a backend without a kernel for these steps,
            leaves the choice open.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    check_input_gate(input_gate)
    request = Request(
        q=q, k=k, v=v, i=i, f=f, state=state, lengths=None, gates=input_gate, normalize=input_gate == "exp",
        return_state=True, scale=check_scale(scale), backend=backend, time=False, in_place=in_place,
        state_indices=state_indices,
    )  # fmt: skip
    return _run(request)


def step_with_offset(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State, eps: float, scale: float | None = None
) -> tuple[Tensor, State]:
    """Compute :func:`mlstm_step` with an exponential gate and the denominator max(abs(scale n^T q), exp(-m)) + eps."""
    request = Request(
        q=q, k=k, v=v, i=i, f=f, state=state, lengths=None, gates="exp", normalize=True, return_state=True, scale=scale,
        backend=None, time=False, eps=eps,
    )  # fmt: skip
    return _run(request)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    state: State,
    log_i: Tensor | None = None,
    *,
    normalize: bool = False,
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State]:
    """Compute one step of :func:`linear_attention`, for decoding.

    Args:
        q, k, v: (B, Hq, dqk), (B, Hq, dqk), (B, H, dhv).
        log_f: (B, H), or (B, H, dqk) without ``normalize``: log-gates, any float dtype.
        log_i: (B, H), log-gates, any float dtype; None is 0.
        state: as in :func:`mlstm_step`; without ``normalize`` its n and m are None.
        normalize, scale: as in :func:`linear_attention`.
        in_place, state_indices, backend: as in :func:`mlstm_step`.

    Returns:
        h (B, H, dhv) in v's dtype, and the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    if has_channel_gates(log_f, time=False):
        scale = check_scale(scale)
        return channel_gates.steps(
            q, k, v, log_f, log_i, normalize, state, None, False, True, in_place, scale, backend, state_indices
        )
    request = Request(
        q=q, k=k, v=v, i=log_i, f=log_f, state=state, lengths=None, gates="log", normalize=normalize,
        return_state=True, scale=check_scale(scale), backend=backend, time=False, in_place=in_place,
        state_indices=state_indices,
    )  # fmt: skip
    return _run(request)


@overload
def mlstm_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    return_state: Literal[True] = True,
    lengths: Tensor | None = ...,
    input_gate: InputGate = ...,
    scale: float | None = ...,
    in_place: bool = ...,
    state_indices: Tensor | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, State]: ...
@overload
def mlstm_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    return_state: Literal[False],
    lengths: Tensor | None = ...,
    input_gate: InputGate = ...,
    scale: float | None = ...,
    in_place: bool = ...,
    state_indices: Tensor | None = ...,
    backend: str | None = ...,
) -> Tensor: ...
def mlstm_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    state: State,
    *,
    return_state: bool = True,
    lengths: Tensor | None = None,
    input_gate: InputGate = "exp",
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State] | Tensor:
    """Compute up to 32 steps of :func:`mlstm` in one call, for speculative decoding.

    The state is read once and written once. Proposed tokens are verified with ``return_state=False``, which writes no
    state. Once it is clear how many of them each sequence accepts, the same call with ``lengths`` returns the state
    after the accepted ones. The equations are those of :func:`mlstm_step`.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), as in :func:`mlstm`, T from 1 to 32.
        i, f: (B, T, H), pre-activations, any float dtype.
        state: as in :func:`mlstm_step`.
        return_state: also return the new state.
        lengths: (B,) int32 or int64, from 0 to T: the new state is the one after this many steps of each sequence; None
            is T. Outputs are computed for all T steps in any case. On a CPU, values out of range are an error, in
            compiled functions too; on a GPU they are not read on the host, so that the call does not wait for the
            device, and are clamped to [0, T].
        input_gate, scale, in_place, state_indices, backend: as in :func:`mlstm_step`. With ``return_state=False`` rows
            of a pool are read, and none is written.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    check_input_gate(input_gate)
    request = Request(
        q=q, k=k, v=v, i=i, f=f, state=state, lengths=lengths, gates=input_gate, normalize=input_gate == "exp",
        return_state=return_state, scale=check_scale(scale), backend=backend, time=True, in_place=in_place,
        state_indices=state_indices,
    )  # fmt: skip
    found = _run(request)
    return found if return_state else found[0]


def linear_attention_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    state: State,
    log_i: Tensor | None = None,
    *,
    normalize: bool = False,
    return_state: bool = True,
    lengths: Tensor | None = None,
    scale: float | None = None,
    in_place: bool = False,
    state_indices: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, State] | Tensor:
    """Compute up to 32 steps of :func:`linear_attention` in one call.

    Args:
        q, k, v: (B, T, Hq, dqk), (B, T, Hq, dqk), (B, T, H, dhv), T from 1 to 32.
        log_f: (B, T, H), or (B, T, H, dqk) without ``normalize``: log-gates, any float dtype.
        log_i: (B, T, H), log-gates, any float dtype; None is 0.
        state: as in :func:`linear_attention_step`.
        normalize, scale: as in :func:`linear_attention`.
        return_state, lengths, in_place, state_indices, backend: as in :func:`mlstm_steps`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the new :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    if has_channel_gates(log_f):
        scale = check_scale(scale)
        h, new = channel_gates.steps(
            q,
            k,
            v,
            log_f,
            log_i,
            normalize,
            state,
            lengths,
            True,
            return_state,
            in_place,
            scale,
            backend,
            state_indices,
        )
        return (h, new) if return_state else h
    request = Request(
        q=q, k=k, v=v, i=log_i, f=log_f, state=state, lengths=lengths, gates="log", normalize=normalize,
        return_state=return_state, scale=check_scale(scale), backend=backend, time=True, in_place=in_place,
        state_indices=state_indices,
    )  # fmt: skip
    found = _run(request)
    return found if return_state else found[0]
