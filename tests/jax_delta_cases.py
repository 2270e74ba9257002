"""The problems of delta_cases.py on JAX: the same quantities as there, compared with the same truth and tolerances."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import pytest
import torch
from delta_cases import MODELS, DeltaProblem, gradients, options
from delta_cases import call as torch_call
from jax_cases import Arrays, to_jax, to_torch
from torch import Tensor

import tfla
import tfla.jax


def leaves_of(p: DeltaProblem) -> Arrays:
    """Return everything that has a gradient, by name."""
    return {name: to_jax(x) for name, x in p.leaves.items()}


def call(model: str, leaves: Mapping[str, Any], **given: Any) -> tuple[Any, tfla.jax.State]:
    """Return what the public function of a model returns on these leaves."""
    correct, _, _, before = MODELS[model]
    state = tfla.jax.State(leaves["C"]) if "C" in leaves else None
    given |= {"initial_state": state, "return_state": True}
    qkv = leaves["q"], leaves["k"], leaves["v"]
    if not correct:
        return tfla.jax.linear_attention(*qkv, leaves["log_f"], leaves.get("log_i"), **given)
    given |= options(**{name: leaves.get(name) for name in ("read_key", "A_log", "dt_bias")})
    return tfla.jax.delta_rule(*qkv, leaves.get("beta"), leaves.get("log_f"), read_before_decay=before, **given)


@functools.partial(jax.jit, static_argnames=("model", "given"))
def _quantities(
    model: str, given: tuple[tuple[str, Any], ...], leaves: Arrays, cu_seqlens: Any, dh: Any, dC: Any
) -> Arrays:
    """Return outputs, and gradients of all leaves as "d...", of one problem as one compiled function."""
    more = dict(given) | options(cu_seqlens=cu_seqlens)

    def outputs(leaves: Arrays) -> tuple[Any, Any]:
        h, state = call(model, leaves, **more)
        return h, state.C

    (h, C), pullback = jax.vjp(outputs, leaves)
    (grads,) = pullback((dh.astype(h.dtype), dC.astype(C.dtype)))
    return {"h": h, "C": C} | {f"d{name}": x for name, x in grads.items()}


def solve(p: DeltaProblem, more: Mapping[str, Tensor] | None = None, **given: Any) -> dict[str, Tensor]:
    """Return all quantities of `delta_cases.truth`, computed by JAX; `more` are further leaves."""
    leaves = leaves_of(p) | {name: to_jax(x) for name, x in (more or {}).items()}
    given |= {"scale": p.scale}
    cu_seqlens = None if "cu_seqlens" in given else to_jax(p.x.cu_seqlens)
    found = _quantities(p.model, tuple(sorted(given.items())), leaves, cu_seqlens, to_jax(p.dh), to_jax(p.dC))
    return {name: to_torch(x) for name, x in found.items()}


def of_pytorch(p: DeltaProblem, backend: str) -> dict[str, Tensor]:
    """Return all quantities of `solve`, computed by PyTorch's backend of that name on its GPU, with its own choices."""
    leaves = {name: x.cuda().requires_grad_() for name, x in p.leaves.items()}
    if p.x.cu_seqlens is not None:
        p = replace(p, x=p.x._replace(cu_seqlens=p.x.cu_seqlens.cuda()))
    h, state = torch_call(p, leaves, backend=backend)
    return {name: x.detach().cpu() for name, x in gradients(p, leaves, h, state.C).items()}


def check_bits(p: DeltaProblem, backend: str, kernel: str) -> None:
    """Check that JAX and PyTorch choose this kernel, and that all quantities of `solve` have the same bits."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU here")
    if MODELS[p.model][0]:  # the other models have no operator that explains a call
        names = "q", "k", "v", "beta", "log_f"
        arrays, tensors = leaves_of(p), p.leaves
        told = tfla.jax.explain_delta_rule(*map(arrays.get, names), backend=backend)  # type: ignore[arg-type]
        theirs = tfla.explain_delta_rule(*(tensors[n].cuda() if n in tensors else None for n in names), backend=backend)  # type: ignore[arg-type]
        assert told.kernel == theirs.kernel == kernel
    found = solve(p, backend=backend)
    for name, x in of_pytorch(p, backend).items():
        assert torch.equal(found[name].cpu(), x), name
