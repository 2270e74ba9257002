"""Triton's decoding kernel of the delta rule from JAX computes what the steps in plain JAX do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from delta_cases import delta_problem
from interpreted_plan import InterpretedPlan
from jax_delta_cases import leaves_of
from jax_plans import MARKS, plans_run

import tfla.jax

pytestmark = MARKS
Arrays = dict[str, Any]
SHAPE: dict[str, Any] = {"B": 2, "T": 3, "Hq": 1, "H": 2, "K": 16, "V": 24, "dtype": torch.float32}


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with plans_run(monkeypatch):
        InterpretedPlan.ran.clear()
        yield


def arrays(model: str, **changed: Any) -> Arrays:
    x = leaves_of(delta_problem(model, **SHAPE | changed))
    return x | {"state": tfla.jax.State(x.pop("C"))}


def steps(x: Arrays, **options: Any) -> Any:
    if "beta" in x:
        return tfla.jax.delta_rule_steps(**x, **options)
    return tfla.jax.linear_attention_steps(**x, **options)


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize(("model", "T"), [("deltanet", 1), ("gdn", 3), ("kda", 1), ("kda", 3), ("gla", 3)])
def test_models(model: str, T: int) -> None:
    x = arrays(model, T=T)
    close(steps(x), steps(x, backend="chunkwise"))
    lengths = jnp.array([0, T], jnp.int32)
    close(steps(x, lengths=lengths), steps(x, lengths=lengths, backend="chunkwise"))
    close(steps(x, return_state=False), steps(x, return_state=False, backend="chunkwise"))
    assert set(InterpretedPlan.ran) <= {"delta_steps"}


ACTIVATIONS: Arrays = {"normalize_qk": True, "beta_activation": "2sigmoid", "gate_activation": "softplus"}


def test_a_donated_state_activations_gradients_and_vmap() -> None:
    """The kernel applies the activations; A_log and dt_bias are no rows of a batch."""
    x = arrays("kda") | {"A_log": jnp.array([0.3, -0.2], jnp.float32), "dt_bias": jnp.ones((2, 16), jnp.float32)}
    expected = steps(x, backend="chunkwise", **ACTIVATIONS)
    close(steps(x, **ACTIVATIONS), expected)  # what is not donated stays as it is
    donated = tfla.jax.State(jnp.array(x["state"].C))
    rest = {name: a for name, a in x.items() if name != "state"}
    run = jax.jit(lambda state, x: steps(x | {"state": state}, **ACTIVATIONS), donate_argnums=0)
    close(run(donated, rest), expected)

    def loss(x: Arrays, backend: Any = None) -> Any:
        h, state = steps(x, backend=backend, **ACTIVATIONS)
        return (h**2).sum() + (state.C**2).sum()

    close(jax.grad(loss)(x), jax.grad(loss)(x, "chunkwise"))

    def alone(x: Arrays, rest: Arrays) -> Any:
        return steps(x | rest, **ACTIVATIONS)

    shared = {name: x.pop(name) for name in ("A_log", "dt_bias")}
    every = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x)
    twice = alone(jax.tree.map(lambda a: 2 * a, x), shared)
    close(jax.tree.map(lambda a: a[1], jax.vmap(alone, (0, None))(every, shared)), twice)
    both = jax.tree.map(lambda a: jnp.stack([a, a]), shared)
    close(jax.tree.map(lambda a: a[1], jax.vmap(alone)(every, both)), twice)
