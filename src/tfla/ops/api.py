"""The public operators over whole sequences: the mLSTM and scalar-gated linear attention."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from tfla._util.caching import CallCache
from tfla.backends import Backend, Inputs
from tfla.backends.base import Gates, Replay, Spec
from tfla.ops import checks
from tfla.ops.dispatch import autocast_dtype, call_signature, choose
from tfla.ops.gates import InputGate, clamp, log_gates
from tfla.ops.registration import attend
from tfla.ops.state import State


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return q, k, v in the dtype of autocast, where it is on and they are not float64.

    As in PyTorch's attention; gates and states keep their dtypes.
    """
    dtype = autocast_dtype(tensors[0].device.type)
    if dtype is None:
        return tensors
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
) -> Inputs:
    """Return the inputs as backends read them: autocast, with a dense last dimension and a clamped initial m."""
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in autocast(q, k, v))
    C, n, m = initial_state or (None, None, None)
    return Inputs(q, k, v, i, f, C, n, m if m is None else clamp(m), cu_seqlens)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    normalize: bool,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> Inputs:
    """Check the chunk size, the offsets and the initial state of a call, and return the inputs that a backend reads.

    Shapes, dtypes and devices of q, k, v and the gates have been checked before.
    """
    checks.check_chunk_size(chunk_size)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        checks.check_state(initial_state, sequences, q, v, normalize, "initial_state")
    return _inputs(q, k, v, i, f, initial_state, cu_seqlens)


# What calls that have passed the checks run: the backend, the options, and the recorded forward where there is one.
_CALLS: CallCache[tuple[Backend, Spec, Replay | None]] = CallCache()


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    gates: Gates,
    normalize: bool,
    initial_state: State | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    scale: float | None,
    backend: str | None,
    kernel: str | None,
    normalizer_grad: bool,
    store_dtype: torch.dtype | None,
) -> Tensor | tuple[Tensor, State]:
    """Check a call and choose what runs it, or look both up under its signature, and run it."""
    checks.check_store_dtype(store_dtype)
    checks.check_chunk_size(chunk_size)
    scale = checks.check_scale(scale)
    call = call_signature(
        (q, k, v, i, f), initial_state, cu_seqlens, gates, normalize, return_state, chunk_size, scale, backend, kernel,
        normalizer_grad, store_dtype,
    )  # fmt: skip
    cached = None if call is None else _CALLS.get(call)
    if cached is not None:
        chosen, spec, replay = cached
        x = _inputs(q, k, v, i, f, initial_state, cu_seqlens)
    else:
        checks.check_flags(normalize=normalize, return_state=return_state, normalizer_grad=normalizer_grad)
        names = ("log_i", "log_f") if gates == "log" else ("i", "f")
        # Of all gates only log_i may be None.
        given = {name: t for name, t in zip(names, (i, f), strict=True) if t is not None or name != "log_i"}
        checks.check_inputs(q, k, v, given, time=True)  # type: ignore[arg-type]
        x = prepare(q, k, v, i, f, normalize, initial_state, cu_seqlens, chunk_size)
        chosen, kernel, steps = choose(x, normalize, backend, kernel, chunk_size)
        save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        spec = Spec(
            scale=scale, normalize=normalize, normalizer_grad=normalizer_grad, chunk_size=steps, kernel=kernel,
            save=save, final_state=return_state, store_dtype=store_dtype, gates=gates if chosen.takes_gates else "log",
        )  # fmt: skip
        replay = None
    if not chosen.takes_gates:
        log_i, log_f = (None, clamp(f)) if i is None else log_gates(i, f, gates)
        x = x._replace(log_i=log_i, log_f=log_f)
    h, *state = attend(x, chosen.name, spec, call is not None, replay)
    if cached is None and call is not None:
        _CALLS.add(call, (chosen, spec, chosen.forward_replay(x, spec)))
    if not return_state:
        return h
    if not normalize:
        return h, State(state[0])
    C, n, m, *_ = state
    return h, State(C, n, m.detach())


