"""Differentiated functions over the devices of a mesh keep no arrays without elements: XLA crashes on them on GPUs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import INTERPRETED
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax_plans import MARKS, plans_run

import tfla.jax

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


def of_kernels(test: Any) -> Any:
    """Mark a test of kernels as those are that run plans."""
    return functools.reduce(lambda test, mark: mark(test), MARKS, test)


RULES = "exp", "sigmoid", "plain", "normalized", "delta"
T = 128  # steps of each device


def run(rule: str, options: dict[str, Any], x: tuple[Any, ...], state: Any) -> Any:
    """Return the results of an operator for q, k, v, two gates and an initial state."""
    q, k, v, i, f = x
    options = options | {"initial_state": state, "return_state": state is not None}
    if rule == "delta":
        return tfla.jax.delta_rule(q, k, v, jax.nn.sigmoid(i), jax.nn.log_sigmoid(f), **options)
    if rule in ("plain", "normalized"):
        log_f = jax.nn.log_sigmoid(f)
        return tfla.jax.linear_attention(q, k, v, log_f, None, normalize=rule == "normalized", **options)
    return tfla.jax.mlstm(q, k, v, i, f, input_gate=rule, **options)


def inner_maps(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of all `shard_map` in a jaxpr and in what it contains."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from inner_maps(inner)


def check(rule: str, backend: str, divided: bool, states: bool, packed: bool, dtype: Any = jnp.float32) -> None:
    """Check what goes into and out of the forward and the backward of an operator in a `shard_map`.

    Args:
        rule: the operator.
        backend: the backend.
        divided: whether each sequence is divided over the devices.
        states: whether there are an initial and a final state.
        packed: whether there are two packed sequences, of each device where they are not divided.
        dtype: the dtype of q, k and v.
    """
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    shape = (1, 2 * T, 2) if divided or packed else (2, T, 2)
    part = P(None, "x") if divided or packed else P("x")
    x = *[jnp.ones((*shape, 16), dtype)] * 3, *[jnp.ones(shape, jnp.float32)] * 2
    state = tfla.jax.State.zeros(1 + packed, 2, 16, 16, normalize=rule in ("exp", "normalized")) if states else None
    options: dict[str, Any] = {"backend": backend, "chunk_size": 32}
    if divided:
        options["context_parallel"] = "x"
    if packed:
        options["cu_seqlens"] = jnp.array([0, 30, T * (1 + divided)])

    def one(x: Any, state: Any) -> Any:
        return sum(jnp.sin(t).sum() for t in jax.tree.leaves(run(rule, options, x, state)))[None]

    whole = jax.shard_map(one, mesh=mesh, in_specs=(part, P()), out_specs=P("x"), check_vma=not packed)
    traced = jax.jit(jax.grad(lambda x, state: whole(x, state).sum(), (0, 1) if states else 0)).trace(x, state)
    maps = list(inner_maps(traced.jaxpr.jaxpr))
    assert len(maps) >= 2  # a forward and a backward
    assert not [t.aval for e in maps for t in (*e.invars, *e.outvars) if 0 in t.aval.shape]


def cases(*rules: str) -> list[tuple[str, bool, bool, bool]]:
    """Return all cases that the operators take: the delta rule divides no packed sequences with states."""
    flags = list(itertools.product((False, True), repeat=3))
    return [(rule, *each) for rule in rules for each in flags if rule != "delta" or not all(each)]


@pytest.mark.parametrize(
    ("rule", "divided", "states", "packed"), cases("exp", "sigmoid", "plain", "normalized", "delta")
)
def test_chunkwise(rule: str, divided: bool, states: bool, packed: bool) -> None:
    check(rule, "chunkwise", divided, states, packed)


@of_kernels
@pytest.mark.parametrize(("rule", "divided", "states", "packed"), cases("exp", "sigmoid"))
def test_kernels(rule: str, divided: bool, states: bool, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with plans_run(monkeypatch):
        check(rule, "triton", divided, states, packed)


@of_kernels
def test_kernels_of_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    with plans_run(monkeypatch):
        check("delta", "triton", False, False, False, jnp.float32 if INTERPRETED else jnp.bfloat16)
