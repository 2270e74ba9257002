"""Checkpoints of functions whose arguments and results have tensors inside of tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


def checkpointed(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args), which the backward computes again.

    :func:`torch.utils.checkpoint.checkpoint` with ``use_reentrant=True`` has gradients of the arguments and the results
    that are tensors, not of tensors inside of them, so that it is given and returns each of these.

    Args:
        checkpoint: the checkpoint, a function of a function and its arguments.
        function: the function.
        args: its arguments, tensors or trees of them.
    """
    leaves, tree = tree_flatten(args)
    found: list[TreeSpec] = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        """Return the leaves of the results from those of the arguments."""
        results, results_tree = tree_flatten(function(*tree_unflatten(leaves, tree)))
        found[:] = [results_tree]
        return tuple(results)

    return tree_unflatten(checkpoint(flat, *leaves), found[0])
