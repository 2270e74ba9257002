"""A jitted function of the kernels runs again and again: from its second call on XLA replays CUDA graphs of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tfla.jax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or jax.default_backend() != "gpu", reason="needs JAX on a GPU"),
]


def random(n: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(n), shape, jnp.float32).astype(dtype)


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("model", ["mlstm", "linear", "gdn", "kda"])
@pytest.mark.parametrize(("B", "T", "H", "K", "V"), [(2, 200, 2, 16, 16), (1, 2048, 4, 128, 128)])
def test_calls_repeat(model: str, backend: str | None, B: int, T: int, H: int, K: int, V: int) -> None:
    q, k, v = random(1, B, T, H, K), random(2, B, T, H, K), random(3, B, T, H, V)
    i, f = random(4, B, T, H, dtype=jnp.float32), random(5, B, T, H, dtype=jnp.float32)
    by_channel = random(6, B, T, H, K)

    def loss(*x: Any) -> Any:
        q, k, v, i, f, g = x
        if model == "mlstm":
            h = tfla.jax.mlstm(q, k, v, i, f, backend=backend)
        elif model == "linear":
            h = tfla.jax.linear_attention(q, k, v, -jax.nn.softplus(f), backend=backend)
        else:
            log_f = -jax.nn.softplus(f if model == "gdn" else g)
            h = tfla.jax.delta_rule(q, k, v, jax.nn.sigmoid(i), log_f, normalize_qk=True, backend=backend)
        assert isinstance(h, jax.Array)
        return jnp.sin(h.astype(jnp.float32)).sum()

    run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(6))))
    x = (q, k, v, i, f, by_channel)
    first = run(*x)
    moved = [a + 0 for a in x]  # graphs are made again for other addresses
    for given in (x, moved, x, moved):
        for once, again in zip(jax.tree.leaves(first), jax.tree.leaves(run(*given)), strict=True):
            assert jnp.array_equal(once, again)
