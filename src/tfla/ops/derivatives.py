"""First and second derivatives of an operator, by differentiating its forward in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Any, Any], Sequence[Tensor]]
Found = tuple[Tensor | None, ...]


def _spread(names: Sequence[int], tensors: Sequence[Tensor], size: int) -> list[Tensor | None]:
    """Return a list of the given size with tensors at the given indices and None elsewhere."""
    found: list[Tensor | None] = [None] * size
    for j, t in zip(names, tensors, strict=True):
        found[j] = t
    return found


def _present(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the indices of the tensors that are not None."""
    return [j for j, t in enumerate(tensors) if t is not None]


def gradients(forward: Forward, x: Any, cotangents: Sequence[Tensor | None], spec: Any) -> Found:
    """Compute the backward by differentiating the forward, so that every transform composes with it.

    Args:
        forward: a differentiable function of inputs and options.
        x: the named tuple of the inputs; its last one has no gradient.
        cotangents: those of the first results of the forward; the first one is not None.
        spec: the options, with `save` and `final_state`.

    Returns:
        the gradients of all inputs but the last one; None for an input that is None.
    """
    *tensors, last = x
    given, read = _present(tensors), _present(cotangents)
    spec = spec._replace(save=False, final_state=len(read) > 1)

    def outputs(*present: Tensor) -> tuple[Tensor, ...]:
        out = forward(type(x)(*_spread(given, present, len(tensors)), last), spec)
        return tuple(out[j] for j in read)

    pull_back = torch.func.vjp(outputs, *(tensors[j] for j in given))[1]
    return tuple(_spread(given, pull_back(tuple(cotangents[j] for j in read)), len(tensors)))


def recorded_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a function's inputs with their graph, for a backward that is differentiated in turn.

    Args:
        function: a function of the inputs, of operations that autograd knows.
        inputs: the inputs; two of them may be the same tensor, or one computed from another.
        dy: the cotangent of the result.

    Returns:
        a gradient for each input that requires one, and None for the others.
    """
    # Gradients of views: those of an input itself would contain what reaches it through the others.
    views = [t if t is None or not t.requires_grad else t.view_as(t) for t in inputs]
    wanted = [t for t in views if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(function(*views), wanted, dy, create_graph=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in views)


def second_gradients(
    forward: Forward,
    x: Any,
    cotangents: Sequence[Tensor | None],
    second_cotangents: Sequence[Tensor | None],
    spec: Any,
) -> Found:
    """Compute the gradients of :func:`gradients`.

    Args:
        forward, x, cotangents, spec: as in :func:`gradients`.
        second_cotangents: the cotangents of the gradients.

    Returns:
        the gradients of all inputs but the last one, then those of the cotangents.
    """
    *inputs, last = x
    tensors = *inputs, *cotangents
    given = _present(tensors)
    read = [j for j in _present(second_cotangents) if x[j] is not None]
    if not read:
        return (None,) * len(tensors)

    def outputs(*present: Tensor) -> tuple[Tensor, ...]:
        t = _spread(given, present, len(tensors))
        found = gradients(forward, type(x)(*t[: len(inputs)], last), t[len(inputs) :], spec)
        return tuple(g for j in read if (g := found[j]) is not None)

    pull_back = torch.func.vjp(outputs, *(tensors[j] for j in given))[1]
    return tuple(_spread(given, pull_back(tuple(second_cotangents[j] for j in read)), len(tensors)))
