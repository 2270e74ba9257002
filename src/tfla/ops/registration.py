"""The operators as PyTorch sees them: registered with torch.library, traceable, with a closed-form backward.

    tfla::attend            a whole sequence, forward
    tfla::attend_backward   its backward
    tfla::steps, steps_     a few decoding steps; steps_ overwrites the state C in place
    tfla::checked_lengths   the check of the lengths of decoding steps inside a graph

Plain eager calls skip the dispatcher, whose wrappers of operators written in Python cost more host time than the rest
of a call.
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
from tfla.backends.base import Gates, Outputs, Replay, Spec, StepSpec, packed_bounds
from tfla.ops import batching, differentiable, flops
from tfla.ops.checks import check_values_of_lengths
from tfla.ops.dispatch import without_autocast
from tfla.ops.transforms import forward_mode, needs_dispatcher


def attend(
    x: Inputs, backend: str, spec: Spec, eager: bool = False, replay: Replay | None = None
) -> tuple[Tensor, ...]:
    """Run the operator on the backend of that name.

    Args:
        x: the inputs of the call.
        backend: the name of the backend.
        spec: the options of the call.
        eager: the caller has made sure that :func:`needs_dispatcher` is False for x.
        replay: the recorded forward of calls of this signature; None calls the backend.

    Returns:
        h, and if ``spec.final_state`` also the final C, n and m; more parts may follow, which callers ignore.
    """
    if not eager and needs_dispatcher(x):
        if x.cu_seqlens is not None and forward_ad._current_level >= 0 and torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # forward mode reads the offsets
        flops.register()
        scale, normalize, normalizer_grad, chunk_size, kernel, *rest = spec
        return torch.ops.tfla.attend(*x, scale, normalize, normalizer_grad, chunk_size, backend, kernel, *rest)
    return _EagerAttend.apply(backend, spec, replay, *x) if spec.save else _forward(x, backend, spec, replay)


class _EagerAttend(torch.autograd.Function):
    """The operator as a node of autograd for plain eager calls, which skip the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, backend: str, spec: Spec, replay: Replay | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        out = _forward(Inputs(*tensors), backend, spec, replay)  # type: ignore[arg-type]
        _save_for_backward(ctx, tensors, out, backend, spec)
        return out[: (4 if spec.normalize else 2) if spec.final_state else 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *_gradients(ctx, *grads[:3])


def _forward(x: Inputs, backend: str, spec: Spec, replay: Replay | None = None) -> Outputs:
    """Run a recorded forward where there is one, else the forward of the backend."""
    if replay is not None:
        return Outputs(*replay(x))
    with without_autocast(x.q.device.type):
        return BACKENDS[backend].forward(x, spec)


def _backward(
    x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, backend: str, spec: Spec
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, log_i, log_f and of the initial C, n, m; None for an input that is None.

    The true initial state is exp(m) C and exp(m) n, hence dm = <C, dC> + <n, dn> of each head.
    """
    with without_autocast(x.q.device.type):
        g = BACKENDS[backend].backward(x, out, dh, dC, dn, spec)
        dm = None
        if x.m is not None and x.C is not None and x.n is not None:
            dm = (x.C * g.C).sum((-2, -1)) + (x.n * g.n).sum(-1)
        found = (g.q, g.k, g.v, g.log_i, g.log_f, g.C, g.n, dm)
        return tuple(
            [None if t is None or d is None else _match_dtype(d, t) for d, t in zip(found, x[:8], strict=True)]
        )


def _match_dtype(d: Tensor, t: Tensor) -> Tensor:
    """Return a gradient in the dtype of t and dense, without a copy where it is so already."""
    return d if d.dtype == t.dtype and d.is_contiguous() else d.to(t.dtype).contiguous()


def _save_for_backward(
    ctx: Any, tensors: tuple[Tensor | None, ...], out: tuple[Tensor, ...], backend: str, spec: Spec
) -> None:
    """Save what the backward reads: the inputs, and of the outputs h, d and the states of chunks."""
    h, _, _, _, d, chunk_C, chunk_n = out
    ctx.save_for_backward(*tensors, h, d, chunk_C, chunk_n)
    ctx.backend, ctx.spec = backend, spec
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh: Tensor | None, dC: Tensor | None = None, dn: Tensor | None = None) -> list[Tensor | None]:
    """Return the gradients of the nine tensors of :class:`Inputs` from the cotangents of h and of the final C, n."""
    saved = unwrap_dead_wrappers(ctx.saved_tensors)  # once: activation checkpointing recomputes them at each access
    tensors, (h, d, chunk_C, chunk_n) = saved[:9], saved[9:]
    dh = torch.zeros_like(h) if dh is None else dh
    # A backward that is itself recorded or traced is the registered operator, which has a derivative.
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


def _backward_spec(
    scale: float, normalize: bool, normalizer_grad: bool, chunk_size: int, kernel: str, *rest: Any
) -> Spec:
    """Return the options of the forward that a backward belongs to."""
    return Spec(scale, normalize, normalizer_grad, chunk_size, kernel, True, False, *rest)


# The registered operators of whole sequences: implementations and shapes.


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
    """Compute the forward; returns the tensors of :class:`Outputs`. The annotations are the operator's schema."""
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    _check_packed(x)
    spec = Spec(
        scale=scale, normalize=normalize, normalizer_grad=normalizer_grad, chunk_size=chunk_size, kernel=kernel,
        save=save, final_state=final_state, store_dtype=store_dtype, gates=gates,  # type: ignore[arg-type]
    )  # fmt: skip
    return _distinct(_forward(x, backend, spec))  # type: ignore[return-value]


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
    """Return empty tensors of the shapes and dtypes of :func:`_attend`."""
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
    """Compute the gradients of q, k, v, log_i, log_f and of the initial C, n, m; shape (0,) where the input is None."""
    x = Inputs(q, k, v, log_i, log_f, C, n, m, cu_seqlens)
    _check_packed(x)
    spec = _backward_spec(scale, normalize, normalizer_grad, chunk_size, kernel, store_dtype, gates)
    none = d.new_empty(0)
    out = Outputs(h, none, none, none, d, chunk_C, chunk_n)
    grads = _backward(x, out, dh, dC, dn, backend, spec)
    return tuple(d.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


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
    """Return empty tensors of the shapes and dtypes of :func:`_attend_backward`."""
    return tuple(d.new_empty(0) if t is None else t.new_empty(t.shape) for t in (q, k, v, log_i, log_f, C, n, m))


def _check_packed(x: Inputs) -> None:
    """Check the values of cu_seqlens on a CPU, which a call that is traced cannot read."""
    if x.cu_seqlens is not None and x.cu_seqlens.device.type == "cpu":
        packed_bounds(x.cu_seqlens, x.v.shape[1])


def _distinct(out: Outputs) -> tuple[Tensor, ...]:
    """Return outputs of which no two are the same tensor.

    PyTorch does not allow that of an operator, but the empty parts of :class:`Outputs` may be one tensor.
    """
    return tuple(t if t.numel() else torch.empty_like(t) for t in out)


# Autograd of the registered operators.


def _attend_autograd(keys: Any, *args: Any) -> Any:
    """Call tfla::attend under autograd; under forward-mode AD compute it in plain PyTorch."""
    if not forward_mode(args[:9]):
        return _call_with_node(_AttendNode, torch.ops.tfla.attend.default, keys, args)
    scale, normalize, normalizer_grad, chunk_size, _, kernel, *rest = args[9:]
    spec = Spec(scale, normalize, normalizer_grad, chunk_size, kernel, *rest)
    return _distinct(differentiable.attend(Inputs(*args[:9]), spec))


def _attend_backward_autograd(keys: Any, *args: Any) -> Any:
    """Call tfla::attend_backward under autograd.

    Raises:
        NotImplementedError: an argument has a tangent, but the forward was computed outside of forward-mode AD.
    """
    if forward_mode(args[:16]):
        raise NotImplementedError(
            "forward-mode AD: this backward is of a forward that was computed outside of it; compute both inside, "
            "as torch.func.jvp(torch.func.grad(f), ...) does"
        )
    return _call_with_node(_AttendBackwardNode, torch.ops.tfla.attend_backward.default, keys, args)


def _call_with_node(node: type[_SingleLevelNode], operator: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Call the operator, and add its node to the graph of autograd if gradients are recorded."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
        with enable_single_level_autograd_function():
            return node.apply(keys, *args)  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _call_below_autograd(operator: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Call the operator below autograd of this level of transforms.

    The forward of a node runs with gradients off. They are turned on again, because outer levels record the call.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *args)


class _SingleLevelNode(_SingleLevelFunction):
    """A node of autograd for one level of torch.func transforms.

    `torch.library.register_autograd` makes no such node under torch.func (pytorch issue 170834).
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        return (ctx._autograd_function_id,)


class _AttendNode(_SingleLevelNode):
    """The node of tfla::attend; its arguments are the dispatcher's keys, then those of the operator."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, ...]:
        tensors, (scale, normalize, normalizer_grad, chunk_size, backend, kernel, _, *rest) = args[:9], args[9:]
        # save = True: a graph that was traced without gradients has False, but a backward follows this call.
        args = (*args[:15], True, *args[16:])
        out = _call_below_autograd(torch.ops.tfla.attend.default, keys, args)
        _save_for_backward(
            ctx, tensors, out, backend, Spec(scale, normalize, normalizer_grad, chunk_size, kernel, True, *rest)
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *_gradients(ctx, *grads[:3]), *[None] * (len(ctx.needs_input_grad) - 10)


class _AttendBackwardNode(_SingleLevelNode):
    """The node of tfla::attend_backward; its derivative is computed by differentiating plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *args: Any) -> tuple[Tensor, ...]:
        scale, normalize, normalizer_grad, chunk_size, _, kernel, *rest = args[16:]
        ctx.spec = _backward_spec(scale, normalize, normalizer_grad, chunk_size, kernel, *rest)
        ctx.save_for_backward(*args[:9], *args[13:16])
        ctx.set_materialize_grads(False)
        return _call_below_autograd(torch.ops.tfla.attend_backward.default, keys, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *tensors, dh, dC, dn = unwrap_dead_wrappers(ctx.saved_tensors)
        found = differentiable.second_gradients(Inputs(*tensors), dh, dC, dn, grads, ctx.spec)
        # h and what the forward stored are functions of the inputs, whose derivatives `found` holds already.
        return None, *found[:8], *[None] * 5, *found[8:], *[None] * (len(ctx.needs_input_grad) - 17)


LIBRARY = torch.library.Library("tfla", "FRAGMENT")


def _register(
    name: str, forward: Callable[..., Any], shapes: Callable[..., Any], autograd: Callable[..., Any],
    batched: Callable[..., Any],
) -> None:  # fmt: skip
    """Define an operator for every device; the annotations of ``forward`` are its schema.

    torch.compile must not trace into what the dispatcher calls, so each function is hidden from it.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", torch._disable_dynamo(forward))
    torch.library.register_fake(name, shapes)
    LIBRARY.impl(name.partition("::")[2], torch._disable_dynamo(autograd), "Autograd", with_keyset=True)
    torch.library.register_vmap(name, torch._disable_dynamo(batched))


_register("tfla::attend", _attend, _attend_shapes, _attend_autograd, batching.attend)
_register(
    "tfla::attend_backward",
    _attend_backward,
    _attend_backward_shapes,
    _attend_backward_autograd,
    batching.attend_backward,
)


# The operators of decoding steps.

STEP_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? i, Tensor f, {}, Tensor? n, Tensor? m, Tensor? lengths"
STEP_OPTIONS = "float scale, str gates, str backend"
torch.library.define(
    "tfla::steps",
    f"({STEP_INPUTS.format('Tensor C')}, {STEP_OPTIONS}, bool final_state, float eps=0.0)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "tfla::steps_",
    f"({STEP_INPUTS.format('Tensor(a!) C')}, {STEP_OPTIONS}, float eps=0.0) -> (Tensor, Tensor, Tensor)",
)
steps, steps_ = torch.ops.tfla.steps.default, torch.ops.tfla.steps_.default


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


def _check_lengths(lengths: Tensor | None, v: Tensor) -> None:
    """Check the values of lengths on a CPU, which a call that is traced cannot read."""
    if lengths is not None and lengths.device.type == "cpu":
        check_values_of_lengths(lengths, v.shape[1])


torch.library.define(
    "tfla::checked_lengths", "(Tensor lengths, SymInt T) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
checked_lengths = torch.ops.tfla.checked_lengths.default


@torch.library.impl("tfla::checked_lengths", "default")
@torch._disable_dynamo
def _(lengths: Tensor, T: int) -> Tensor:
    """Check the values of lengths and return a copy: a traced call puts this check into its graph."""
    check_values_of_lengths(lengths, T)
    return lengths.clone()


@torch.library.register_fake("tfla::checked_lengths")
def _(lengths: Tensor, T: int) -> Tensor:
    return torch.empty_like(lengths)


@torch.library.register_vmap("tfla::checked_lengths")
@torch._disable_dynamo
def _(info: Any, in_dims: Sequence[int | None], lengths: Tensor, T: int) -> tuple[Tensor, int | None]:
    return checked_lengths(lengths, T), in_dims[0]
