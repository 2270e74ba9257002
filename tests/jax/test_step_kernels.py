"""Triton's decoding kernel from JAX computes what the steps in plain JAX do, in every form and under transforms."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import FORMS, INTERPRETED, problem
from jax_cases import to_jax
from jax_plans import MARKS, ON_GPU, plans_run

import tfla.jax
from tfla.jax import kernels, step_kernels

pytestmark = MARKS
Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with plans_run(monkeypatch):
        yield


def arrays(form: str = "exp", T: int = 3, dtype: torch.dtype = torch.float32) -> Arrays:
    p = problem(form, dtype=dtype, T=T, Hq=1, H=2, K=16, V=24)
    assert p.state is not None
    found = {name: to_jax(getattr(p, name)) for name in "qkvif"}
    return found | {"state": tfla.jax.State(*map(to_jax, p.state))}


def steps(form: str, x: Arrays, **options: Any) -> Any:
    if form in ("exp", "sigmoid"):
        return tfla.jax.mlstm_steps(**x, input_gate=form, **options)
    given = {name: a for name, a in x.items() if name not in "if"}
    return tfla.jax.linear_attention_steps(
        **given, log_f=x["f"], log_i=x["i"], normalize=form == "normalized", **options
    )


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, T: int) -> None:
    x = arrays(form, T)
    close(steps(form, x), steps(form, x, backend="chunkwise"))
    lengths = jnp.array([0, T], jnp.int32)
    close(steps(form, x, lengths=lengths), steps(form, x, lengths=lengths, backend="chunkwise"))
    close(steps(form, x, return_state=False), steps(form, x, return_state=False, backend="chunkwise"))


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter takes bfloat16 for integers")
def test_bfloat16_and_its_state() -> None:
    x = arrays(dtype=torch.bfloat16, T=1)
    close(steps("exp", x), steps("exp", x, backend="chunkwise"), 4e-3)
    low = x | {"state": tfla.jax.State(*(a.astype(jnp.bfloat16) for a in x["state"][:2]), x["state"].m)}
    close(steps("exp", low), steps("exp", low, backend="chunkwise"), 4e-3)


def one(x: Arrays, **options: Any) -> Any:
    x = {name: a if name == "state" else a[:, 0] for name, a in x.items()}
    return tfla.jax.mlstm_step(**x, **options)


def test_a_donated_state() -> None:
    x = arrays(T=1)
    expected = one(x, backend="chunkwise")
    close(one(x), expected)  # what is not donated stays as it is
    close(one(x), expected)

    def several(state: Any, x: Arrays) -> Any:
        def body(state: Any, _: Any) -> Any:
            h, state = one(x | {"state": state})
            return state, h

        return jax.lax.scan(body, state, None, length=3)

    plain = x["state"]
    for _ in range(3):
        h, plain = one(x | {"state": plain}, backend="chunkwise")
    donated = tfla.jax.State(*(jnp.array(a) for a in x["state"]))
    state, hs = jax.jit(several, donate_argnums=0)(donated, {name: a for name, a in x.items() if name != "state"})
    close((hs[2], state), (h, plain))


def test_gradients_and_vmap() -> None:
    x = arrays()

    def loss(x: Arrays, **options: Any) -> Any:
        h, state = steps("exp", x, **options)
        return (h**2).sum() + (state.C**2).sum() + (state.n**2).sum()

    close(jax.grad(loss)(x), jax.grad(functools.partial(loss, backend="chunkwise"))(x))
    every = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x)
    run = functools.partial(steps, "exp")
    close(jax.tree.map(lambda a: a[1], jax.vmap(run)(every)), run(jax.tree.map(lambda a: 2 * a, x)))


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jnp.ones((1, 1, 1, 16))
    x = step_kernels.StepInputs(
        q, q, q, None, q[..., 0], jnp.ones((1, 1, 16, 16)), None, None, None
    )  # fmt: skip
    low = step_kernels.StepInputs(*(None if a is None else a.astype(jnp.float32) for a in x))
    assert step_kernels.choose(None, low) is not None
    assert step_kernels.choose("triton", low) is not None
    assert step_kernels.choose("chunkwise", low) is None
    assert step_kernels.choose(None, x) is None  # float64
    monkeypatch.setattr(step_kernels, "AUTOMATIC", False)
    assert step_kernels.choose(None, low) is None
    if not ON_GPU:
        monkeypatch.setattr(kernels, "present_gpu", lambda: None)
        assert step_kernels.choose("triton", low) is None
