"""Mesh axes of explicit sharding: all operators and steps run, and results are divided as v is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tfla.jax
from tfla.jax import State

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
B, T, H, K, V = 2, 8, 2, 4, 6


def gates(f: Any, k: Any) -> Any:
    return jax.nn.log_sigmoid(f)[..., None] * jnp.cos(k)


def several_writes(q: Any, k: Any, v: Any, i: Any, f: Any) -> Any:
    return tfla.jax.delta_product(q[:, ::2], k, v, jax.nn.sigmoid(i), writes=2, normalize_qk=True)


def step(q: Any, k: Any, v: Any, i: Any, f: Any) -> Any:
    return tfla.jax.mlstm_step(*(x[:, 0] for x in (q, k, v, i, f)), State.zeros(B, H, K, V))


def step_of_a_pool(q: Any, k: Any, v: Any, i: Any, f: Any) -> Any:
    pool = State.zeros(5, H, K, V, normalize=False)
    one = (x[:, 0] for x in (q, k, v, jax.nn.sigmoid(i)))
    return tfla.jax.delta_rule_step(*one, pool, state_indices=jnp.array([3, -1]))


CALLS: dict[str, Any] = {
    "mlstm": lambda *x: tfla.jax.mlstm(*x, return_state=True),
    "reference": lambda *x: tfla.jax.mlstm(*x, backend="reference", kernel="parallel"),
    "gla": lambda q, k, v, i, f: tfla.jax.linear_attention(q, k, v, gates(f, k)),
    "gdn": lambda q, k, v, i, f: tfla.jax.delta_rule(q, k, v, i, f, normalize_qk=True, beta_activation="sigmoid"),
    "several writes": several_writes,
    "step": step,
    "step of a pool": step_of_a_pool,
}


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name: str, spec: P) -> None:
    """Arrays that calls make by themselves, such as states of zero, may be divided in another way than the inputs."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    x = [jax.random.normal(next(keys), (B, T, H, n), float) for n in (K, K, V)]
    x += [-jnp.abs(jax.random.normal(next(keys), (B, T, H), float)) for _ in range(2)]

    def loss(x: list[Any]) -> Any:
        found = CALLS[name](*x)
        return sum(jnp.sin(t).sum() for t in jax.tree.leaves(found)), jax.tree.leaves(found)[0]

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    expected = run(x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(t, NamedSharding(mesh, spec)) for t in x]
        found = run(placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    (_, h), grads = found
    assert "x" in h.sharding.spec
    assert all(g.sharding.is_equivalent_to(t.sharding, t.ndim) for g, t in zip(grads, placed, strict=True))
