"""The operator as PyTorch knows it: registered with torch.library, traceable, with a closed-form backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.backends import BACKENDS, Inputs
from tfla.backends.base import Outputs, Spec


@torch.library.custom_op("tfla::attend", mutates_args=())
def attend(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Forward; see `backends.base.Outputs` for what it returns."""
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    spec = Spec(scale, normalize, normalizer_grad, chunk_size, kernel, save, final_state)
    with torch.autocast(q.device.type, enabled=False):
        return tuple(BACKENDS[backend].forward(x, spec))  # type: ignore[return-value]


@attend.register_fake
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
) -> tuple[Tensor, ...]:
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    N, H, K, V = x.sequences, v.shape[2], q.shape[3], v.shape[3]
    rows = BACKENDS[backend].stored_states(x, chunk_size, kernel) if save else 0

    def new(wanted: bool, *shape: int) -> Tensor:
        return q.new_empty(shape if wanted else (0,), dtype=x.acc_dtype)

    return (
        v.new_empty(v.shape),
        new(final_state, N, H, K, V),
        new(final_state and normalize, N, H, K),
        new(final_state and normalize, N, H),
        new(save and normalize, *v.shape[:3]),
        new(save, rows, H, K, V),
        new(save and normalize, rows, H, K),
    )


@torch.library.custom_op("tfla::attend_backward", mutates_args=())
def attend_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_i, log_f and of the initial C, n, m; shape (0,) for an input that is None."""
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    spec = Spec(scale, normalize, normalizer_grad, chunk_size, kernel, True, False)
    none = d.new_empty(0)
    with torch.autocast(q.device.type, enabled=False):
        g = BACKENDS[backend].backward(x, Outputs(h, none, none, none, d, chunk_C, chunk_n), dh, dC, dn, spec)

    def like(grad: Tensor, t: Tensor | None) -> Tensor:
        return none.clone() if t is None else grad.to(t.dtype).contiguous()

    # The true initial state is exp(m) C, exp(m) n.
    dm = none
    if m is not None and C is not None and n is not None:
        dm = (C * g.C).sum((-2, -1)) + (n * g.n).sum(-1)
    return (
        like(g.q, q), like(g.k, k), like(g.v, v), like(g.log_i, log_i), like(g.log_f, log_f),
        like(g.C, C), like(g.n, n), like(dm, m),
    )  # fmt: skip


@attend_backward.register_fake
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, scale, normalize, normalizer_grad, chunk_size, backend, kernel, _, _ = inputs
    h, _, _, _, d, chunk_C, chunk_n = output
    ctx.save_for_backward(*tensors, h, d, chunk_C, chunk_n)
    ctx.static = scale, normalize, normalizer_grad, chunk_size, backend, kernel
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dh: Tensor | None, dC: Tensor | None, dn: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them at each access
    tensors, h, rest = saved[:9], saved[9], saved[10:]
    dh = torch.zeros_like(h) if dh is None else dh
    grads = attend_backward(*tensors, h, *rest, dh, dC, dn, *ctx.static)
    inputs = tensors[:8]
    return (*(None if t is None else g for t, g in zip(inputs, grads, strict=True)), *([None] * 9))


attend.register_autograd(_backward, setup_context=_setup_context)
