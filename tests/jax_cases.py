"""The problems of cases.py on JAX: the same quantities as there, compared with the same truth and tolerances."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from cases import Problem, truth_m
from torch import Tensor

import tfla.jax

Arrays = dict[str, Any]
SHAPE: dict[str, Any] = {"T": 100, "Hq": 1, "H": 2}  # of most tests, so that they share compiled functions


def to_jax(x: Tensor | None) -> Any:
    """Return a tensor as an array of JAX of its dtype."""
    if x is None:
        return None
    x = x.detach().cpu()
    values = x.float().numpy() if x.is_floating_point() and x.element_size() <= 2 else x.numpy()
    return jnp.asarray(values).astype(str(x.dtype).removeprefix("torch."))


def to_torch(x: Any) -> Tensor:
    """Return an array of JAX as a tensor of its dtype."""
    dtype = getattr(torch, str(x.dtype))
    return torch.from_numpy(np.array(x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x)).to(dtype)


def leaves_of(p: Problem) -> Arrays:
    """Return everything that has a gradient, by name."""
    return {name: to_jax(x) for name, x in p.leaves.items()}


def call(form: str, leaves: Mapping[str, Any], **options: Any) -> tuple[Any, tfla.jax.State]:
    """Return what the public function returns on these leaves."""
    state = tfla.jax.State(leaves["C0"], leaves.get("n0"), leaves.get("m0")) if "C0" in leaves else None
    options = {"initial_state": state, "return_state": True} | options
    qkv = leaves["q"], leaves["k"], leaves["v"]
    if form in ("plain", "normalized"):
        return tfla.jax.linear_attention(*qkv, leaves["f"], leaves.get("i"), normalize=form == "normalized", **options)
    return tfla.jax.mlstm(*qkv, leaves["i"], leaves["f"], input_gate=form, **options)


@functools.partial(jax.jit, static_argnames=("form", "options"))
def _quantities(
    form: str, options: tuple[tuple[str, Any], ...], leaves: Arrays, cu_seqlens: Any, m: Any, cotangents: Arrays
) -> Arrays:
    """Return outputs, and gradients of all leaves as "d...", of one problem as one compiled function."""
    given = dict(options)
    if cu_seqlens is not None:
        given["cu_seqlens"] = cu_seqlens

    def outputs(leaves: Arrays) -> Arrays:
        h, state = call(form, leaves, **given)
        found = {"h": h, "C": state.C.astype(jnp.float64)}
        if state.n is not None:
            weight = jnp.exp(jax.lax.stop_gradient(state.m).astype(jnp.float64) - m)
            found |= {"C": state.C * weight[..., None, None], "n": state.n * weight[..., None]}
        return found

    found, pullback = jax.vjp(outputs, leaves)
    (grads,) = pullback({name: cotangents[name].astype(x.dtype) for name, x in found.items()})
    return found | {f"d{name}": x for name, x in grads.items()}


def solve(p: Problem, **options: Any) -> dict[str, Tensor]:
    """Return all quantities of `cases.gradients`, computed by JAX."""
    options |= {"scale": p.scale, "normalizer_grad": p.normalizer_grad}
    cotangents = {"h": to_jax(p.dh), "C": to_jax(p.dstate.C)}
    if p.dstate.n is not None:
        cotangents["n"] = to_jax(p.dstate.n)
    cu_seqlens = None if "cu_seqlens" in options else to_jax(p.cu_seqlens)
    found = _quantities(
        p.form, tuple(sorted(options.items())), leaves_of(p), cu_seqlens, to_jax(truth_m(p)), cotangents
    )
    return {name: to_torch(x) for name, x in found.items()}
