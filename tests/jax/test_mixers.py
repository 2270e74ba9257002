"""The recurrent mixers as modules of flax.nnx give what tfla.nn gives from the same files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tfla.nn
from tfla.jax.nn import KeyValues, LanguageModel, MixerState
from tfla.nn import ModelConfig

B, T = 2, 24
CASES: dict[str, dict[str, Any]] = {
    "mamba2, gla": {"layers": ("mamba2", "gla")},
    "gated_delta_net, kda": {"layers": ("gated_delta_net", "kda")},
    "delta_net, mlstm": {"layers": ("delta_net", "mlstm_exp")},
    "retnet, attention": {"layers": ("retnet", "attention"), "rope_base": 500.0},
    "window and sinks": {
        "layers": ("attention", "mlstm_sig"), "num_kv_heads": 1, "window": 7, "attention_sinks": True
    },
}  # fmt: skip


def models(folder: Path, **fields: Any) -> tuple[tfla.nn.LanguageModel, LanguageModel]:
    """Return a model of PyTorch, whose norms and skip connections are not the constants that they start as, in both."""
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "d_model": 32, "num_blocks": 2, "num_heads": 2, "vocab_size": 50, "ffn_multiple": 16, "mamba_head_dim": 16,
        "mamba_state_dim": 8, "negative_eigenvalues": True, "chunk_size": 8,
    }  # fmt: skip
    ours = tfla.nn.LanguageModel(ModelConfig.from_dict(small | fields)).double()
    with torch.no_grad():
        for name, p in ours.named_parameters():
            if "norm" in name or name.endswith((".D", "up.bias", "sinks.logits")):
                p.add_(torch.randn_like(p) * 0.1)
    ours.save_pretrained(folder)
    return ours, LanguageModel.from_pretrained(folder)


def ids() -> Any:
    return np.random.default_rng(0).integers(0, 50, (B, T))


def near(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    expected = expected.detach().double().numpy() if isinstance(expected, torch.Tensor) else np.asarray(expected)
    assert found.shape == expected.shape
    assert np.linalg.norm(np.asarray(found, np.float64) - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_logits_and_gradients_are_those_of_pytorch(tmp_path: Path, fields: dict[str, Any]) -> None:
    ours, model = models(tmp_path, **fields)
    assert model.num_parameters() == ours.num_parameters()
    tokens = ids()

    def loss(model: LanguageModel, x: Any) -> Any:
        logits, state = model(x, return_state=True)
        return jax.nn.logsumexp(logits, -1).sum(), (logits, state)

    grads, (logits, state) = nnx.jit(nnx.grad(loss, has_aux=True))(model, jnp.asarray(tokens))
    expected, torch_state = ours(torch.from_numpy(tokens), return_state=True)
    near(logits, expected)
    for a, b in zip(state, torch_state, strict=True):
        if isinstance(a, MixerState):
            near(a.recurrence.C, b.recurrence.C)
            for found, truth in zip(a.convolution, b.convolution, strict=True):
                near(found, truth)
            assert (a.position is None) == (b.position is None)
        elif isinstance(a, KeyValues):
            near(a.k, b.k)
            near(a.v, b.v)
        for found, truth in ((getattr(a, name, None), getattr(b, name, None)) for name in ("position", "start")):
            assert found is truth or found.tolist() == truth.tolist()
    expected.logsumexp(-1).sum().backward()
    found = {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(grads)}
    for name, p in ours.named_parameters():
        if ".mixer." in name:
            linear = name.removesuffix("weight") + "kernel"
            near(found[linear].T if linear in found else found[name], p.grad, 1e-8)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_a_batch_of_no_sequences(tmp_path: Path, fields: dict[str, Any]) -> None:
    _, model = models(tmp_path, **fields)
    logits, state = model(jnp.zeros((0, T), int), return_state=True)
    assert logits.shape == (0, T, 50)
    state = [s.reserve(T + 1) if isinstance(s, KeyValues) else s for s in state]
    logits, _ = model.step(jnp.zeros(0, int), state)
    assert logits.shape == (0, 50)


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_parts_steps_documents_and_packed_sequences(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Parts of a sequence, single tokens, documents and packed sequences give the logits of the whole."""
    _, model = models(tmp_path, **fields)
    run = nnx.jit(lambda model, x, state: model(x, state, return_state=True))
    tokens, cut = jnp.asarray(ids()), 12  # both parts are as long, for one compiled function
    whole, last = run(model, tokens, model.initial_state(B))
    first, state = run(model, tokens[:, :cut], model.initial_state(B))
    alone, ended = run(model, tokens[:, cut:], model.initial_state(B))
    step = nnx.jit(lambda model, x, state: model.step(x, state))
    now = state
    for t in range(cut, T):
        stepped, now = step(model, tokens[:, t], now)
        near(stepped, whole[:, t])
    for a, b in zip(jax.tree.leaves(now), jax.tree.leaves(last), strict=True):
        assert a.shape == b.shape
    starts = jnp.zeros((B, T), bool).at[:, cut].set(True)
    logits, after = nnx.jit(lambda model, x, d: model(x, document_start=d, return_state=True))(model, tokens, starts)
    near(logits, jnp.concatenate([first, alone], 1))
    near(step(model, tokens[:, 0], after)[0], step(model, tokens[:, 0], ended)[0])
    packed = nnx.jit(lambda model, x, at, state: model(x, state, cu_seqlens=at, return_state=True))
    row, none = tokens[:1], jax.tree.map(lambda a: jnp.zeros_like(a[:1]), state)
    for at in (jnp.array([0, cut, cut, T]), (0, cut, cut, T)):  # traced and static offsets
        logits, ends = nnx.jit(lambda model, x, at=at: model(x, cu_seqlens=at, return_state=True))(model, row)
        near(logits, jnp.concatenate([first[:1], alone[:1]], 1))
        after = jax.tree.map(lambda a: a[:1], ends)
        near(step(model, row[:, cut], after)[0], whole[:1, cut])
    if "attention" in fields["layers"]:  # which takes no state with packed sequences
        return
    both = jax.tree.map(lambda a, b: jnp.concatenate([a[:1], b, b]), state, none)
    # The first sequence goes on from the state, with fewer tokens than a convolution sees; an empty one follows.
    order = jnp.concatenate([row[:, cut : cut + 2], row[:, :cut]], 1)
    logits, ends = packed(model, order, jnp.array([0, 2, 2, 2 + cut]), both)
    near(logits, jnp.concatenate([whole[:1, cut : cut + 2], first[:1]], 1))
    one = jax.tree.map(lambda a: a[:1], ends)
    near(step(model, row[:, cut + 2], one)[0], whole[:1, cut + 2])


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_context_parallelism(tmp_path: Path) -> None:
    """Convolutions get their inputs from the device before, and attention gathers the keys and values of its state."""
    _, model = models(tmp_path, layers=("gated_delta_net", "mamba2", "retnet", "attention"), num_blocks=4)
    graph, weights = nnx.split(model)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def logits(weights: Any, tokens: Any, axis: Any = None) -> Any:
        return nnx.merge(graph, weights)(tokens, return_state=True, context_parallel=axis)

    states = jax.tree.map(lambda _: P(), jax.eval_shape(logits, weights, jnp.asarray(ids()))[1])
    run = jax.shard_map(
        functools.partial(logits, axis="x"), mesh=mesh, in_specs=(P(), P(None, "x")),
        out_specs=(P(None, "x"), states),
    )  # fmt: skip
    found, state = jax.jit(run)(weights, jnp.asarray(ids()))
    expected, last = jax.jit(logits)(weights, jnp.asarray(ids()))
    near(found, expected, 1e-9)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
        near(a, b, 1e-9)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_context_parallelism_with_documents(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Documents that start on one device and go on over the next ones give the logits of one device."""
    _, model = models(tmp_path, **fields)
    graph, weights = nnx.split(model)
    devices = min(4, jax.device_count())
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def logits(weights: Any, tokens: Any, starts: Any, axis: Any = None) -> Any:
        return nnx.merge(graph, weights)(tokens, document_start=starts, context_parallel=axis)

    steps = P(None, "x")
    run = jax.shard_map(
        functools.partial(logits, axis="x"), mesh=mesh, in_specs=(P(), steps, steps), out_specs=steps
    )  # fmt: skip
    tokens, starts = jnp.asarray(ids()), jnp.zeros((B, T), bool).at[0, 3].set(True).at[0, T - 4].set(True)
    near(jax.jit(run)(weights, tokens, starts), jax.jit(logits)(weights, tokens, starts), 1e-9)
    at = jnp.array([0, 3, 3, T - 4, T])

    def packed(weights: Any, tokens: Any, axis: Any = None) -> Any:
        return nnx.merge(graph, weights)(tokens, cu_seqlens=at, context_parallel=axis)

    run = jax.shard_map(functools.partial(packed, axis="x"), mesh=mesh, in_specs=(P(), steps), out_specs=steps)
    near(jax.jit(run)(weights, tokens[:1]), jax.jit(packed)(weights, tokens[:1]), 1e-9)


def test_files_go_both_ways_and_dtypes(tmp_path: Path) -> None:
    config = ModelConfig(d_model=32, num_blocks=3, num_heads=2, vocab_size=50, layers=("gla", "kda", "mamba2"),
                         mamba_head_dim=16, mamba_state_dim=8)  # fmt: skip
    model = LanguageModel(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = tfla.nn.LanguageModel.from_pretrained(tmp_path)
    tokens = jnp.asarray(ids())
    logits = nnx.jit(lambda model, x: model(x))(model, tokens)
    assert logits.dtype == jnp.float32
    near(logits, loaded(torch.from_numpy(ids())), 3e-2)
    sizes = np.asarray(jax.nn.softplus(model.blocks[1].mixer.decay.dt_bias[...]))
    assert sizes.min() >= 0.99e-3
    assert sizes.max() <= 1.01e-1
    with pytest.raises(TypeError, match=r"^state: got State, expected MixerState"):
        model.blocks[0].mixer(jnp.zeros((1, 3, 32)), tfla.jax.State.zeros(1, 2, 8, 16, normalize=False))
    with pytest.raises(ValueError, match=r"^context_parallel: got 'cp', expected an axis of the mesh"):
        model.blocks[0].mixer(jnp.zeros((1, 3, 32)), context_parallel="cp")


RECURRENT = ("mamba2", "gla"), ("gated_delta_net", "kda"), ("delta_net", "retnet"), ("mlstm_exp", "mlstm_sig")


@functools.cache
def _with_states(layers: tuple[str, ...], count: int) -> tuple[Any, Any, Any]:
    """Return compiled functions (tokens, offsets, state) of four devices and of one, and states of sequences."""
    with tempfile.TemporaryDirectory() as folder:
        _, model = models(Path(folder), layers=layers)
    graph, weights = nnx.split(model)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    read = nnx.jit(lambda model, x: model(x, model.initial_state(count), return_state=True)[1])
    state = read(model, jnp.asarray(ids()).reshape(-1, 6)[:count])
    state = jax.tree.map(
        lambda t: t + jnp.arange(count, dtype=t.dtype) if t.ndim == 1 else t, state
    )  # positions differ

    def logits(tokens: Any, at: Any, state: Any, axis: Any = None) -> Any:
        return nnx.merge(graph, weights)(tokens, state, cu_seqlens=at, return_state=True, context_parallel=axis)

    of_states = jax.tree.map(lambda _: P(), state)
    run = jax.shard_map(
        functools.partial(logits, axis="x"), mesh=mesh, in_specs=(P(None, "x"), P(), of_states),
        out_specs=(P(None, "x"), of_states),
    )  # fmt: skip
    fresh = jax.shard_map(
        lambda tokens, at: logits(tokens, at, None, "x"), mesh=mesh, in_specs=(P(None, "x"), P()),
        out_specs=(P(None, "x"), of_states),
    )  # fmt: skip
    return (jax.jit(run), jax.jit(fresh)), jax.jit(logits), state


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("layers", RECURRENT, ids=str)
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(0, T), min_size=4, max_size=4))
@example(cuts=[0, 1, 7, 7])
@example(cuts=[6, 6, 12, 23])
@example(cuts=[0, 0, 0, 0])
@example(cuts=[5, 13, 24, 24])
def test_context_parallelism_with_states_of_packed_sequences(layers: tuple[str, ...], cuts: list[int]) -> None:
    """Sequences that start and end on any device go on from their states and leave those of one device."""
    (parts, fresh), whole, state = _with_states(layers, 5)
    tokens, at = jnp.asarray(ids()[:1]), jnp.array([0, *sorted(cuts), T])
    carried = parts(tokens, at, state), whole(tokens, at, state)
    for found, expected in (carried, (fresh(tokens, at), whole(tokens, at, None))):
        near(found[0], expected[0], 1e-9)
        for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
            near(a, b, 1e-9)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_short_parts_of_packed_sequences_with_states_are_named() -> None:
    (_, fresh), _, _ = _with_states(("gated_delta_net", "kda"), 5)
    with pytest.raises(ValueError, match="x: got 2 steps with context parallelism, expected at least 3"):
        fresh(jnp.zeros((1, 8), int), jnp.array([0, 1, 2, 3, 4, 8]))
