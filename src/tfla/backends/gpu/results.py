"""The states and results of a call: padding of states to the head dims of the kernels, and what a call returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import Grads, Outputs, stored_dtype
from tfla.backends.gpu.context import LaunchContext, Pair

NO_STATE: Pair = (None, None)  # scans start from zeros, or do not store their final states


def dense(ctx: LaunchContext, x: Tensor | None) -> Tensor | None:
    """Return x as a contiguous float32 tensor."""
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    found: Tensor = ctx.do(lambda t: t.float().contiguous(), x)
    return found


def dense_rows(ctx: LaunchContext, x: Tensor) -> Tensor:
    """Return x with a contiguous last dim."""
    found: Tensor = x if x.stride(-1) == 1 else ctx.do(Tensor.contiguous, x)
    return found


def pad_state(ctx: LaunchContext, C: Tensor | None, n: Tensor | None) -> Pair:
    """Return states C, (N, H, dqk, dhv), and n, (N, H, dqk), padded with zeros to K and V, in float32."""
    C, n = dense(ctx, C), dense(ctx, n)
    if not ctx.padded:
        return C, n
    return _with_head_dims(ctx, C, n, ctx.K, ctx.V)


def initial_states(ctx: LaunchContext) -> Pair:
    """Return the initial C and n of the sequences, padded; if the context has rows, C is the pool, without padding."""
    x = ctx.x
    return pad_state(ctx, x.C, x.n) if ctx.rows is None else (x.C, dense(ctx, x.n))


def unpad_state(ctx: LaunchContext, C: Tensor | None, n: Tensor | None) -> Pair:
    """Return states C, (N, H, K, V), and n, (N, H, K), cut to the head dims of the inputs."""
    if not ctx.padded:
        return C, n
    return _with_head_dims(ctx, C, n, ctx.x.q.shape[3], ctx.x.v.shape[3])


def _with_head_dims(ctx: LaunchContext, C: Tensor | None, n: Tensor | None, dqk: int, dhv: int) -> Pair:
    """Return states C and n, each cut or padded with zeros to these head dims."""
    return (
        None if C is None else ctx.resize(C, *C.shape[:2], dqk, dhv),
        None if n is None else ctx.resize(n, *n.shape[:2], dqk),
    )


def new_segment_states(ctx: LaunchContext) -> Tensor:
    """Allocate C of all segments, (segments, H, K, V), in the dtype of stored states."""
    return ctx.new(ctx.segments, ctx.H, ctx.K, ctx.V, dtype=stored_dtype(ctx.x, ctx.spec))


def new_segment_n(ctx: LaunchContext) -> Tensor:
    """Allocate n of all segments, (segments, H, K)."""
    return ctx.new(ctx.segments, ctx.H, ctx.K)


class NewOutputs(NamedTuple):
    """The tensors that one forward computes; None for what is not needed."""

    h: Tensor  # (B, T, H, dhv)
    C: Tensor | None  # (N, H, K, V), final states
    n: Tensor | None  # (N, H, K)
    m: Tensor | None  # (N, H)
    d: Tensor | None  # (B, T, H), denominators


def new_h(ctx: LaunchContext) -> Tensor:
    """Allocate h, (B, T, H, dhv)."""
    return ctx.new(*ctx.x.v.shape, dtype=ctx.x.v.dtype)


def new_outputs(ctx: LaunchContext, h: Tensor) -> NewOutputs:
    """Allocate the outputs of a forward other than h; if the context has rows, C is a pool and not allocated."""
    x, spec, N = ctx.x, ctx.spec, ctx.x.sequences
    C = n = m = None
    if spec.final_state:
        C = ctx.new(N, ctx.H, ctx.K, ctx.V) if ctx.rows is None else ctx.final_pool
    if spec.final_state and spec.normalize:
        # An empty sequence has no last step: its max state keeps the initial value.
        m = ctx.zeros(N, ctx.H) if x.m is None else ctx.do(Tensor.copy_, ctx.new(N, ctx.H), x.m)
        n = ctx.new(N, ctx.H, ctx.K)
    d = ctx.new(*x.log_f.shape) if spec.normalize and spec.save else None
    return NewOutputs(h, C, n, m, d)


def final_cotangents(ctx: LaunchContext, dC: Tensor | None, dn: Tensor | None) -> Pair:
    """Return the padded cotangents of the final states; if only one of dC and dn is given, the other is zeros."""
    dC, dn = pad_state(ctx, dC, dn)
    if not ctx.spec.normalize or (dC is None) == (dn is None):
        return dC, dn
    shape = ctx.x.sequences, ctx.H, ctx.K
    return ctx.zeros(*shape, ctx.V) if dC is None else dC, ctx.zeros(*shape) if dn is None else dn


def forward_results(ctx: LaunchContext, out: NewOutputs, starts: Pair) -> Outputs:
    """Return the results of a forward.

    Args:
        ctx: The context of the call.
        out: The outputs.
        starts: The states C and n at the starts of segments, (segments, H, K, V) and (segments, H, K), or None.
    """
    x, (chunk_C, chunk_n) = ctx.x, starts
    if not (ctx.spec.save and ctx.stores_segment_states):
        chunk_C = chunk_n = None
    if ctx.spec.save and chunk_C is None:
        chunk_C = ctx.placeholder(0, ctx.H, x.q.shape[3], x.v.shape[3], dtype=stored_dtype(x, ctx.spec))
        chunk_n = ctx.placeholder(0, ctx.H, x.q.shape[3]) if ctx.spec.normalize else None
    # With rows C is in its pool already, and `normalizer_rows.launch_store` reads n with its padding.
    C, n = unpad_state(ctx, out.C, out.n) if ctx.rows is None else (None, out.n)
    none = ctx.placeholder(0)
    return Outputs(
        h=out.h,
        C=none if C is None else C,
        n=none if n is None else n,
        m=none if out.m is None else out.m,
        d=none if out.d is None else out.d,
        chunk_C=none if chunk_C is None else chunk_C,
        chunk_n=none if chunk_n is None else chunk_n,
    )


def stored_starts(ctx: LaunchContext, out: Outputs) -> Pair | None:
    """Return the states at the starts of segments where the forward has stored them, else None."""
    if not ctx.stores_segment_states:
        return None
    return out.chunk_C, out.chunk_n if ctx.spec.normalize else None


def ends_of_states(ctx: LaunchContext) -> Pair:
    """Return where scans of whole sequences read their initial states C and store the final ones, or None.

    Where the context has rows, these are pools.
    """
    C, final = ctx.x.C, ctx.spec.final_state
    if ctx.rows is not None:
        return C, ctx.final_pool if final else None
    return dense(ctx, C), ctx.new(ctx.x.sequences, ctx.H, ctx.K, ctx.V) if final else None


class Gradients(NamedTuple):
    """The tensors that one backward computes."""

    dq: Tensor  # (B, T, Hq * shares, dqk), partial gradients of `shares` heads or programs
    dk: Tensor  # (B, T, Hq * shares, dqk)
    dv: Tensor  # (B, T, H, dhv)
    di: Tensor | None  # (B, T, H)
    df: Tensor  # (B, T, H)
    dC0: Tensor | None  # (N, H, K, V), of the initial states
    dn0: Tensor | None  # (N, H, K)

    def of_steps(self) -> tuple[Tensor, ...]:
        """Return the gradients that have one row for each step."""
        return tuple(t for t in (self.dq, self.dk, self.dv, self.di, self.df) if t is not None)


def new_gradients(ctx: LaunchContext, shares: int) -> Gradients:
    """Allocate the gradients.

    Partial dq and dk are rounded before they are summed: in float32 they would take twice the bytes of all others.

    Args:
        ctx: The context of the call.
        shares: The number of partial gradients of each head of q and k.
    """
    x, N = ctx.x, ctx.x.sequences
    shape = ctx.B, ctx.T, x.q.shape[2] * shares, x.q.shape[3]
    return Gradients(
        dq=ctx.new(*shape, dtype=x.q.dtype),
        dk=ctx.new(*shape, dtype=x.q.dtype),
        dv=ctx.new(*x.v.shape, dtype=x.v.dtype),
        dC0=None if x.C is None else ctx.new(N, ctx.H, ctx.K, ctx.V),
        dn0=None if x.n is None else ctx.new(N, ctx.H, ctx.K),
        di=None if x.log_i is None else ctx.new(*x.log_i.shape, dtype=x.log_i.dtype),
        df=ctx.new(*x.log_f.shape, dtype=x.log_f.dtype),
    )


def backward_results(ctx: LaunchContext, dq: Tensor, dk: Tensor, grads: Gradients) -> Grads:
    """Return the results of a backward; dq and dk, (B, T, Hq, dqk), are the sums of partial gradients."""
    dC0, dn0 = unpad_state(ctx, grads.dC0, grads.dn0)
    none = ctx.placeholder(0)
    return Grads(
        q=dq,
        k=dk,
        v=grads.dv,
        log_i=none if grads.di is None else grads.di,
        log_f=grads.df,
        C=none if dC0 is None else dC0,
        n=none if dn0 is None else dn0,
    )
