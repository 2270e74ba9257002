"""The inputs of mlstm_kernels' functions, with heads before time, and the comparison of two such functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from cases import TOLERANCE, error
from torch import Tensor

B, H, S, K, V = 2, 3, 64, 8, 6
Tensors = dict[str, Tensor]


def inputs(S: int = S, i_mean: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return q, k (B, H, S, K), v (B, H, S, V) and the pre-activations i, f (B, H, S), all with gradients."""
    torch.manual_seed(0)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "i": (), "f": ()}
    x = {name: torch.randn(B, H, S, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    x["i"], x["f"] = x["i"] + i_mean, x["f"] + 2
    return {name: t.to(dtype).requires_grad_() for name, t in x.items()}


def states(dtype: torch.dtype = torch.float32) -> Tensors:
    """Return the initial states c (B, H, K, V), n (B, H, K) and m (B, H, 1), all with gradients."""
    torch.manual_seed(1)
    shapes = {"c_initial": (K, V), "n_initial": (K,), "m_initial": (1,)}
    return {name: torch.randn(B, H, *shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def flat(result: Any) -> list[Tensor]:
    """Return the tensors in a kernel's result, h or (h, states)."""
    return [result] if isinstance(result, Tensor) else [result[0], *result[1]]


def agree(run: Any, original: Any, given: Mapping[str, Any], cotangents_of_states: bool = True, **options: Any) -> None:
    """Compare all results of two functions, and the gradients of all inputs from random cotangents.

    Args:
        run: the function to test.
        original: the function of mlstm_kernels.
        given: the tensors by name.
        cotangents_of_states: whether the last states have cotangents too. Stabilized by m, states are of the size of 1.
        options: the other arguments of both functions.
    """
    leaves = {name: t for name, t in given.items() if t.requires_grad}
    found, expected = (flat(fn(**given, **options)) for fn in (run, original))
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert found[0].dtype == expected[0].dtype
    allowed = TOLERANCE[found[0].dtype]
    for ours_, theirs_ in zip(found, expected, strict=True):
        assert error(ours_, theirs_) <= allowed
    chosen = range(len(found) if cotangents_of_states else 1)
    cotangents = [torch.randn_like(expected[at]) for at in chosen]
    at = {"inputs": list(leaves.values()), "allow_unused": True, "materialize_grads": True}
    grads = [torch.autograd.grad([out[n] for n in chosen], grad_outputs=cotangents, **at) for out in (found, expected)]
    for name, ours_, theirs_ in zip(leaves, *grads, strict=True):
        assert error(ours_, theirs_) <= allowed, name
