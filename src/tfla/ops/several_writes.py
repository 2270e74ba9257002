"""The public operators with several writes in each step, as calls of the delta rule: DeltaProduct and DPLR.

The delta rule gets the writes of a step as steps of its own. The first one has the decay, and the last one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from tfla._util.shapes import check_input_shapes
from tfla.ops import checks
from tfla.ops.delta import delta_rule
from tfla.ops.delta_checks import check_gates_shape
from tfla.ops.delta_dispatch import DeltaRequest
from tfla.ops.delta_operator import compute
from tfla.ops.state import State
from tfla.ops.states_every import check_states_every, with_states_every
from tfla.ops.transforms import is_distributed

if TYPE_CHECKING:
    from tfla.ops.context_parallel.group import Group


class Writes(NamedTuple):
    """The arguments of the delta rule for all writes, (B, T x writes, ...)."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_f: Tensor | None
    read_key: Tensor | None


@overload
def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[False] = False,
    writes: int,
    normalize_qk: bool = ...,
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> Tensor: ...
@overload
def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[True],
    writes: int,
    normalize_qk: bool = ...,
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> tuple[Tensor, State]: ...
@overload
def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    return_state: Literal[True],
    writes: int,
    normalize_qk: bool = ...,
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: int,
) -> tuple[Tensor, State, State]: ...
def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    writes: int,
    normalize_qk: bool = False,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    context_parallel: Group | None = None,
    state_indices: Tensor | None = None,
    states_every: int | None = None,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, State, State]:
    """Compute (Gated) DeltaProduct over whole sequences: the delta rule with several writes in each step.

    The state decays before the first write of a step and is read by q after the last one. The call is one of
    :func:`delta_rule` over T x writes steps.

    Args:
        q: (B, T, Hq, dqk).
        k: (B, T x writes, Hq, dqk), the keys of a step next to each other.
        v: (B, T x writes, H, dhv).
        beta: (B, T x writes, H); None is 1.
        log_f: (B, T, H) or (B, T, H, dqk); None is no decay.
        writes: the number of writes in each step.
        normalize_qk: divide q and k by sqrt(their squared norm + 1e-6).
        scale, initial_state, return_state, chunk_size, backend, kernel: as in :func:`delta_rule`.
        cu_seqlens: the offsets of packed sequences in steps, not in writes.
        context_parallel: as in :func:`delta_rule`. Sequences are cut between steps; its lengths are steps.
        state_indices: (sequences,) int32 or int64: the states are these rows of a pool, see :func:`tfla.mlstm`.
        states_every: also return the states after every so many steps, not writes, see :func:`tfla.mlstm`.

    Returns:
        h (B, T, H, dhv); with ``return_state`` also the :class:`State`, and with ``states_every`` the states between.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    options: dict[str, Any] = {
        "scale": scale, "return_state": return_state, "chunk_size": chunk_size, "backend": backend, "kernel": kernel,
        "context_parallel": context_parallel, "state_indices": state_indices, "states_every": states_every,
    }  # fmt: skip
    if states_every is not None:
        check_states_every(states_every, return_state, context_parallel, {"q": q, "v": v})
    if is_distributed(q):
        given = {"q": q, "k": k, "v": v, "beta": beta, "log_f": log_f, "cu_seqlens": cu_seqlens}
        return _on_local_tensors(
            delta_product, given, initial_state, writes=writes, normalize_qk=normalize_qk, **options
        )
    return _compute(
        _writes_of_product, (q, k, v, beta, log_f), initial_state, cu_seqlens, writes, normalize_qk=normalize_qk,
        **options,
    )  # fmt: skip


def _writes_of_product(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_f: Tensor | None, writes: int
) -> Writes:
    """Return the writes of :func:`delta_product`, after the checks of its arguments."""
    if isinstance(writes, bool) or not isinstance(writes, int | torch.SymInt):
        raise TypeError(f"writes: got {type(writes).__name__}, expected an int")
    if writes < 1:
        raise ValueError(f"writes: got {writes}, expected at least 1")
    checks.check_float("q", q)
    checks.check_shape("q", q, ("B", "T", "H", "dqk"))
    B, T, Hq, dqk = q.shape
    for name, x, dims in (("k", k, ("H", "dqk")), ("v", v, ("H", "dhv")), ("beta", beta, ("H",))):
        if name != "beta" or x is not None:
            checks.check_float(name, x)
            checks.check_shape(name, x, (B, T * writes, *dims))
    # Only the last write of a step is read, and only the first one has the decay.
    queries = torch.cat([q.new_zeros(B, T, writes - 1, Hq, dqk), q.unsqueeze(2)], 2).flatten(1, 2)
    if log_f is not None:
        checks.check_float("log_f", log_f)
        check_gates_shape(log_f, (B, T, v.shape[2]), dqk)
        open_gates = log_f.new_zeros(B, T, writes - 1, *log_f.shape[2:])
        log_f = torch.cat([log_f.unsqueeze(2), open_gates], 2).flatten(1, 2)
    return Writes(queries, k, v, beta, log_f, None)


@overload
def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_f: Tensor,
    *,
    return_state: Literal[False] = False,
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> Tensor: ...
@overload
def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_f: Tensor,
    *,
    return_state: Literal[True],
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: None = ...,
) -> tuple[Tensor, State]: ...
@overload
def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_f: Tensor,
    *,
    return_state: Literal[True],
    scale: float | None = ...,
    initial_state: State | None = ...,
    cu_seqlens: Tensor | None = ...,
    chunk_size: int | None = ...,
    backend: str | None = ...,
    kernel: str | None = ...,
    context_parallel: Group | None = ...,
    state_indices: Tensor | None = ...,
    states_every: int,
) -> tuple[Tensor, State, State]: ...
def dplr(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_f: Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    context_parallel: Group | None = None,
    state_indices: Tensor | None = None,
    states_every: int | None = None,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, State, State]:
    """Compute a recurrence with a diagonal plus low-rank transition over whole sequences.

    For every head and step t:

        C_t = diag(exp(log_f_t)) C_{t-1} + b_t (C_{t-1}^T a_t)^T + k_t v_t^T        h_t = scale C_t^T q_t

    RWKV-7 has a = -kk, b = kk * (its in-context learning rate) and scale = 1. The call is one of :func:`delta_rule`
    over 2 T steps: b writes what a reads before the decay, then k writes v.

    Args:
        q, k, a, b: (B, T, Hq, dqk).
        v: (B, T, H, dhv).
        log_f: (B, T, H) or (B, T, H, dqk).
        scale, initial_state, return_state, chunk_size, backend, kernel: as in :func:`delta_rule`.
        cu_seqlens: the offsets of packed sequences in steps.
        context_parallel: as in :func:`delta_rule`.
        state_indices: (sequences,) int32 or int64: the states are these rows of a pool, see :func:`tfla.mlstm`.
        states_every: also return the states after every so many steps, see :func:`tfla.mlstm`.

    Returns:
        h (B, T, H, dhv); with ``return_state`` also the :class:`State`, and with ``states_every`` the states between.

    Raises:
        ValueError, TypeError: as :func:`delta_rule`.
    """
    options: dict[str, Any] = {
        "scale": scale, "return_state": return_state, "chunk_size": chunk_size, "backend": backend, "kernel": kernel,
        "context_parallel": context_parallel, "state_indices": state_indices, "states_every": states_every,
    }  # fmt: skip
    if states_every is not None:
        check_states_every(states_every, return_state, context_parallel, {"q": q, "v": v})
    if is_distributed(q):
        given = {"q": q, "k": k, "v": v, "a": a, "b": b, "log_f": log_f, "cu_seqlens": cu_seqlens}
        return _on_local_tensors(dplr, given, initial_state, **options)
    return _compute(
        _writes_of_dplr, (q, k, v, a, b, log_f), initial_state, cu_seqlens, 2, read_before_decay=True, **options
    )


def _writes_of_dplr(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_f: Tensor, _: int) -> Writes:
    """Return the writes of :func:`dplr`, after the checks of its arguments."""
    for name, x in {"q": q, "k": k, "a": a, "b": b}.items():
        checks.check_float(name, x)
        checks.check_shape(name, x, ("B", "T", "H", "dqk") if name == "q" else tuple(q.shape))
        checks.check_dtype_of_q(name, x, q)
        if x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, expected that of q, {q.device}")
    checks.check_float("v", v)
    check_input_shapes(q, k, v, {}, time=True)
    checks.check_float("log_f", log_f)
    check_gates_shape(log_f, tuple(v.shape[:3]), q.shape[3])
    zero = torch.zeros_like

    def each(first: Tensor, second: Tensor) -> Tensor:
        """Return what both writes of a step have, (B, T, ...) each, as (B, 2 T, ...)."""
        return torch.stack([first, second], 2).flatten(1, 2)

    # The first write has key b, value 0 and beta -1: it adds b (C^T a)^T, C being the state before the decay. The
    # second one has key k and value v and reads nothing.
    one = torch.ones(v.shape[:-1], dtype=torch.float32, device=v.device)
    return Writes(
        each(zero(q), q), each(b, k), each(zero(v), v), each(-one, one), each(log_f, zero(log_f)), each(a, zero(a))
    )  # fmt: skip


def _compute(
    find: Callable[..., Writes],
    given: tuple[Tensor | None, ...],
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    writes: int,
    *,
    scale: float | None,
    return_state: bool,
    context_parallel: Group | None,
    state_indices: Tensor | None,
    states_every: int | None,
    read_before_decay: bool = False,
    normalize_qk: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, State, State]:
    """Compute the delta rule over the writes of all steps, and return the outputs of the steps.

    Args:
        find: the function that checks the tensors of the call and returns the writes of all steps.
        given: the tensors of the call, q, k and v first.
        initial_state, scale, return_state, context_parallel, state_indices: as in :func:`delta_rule`.
        cu_seqlens: the offsets of packed sequences in steps.
        states_every: the number of steps between the states that are returned, which is checked.
        read_before_decay, normalize_qk: as in :func:`delta_rule`.
        writes: the number of writes in each step.
        options: the chunk size, the backend and the kernel.

    Returns:
        h after the last write of each step, (B, T, H, dhv); with ``return_state`` also the final state, and with
        ``states_every`` the states between.
    """

    def prepare() -> tuple[Writes, Tensor | None]:
        """Return the writes and their offsets, after the checks."""
        steps = find(*given, writes)
        if cu_seqlens is None:
            return steps, None
        check = checks.check_cu_seqlens if context_parallel is None else checks.check_offsets
        check(cu_seqlens, steps.q[:, ::writes])
        return steps, cu_seqlens * writes

    try:
        steps, offsets = prepare()
    except Exception as error:
        if context_parallel is None:
            raise
        from tfla.ops.context_parallel.group import context_parallel_of
        from tfla.ops.context_parallel.refusals import refuse_call

        own = context_parallel_of(context_parallel)
        return refuse_call(error, prepare, *own, given, cu_seqlens, return_state, False)
    found: Any
    if states_every is not None:
        found = with_states_every(
            delta_rule, steps._asdict(), writes * states_every, initial_state=initial_state, return_state=return_state,
            cu_seqlens=offsets, context_parallel=context_parallel, state_indices=state_indices, scale=scale,
            read_before_decay=read_before_decay, normalize_qk=normalize_qk, **options,
        )  # fmt: skip
    else:
        request = DeltaRequest(
            **steps._asdict(), A_log=None, dt_bias=None, state=initial_state, cu_seqlens=offsets, correct=True,
            read_before_decay=read_before_decay, normalize_qk=normalize_qk,
            beta_activation="none", gate_activation="none", lower_bound=None, return_state=return_state,
            scale=checks.check_scale(scale), **options,
        )  # fmt: skip
        found = compute(request, context_parallel, state_indices, writes)
    if isinstance(found, Tensor):
        return found[:, writes - 1 :: writes]
    h, *states = found
    return (h[:, writes - 1 :: writes], *states)


def _on_local_tensors(
    operator: Any,
    given: dict[str, Tensor | None],
    initial_state: State | None,
    *,
    state_indices: Tensor | None,
    **options: Any,
) -> Tensor | tuple[Tensor, State]:
    """Compute a call of an operator of this module on the local tensors of DTensors."""
    from tfla.ops import sharded

    sharded.check_no_indices(state_indices)
    return sharded.call_with_state(
        given, initial_state, lambda local, state: operator(**local, initial_state=state, **options)
    )
