"""The interface of tfla.jax is that of tfla, and what it traces runs on devices without kernels of this library."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tfla
import tfla.jax

OPERATORS = ("mlstm", "linear_attention", "delta_rule", "delta_product", "dplr")
STEPS = [f"{name}_{many}" for name in ("mlstm", "linear_attention", "delta_rule") for many in ("step", "steps")]


@pytest.mark.parametrize("name", [*OPERATORS, *STEPS])
def test_arguments_are_those_of_pytorch(name: str) -> None:
    """Names, their order, defaults and what may be positional are equal."""
    theirs, own = (inspect.signature(getattr(module, name)).parameters.values() for module in (tfla, tfla.jax))
    assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in theirs]


@pytest.mark.parametrize("name", ["explain", "explain_delta_rule"])
def test_explanations_take_the_arguments_of_pytorch(name: str) -> None:
    """A mesh axis is a further one, since its operator runs inside a `shard_map`."""
    theirs, own = (inspect.signature(getattr(module, name)).parameters.values() for module in (tfla, tfla.jax))
    found = [(p.name, p.kind, p.default) for p in own if p.name != "context_parallel"]
    assert found == [(p.name, p.kind, p.default) for p in theirs]


def mlstm(q: Any, v: Any, gate: Any) -> Any:
    return tfla.jax.mlstm(q, q, v, gate, gate)


def delta_rule(q: Any, v: Any, gate: Any) -> Any:
    return tfla.jax.delta_rule(q, q, v, gate, -gate, normalize_qk=True)


def steps(q: Any, v: Any, gate: Any) -> Any:
    q, v, gate = (x[:, :4] for x in (q, v, gate))
    return tfla.jax.mlstm_steps(q, q, v, gate, gate, tfla.jax.State.zeros(2, 4, 64, 64))[0]


@pytest.mark.parametrize("run", [mlstm, delta_rule, steps])
def test_tpus_get_operations_of_xla_alone(run: Any) -> None:
    """Without x64 nothing is float64, and no call leaves XLA, in a forward and a backward."""
    shapes = ((2, 256, 2, 64), jnp.bfloat16), ((2, 256, 4, 64), jnp.bfloat16), ((2, 256, 4), jnp.float32)
    with jax.enable_x64(False):
        gradients = jax.jit(jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
        traced = gradients.trace(*(jax.ShapeDtypeStruct(*x) for x in shapes))
        module = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert not re.findall(r"custom_call @\w+", module)
    assert "f64" not in module
    assert "dot_general" in module
