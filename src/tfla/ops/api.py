"""The public operators over whole sequences: the mLSTM and gated linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from tfla.ops import channel_gates
from tfla.ops.channel_gates import has_channel_gates
from tfla.ops.checks import check_flags, check_input_gate, check_scale, is_empty_batch
from tfla.ops.dispatch import Request, plan
from tfla.ops.gates import InputGate
from tfla.ops.operators import attend
from tfla.ops.rows_in_kernels import attend_rows
from tfla.ops.state import State
from tfla.ops.state_pool import attend_by_index
from tfla.ops.states_every import with_states_every
from tfla.ops.transforms import PLAIN, is_distributed

if TYPE_CHECKING:
    from tfla.ops.context_parallel.group import Group


def _attend_on_processes(request: Request, context_parallel: Group | None) -> Tensor | tuple[Tensor, State]:
    """Compute a call whose tensors are DTensors, or parts of sequences that several processes share."""
    if is_distributed(request.q):
        from tfla.ops import sharded

        return sharded.attend(request, lambda local: _attend_on_processes(local, context_parallel))
    if context_parallel is None or is_empty_batch(request.q, request.lengths):
        return attend(*plan(request))
    from tfla.ops.context_parallel.call import attend_part

    return attend_part(request, context_parallel)


def _attend(
    request: Request, context_parallel: Group | None, state_indices: Tensor | None
) -> Tensor | tuple[Tensor, State]:
    """Compute a call: on one process or several, with states of its own or with rows of a pool."""
    if state_indices is not None:
        if context_parallel is not None:
            raise ValueError("state_indices: got them with context_parallel, expected at most one of them")
        return attend_by_index(
            request, state_indices, request.lengths, lambda own: attend(*plan(own)), in_kernels=attend_rows,
            in_graph=True,
        )  # fmt: skip
    if context_parallel is not None or type(request.q) not in PLAIN:
        return _attend_on_processes(request, context_parallel)
    return attend(*plan(request))


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
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
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
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> tuple[Tensor, State]: ...
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
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: int,
) -> tuple[Tensor, State, State]: ...
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
    context_parallel: Group | None = None,
    state_indices: Tensor | None = None,
    states_every: int | None = None,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, State, State]:
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
            "medium" tf32. Under autocast q, k and v are cast to its dtype, unless they are float64.
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
        context_parallel: the processes that share the steps of all sequences: a process group, a one-dimensional
            DeviceMesh, or :class:`tfla.distributed.ContextParallel`. All other arguments are this process's part (T its
            steps), but for ``cu_seqlens``, the offsets in the whole sequence on the CPU, and ``initial_state``, whose
            rows are read on the process that has the first step of a sequence. Every process gets the final state; its
            gradients from all of them are added up. docs/distributed.md says more.
        state_indices: (sequences,) int32 or int64: ``initial_state`` is a pool of any number of states, and sequence s
            starts from row ``state_indices[s]``, or at -1 from zero. With ``return_state`` the final states overwrite
            these rows, but for those at -1, and the returned state is the pool. The GPU kernels read and overwrite the
            rows themselves where C and n are float32, bfloat16 or float16, no gradients are recorded and a batch is
            (1, B T, ...) without a copy; with ``states_every`` in eager calls on packed sequences and batches of one.
            In other calls the rows are gathered before the kernels and scattered after them: two passes over the
            states, not over the sequences. Further as in :func:`mlstm_step`.
        states_every: also return the states after every so many steps, for which each step is computed once; requires
            ``return_state``. The steps are computed in parts of this length, so that a state has the bits of the
            same call that stops there. On a GPU a part should have some hundred steps. Offsets are read on the host.

    Returns:
        h (B, T, H, dhv) in v's dtype, before norm and output gate; with ``return_state`` also the :class:`State`, and
        with ``states_every`` = n a further one of shape (B, T // n, H, ...). Of packed sequences, the state after step
        (j + 1) n of sequence s is in [0, cu_seqlens[s] // n + j], and rows that belong to none are zero.

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it, what was given and what is allowed.

    NaN or infinity in k or v reaches the outputs of all later steps of its sequence in the heads that read it, and may
    reach those of earlier steps, back to the start of the tile of steps that a backend computes at once. No bit changes
    in other batch rows, packed sequences and heads.

    All tensors may be DTensors that are sharded over B or the heads; results are then sharded like v.

    Autograd, derivatives of gradients, forward-mode AD, `torch.func` and `torch.compile` work; docs/transforms.md says
    which of them run on the kernels.
    """
    if states_every is not None:
        return with_states_every(
            mlstm, {"q": q, "k": k, "v": v, "i": i, "f": f}, states_every, initial_state=initial_state,
            return_state=return_state, cu_seqlens=cu_seqlens, context_parallel=context_parallel,
            state_indices=state_indices, input_gate=input_gate, chunk_size=chunk_size, scale=scale, backend=backend,
            kernel=kernel, normalizer_grad=normalizer_grad, store_dtype=store_dtype,
        )  # fmt: skip
    check_input_gate(input_gate)
    request = Request(
        q=q, k=k, v=v, i=i, f=f, state=initial_state, lengths=cu_seqlens, gates=input_gate,
        normalize=input_gate == "exp", return_state=return_state, scale=check_scale(scale), backend=backend,
        chunk_size=chunk_size, kernel=kernel, normalizer_grad=normalizer_grad, store_dtype=store_dtype,
    )  # fmt: skip
    return _attend(request, context_parallel, state_indices)


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    log_i: Tensor | None = ...,
    *,
    normalize: bool = ...,
    initial_state: State | None = ...,
    return_state: bool = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    scale: float | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    normalizer_grad: bool = ...,
    store_dtype: torch.dtype | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> Tensor | tuple[Tensor, State]: ...