@overload
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    return_state: Literal[False] = False,
    input_gate: InputGate = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    scale: float | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    normalizer_grad: bool = ...,
    store_dtype: torch.dtype | None = ...,
) -> Tensor: ...
@overload
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    return_state: Literal[True],
    input_gate: InputGate = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    scale: float | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    normalizer_grad: bool = ...,
    store_dtype: torch.dtype | None = ...,
) -> tuple[Tensor, State]: ...
def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    input_gate: InputGate = "exp",
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    normalizer_grad: bool = True,
    store_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Compute the mLSTM over whole sequences: mLSTMexp, equations (1)-(8) of the paper, or mLSTMsig, (22)-(24).

    For every head and step t, with log_f = logsigmoid(f), and log_i = i (mLSTMexp) or logsigmoid(i) (mLSTMsig):

        C_t = exp(log_f_t) C_{t-1} + exp(log_i_t) k_t v_t^T        n_t = exp(log_f_t) n_{t-1} + exp(log_i_t) k_t
        h_t = scale C_t^T q_t / max(abs(scale n_t^T q_t), 1)       mLSTMsig: h_t = scale C_t^T q_t

    The paper is arXiv 2503.14376; docs/mathematics.md derives the gradients.

    Args:
        q, k: (B, T, Hq, dqk), float64, float32, bfloat16 or float16. Hq divides H, and each head of q and k serves
            H / Hq heads of v.
        v: (B, T, H, dhv), dtype of q. Any strides; a dense last dimension is read without a copy. Float32 is multiplied
            as `torch.set_float32_matmul_precision` says: on GPUs "highest" (the default) is IEEE, "high" tf32x3,
            "medium" tf32. Under autocast q, k and v are cast to its dtype, whatever float dtypes they have.
        i, f: (B, T, H), pre-activations of the input and the forget gate, any float dtype. Infinite ones are allowed
            and act as fully closed or fully open gates.
        input_gate: "exp" (mLSTMexp, with a normalizer n and a max state m) or "sigmoid" (mLSTMsig, with neither).
        initial_state: the state before the first step of each sequence; None is zero.
        return_state: also return the state after the last step.
        cu_seqlens: (sequences + 1,) int32 or int64, for B = 1: the first step of each packed sequence and, last, T.
            Sequences may be empty. On a CPU, offsets that do not go from 0 to T or that decrease are an error, in
            compiled functions too. On a GPU their values are not read on the host, so that the call does not wait for
            the device: offsets are clamped to [0, T] and to a sequence that never decreases, and steps outside of all
            sequences have outputs of zero.
        chunk_size: the distance in steps between the states that are stored for the backward; None chooses it.
        scale: the factor of the queries, a finite number without a gradient; None is 1/sqrt(dqk).
        backend: the name of the implementation; None chooses the fastest one that supports the inputs.
        kernel: the name of one of the backend's kernels; None chooses it.
        normalizer_grad: False leaves the denominator of (4) out of the gradient, as the paper does.
        store_dtype: the dtype of the states stored for the backward, and on GPUs also of the states from which
            segments start. torch.bfloat16 halves their memory and rounds the state between chunks; None is float32
            (float64 with float64 inputs).

    Returns:
        h (B, T, H, dhv) in v's dtype, before norm and output gate; with ``return_state`` also the :class:`State`.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, what was given and what is allowed.

    Autograd, derivatives of gradients, forward-mode AD, `torch.func` and `torch.compile` work; docs/transforms.md says
    which of them run on the kernels.
    """
    checks.check_input_gate(input_gate)
    return _run(
        q, k, v, i, f, input_gate, input_gate == "exp", initial_state, return_state, cu_seqlens, chunk_size, scale,
        backend, kernel, normalizer_grad, store_dtype,
    )  # fmt: skip


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    log_i: Tensor | None = None,
    *,
    normalize: bool = False,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    normalizer_grad: bool = True,
    store_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Compute scalar-gated linear attention over whole sequences.

    For every head and step t:

        C_t = exp(log_f_t) C_{t-1} + exp(log_i_t) k_t v_t^T        h_t = scale C_t^T q_t

    RetNet and Lightning Attention have a constant log_f per head, simple GLA has log_f = g, and Mamba-2 has
    log_f = A dt, log_i = log dt and scale = 1.

    Args:
        q, k, v: as in :func:`mlstm`.
        log_f, log_i: (B, T, H), log-gates, any float dtype; log_i None is 0. They are clamped to [-1e5, 5e4]. Results
            with gates above 0 are correct as long as the states and the results fit into float32 (at most 3.4e38),
            which limits one gate to 88. On a GPU, the sum over up to 16 steps of float32 inputs, or up to 128 of 16-bit
            ones, must not exceed 88 either; float16 inputs hold weights up to 65,504. Beyond these limits results are
            infinite or NaN. With ``normalize`` the states are stabilized, and only the running maximum m must fit.
        normalize: divide h_t by max(abs(scale n_t^T q_t), 1) with n_t = exp(log_f_t) n_{t-1} + exp(log_i_t) k_t, as
            mLSTMexp does.
        initial_state, return_state, cu_seqlens, chunk_size, scale, backend, kernel, normalizer_grad, store_dtype: as in
            :func:`mlstm`. Without ``normalize`` a state has n and m None.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the :class:`State`.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    return _run(
        q, k, v, log_i, log_f, "log", normalize, initial_state, return_state, cu_seqlens, chunk_size, scale, backend,
        kernel, normalizer_grad, store_dtype,
    )  # fmt: skip
