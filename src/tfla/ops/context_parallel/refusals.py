"""Errors of the arguments of one process, of which the other ones learn, in eager calls and in traced ones.

    tfla::context_check    compares the parts of all processes when a graph runs, for layers
    tfla::context_refuse   tells the other processes, when a graph runs, that this one refuses its arguments, and raises

A traced call that raised at once would leave the other processes in the exchange of their graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.ops.context_parallel.cuts import Placement
from tfla.ops.context_parallel.parts import check_parts, tell_refusal
from tfla.ops.state import State
from tfla.ops.transforms import is_distributed

_KINDS = {kind.__name__: kind for kind in (TypeError, ValueError, NotImplementedError)}
_PLACED = "int rank, int size, str order, SymInt[] lengths, str group"

for _schema in (
    f"context_check(Tensor x, Tensor? cu_seqlens, bool equal, {_PLACED}) -> Tensor",
    "context_refuse(Tensor x, Tensor? cu_seqlens, SymInt[] shape, str kind, str message, bool compare, SymInt writes, "
    f"{_PLACED}) -> Tensor",
):
    torch.library.define(f"tfla::{_schema.partition('(')[0]}", "(" + _schema.partition("(")[2],
                         tags=(torch.Tag.pt2_compliant_tag,))  # fmt: skip


def _placement(placed: tuple[Any, ...]) -> tuple[Placement, str]:
    """Return the placement and the name of the group of the last arguments of an operator."""
    rank, size, order, lengths, group = placed
    return Placement(rank, size, order, tuple(lengths)), group


@torch.library.impl("tfla::context_check", "default")
@torch._disable_dynamo
def _(x: Tensor, cu_seqlens: Tensor | None, equal: bool, *placed: Any) -> Tensor:
    check_parts(*_placement(placed), x, cu_seqlens, name="x", equal=equal)
    return x.new_zeros(())


@torch.library.register_fake("tfla::context_check")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(())


@torch.library.impl("tfla::context_refuse", "default")
@torch._disable_dynamo
def _(
    x: Tensor, cu_seqlens: Tensor | None, shape: Sequence[int], kind: str, message: str, compare: bool, writes: int,
    *placed: Any,
) -> Tensor:  # fmt: skip
    placement, group = _placement(placed)
    if compare:
        check_parts(placement, group, x, cu_seqlens, writes=writes)
    else:
        tell_refusal(placement, group, (x,), None)
    raise _KINDS.get(kind, RuntimeError)(message)


@torch.library.register_fake("tfla::context_refuse")
def _(x: Tensor, cu_seqlens: Tensor | None, shape: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty(shape)


def _no_gradient(ctx: Any, grad: Tensor) -> Any:
    """Return the gradients of the arguments: a check has none, and a call that is refused never returns."""
    return (None,) * ctx.arguments


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = len(inputs)


for _name in ("tfla::context_check", "tfla::context_refuse"):
    torch.library.register_autograd(_name, _no_gradient, setup_context=_setup_context)


def checked(placement: Placement, group: str, x: Tensor, cu_seqlens: Tensor | None, equal: bool) -> Tensor:
    """Return x (B, T, ...) of a traced layer, whose graph runs :func:`.parts.check_parts` on it before it is read."""
    if not is_distributed(x):
        return x + torch.ops.tfla.context_check(x, cu_seqlens, equal, *placement, group)
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = x.device_mesh  # type: ignore[attr-defined]
    like = x.to_local().new_empty(x.shape)  # type: ignore[attr-defined]
    zero = torch.ops.tfla.context_check(like, cu_seqlens, equal, *placement, group)
    return x + DTensor.from_local(zero, mesh, [Replicate()] * mesh.ndim, run_check=False)


def refuse(
    error: Exception,
    again: Callable[[], object],
    placement: Placement,
    group: str,
    given: Sequence[object],
    cu_seqlens: Tensor | None,
    shapes: Sequence[Sequence[int]],
    *,
    compare: bool = False,
    writes: int = 1,
) -> list[Tensor]:
    """Tell the other processes that this one refuses its arguments, and raise the error.

    Args:
        error: the error that names the argument.
        again: the function that has raised it, without arguments.
        placement: the order of spans; its lengths count steps.
        group: the name of the process group.
        given: the arguments of the call, of which any may be wrong.
        cu_seqlens: the offsets of packed sequences.
        shapes: those of the results of the call.
        compare: the error is one of the parts, which all processes of a traced call compare instead.
        writes: how many steps of the first tensor are one step.

    Returns:
        Tensors of these shapes if the call is traced; the graph raises the error when it runs.
    """
    tensors = [x for x in given if isinstance(x, Tensor)]
    if not torch.compiler.is_compiling() or not tensors or not shapes:
        tell_refusal(placement, group, tuple(given), cu_seqlens)
        raise error
    # Dynamo formats no message with symbolic sizes, so that the error is found again with those of this call.
    for x in tensors:
        for size in x.shape:
            len(range(size))  # makes the size a constant
    try:
        again()
    except Exception as found:
        error = found
    first, offsets = tensors[0], cu_seqlens if compare else None
    kind, message = type(error).__name__, str(error)
    return [
        torch.ops.tfla.context_refuse(first, offsets, list(shape), kind, message, compare, writes, *placement, group)
        for shape in shapes
    ]


def refuse_call(
    error: Exception,
    again: Callable[[], object],
    placement: Placement,
    group: str,
    tensors: Sequence[object],
    cu_seqlens: Tensor | None,
    return_state: bool,
    normalize: bool,
    *,
    compare: bool = False,
    writes: int = 1,
) -> Tensor | tuple[Tensor, State]:
    """Run :func:`refuse` for a call of an operator, and return results of the shapes that those of the call have.

    Args:
        error, again, placement, group, cu_seqlens, compare, writes: as there.
        tensors: q, k, v and further arguments.
        return_state, normalize: whether the call returns a state, and whether that has n and m.
    """
    q, v = tensors[0], tensors[2]
    shapes: list[Sequence[int]] = []
    if isinstance(q, Tensor) and isinstance(v, Tensor) and q.dim() == v.dim() == 4:
        (B, T, _, K), (H, V) = q.shape, v.shape[2:]
        sequences = cu_seqlens.shape[0] - 1 if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 else B
        shapes = [(B, T, H, V), (sequences, H, K, V), (sequences, H, K), (sequences, H)]
        shapes = shapes[: 1 if not return_state else 4 if normalize else 2]
    found = refuse(error, again, placement, group, tensors, cu_seqlens, shapes, compare=compare, writes=writes)
    return (found[0], State(*found[1:])) if return_state else found[0]
