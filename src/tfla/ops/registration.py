"""The operators as PyTorch sees them: registered with torch.library, traceable, with a closed-form backward.

Calls that only eager PyTorch sees go past the dispatcher, whose wrappers of operators written in Python
cost more host time than the rest of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tfla.backends import BACKENDS, Inputs, StepInputs
from tfla.backends.base import Again, Gates, Outputs, Spec, StepSpec, packed_bounds
from tfla.ops import batching, differentiable, flops
from tfla.ops.checks import check_values_of_lengths
from tfla.ops.dispatch import without_autocast
from tfla.ops.transforms import forward_mode, needs_dispatcher


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


def _check_packed(x: Inputs) -> None:
    """Check what traced calls could not: on the CPU the values of cu_seqlens cost nothing to read."""
    if x.cu_seqlens is not None and x.cu_seqlens.device.type == "cpu":
        packed_bounds(x.cu_seqlens, x.v.shape[1])


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
    _check_packed(x)
    spec = Spec(scale, normalize, normalizer_grad, chunk_size, kernel, save, final_state, store_dtype, gates)  # type: ignore[arg-type]
    return _distinct(_forward(x, backend, spec))  # type: ignore[return-value]


def _distinct(out: Outputs) -> tuple[Tensor, ...]:
    """Outputs of which no two are one tensor, which PyTorch does not allow; empty parts may be."""
    return tuple(t if t.numel() else torch.empty_like(t) for t in out)


def _attend_shapes(
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
    _check_packed(x)
    spec = _backward_spec(scale, normalize, normalizer_grad, chunk_size, kernel, store_dtype, gates)
    none = d.new_empty(0)
    out = Outputs(h, none, none, none, d, chunk_C, chunk_n)
    grads = _backward(x, out, dh, dC, dn, backend, spec)
    return tuple(d.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


def _backward_spec(
    scale: float, normalize: bool, normalizer_grad: bool, chunk_size: int, kernel: str, *rest: Any
) -> Spec:
    """The options of the forward that a backward belongs to."""
    return Spec(scale, normalize, normalizer_grad, chunk_size, kernel, True, False, *rest)


def _attend_backward_shapes(
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
    saved = unwrap_dead_wrappers(ctx.saved_tensors)  # once: activation checkpointing recomputes them at each access
    tensors, (h, d, chunk_C, chunk_n) = saved[:9], saved[9:]
    dh = torch.zeros_like(h) if dh is None else dh
    # With a graph of its own the backward is the registered operator, which knows its derivative.
    if torch.is_grad_enabled() or needs_dispatcher((*tensors, dh, dC, dn)):
        if forward_mode((*tensors, dh, dC, dn)):
            return [*differentiable.gradients(Inputs(*tensors), dh, dC, dn, ctx.spec), None]
        scale, normalize, normalizer_grad, chunk_size, kernel, _, _, store_dtype, gates = ctx.spec
        flops.register()
        grads = torch.ops.tfla.attend_backward(
            *tensors, h, d, chunk_C, chunk_n, dh, dC, dn, scale, normalize, normalizer_grad, chunk_size, ctx.backend,
            kernel, store_dtype, gates,
        )  # fmt: skip
        return [None if t is None else g for t, g in zip(tensors, (*grads, None), strict=True)]
    out = Outputs(h, d, d, d, d, chunk_C, chunk_n)
    return [*_backward(Inputs(*tensors), out, dh, dC, dn, ctx.backend, ctx.spec), None]


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


class _Node(_SingleLevelFunction):
    """A node of the graph of one level of transforms, which `torch.library.register_autograd` does not make under
    torch.func (pytorch issue 170834)."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        return (ctx._autograd_function_id,)


