"""Steps on JAX, one or a few at once, are the recurrence; their states and those of whole sequences are one kind."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import FORMS, TOLERANCE, Problem, error, problem, truth, truth_m
from jax_cases import leaves_of, to_jax, to_torch

import tfla.jax


def steps(p: Problem, a: int, b: int, state: tfla.jax.State, **options: Any) -> Any:
    q, k, v, i, f = (to_jax(getattr(p, name))[:, a:b] for name in "qkvif")
    if p.form in ("exp", "sigmoid"):
        return tfla.jax.mlstm_steps(q, k, v, i, f, state, input_gate=p.form, **options)
    return tfla.jax.linear_attention_steps(q, k, v, f, state, i, normalize=p.normalize, **options)


def start(p: Problem) -> tfla.jax.State:
    assert p.state is not None
    return tfla.jax.State(*map(to_jax, p.state))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_pieces_equal_the_truth(form: str, dtype: torch.dtype) -> None:
    p = problem(form, dtype=dtype, T=16, Hq=1)
    state, hs = start(p), []
    for a, b in itertools.pairwise((0, 1, 6, 11, 16)):
        h, state = steps(p, a, b, state)
        hs.append(h)
    found, exact, m = to_torch(jnp.concatenate(hs, 1)), truth(p), truth_m(p)
    assert found.dtype == dtype
    assert error(found, exact["h"]) < TOLERANCE[dtype]
    weight = 1.0 if state.m is None else torch.exp(to_torch(state.m).double() - m)[..., None, None]
    assert error(to_torch(state.C).double() * weight, exact["C"]) < max(1e-5, TOLERANCE[dtype] / 10)


def test_single_steps_equal_several() -> None:
    p = problem(dtype=torch.float32, T=5)
    state, hs = start(p), []
    for t in range(5):
        q, k, v, i, f = (to_jax(getattr(p, name))[:, t] for name in "qkvif")
        h, state = tfla.jax.mlstm_step(q, k, v, i, f, state)
        hs.append(h)
    whole, last = steps(p, 0, 5, start(p))
    np.testing.assert_allclose(jnp.stack(hs, 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.C, last.C, rtol=1e-5, atol=1e-6)
    log_f, log_i = jax.nn.log_sigmoid(f), i
    again, _ = tfla.jax.linear_attention_step(q, k, v, log_f, state, log_i, normalize=True)
    expected, _ = tfla.jax.mlstm_step(q, k, v, i, f, state)
    np.testing.assert_allclose(again, expected, rtol=1e-6)


def test_the_state_after_as_many_steps_as_are_kept() -> None:
    p = problem(dtype=torch.float64, B=5, T=4)
    kept = jnp.array([0, 1, 2, 3, 4])
    whole, last = steps(p, 0, 4, start(p))
    np.testing.assert_array_equal(steps(p, 0, 4, start(p), return_state=False), whole)
    h, found = steps(p, 0, 4, start(p), lengths=kept)
    np.testing.assert_array_equal(h, whole)
    np.testing.assert_array_equal(found.C[0], start(p).C[0])
    np.testing.assert_array_equal(found.C[4], last.C[4])
    _, two = steps(p, 0, 2, start(p))
    np.testing.assert_allclose(found.C[2], two.C[2], rtol=1e-12)
    # Traced lengths cannot be checked, and are clamped.
    traced = jax.jit(lambda lengths: steps(p, 0, 4, start(p), lengths=lengths))
    for a, b in zip(traced(jnp.array([-3, 1, 2, 3, 99]))[1], traced(kept)[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kept", [jnp.bfloat16, jnp.float16])
def test_a_state_of_16_bits_stays_so(kept: Any) -> None:
    p = problem(dtype=torch.float32, T=3)
    state = start(p)
    low = state._replace(C=state.C.astype(kept), n=state.n.astype(kept))
    h, expected = steps(p, 0, 3, state._replace(C=low.C.astype("float32"), n=low.n.astype("float32")))
    found_h, found = steps(p, 0, 3, low)
    np.testing.assert_array_equal(found_h, h)
    assert found.C.dtype == found.n.dtype == kept
    assert found.m.dtype == jnp.float32
    np.testing.assert_array_equal(found.C, expected.C.astype(kept))


def test_training_through_steps() -> None:
    """Gradients of steps are those of the sequence form."""
    p = problem(T=6)
    x = leaves_of(p)
    qkvif = [x[name] for name in "qkvif"]

    def by_steps(qkvif: list[Any]) -> Any:
        return (tfla.jax.mlstm_steps(*qkvif, start(p))[0] ** 2).sum()

    def whole(qkvif: list[Any]) -> Any:
        return (tfla.jax.mlstm(*qkvif, initial_state=start(p)) ** 2).sum()

    for a, b in zip(jax.jit(jax.grad(by_steps))(qkvif), jax.jit(jax.grad(whole))(qkvif), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_a_donated_state_is_overwritten() -> None:
    """In place is donation: the old state is gone, and the new one may have its memory."""
    p = problem(dtype=torch.float32, T=1)
    q, k, v, i, f = (to_jax(getattr(p, name))[:, 0] for name in "qkvif")
    step = jax.jit(tfla.jax.mlstm_step, donate_argnames="state")
    state = start(p)
    h, new = step(q, k, v, i, f, state=state)
    np.testing.assert_allclose(h, tfla.jax.mlstm_step(q, k, v, i, f, start(p))[0], rtol=1e-6)
    assert state.C.is_deleted()
    assert new.C.shape == start(p).C.shape


def test_states_of_single_sequences() -> None:
    state = start(problem(B=3))
    some = state.gather([2, 0])
    np.testing.assert_array_equal(some.n, state.n[jnp.array([2, 0])])
    back = tfla.jax.State.zeros(3, 2, 5, 7, dtype=jnp.float64).scatter([2, 0], some)
    np.testing.assert_array_equal(back.C[2], state.C[2])
    assert not back.C[1].any()
    reset = state.reset([1])
    assert not reset.m[1].any()
    np.testing.assert_array_equal(reset.m[0], state.m[0])
    bare = tfla.jax.State.zeros(3, 2, 5, 7, normalize=False)
    assert bare.n is None
    assert bare.scatter([0], bare.gather([1])).m is None


def test_gradients_of_the_max_state_reach_states_after_no_steps() -> None:
    """As in states after some steps, they pass through C and n; the returned m is a constant."""
    p = problem("exp", dtype=torch.float64, T=3)
    state = start(p)
    assert state.m is not None

    def total(m: jax.Array) -> jax.Array:
        """Return a sum over the new true state."""
        new = steps(p, 0, 3, state._replace(m=m), lengths=jnp.array([0, 3]))[1]
        return (jnp.exp(jax.lax.stop_gradient(new.m))[..., None] * (new.C.sum(-1) + new.n)).sum()

    change = jnp.array(np.random.default_rng(0).standard_normal(state.m.shape))
    difference = (total(state.m + 1e-6 * change) - total(state.m - 1e-6 * change)) / 2e-6
    assert jnp.allclose((jax.grad(total)(state.m) * change).sum(), difference, rtol=1e-6)
