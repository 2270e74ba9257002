"""States of packed sequences of the delta rule that are divided over a mesh axis: those of one device, cut anywhere."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import TOLERANCE, problem
from delta_cases import delta_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax_cases import leaves_of
from jax_delta_cases import call
from jax_delta_cases import leaves_of as delta_leaves

import tfla.jax

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
TOTAL, COUNT = 80, 5
SHAPE: dict[str, Any] = {"Hq": 2, "H": 4, "K": 4, "V": 3}
OF_STATES = ("C", "A_log", "dt_bias")  # what is not divided along time


def divided(run: Any, x: dict[str, Any], check_vma: bool = True, **options: Any) -> Any:
    """Return a function (x, at) whose sequence is over four devices; it returns h and the state."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    specs = {name: P() if name in OF_STATES else P(None, "x") for name in x}
    return jax.shard_map(
        lambda x, at: run(x, cu_seqlens=at, context_parallel="x", **options), mesh=mesh, in_specs=(specs, P()),
        out_specs=(P(None, "x"), tfla.jax.State(P())), check_vma=check_vma,
    )  # fmt: skip


def loss(run: Any, x: dict[str, Any], at: Any) -> Any:
    h, state = run(x, at)
    return jnp.sin(h).sum() + jnp.cos(state.C).sum()


def with_gradients(run: Any) -> Any:
    return jax.jit(jax.value_and_grad(functools.partial(loss, run)))


