"""The registration of a differentiable operator with PyTorch, from the named tuples of its inputs, options and results.

`DifferentiableOperator("attend", ...)` defines

    tfla::attend            the forward
    tfla::attend_backward   its backward, with a derivative of its own

with their schemas, fake kernels, autograd and rules for `torch.vmap`. :mod:`.operators` has the operators.

Plain eager calls skip the dispatcher, whose wrappers of operators written in Python cost more host time than the rest
of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tfla.ops import batching, derivatives, flops
from tfla.ops.autocast import without_autocast
from tfla.ops.dispatch import Plan
from tfla.ops.schema import S, Schema, X
from tfla.ops.transforms import forward_mode, needs_dispatcher

Out = TypeVar("Out", bound=tuple[Any, ...])  # a NamedTuple of results
R = TypeVar("R")  # what a caller gets
Gradients = tuple[Tensor | None, ...]

LIBRARY = torch.library.Library("tfla", "FRAGMENT")


class DifferentiableOperator(Generic[X, S, Out, R]):
    """A function of some tensors with a backward, which backends compute, registered as two operators.

    Calling it with inputs and a plan computes it.

    Args:
        name: the operators are `tfla::NAME` and `tfla::NAME_backward`.
        inputs: the named tuple of the inputs. The first result has the shape and dtype of the field `v`. The last
            field, `cu_seqlens`, has no gradient, all others have one.
        spec: the named tuple of the options. Those named `save` (store what the backward needs) and `final_state` are
            no arguments of the backward.
        outputs: the named tuple of the results of a forward.
        backend_before: the option before which the name of the backend stands in the schemas.
        cotangents: the cotangents of the first results, by name. Only the first one is always given.
        saved: the results that the backward reads, the last of them in the dtype of the accumulators.
        backends: the backends by name. `forward(x, spec)` returns the results, `backward(x, out, *cotangents, spec)`
            gradients, and `forward_replay(x, spec)` the recorded launches of a forward or None.
        check: checks values of inputs that a traced call cannot read.
        shapes: returns empty tensors of the shapes and dtypes of the results, from inputs, backend and options.
        gradients: returns the gradients of all inputs but `cu_seqlens`, in their order, from the inputs and what the
            backward of a backend returned.
        num_read: returns how many of the results a call with these options reads.
        results: returns what the caller gets, from the options and the results that are read.
        differentiable: the forward in plain differentiable PyTorch, for forward-mode AD and second derivatives.
        flops: the formulas of forward and backward for PyTorch's counter, of the shapes of the inputs, the name of the
            backend and the options.
        without_batch: the inputs without a dimension of the batch, apart from `cu_seqlens`.
        stores_whole_batch: whether what a forward with `save` stores for all rows of the batch is one tensor that is
            not divided by rows, from the name of the backend and the options.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: type[X],
        spec: type[S],
        outputs: type[Out],
        backend_before: str,
        cotangents: Sequence[str],
        saved: Sequence[str],
        backends: Mapping[str, Any],
        check: Callable[[X], None],
        shapes: Callable[[X, str, S], tuple[Tensor, ...]],
        gradients: Callable[[X, Any], Gradients],
        num_read: Callable[[S], int],
        results: Callable[[S, Sequence[Tensor]], R],
        differentiable: Callable[[X, S], Out],
        flops: tuple[Callable[[Any, str, S], int], Callable[[Any, str, S], int]],
        without_batch: Sequence[str] = (),
        stores_whole_batch: Callable[[str, S], bool] = lambda backend, spec: False,
    ) -> None:
        self.outputs, self.backends, self.check, self.shapes, self.gradients = (
            outputs,
            backends,
            check,
            shapes,
            gradients,
        )
        self.num_read, self.results, self.differentiable = num_read, results, differentiable
        self.num_cotangents = len(cotangents)
        fields = list(outputs._fields)  # type: ignore[attr-defined]
        self._saved = [fields.index(each) for each in saved]
        # Where each result is among the saved ones; one that is not read may be any of them.
        self._restored = [saved.index(field) if field in saved else 0 for field in fields]
        self.forward_schema = Schema(inputs, spec, backend_before=backend_before, results=len(fields))
        self.num_inputs = self.forward_schema.num_inputs
        self.backward_schema = Schema(
            inputs, spec, backend_before=backend_before, results=self.num_inputs - 1,
            further=dict.fromkeys(saved, False) | {each: j > 0 for j, each in enumerate(cotangents)},
            fixed={"save": True, "final_state": False},
        )  # fmt: skip
        alone = [*without_batch, "cu_seqlens"]
        self.forward = _register(
            name, self.forward_schema, self._forward_kernel, self._forward_shapes, self._forward_autograd, flops[0],
            alone, stores_whole_batch,
        )  # fmt: skip
        self.backward = _register(
            f"{name}_backward", self.backward_schema, self._backward_kernel, self._backward_shapes,
            self._backward_autograd, flops[1], alone, stores_whole_batch,
        )  # fmt: skip

    def __call__(self, x: X, plan: Plan) -> R:
        """Compute the operator as planned, and return what the caller gets."""
        spec = plan.spec
        if plan.use_dispatcher:
            if x[-1] is not None and forward_ad._current_level >= 0 and torch.compiler.is_compiling():
                torch._dynamo.graph_break()  # forward mode reads the offsets
            flops.register()
            out = self.forward(*self.forward_schema.pack(x, (), plan.backend.name, spec))
        else:
            out = _EagerNode.apply(self, plan, *x) if spec.save else self._run_plan(x, plan)
        return self.results(spec, out)

    # What operators and nodes of autograd compute.

    def _run_plan(self, x: X, plan: Plan) -> Out:
        """Replay the recorded forward of the plan, or run that of the backend where there is none."""
        if plan.replay is not None:
            return self.outputs(*plan.replay(x))
        out = self._run_forward(x, plan.backend, plan.spec)
        if plan.record:
            plan.record, plan.replay = False, plan.backend.forward_replay(x, plan.spec)
        return out

    def _run_forward(self, x: X, backend: Any, spec: S) -> Out:
        """Run the forward of a backend."""
        with without_autocast(x[0].device.type):
            return backend.forward(x, spec)

    def _run_backward(
        self, x: X, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None], backend: Any, spec: S
    ) -> list[Tensor | None]:
        """Run the backward of a backend; the gradient of an input that is None is None."""
        out = self.outputs(*[saved[j] for j in self._restored])
        with without_autocast(x[0].device.type):
            found = self.gradients(x, backend.backward(x, out, *cotangents, spec))
            return [None if t is None or d is None else _match(d, t) for d, t in zip(found, x[:-1], strict=True)]

    def save_for_backward(self, ctx: Any, x: X, out: Sequence[Tensor], backend: Any, spec: S) -> None:
        """Save what the backward reads: the inputs and some of the results."""
        ctx.save_for_backward(*x, *[out[j] for j in self._saved])
        ctx.operator, ctx.backend, ctx.spec = self, backend, spec
        ctx.set_materialize_grads(False)

    # The two registered operators: what they compute, their shapes, and their autograd.

    def _forward_kernel(self, *args: Any) -> tuple[Tensor, ...]:
        x, _, backend, spec = self.forward_schema.unpack(args)
        self.check(x)
        return _distinct(self._run_forward(x, self.backends[backend], spec))

    def _forward_shapes(self, *args: Any) -> tuple[Tensor, ...]:
        x, _, backend, spec = self.forward_schema.unpack(args)
        return self.shapes(x, backend, spec)

    def _forward_autograd(self, keys: Any, *args: Any) -> Any:
        """Call the forward under autograd; under forward-mode AD compute it in plain PyTorch."""
        if not forward_mode(args[: self.num_inputs]):
            return _call_with_node(_ForwardNode, self, self.forward, keys, args)
        x, _, _, spec = self.forward_schema.unpack(args)
        return _distinct(self.differentiable(x, spec))

    def _backward_kernel(self, *args: Any) -> tuple[Tensor, ...]:
        x, further, backend, spec = self.backward_schema.unpack(args)
        self.check(x)
        saved, cotangents = further[: len(self._saved)], further[len(self._saved) :]
        found = self._run_backward(x, saved, cotangents, self.backends[backend], spec)  # type: ignore[arg-type]
        return tuple(saved[-1].new_empty(0) if g is None else g for g in found)  # type: ignore[union-attr]

    def _backward_shapes(self, *args: Any) -> tuple[Tensor, ...]:
        last_saved = args[self.num_inputs + len(self._saved) - 1]
        return tuple(
            last_saved.new_empty(0) if t is None else t.new_empty(t.shape) for t in args[: self.num_inputs - 1]
        )

    def _backward_autograd(self, keys: Any, *args: Any) -> Any:
        """Call the backward under autograd.

        Raises:
            NotImplementedError: an argument has a tangent, but the forward was computed outside of forward-mode AD.
        """
        if forward_mode(args[: self.backward_schema.num_tensors]):
            raise NotImplementedError(
                "forward-mode AD: this backward is of a forward that was computed outside of it; compute both inside, "
                "as torch.func.jvp(torch.func.grad(f), ...) does"
            )
        return _call_with_node(_BackwardNode, self, self.backward, keys, args)