class _Attend(_Node):
    """The operator; its arguments follow the dispatcher's keys."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, ...]:
        tensors, (scale, normalize, normalizer_grad, chunk_size, backend, kernel, _, *rest) = args[:9], args[9:]
        # A graph that was traced without gradients stores nothing for the backward that is now wanted.
        args = (*args[:15], True, *args[16:])
        out = _below(torch.ops.tfla.attend.default, keys, args)
        _keep(ctx, tensors, out, backend, Spec(scale, normalize, normalizer_grad, chunk_size, kernel, True, *rest))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *_gradients(ctx, *grads[:3]), *[None] * (len(ctx.needs_input_grad) - 10)


class _AttendBackward(_Node):
    """The backward of the operator; its own derivative is that of plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, ...]:
        scale, normalize, normalizer_grad, chunk_size, _, kernel, *rest = args[16:]
        ctx.spec = _backward_spec(scale, normalize, normalizer_grad, chunk_size, kernel, *rest)
        ctx.save_for_backward(*args[:9], *args[13:16])
        ctx.set_materialize_grads(False)
        return _below(torch.ops.tfla.attend_backward.default, keys, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *tensors, dh, dC, dn = unwrap_dead_wrappers(ctx.saved_tensors)
        found = differentiable.second_gradients(Inputs(*tensors), dh, dC, dn, grads, ctx.spec)
        # h and what the forward stored are functions of the inputs, whose derivatives `found` holds already.
        return None, *found[:8], *[None] * 5, *found[8:], *[None] * (len(ctx.needs_input_grad) - 17)


def _below(operator: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Call the operator below autograd of this level of transforms; outer levels record, though a node does not."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _differentiated(node: type[_Node], operator: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Call the operator with a node of the graph where gradients are recorded."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
        with enable_single_level_autograd_function():
            return node.apply(keys, *args)  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _attend_autograd(keys: Any, *args: Any) -> Any:
    if not forward_mode(args[:9]):
        return _differentiated(_Attend, torch.ops.tfla.attend.default, keys, args)
    scale, normalize, normalizer_grad, chunk_size, _, kernel, *rest = args[9:]
    spec = Spec(scale, normalize, normalizer_grad, chunk_size, kernel, *rest)
    return _distinct(differentiable.attend(Inputs(*args[:9]), spec))


def _attend_backward_autograd(keys: Any, *args: Any) -> Any:
    if forward_mode(args[:16]):
        raise NotImplementedError(
            "forward-mode AD: this backward is of a forward that was computed outside of it; compute both inside, "
            "as torch.func.jvp(torch.func.grad(f), ...) does"
        )
    return _differentiated(_AttendBackward, torch.ops.tfla.attend_backward.default, keys, args)


def _register(
    name: str, forward: Callable[..., Any], shapes: Callable[..., Any], autograd: Callable[..., Any],
    batched: Callable[..., Any],
) -> None:  # fmt: skip
    """Define an operator by the annotations of its forward, for every device.

    A function that torch.compile runs uncompiled would have it look into what the dispatcher calls.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", torch._disable_dynamo(forward))
    torch.library.register_fake(name, shapes)
    LIBRARY.impl(name.partition("::")[2], torch._disable_dynamo(autograd), "Autograd", with_keyset=True)
    torch.library.register_vmap(name, torch._disable_dynamo(batched))


LIBRARY = torch.library.Library("tfla", "FRAGMENT")
_register("tfla::attend", _attend, _attend_shapes, _attend_autograd, batching.attend)
_register(
    "tfla::attend_backward",
    _attend_backward,
    _attend_backward_shapes,
    _attend_backward_autograd,
    batching.attend_backward,
)


def attend(x: Inputs, backend: str, spec: Spec, alone: bool = False, again: Again | None = None) -> tuple[Tensor, ...]:
    """h, and if asked for the final C, n and m.

    alone: it is known that nobody else sees the call; again: what does the forward for such x.
    """
    if not alone and needs_dispatcher(x):
        if x.cu_seqlens is not None and forward_ad._current_level >= 0 and torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # forward mode reads the offsets
        flops.register()
        scale, normalize, normalizer_grad, chunk_size, kernel, *rest = spec
        return torch.ops.tfla.attend(*x, scale, normalize, normalizer_grad, chunk_size, backend, kernel, *rest)
    return _Direct.apply(backend, spec, again, *x) if spec.save else _forward(x, backend, spec, again)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? i, Tensor f, {}, Tensor? n, Tensor? m, Tensor? lengths"
OPTIONS = "float scale, str gates, str backend"
torch.library.define("tfla::steps", f"({INPUTS.format('Tensor C')}, {OPTIONS}, bool final_state, float eps=0.0) "
                                    "-> (Tensor, Tensor, Tensor, Tensor)")  # fmt: skip
torch.library.define(
    "tfla::steps_", f"({INPUTS.format('Tensor(a!) C')}, {OPTIONS}, float eps=0.0) -> (Tensor, Tensor, Tensor)"
)
steps, steps_ = torch.ops.tfla.steps.default, torch.ops.tfla.steps_.default

torch.library.define(
    "tfla::checked_lengths", "(Tensor lengths, SymInt T) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
checked_lengths = torch.ops.tfla.checked_lengths.default


@torch.library.impl("tfla::checked_lengths", "default")
@torch._disable_dynamo
def _(lengths: Tensor, T: int) -> Tensor:
    """Return the lengths of steps once their values have been checked, which a traced call leaves to its graph."""
    check_values_of_lengths(lengths, T)
    return lengths.clone()


@torch.library.register_fake("tfla::checked_lengths")
def _(lengths: Tensor, T: int) -> Tensor:
    return torch.empty_like(lengths)


@torch.library.register_vmap("tfla::checked_lengths")
@torch._disable_dynamo
def _(info: Any, in_dims: Sequence[int | None], lengths: Tensor, T: int) -> tuple[Tensor, int | None]:
    return checked_lengths(lengths, T), in_dims[0]


@torch.library.impl("tfla::steps", "default")
@torch._disable_dynamo
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    final_state: bool,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_lengths(lengths, v)
    out = BACKENDS[backend].steps(
        StepInputs(q, k, v, i, f, C, n, m, lengths), StepSpec(scale, gates, final_state, eps), None
    )
    return out.h, *(t if t.numel() else torch.empty_like(t) for t in out[1:])  # type: ignore[return-value]


def _check_lengths(lengths: Tensor | None, v: Tensor) -> None:
    """Check what traced calls could not: on the CPU the values cost nothing to read."""
    if lengths is not None and lengths.device.type == "cpu":
        check_values_of_lengths(lengths, v.shape[1])


@torch.library.register_fake("tfla::steps")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    final_state: bool,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = StepInputs(q, k, v, i, f, C, n, m, lengths)

    def new(like: Tensor | None, dtype: torch.dtype) -> Tensor:
        return q.new_empty((0,) if like is None or not final_state else like.shape, dtype=dtype)

    new_n = new(n, q.dtype if n is None or not final_state else x.kept_dtype(n))
    new_C = new(C, x.kept_dtype(C) if final_state else q.dtype)
    return v.new_empty(v.shape), new_C, new_n, new(m, x.acc_dtype if n is not None and final_state else q.dtype)


@torch.library.impl("tfla::steps_", "default")
@torch._disable_dynamo
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_lengths(lengths, v)
    out = BACKENDS[backend].steps(StepInputs(q, k, v, i, f, C, n, m, lengths), StepSpec(scale, gates, True, eps), C)
    return out.h, *(t if t.numel() else torch.empty_like(t) for t in out[2:])  # type: ignore[return-value]


@torch.library.register_fake("tfla::steps_")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor | None,
    f: Tensor,
    C: Tensor,
    n: Tensor | None,
    m: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    gates: Gates,
    backend: str,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    x = StepInputs(q, k, v, i, f, C, n, m, lengths)
    new_n = q.new_empty(0) if n is None else q.new_empty(n.shape, dtype=x.kept_dtype(n))
    new_m = q.new_empty(0) if m is None else q.new_empty(m.shape, dtype=x.acc_dtype)
    return v.new_empty(v.shape), new_n, new_m
