"""NaN in a gate reaches all that depends on it on JAX, the max states too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import problem
from jax_cases import to_jax

import tfla.jax

T = 130


@pytest.mark.parametrize("cu_seqlens", [None, (0, 0, T)], ids=["batch", "packed"])
@pytest.mark.parametrize("gate", ["i", "f"])
def test_max_states_keep_nan(gate: str, cu_seqlens: tuple[int, ...] | None) -> None:
    """In every tile, as in PyTorch: XLA's maximum over a dim leaves NaN out on CPUs."""
    p = problem(T=T, B=1, H=1, Hq=1, carried=False)
    run = jax.jit(lambda x: tfla.jax.mlstm(**x, return_state=True, cu_seqlens=cu_seqlens, backend="chunkwise"))
    for at in (0, 20, 70, T - 1):
        x = {name: to_jax(getattr(p, name)) for name in "qkvif"}
        x[gate] = x[gate].at[0, at, 0].set(jnp.nan)
        h, state = run(x)
        assert jnp.isnan(h[:, at:]).all()
        assert not jnp.isnan(h[:, :at]).any()
        last = [t[-1] for t in state if t is not None]
        assert len(last) == 3
        assert all(jnp.isnan(t).all() for t in last), (at, [jnp.isnan(t).any() for t in last])


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("at", [3, 70, 100, 2 * T - 1])
def test_max_states_of_divided_sequences_keep_nan(at: int) -> None:
    """The second of two packed sequences, which starts on the first device, has a NaN; the first one has none."""
    p = problem(T=2 * T, B=1, H=1, Hq=1, carried=False)
    x = {name: to_jax(getattr(p, name)) for name in "qkvif"}
    x["i"] = x["i"].at[0, at, 0].set(jnp.nan)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    run = functools.partial(tfla.jax.mlstm, return_state=True, cu_seqlens=(0, 3, 2 * T), context_parallel="x")
    states = tfla.jax.State(jax.P(), jax.P(), jax.P())
    divided = jax.shard_map(
        run, mesh=mesh, in_specs=(jax.P(None, "x"),) * 5, out_specs=(jax.P(None, "x"), states), check_vma=False
    )
    _, state = jax.jit(divided)(*x.values())
    for t in state:
        assert jnp.isnan(t[1]).all()
        assert not jnp.isnan(t[0]).any()