@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    log_i: Tensor | None = ...,
    *,
    normalize: bool = ...,
    initial_state: State | None = ...,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    scale: float | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    normalizer_grad: bool = ...,
    store_dtype: torch.dtype | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: int,
) -> tuple[Tensor, State, State]: ...
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
    context_parallel: Group | None = None,
    state_indices: Tensor | None = None,
    states_every: int | None = None,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, State, State]:
    """Compute gated linear attention over whole sequences.

    For every head and step t:

        C_t = diag(exp(log_f_t)) C_{t-1} + exp(log_i_t) k_t v_t^T        h_t = scale C_t^T q_t

    GLA has a log_f for each key channel. RetNet and Lightning Attention have a constant log_f per head, simple GLA has
    log_f = g, and Mamba-2 has log_f = A dt, log_i = log dt and scale = 1.

    Args:
        q, k, v: as in :func:`mlstm`.
        log_f: (B, T, H), or (B, T, H, dqk) without ``normalize`` and ``store_dtype``: log-gates, any float dtype.
        log_i: (B, T, H), log-gates, any float dtype; None is 0. All log-gates are clamped to [-1e5, 5e4]. Results with
            gates above 0 are correct as long as the states and the results fit into float32 (at most 3.4e38), which
            limits one gate to 88. On a GPU, the sum over up to 16 steps of float32 inputs, or up to 128 of 16-bit ones,
            must not exceed 88 either; float16 inputs hold weights up to 65,504. Beyond these limits results are
            infinite or NaN. With ``normalize`` the states are stabilized, and only the running maximum m must fit.
        normalize: divide h_t by max(abs(scale n_t^T q_t), 1) with n_t = exp(log_f_t) n_{t-1} + exp(log_i_t) k_t, as
            mLSTMexp does.
        initial_state, return_state: as in :func:`mlstm`. Without ``normalize`` a state has n and m None.
        cu_seqlens, chunk_size, scale, backend, kernel, normalizer_grad: as in :func:`mlstm`.
        store_dtype, context_parallel, state_indices, states_every: as in :func:`mlstm`.

    Returns:
        h (B, T, H, dhv) in v's dtype; with ``return_state`` also the :class:`State`; with ``states_every`` also those.

    Raises:
        ValueError, TypeError: as :func:`mlstm`.
    """
    if states_every is not None:
        return with_states_every(
            linear_attention, {"q": q, "k": k, "v": v, "log_f": log_f, "log_i": log_i}, states_every,
            initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens,
            context_parallel=context_parallel, state_indices=state_indices, normalize=normalize,
            chunk_size=chunk_size, scale=scale, backend=backend, kernel=kernel, normalizer_grad=normalizer_grad,
            store_dtype=store_dtype,
        )  # fmt: skip
    if has_channel_gates(log_f):
        check_flags(normalizer_grad=normalizer_grad)
        return channel_gates.linear_attention(
            q, k, v, log_f, log_i, normalize, initial_state, return_state, cu_seqlens, chunk_size, check_scale(scale),
            backend, kernel, store_dtype, context_parallel, state_indices,
        )  # fmt: skip
    request = Request(
        q=q, k=k, v=v, i=log_i, f=log_f, state=initial_state, lengths=cu_seqlens, gates="log", normalize=normalize,
        return_state=return_state, scale=check_scale(scale), backend=backend, chunk_size=chunk_size, kernel=kernel,
        normalizer_grad=normalizer_grad, store_dtype=store_dtype,
    )  # fmt: skip
    return _attend(request, context_parallel, state_indices)
