"""Attention as a module of flax.nnx: blocks of queries, caches with room for more tokens, and bad input."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import tfla.nn.mixers.attend
from tfla.jax.nn import Attention, KeyValues, MixerState
from tfla.jax.nn import attend as blocks
from tfla.nn import ModelConfig

B, T, D = 2, 20, 32


def near(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**31), queries=st.integers(1, 9), past=st.integers(0, 5), block=st.sampled_from([3, 4, 16]),
    window=st.sampled_from([None, 1, 4, 30]), group=st.sampled_from([1, 2]), sinks=st.booleans(),
    documents=st.booleans(),
)  # fmt: skip
def test_blocks_of_queries_are_attention(
    seed: int, queries: int, past: int, block: int, window: int | None, group: int, sinks: bool, documents: bool
) -> None:
    """Results and gradients are those of attention with a mask in float64, for every length of the last block."""
    rng, S = np.random.default_rng(seed), queries + past
    q, k, v = (rng.normal(size=(B, n, h, 4)) for n, h in ((queries, 2 * group), (S, 2), (S, 2)))
    s = rng.normal(size=2 * group) if sinks else None
    first = None
    if documents:
        first = np.minimum(np.sort(rng.integers(-2, S, (B, queries))), past + np.arange(queries))
    weight = rng.normal(size=q.shape)

    def ours(q: Any, k: Any, v: Any, s: Any) -> Any:
        return (blocks.attend(q, k, v, past, first, window, s) * weight).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "QUERIES", block)
        found, grads = jax.value_and_grad(ours, argnums=(0, 1, 2, 3) if sinks else (0, 1, 2))(q, k, v, s)
    given = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, s) if x is not None]
    first_key = None if first is None else torch.from_numpy(first)
    h = tfla.nn.mixers.attend.attend(*given[:3], first_key, window, given[3] if sinks else None)
    expected = (h * torch.from_numpy(weight)).sum()
    expected.backward()
    assert float(found) == pytest.approx(expected.item(), rel=1e-10, abs=1e-10)
    scale = max(np.linalg.norm(x.grad) for x in given)
    for a, b in zip(grads, given, strict=True):
        assert np.linalg.norm(np.asarray(a) - b.grad.numpy()) <= 1e-10 * scale


def mixer(**fields: Any) -> Attention:
    fields = {"num_kv_heads": 1, "attention_sinks": True} | fields
    config = ModelConfig(d_model=D, num_blocks=1, num_heads=2, vocab_size=50, mixer="attention", **fields)
    return Attention(config, rngs=nnx.Rngs(0), param_dtype=jnp.float64)


@pytest.mark.parametrize("window", [None, 5])
def test_steps_in_a_cache_with_room(window: int | None) -> None:
    """A scan of steps over a cache of one shape gives the outputs of the whole, for documents of several lengths."""
    attention = mixer(window=window)
    x = jax.random.normal(jax.random.key(1), (B, T, D), jnp.float64)
    starts = jnp.zeros((B, T), bool).at[0, 4].set(True)
    whole, _ = attention(x, document_start=starts)
    before, state = attention(x[:, :9], document_start=starts[:, :9], return_state=True)
    near(before, whole[:, :9])
    assert state is not None
    near(state.tokens(), [5, 9], 0)
    state = state.reserve(T if window is None else 16)
    graph, weights = nnx.split(attention)

    @jax.jit
    def decode(weights: Any, state: KeyValues, x: Any) -> Any:
        def one(state: KeyValues, x: Any) -> Any:
            y, state = nnx.merge(graph, weights).step(x, state)
            return state, y

        return jax.lax.scan(one, state, x)

    state, found = decode(weights, state, x[:, 9:].swapaxes(0, 1))
    near(found.swapaxes(0, 1), whole[:, 9:])
    near(state.tokens(), [T - 4, T], 0)


@pytest.mark.parametrize("window", [None, 5])
def test_what_is_before_a_document_takes_no_room(window: int | None) -> None:
    """A packed sequence of 3 tokens, beside one of 12, has room for 13 more in a state for 16."""
    attention = mixer(window=window)
    x = jax.random.normal(jax.random.key(2), (1, 28, D), jnp.float64)
    whole, _ = attention(x[:, 12:])
    _, state = attention(x[:, :15], cu_seqlens=(0, 12, 15), return_state=True)
    assert state is not None
    state = state.reserve(16)
    for t in range(15, 28):
        y, state = attention.step(jnp.repeat(x[:, t], 2, 0), state)
        near(y[1], whole[0, t - 12])
        full = 15 + 16 - (12 if window is None else window - 1)  # the first sequence has kept so many tokens
        assert jnp.isnan(y[0]).all() == (t >= full)
    near(state.tokens(), [25, 16], 0)


STARTS = np.zeros((B, T), bool)
STARTS[0, [4, 11]] = True
DOCUMENTS: dict[str, dict[str, Any]] = {
    "one": {},
    "starts": {"document_start": STARTS},
    "packed": {"cu_seqlens": (0, 3, 3, 12, T)},
    "packed, traced": {"cu_seqlens": np.array([0, 3, 3, 12, T])},
}


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize(
    ("documents", "window", "check_vma"),
    [
        ("one", None, True),
        ("starts", 5, True),
        ("starts", None, False),
        ("packed", 5, True),
        ("packed, traced", None, False),
    ],
)
def test_states_over_a_mesh_axis(documents: str, window: int | None, check_vma: bool) -> None:
    """Outputs, states and gradients are those of one device. Dense sequences go on from the state of earlier tokens."""
    attention, options = mixer(window=window), dict(DOCUMENTS[documents])
    static = {"cu_seqlens": options.pop("cu_seqlens")} if documents == "packed" else {}
    options = {name: jnp.asarray(t) for name, t in options.items()}
    x = jax.random.normal(jax.random.key(3), (1 if "packed" in documents else B, 9 + T, D), jnp.float64)
    past, own, state = x[:, :9], x[:, 9:], None
    if "packed" not in documents:
        _, state = attention(past, document_start=jnp.zeros((B, 9), bool).at[0, 6].set(True), return_state=True)
        assert state is not None
    graph, weights = nnx.split(attention)

    def run(weights: Any, x: Any, state: Any, options: Any, axis: str | None = None) -> Any:
        return nnx.merge(graph, weights)(
            x, state, return_state=True, context_parallel=axis, **options, **static
        )  # fmt: skip

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    steps, whole = jax.sharding.PartitionSpec(None, "x"), jax.sharding.PartitionSpec()
    divided = {name: steps if name == "document_start" else whole for name in options}
    specs = jax.tree.map(lambda _: whole, jax.eval_shape(run, weights, own, state, options)[1])
    part = jax.shard_map(
        lambda *given: run(*given, axis="x"), mesh=mesh, in_specs=(whole, steps, whole, divided),
        out_specs=(steps, specs), check_vma=check_vma,
    )  # fmt: skip

    def total(run: Any, weights: Any, x: Any, caches: Any) -> Any:
        given = None if state is None else state._replace(k=caches[0], v=caches[1])
        y, new = run(weights, x, given, options)
        return jnp.sin(y).sum() + jnp.sin(new.k).sum() + jnp.cos(new.v).sum(), (y, new)

    caches = None if state is None else (state.k, state.v)
    solved = []
    for each in (part, run):
        both = jax.value_and_grad(functools.partial(total, each), argnums=(0, 1, 2), has_aux=True)
        (_, found), grads = jax.jit(both)(weights, own, caches)
        solved.append((found, grads))
    for a, b in zip(*map(jax.tree.leaves, solved), strict=True):
        near(a, b, 1e-11)
    states = [new for (_, new), _ in solved]
    token = jax.random.normal(jax.random.key(4), (len(states[0].k), D), jnp.float64)
    near(*(attention.step(token, each)[0] for each in states))


def test_bad_input() -> None:
    attention, x = mixer(), jnp.zeros((B, T, D))
    _, state = attention(x, return_state=True)
    assert state is not None
    with pytest.raises(TypeError, match=r"^state: got MixerState, expected KeyValues"):
        attention(x, MixerState(None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^state.k: got shape \(2, 20, 1, 16\), expected \(1, 20, 1, 16\)"):
        attention(x[:1], state)
    with pytest.raises(ValueError, match=r"^state: got one with room for more tokens, expected one that a call has"):
        attention(x, state.reserve(30))
    with pytest.raises(ValueError, match=r"^capacity: got 19, expected at least 20, the places of the state"):
        state.reserve(19)
    with pytest.raises(ValueError, match=r"^context_parallel: got 'cp', expected an axis of the mesh"):
        attention(x, context_parallel="cp")
    starts = jnp.zeros((1, T), bool)
    with pytest.raises(ValueError, match=r"^document_start: got it together with cu_seqlens, expected at most one"):
        attention(x[:1], document_start=starts, cu_seqlens=(0, 3, T))
    with pytest.raises(ValueError, match=r"^cu_seqlens: got it with a state, expected no state in attention"):
        attention(x[:1], jax.tree.map(lambda t: t[:1], state), cu_seqlens=(0, T))
    with pytest.raises(ValueError, match=r"^cu_seqlens: goes from 0 to 3, expected from 0 to T = 20"):
        attention(x[:1], cu_seqlens=(0, 3))
