"""The operators of `tfla.jax` on tensors of PyTorch, with gradients, so that tests of PyTorch's operators call them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch
from jax_cases import to_jax, to_torch
from torch import Tensor

import tfla
import tfla.jax

Arrays = dict[str, Any]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(name: str, options: tuple[tuple[str, Any], ...], arrays: Arrays, cu_seqlens: Any) -> Any:
    """Return h, C, n and m, and the function that computes gradients from their cotangents."""

    def outputs(arrays: Arrays) -> Any:
        arrays = dict(arrays)
        state = {part: arrays.pop(f"state.{part}", None) for part in ("C", "n", "m")}
        initial = None if state["C"] is None else tfla.jax.State(**state)
        run = getattr(tfla.jax, name)
        h, last = run(**arrays, **dict(options), initial_state=initial, return_state=True, cu_seqlens=cu_seqlens)
        return h, *last

    return jax.vjp(outputs, arrays)


@jax.jit
def _backward(pullback: Any, cotangents: Any) -> Arrays:
    """Return the gradients."""
    (found,) = pullback(cotangents)
    return found


class _Call(torch.autograd.Function):
    """One call, whose gradients are those of JAX."""

    @staticmethod
    def forward(ctx: Any, call: Any, names: tuple[str, ...], *tensors: Tensor) -> Any:
        found, ctx.pullback = call(dict(zip(names, map(to_jax, tensors), strict=True)))
        ctx.names = names
        ctx.device = tensors[0].device
        results = [None if x is None else to_torch(x).to(ctx.device) for x in found]
        if results[3] is not None:
            ctx.mark_non_differentiable(results[3])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        found = _backward(ctx.pullback, tuple(map(to_jax, cotangents)))
        return None, None, *(to_torch(found[name]).to(ctx.device) for name in ctx.names)


def _run(name: str, arrays: dict[str, Tensor | None], options: dict[str, Any]) -> Any:
    """Compute a call by JAX."""
    state, return_state = options.pop("initial_state", None), options.pop("return_state", False)
    cu_seqlens = to_jax(options.pop("cu_seqlens", None))
    if options.get("store_dtype") is not None:
        options["store_dtype"] = str(options["store_dtype"]).removeprefix("torch.")
    if state is not None:
        arrays |= {f"state.{part}": x for part, x in state._asdict().items()}
    there = {name: x for name, x in arrays.items() if x is not None}
    call = functools.partial(_forward, name, tuple(sorted(options.items())), cu_seqlens=cu_seqlens)
    h, *last = _Call.apply(call, tuple(there), *there.values())
    return (h, tfla.State(*last)) if return_state else h


class JaxOperators:
    """What stands for the module `tfla` in tests: the operators are those of JAX, all else is PyTorch's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tfla, name)

    def mlstm(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, **options: Any) -> Any:
        """Compute `tfla.jax.mlstm`."""
        return _run("mlstm", {"q": q, "k": k, "v": v, "i": i, "f": f}, options)

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None = None, **options: Any
    ) -> Any:
        """Compute `tfla.jax.linear_attention`."""
        return _run("linear_attention", {"q": q, "k": k, "v": v, "log_f": log_f, "log_i": log_i}, options)