def _register(
    name: str, schema: Schema[Any, Any], kernel: Callable[..., Any], shapes: Callable[..., Any],
    autograd: Callable[..., Any], formula: Callable[[Any, str, Any], int], without_batch: Sequence[str],
    stores_whole_batch: Callable[[str, Any], bool],
) -> Any:  # fmt: skip
    """Define an operator for every device and return it."""
    qualified = f"tfla::{name}"
    torch.library.define(qualified, schema.text, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", _hidden(kernel))
    torch.library.register_fake(qualified, shapes)
    LIBRARY.impl(name, _hidden(autograd), "Autograd", with_keyset=True)
    packet = getattr(torch.ops.tfla, name)
    operator = packet.default
    flops.add(packet, schema, formula)
    alone = [schema.inputs._fields.index(field) for field in without_batch]

    def batched(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        _, _, backend, spec = schema.unpack(args)
        one_by_one = spec.save and stores_whole_batch(backend, spec)
        return batching.call(operator, info.batch_size, in_dims, args, alone, one_by_one)

    torch.library.register_vmap(qualified, _hidden(batched))
    return operator


def _hidden(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace into, as it must not into what the dispatcher calls."""

    @torch._disable_dynamo
    def hidden(*args: Any) -> Any:  # a bound method cannot be marked
        return fn(*args)

    return hidden


def _match(d: Tensor, t: Tensor) -> Tensor:
    """Return a gradient in the dtype of t and dense, without a copy where it is so already."""
    return d if d.dtype == t.dtype and d.is_contiguous() else d.to(t.dtype).contiguous()


def _distinct(out: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return dense results, as tracing predicts them, of which no two are the same tensor.

    PyTorch does not allow that of an operator, but results that are left out may be one empty tensor. Final states may
    be rows of the states of all segments.
    """
    return tuple(t.contiguous() if t.numel() else torch.empty_like(t) for t in out)


# Nodes of autograd.


def _gradients(ctx: Any, *grads: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of all inputs from the cotangents of the first results."""
    operator, spec = ctx.operator, ctx.spec
    every = unwrap_dead_wrappers(ctx.saved_tensors)  # once: activation checkpointing recomputes them at each access
    x, saved = operator.forward_schema.inputs(*every[: operator.num_inputs]), every[operator.num_inputs :]
    given = [*grads, *[None] * (operator.num_cotangents - len(grads))]
    if given[0] is None:
        given[0] = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    # `is_grads_batched` of PyTorch's autograd maps over cotangents by an older vmap, which calls registered operators.
    mapped = any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in given)
    # A backward that is itself recorded or traced is the registered operator, which has a derivative.
    if mapped or torch.is_grad_enabled() or needs_dispatcher((*x, *given)):
        if not mapped and forward_mode((*x, *given)):
            return [*derivatives.gradients(operator.differentiable, x, given, spec), None]
        flops.register()
        args = operator.backward_schema.pack(x, (*saved, *given), ctx.backend.name, spec)
        return [None if t is None else g for t, g in zip(x, (*operator.backward(*args), None), strict=True)]
    return [*operator._run_backward(x, saved, given, ctx.backend, spec), None]


class _EagerNode(torch.autograd.Function):
    """The operator for plain eager calls, which skip the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, operator: DifferentiableOperator[Any, Any, Any, Any], plan: Plan, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        x = operator.forward_schema.inputs(*tensors)
        out = operator._run_plan(x, plan)
        operator.save_for_backward(ctx, x, out, plan.backend, plan.spec)
        return out[: operator.num_read(plan.spec)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *_gradients(ctx, *grads[: ctx.operator.num_cotangents])


class _SingleLevelNode(_SingleLevelFunction):
    """A node of autograd for one level of torch.func transforms.

    `torch.library.register_autograd` makes no such node under torch.func (pytorch issue 170834). Its arguments are the
    operator, the dispatcher's keys, then the arguments of the registered operator.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        return (ctx._autograd_function_id,)


class _ForwardNode(_SingleLevelNode):
    """The node of a forward."""

    @staticmethod
    def forward(
        ctx: Any, operator: DifferentiableOperator[Any, Any, Any, Any], keys: Any, *args: Any
    ) -> tuple[Tensor, ...]:
        # A graph that was traced without gradients has save = False, but a backward follows this call.
        args = operator.forward_schema.replace(args, "save", True)
        out: tuple[Tensor, ...] = _call_below_autograd(operator.forward, keys, args)
        x, _, backend, spec = operator.forward_schema.unpack(args)
        operator.save_for_backward(ctx, x, out, operator.backends[backend], spec)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = _gradients(ctx, *grads[: ctx.operator.num_cotangents])
        return None, None, *found, *[None] * (len(ctx.needs_input_grad) - 2 - len(found))


class _BackwardNode(_SingleLevelNode):
    """The node of a backward; its derivative is computed by differentiating plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, operator: DifferentiableOperator[Any, Any, Any, Any], keys: Any, *args: Any
    ) -> tuple[Tensor, ...]:
        x, further, _, ctx.spec = operator.backward_schema.unpack(args)
        ctx.operator = operator
        ctx.save_for_backward(*x, *further[-operator.num_cotangents :])
        ctx.set_materialize_grads(False)
        return _call_below_autograd(operator.backward, keys, args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        operator = ctx.operator
        every = unwrap_dead_wrappers(ctx.saved_tensors)
        x, cotangents = operator.forward_schema.inputs(*every[: operator.num_inputs]), every[operator.num_inputs :]
        found = derivatives.second_gradients(operator.differentiable, x, cotangents, grads, ctx.spec)
        # What the forward stored is a function of the inputs, whose derivatives `found` holds already.
        stored = [None] * (operator.backward_schema.num_tensors - len(every) + 1)  # and that of cu_seqlens
        of_x, of_cotangents = found[: operator.num_inputs - 1], found[operator.num_inputs - 1 :]
        gradients = None, None, *of_x, *stored, *of_cotangents
        return *gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))


def _call_with_node(
    node: type[_SingleLevelNode], operator: DifferentiableOperator[Any, Any, Any, Any], registered: Any, keys: Any,
    args: tuple[Any, ...],
) -> Any:  # fmt: skip
    """Call a registered operator, and add its node to the graph of autograd if gradients are recorded."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
        with enable_single_level_autograd_function():
            return node.apply(operator, keys, *args)  # type: ignore[attr-defined]
    with torch._C._AutoDispatchBelowAutograd():
        return registered.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _call_below_autograd(registered: Any, keys: Any, args: tuple[Any, ...]) -> Any:
    """Call a registered operator below autograd of this level of transforms.

    The forward of a node runs with gradients off. They are turned on again, because outer levels record the call.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return registered.redispatch(keys & torch._C._after_autograd_keyset, *args)
