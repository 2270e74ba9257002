"""Mesh axes of explicit sharding: all operators and steps run, and results are divided as v is."""

from __future__ import annotations

import contextlib
import functools
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


def explicit_mesh() -> Any:
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])


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


def of_a_pool(q: Any, k: Any, v: Any, i: Any, f: Any) -> Any:
    return tfla.jax.mlstm(
        q, k, v, i, f, initial_state=State.zeros(5, H, K, V), state_indices=jnp.array([3, -1]), return_state=True
    )


def states_every(q: Any, k: Any, v: Any, i: Any, f: Any) -> Any:
    """Call with gates whose weights are arrays too."""
    return tfla.jax.delta_rule(
        q, k, v, jax.nn.sigmoid(i), f, gate_activation="softplus", A_log=i.mean((0, 1)), dt_bias=f.mean((0, 1)),
        initial_state=State.zeros(5, H, K, V, normalize=False), state_indices=jnp.array([3, -1]), return_state=True,
        states_every=3,
    )  # fmt: skip


CALLS: dict[str, Any] = {
    "mlstm": lambda *x: tfla.jax.mlstm(*x, return_state=True),
    "reference": lambda *x: tfla.jax.mlstm(*x, backend="reference", kernel="parallel"),
    "gla": lambda q, k, v, i, f: tfla.jax.linear_attention(q, k, v, gates(f, k)),
    "gdn": lambda q, k, v, i, f: tfla.jax.delta_rule(q, k, v, i, f, normalize_qk=True, beta_activation="sigmoid"),
    "several writes": several_writes,
    "step": step,
    "step of a pool": step_of_a_pool,
    "pool": of_a_pool,
    "states every": states_every,
}


@functools.cache
def on_one_device(name: str) -> tuple[Any, list[Any], Any]:
    """Return the compiled function of a call, its inputs, and its results and gradients on one device."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    x = [jax.random.normal(next(keys), (B, T, H, n), float) for n in (K, K, V)]
    x += [-jnp.abs(jax.random.normal(next(keys), (B, T, H), float)) for _ in range(2)]

    def loss(x: list[Any]) -> Any:
        found = CALLS[name](*x)
        return sum(jnp.sin(t).sum() for t in jax.tree.leaves(found)), jax.tree.leaves(found)[0]

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return run, x, run(x)


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name: str, spec: P) -> None:
    """Arrays that calls make by themselves, such as states of zero, may be divided in another way than the inputs."""
    run, x, expected = on_one_device(name)
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        placed = [jax.device_put(t, NamedSharding(mesh, spec)) for t in x]
        found = run(placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    (_, h), grads = found
    assert "x" in h.sharding.spec
    assert all(g.sharding.is_equivalent_to(t.sharding, t.ndim) for g, t in zip(grads, placed, strict=True))


def test_states_every_of_packed_sequences() -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    x = [jax.random.normal(key, (1, T, H, n), float) for key, n in zip(keys, (K, K, V), strict=True)]
    options: Any = {"cu_seqlens": (0, 5, T), "return_state": True, "states_every": 4, "backend": "reference"}
    run = jax.jit(lambda q, k, v: tfla.jax.linear_attention(q, k, v, -(k[..., 0] ** 2), **options))
    expected = run(*x)
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        found = run(*(jax.device_put(t, NamedSharding(mesh, P(None, None, "x"))) for t in x))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    assert found[1].C.sharding.spec[1] == found[2].C.sharding.spec[2] == "x"


CHANGES: dict[str, Any] = {
    "gather": lambda state, rows, one: state.gather(rows),
    "scatter": lambda state, rows, one: state.scatter(rows, one),
    "reset": lambda state, rows, one: state.reset(rows),
}


@pytest.mark.parametrize("set_mesh", [False, True])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["batch", "heads"])
@pytest.mark.parametrize("name", CHANGES)
def test_rows_of_a_state(name: str, spec: P, jit: bool, set_mesh: bool) -> None:
    """Changed states keep their division; those that are taken out are divided over the batch as the rows are."""
    state = State(*(jax.random.normal(jax.random.key(2), shape) for shape in ((4, H, K, V), (4, H, K), (4, H))))
    rows = jnp.array([2, 0])
    one = state.gather([1, 3])
    run = jax.jit(CHANGES[name]) if jit else CHANGES[name]
    expected = run(state, rows, one)
    mesh = explicit_mesh()
    placed = jax.tree.map(lambda t: jax.device_put(t, NamedSharding(mesh, spec)), (state, one))
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        found = run(placed[0], rows, placed[1])
        assert jax.typeof(found.C).sharding.spec == P(
            None if name == "gather" else spec[0], *spec[1:], *[None] * (4 - len(spec))
        )
        if name == "gather":
            divided = placed[0].gather(jax.device_put(rows, NamedSharding(mesh, P("x")))) if spec[0] else found
            assert jax.typeof(divided.C).sharding.spec[:2] == (*spec, None)[:2]
            jax.tree.map(np.testing.assert_array_equal, divided, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
