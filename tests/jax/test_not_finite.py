"""NaN in a gate reaches all that depends on it on JAX, the max states too."""

from __future__ import annotations

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
