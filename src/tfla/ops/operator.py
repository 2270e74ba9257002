"""The operator as PyTorch knows it: registered with torch.library, traceable, with a closed-form backward.

Where nobody but eager PyTorch sees a call it goes past the dispatcher, whose wrappers of operators written in Python
take the host longer than all the rest of a call does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.backends import BACKENDS, Inputs
from tfla.backends.base import Again, Outputs, Spec
from tfla.ops.signature import observed, without_autocast


def _forward(x: Inputs, backend: str, spec: Spec, again: Again | None = None) -> Outputs:
    if again is not None:
        return Outputs(*again(x))
    with without_autocast(x.q.device.type):
        return BACKENDS[backend].forward(x, spec)


def _like(d: Tensor, t: Tensor) -> Tensor:
    """A gradient in the dtype of t, dense; most are."""
    return d if d.dtype == t.dtype and d.is_contiguous() else d.to(t.dtype).contiguous()


def _backward(
    x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, backend: str, spec: Spec
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, log_i, log_f and of the initial C, n, m; None for an input that is None."""
    with without_autocast(x.q.device.type):
        g = BACKENDS[backend].backward(x, out, dh, dC, dn, spec)
        # The true initial state is exp(m) C, exp(m) n.
        dm = None
        if x.m is not None and x.C is not None and x.n is not None:
            dm = (x.C * g.C).sum((-2, -1)) + (x.n * g.n).sum(-1)
        found = (g.q, g.k, g.v, g.log_i, g.log_f, g.C, g.n, dm)
        return tuple([None if t is None or d is None else _like(d, t) for d, t in zip(found, x[:8], strict=True)])


@torch.library.custom_op("tfla::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor | None,
    log_f: Tensor,
    C: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    normalizer_grad: bool,
    chunk_size: int,
    backend: str,
    kernel: str,
    save: bool,
    final_state: bool,
    store_dtype: torch.dtype | None = None,
    gates: str = "log",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward; see `backends.base.Outputs` for what it returns."""
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    spec = Spec(scale, normalize, normalizer_grad, chunk_size, kernel, save, final_state, store_dtype, gates)  # type: ignore[arg-type]
    # Empty parts may be one tensor, which PyTorch does not allow.
    return tuple(t if t.numel() else torch.empty_like(t) for t in _forward(x, backend, spec))  # type: ignore[return-value]


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor | None,
    log_f: Tensor,
    C: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,
    normalizer_grad: bool,
    chunk_size: int,
    backend: str,
    kernel: str,
    save: bool,
    final_state: bool,
    store_dtype: torch.dtype | None = None,
    gates: str = "log",
) -> tuple[Tensor, ...]:
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    N, H, K, V = x.sequences, v.shape[2], q.shape[3], v.shape[3]
    rows = BACKENDS[backend].stored_states(x, chunk_size, kernel) if save else 0

    def new(wanted: bool, *shape: int, dtype: torch.dtype = x.acc_dtype) -> Tensor:
        return q.new_empty(shape if wanted else (0,), dtype=dtype)

    return (
        v.new_empty(v.shape),
        new(final_state, N, H, K, V),
        new(final_state and normalize, N, H, K),
        new(final_state and normalize, N, H),
        new(save and normalize, *v.shape[:3]),
        new(save, rows, H, K, V, dtype=store_dtype or x.acc_dtype),
        new(save and normalize, rows, H, K),
    )


@torch.library.custom_op("tfla::attend_backward", mutates_args=())
def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor | None,
    log_f: Tensor,
    C: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor,
    d: Tensor,
    chunk_C: Tensor,
    chunk_n: Tensor,
    dh: Tensor,
    dC: Tensor | None,
    dn: Tensor | None,
    scale: float,
    normalize: bool,
    normalizer_grad: bool,
    chunk_size: int,
    backend: str,
    kernel: str,
    store_dtype: torch.dtype | None = None,
    gates: str = "log",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_i, log_f and of the initial C, n, m; shape (0,) for an input that is None."""
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    spec = Spec(scale, normalize, normalizer_grad, chunk_size, kernel, True, False, store_dtype, gates)  # type: ignore[arg-type]
    none = d.new_empty(0)
    out = Outputs(h, none, none, none, d, chunk_C, chunk_n)
    grads = _backward(x, out, dh, dC, dn, backend, spec)
    return tuple(d.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


@_attend_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor | None,
    log_f: Tensor,
    C: Tensor | None,
    n: Tensor | None,
    m: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor,
    d: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(d.new_empty(0) if t is None else t.new_empty(t.shape) for t in (q, k, v, log_i, log_f, C, n, m))


def _keep(ctx: Any, tensors: tuple[Tensor | None, ...], out: tuple[Tensor, ...], backend: str, spec: Spec) -> None:
    h, _, _, _, d, chunk_C, chunk_n = out
    ctx.save_for_backward(*tensors, h, d, chunk_C, chunk_n)
    ctx.backend, ctx.spec = backend, spec
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None) -> list[Tensor | None]:
    """Of all tensors that the operator reads."""
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at each access
    tensors, (h, d, chunk_C, chunk_n) = saved[:9], saved[9:]
    dh = torch.zeros_like(h) if dh is None else dh
    # With a graph of its own the backward is the registered operator, which says that it has no derivative.
    if torch.is_grad_enabled() or observed((*tensors, dh, dC, dn)):
        scale, normalize, normalizer_grad, chunk_size, kernel, _, _, store_dtype, gates = ctx.spec
        grads = torch.ops.tfla.attend_backward(
            *tensors, h, d, chunk_C, chunk_n, dh, dC, dn, scale, normalize, normalizer_grad, chunk_size, ctx.backend,
            kernel, store_dtype, gates,
        )  # fmt: skip
        return [None if t is None else g for t, g in zip(tensors, (*grads, None), strict=True)]
    out = Outputs(h, d, d, d, d, chunk_C, chunk_n)
    return [*_backward(Inputs(*tensors), out, dh, dC, dn, ctx.backend, ctx.spec), None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (scale, normalize, normalizer_grad, chunk_size, backend, kernel, *rest) = inputs[:9], inputs[9:]
    _keep(ctx, tensors, output, backend, Spec(scale, normalize, normalizer_grad, chunk_size, kernel, *rest))


_attend.register_autograd(
    lambda ctx, *grads: (*_gradients(ctx, *grads[:3]), *[None] * 10), setup_context=_setup_context
)


class _Direct(torch.autograd.Function):
    """The same, past the dispatcher."""

    @staticmethod
    def forward(ctx: Any, backend: str, spec: Spec, again: Again | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        out = _forward(Inputs(*tensors), backend, spec, again)  # type: ignore[arg-type]
        _keep(ctx, tensors, out, backend, spec)
        return out[: (4 if spec.normalize else 2) if spec.final_state else 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *_gradients(ctx, *grads[:3])


def attend(x: Inputs, backend: str, spec: Spec, alone: bool = False, again: Again | None = None) -> tuple[Tensor, ...]:
    """h, and if asked for the final C, n and m.

    alone: it is known that nobody else sees the call; again: what does the forward for such x.
    """
    if not alone and observed(x):
        scale, normalize, normalizer_grad, chunk_size, kernel, *rest = spec
        return torch.ops.tfla.attend(*x, scale, normalize, normalizer_grad, chunk_size, backend, kernel, *rest)
    return _Direct.apply(backend, spec, again, *x) if spec.save else _forward(x, backend, spec, again)
