"""The rule of the operators for torch.vmap: the mapped dimension becomes part of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _first(t: Tensor, dim: int | None, size: int) -> Tensor:
    """Return t with the mapped dimension first, repeated where t is not mapped."""
    return t.movedim(dim, 0) if dim is not None else t.expand(size, *t.shape)


def _split(t: Tensor, size: int) -> Tensor:
    """Return (size B, ...) as (size, B, ...)."""
    return t.unflatten(0, (size, t.shape[0] // size))


def call(
    operator: Any, size: int, in_dims: Sequence[int | None], args: Sequence[Any], without_batch: Sequence[int],
    one_by_one: bool,
) -> Any:  # fmt: skip
    """Call an operator on a mapped dimension that is merged into the batch, the first dimension of tensors.

    Where one of the arguments at the positions `without_batch` is given, that is not possible: it has no dimension of
    the batch, or, as cu_seqlens, it requires a batch of 1. The operator is then called once for each index of the
    mapped dimension, as with `one_by_one`.

    Args:
        operator: the registered operator, which returns a tuple of tensors.
        size: the size of the mapped dimension.
        in_dims: the mapped dimension of each argument; None: the argument is not mapped.
        args: the arguments; those that are not tensors are options.
        without_batch: positions of arguments.
        one_by_one: whether tensors that a forward stores have no dimension of the batch.

    Returns:
        The results, and the mapped dimension of each; None for an empty one, which stands for no result.
    """
    args = [_first(t, dim, size) if isinstance(t, Tensor) else t for t, dim in zip(args, in_dims, strict=True)]
    if one_by_one or any(args[j] is not None for j in without_batch):
        calls = [operator(*(t[j].contiguous() if isinstance(t, Tensor) else t for t in args)) for j in range(size)]
        found = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return found, (0,) * len(found)
    # Backwards read what a forward stored as dense tensors, but a tensor that is not mapped is expanded with stride 0.
    found = operator(*(t.flatten(0, 1).contiguous() if isinstance(t, Tensor) else t for t in args))
    empty = [t.dim() == 1 and t.shape[0] == 0 for t in found]
    mapped = tuple(t if none else _split(t, size) for t, none in zip(found, empty, strict=True))
    return mapped, tuple(None if none else 0 for none in empty)
