"""Steps of the delta rule and of gates by channel on JAX are the recurrence of delta_cases.py."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import TOLERANCE, error
from delta_cases import DeltaProblem, delta_problem, options, truth
from jax_cases import to_torch
from jax_delta_cases import leaves_of

import tfla.jax

SMALL: dict[str, Any] = {"T": 12, "Hq": 1, "K": 4, "V": 3}


def steps(p: DeltaProblem, a: int, b: int, state: tfla.jax.State, **given: Any) -> Any:
    x = {name: t[:, a:b] for name, t in leaves_of(p).items() if name != "C"}
    qkv = x["q"], x["k"], x["v"]
    if not p.correct:
        return tfla.jax.linear_attention_steps(*qkv, x["log_f"], state, scale=p.scale, **given)
    given |= options(read_key=x.get("read_key"), read_before_decay=p.read_before_decay, scale=p.scale)
    return tfla.jax.delta_rule_steps(*qkv, x["beta"], state, x.get("log_f"), **given)


def start(p: DeltaProblem) -> tfla.jax.State:
    return tfla.jax.State(leaves_of(p)["C"])


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("deltanet", torch.float64), ("gdn", torch.bfloat16), ("kda", torch.float32), ("gla", torch.float64),
     ("comba", torch.float64)],
)  # fmt: skip
def test_pieces_equal_the_truth(model: str, dtype: torch.dtype) -> None:
    p = delta_problem(model, dtype=dtype, **SMALL)
    state, hs = start(p), []
    for a, b in itertools.pairwise((0, 1, 6, 12)):
        h, state = steps(p, a, b, state)
        hs.append(h)
    found, exact = to_torch(jnp.concatenate(hs, 1)), truth(p)
    assert found.dtype == dtype
    assert error(found, exact["h"]) < TOLERANCE[dtype]
    assert error(to_torch(state.C), exact["C"]) < max(1e-5, TOLERANCE[dtype] / 10)


def test_single_steps_and_lengths() -> None:
    p = delta_problem("kda", **SMALL | {"T": 4, "B": 5})
    kept = jnp.arange(5)
    whole, last = steps(p, 0, 4, start(p))
    np.testing.assert_array_equal(steps(p, 0, 4, start(p), return_state=False), whole)
    _, found = steps(p, 0, 4, start(p), lengths=kept)
    x, now, states = leaves_of(p), start(p), [start(p).C]
    for t in range(4):
        given = (x[name][:, t] for name in ("q", "k", "v", "beta"))
        h, now = tfla.jax.delta_rule_step(*given, now, x["log_f"][:, t], scale=p.scale)
        np.testing.assert_allclose(h, whole[:, t], rtol=1e-11)
        states.append(now.C)
    for b in range(5):
        np.testing.assert_allclose(found.C[b], states[b][b], rtol=1e-11)
    np.testing.assert_allclose(last.C, now.C, rtol=1e-11)
    h, _ = tfla.jax.linear_attention_step(x["q"][:, 0], x["k"][:, 0], x["v"][:, 0], x["log_f"][:, 0], start(p))
    whole = tfla.jax.linear_attention(x["q"], x["k"], x["v"], x["log_f"], initial_state=start(p))
    np.testing.assert_allclose(h, whole[:, 0], rtol=1e-11)


def test_activations() -> None:
    """They are those of whole sequences."""
    p = delta_problem("kda", **SMALL)
    x = leaves_of(p)
    more: dict[str, Any] = {
        "normalize_qk": True, "beta_activation": "2sigmoid", "gate_activation": "softplus",
        "A_log": jnp.array([0.3, -0.2]), "dt_bias": jnp.linspace(-1, 1, 8).reshape(2, 4),
    }  # fmt: skip
    given = x["q"], x["k"], x["v"], x["beta"]
    h = tfla.jax.delta_rule(*given, x["log_f"], initial_state=start(p), **more)
    found, _ = tfla.jax.delta_rule_steps(*given, start(p), x["log_f"], **more)
    np.testing.assert_allclose(found, h, rtol=1e-10)


@pytest.mark.parametrize("kept", [jnp.bfloat16, jnp.float16])
def test_a_state_of_16_bits_stays_so(kept: Any) -> None:
    p = delta_problem("gdn", dtype=torch.float32, **SMALL)
    low = tfla.jax.State(start(p).C.astype(kept))
    h, expected = steps(p, 0, 3, tfla.jax.State(low.C.astype("float32")))
    found_h, found = steps(p, 0, 3, low)
    np.testing.assert_array_equal(found_h, h)
    np.testing.assert_array_equal(found.C, expected.C.astype(kept))


def test_training_through_steps() -> None:
    """Gradients of steps are those of the sequence form."""
    p = delta_problem("gdn", **SMALL)
    x = leaves_of(p)
    given = [x[name] for name in ("q", "k", "v", "beta", "log_f")]

    def by_steps(x: list[Any]) -> Any:
        return (tfla.jax.delta_rule_steps(*x[:4], start(p), x[4])[0] ** 2).sum()

    def whole(x: list[Any]) -> Any:
        return (tfla.jax.delta_rule(*x, initial_state=start(p)) ** 2).sum()

    for a, b in zip(jax.jit(jax.grad(by_steps))(given), jax.jit(jax.grad(whole))(given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