def agree(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def offsets(lengths: tuple[int, ...]) -> Any:
    return jnp.cumsum(jnp.array([0, *lengths]))


@pytest.mark.parametrize(
    ("model", "dtype", "lengths", "check_vma"),
    [
        ("deltanet", torch.float32, (3, 0, 31, 1, 26, 19), False),
        ("gla", torch.float64, (0, 7, 70, 3, 0), True),
        ("comba", torch.float64, (1,) * 41 + (39,), True),
        ("before", torch.float64, (0, 20, 60, 0), False),
    ],
    ids=str,
)
def test_states_and_gradients(model: str, dtype: torch.dtype, lengths: tuple[int, ...], check_vma: bool) -> None:
    """Outputs, final states and all gradients are those of one device."""
    x = delta_leaves(delta_problem(model, lengths=lengths, dtype=dtype, **SHAPE))
    one = functools.partial(call, model, chunk_size=8)
    found = with_gradients(divided(one, x, check_vma))(x, offsets(lengths))
    wide = {name: t.astype(jnp.float64) for name, t in x.items()}
    whole = with_gradients(lambda x, at: one(x, cu_seqlens=at))
    agree(found, whole(wide, offsets(lengths)), 10 * TOLERANCE[dtype])


@functools.cache
def both(model: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a compiled function of any lengths over four devices, that of one device, and its arrays."""
    x = delta_leaves(delta_problem(model, lengths=(TOTAL, *[0] * (COUNT - 1)), **SHAPE))
    one = functools.partial(call, model, chunk_size=8)
    return with_gradients(divided(one, x)), with_gradients(lambda x, at: one(x, cu_seqlens=at)), x


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, TOTAL), min_size=COUNT - 1, max_size=COUNT - 1))
def test_cuts_anywhere(cuts: list[int]) -> None:
    """One compiled function has the results of one device for all lengths of as many sequences."""
    parts, whole, x = both("kda")
    at = jnp.array([0, *sorted(cuts), TOTAL])
    agree(parts(x, at), whole(x, at))


@pytest.mark.parametrize("asked", ["initial", "final"])
def test_one_state_beside_divided_heads(asked: str) -> None:
    """An initial state without a final one, and the other way round, with heads over a second mesh axis."""
    x = delta_leaves(delta_problem("gdn", lengths=(3, 36, 1), carried=asked == "initial", **SHAPE))
    gates = {"A_log": jnp.array([0.1, -0.4, 0.2, 0.0]), "dt_bias": jnp.array([0.3, -0.2, 0.0, 0.1])}
    mesh = jax.make_mesh((2, 2), ("x", "heads"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def run(x: dict[str, Any], **options: Any) -> Any:
        state = tfla.jax.State(x["C"]) if "C" in x else None
        found: Any = tfla.jax.delta_rule(
            x["q"], x["k"], x["v"], x["beta"], x["log_f"], A_log=x["A_log"], dt_bias=x["dt_bias"], chunk_size=8,
            gate_activation="softplus", beta_activation="sigmoid", normalize_qk=True, initial_state=state,
            return_state=asked == "final", cu_seqlens=(0, 3, 39, 40), **options,
        )  # fmt: skip
        return found if asked == "final" else (found, None)

    of = {"C": P(None, "heads"), "A_log": P("heads"), "dt_bias": P("heads")}
    x |= gates
    parts = jax.shard_map(
        functools.partial(run, context_parallel="x"), mesh=mesh,
        in_specs=({name: of.get(name, P(None, "x", "heads")) for name in x},),
        out_specs=(P(None, "x", "heads"), tfla.jax.State(P(None, "heads")) if asked == "final" else None),
    )  # fmt: skip

    def total(run: Any, x: dict[str, Any]) -> Any:
        return sum(jnp.sin(t).sum() for t in jax.tree.leaves(run(x)))

    agree(*(jax.jit(jax.value_and_grad(functools.partial(total, f)))(x) for f in (parts, run)))


def test_final_states_of_the_mlstm_beside_divided_heads() -> None:
    x = leaves_of(problem("exp", lengths=(3, 36, 1), Hq=2, H=2, carried=False))
    mesh = jax.make_mesh((2, 2), ("x", "heads"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    run = functools.partial(tfla.jax.mlstm, return_state=True, cu_seqlens=(0, 3, 39, 40))
    parts = jax.shard_map(
        functools.partial(run, context_parallel="x"), mesh=mesh, in_specs=(P(None, "x", "heads"),) * 5,
        out_specs=(P(None, "x", "heads"), tfla.jax.State(*[P(None, "heads")] * 3)),
    )  # fmt: skip
    arrays = [x[name] for name in ("q", "k", "v", "i", "f")]
    (h, found), (whole, expected) = jax.jit(parts)(*arrays), run(*arrays)
    agree((h, found.m), (whole, expected.m))
    weights = [jnp.exp(state.m - expected.m)[..., None] for state in (found, expected)]
    agree(*(s.n * w for s, w in zip((found, expected), weights, strict=True)))


@pytest.mark.parametrize("operator", ["kda", "mlstm"])
def test_nothing_leaks_from_other_sequences(operator: str) -> None:
    """Values that are no numbers stay in their sequence, also on the device on which the next one starts."""
    lengths = (25, 30, 25)
    if operator == "mlstm":
        x = leaves_of(problem("exp", lengths=lengths, Hq=2, H=2, carried=False))
        arrays = [x[name] for name in ("q", "k", "v", "i", "f")]
        run: Any = tfla.jax.mlstm
    else:
        x = delta_leaves(delta_problem("kda", lengths=lengths, carried=False, **SHAPE))
        arrays = [x[name] for name in ("q", "k", "v", "beta", "log_f")]
        run = tfla.jax.delta_rule
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    run = functools.partial(run, return_state=True, cu_seqlens=tuple(offsets(lengths).tolist()), context_parallel="x")
    parts = jax.jit(jax.shard_map(
        lambda *x: (lambda h, state: (h, state.C))(*run(*x)), mesh=mesh, in_specs=(P(None, "x"),) * 5,
        out_specs=(P(None, "x"), P()),
    ))  # fmt: skip
    first, states = parts(*arrays)
    second, others = parts(*(t.at[:, :25].set(jnp.nan) for t in arrays))
    np.testing.assert_array_equal(first[:, 25:], second[:, 25:])
    np.testing.assert_array_equal(states[1:], others[1:])


def test_several_writes_and_explanation() -> None:
    """DeltaProduct passes on the offsets of its writes; an explanation takes the call as the operator does."""
    x = delta_leaves(delta_problem("gdn", lengths=(7, 13), **SHAPE | {"Hq": 4}))
    twice = {name: jnp.repeat(x[name], 2, 1) * 0.7 for name in ("k", "v", "beta")}
    x = {"q": x["q"], "log_f": x["log_f"], "C": x["C"], **twice}
    explained = []

    def run(x: dict[str, Any], **options: Any) -> Any:
        if "context_parallel" in options:
            of = tfla.jax.explain_delta_rule(x["q"], x["q"], x["q"], None, return_state=True, **options)
            explained.append(of.backend)
        return tfla.jax.delta_product(
            x["q"], x["k"], x["v"], x["beta"], x["log_f"], writes=2, initial_state=tfla.jax.State(x["C"]),
            return_state=True, **options,
        )  # fmt: skip

    at = offsets((7, 13))
    agree(jax.jit(divided(run, x))(x, at), jax.jit(lambda x, at: run(x, cu_seqlens=at))(x, at))
    assert explained == ["chunkwise"]
