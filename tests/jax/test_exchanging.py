"""Context parallelism through the kernels for GPUs: plans with collectives between their launches.

They run on several GPUs. With TRITON_INTERPRET=1 their plans run on CPU devices, in Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import TOLERANCE, problem
from interpreted_plan import InterpretedPlan
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax_cases import call, leaves_of
from jax_plans import MARKS, plans_run

import tfla.jax
from tfla.jax import exchanging, kernels

pytestmark = [*MARKS, pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")]
DEVICES = min(4, jax.device_count())
SHAPE: dict[str, Any] = {"B": 2, "T": 50 * DEVICES, "Hq": 1, "H": 2, "K": 16, "V": 24}
OPTIONS: dict[str, Any] = {"backend": "triton", "chunk_size": 32}
SPANS = ["own_rows", "join_spans"]


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with plans_run(monkeypatch):
        InterpretedPlan.ran.clear()
        yield


def divided(x: dict[str, Any], form: str, check_vma: bool = True, **options: Any) -> Any:
    """Return the operator with its sequence over all devices."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    specs = {name: P() if name.endswith("0") else P(None, "x") for name in x}
    state = tfla.jax.State(P(), *((P(), P()) if form in ("exp", "normalized") else (None, None)))
    return jax.shard_map(
        functools.partial(call, form, context_parallel="x", **(OPTIONS | options)), mesh=mesh, in_specs=(specs,),
        out_specs=(P(None, "x"), state), check_vma=check_vma,
    )  # fmt: skip


def loss(run: Any, x: dict[str, Any]) -> Any:
    """Return a scalar function of h and of the true final state."""
    h, state = run(x)
    weight = 1.0 if state.m is None else jnp.exp(state.m)[..., None, None]
    total = jnp.sin(h).sum() + jnp.cos(state.C * weight).sum()
    return total if state.n is None else total + jnp.sin(state.n * weight[..., 0]).sum()


def agree(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("form", "carried", "check_vma"),
    [("exp", True, True), ("exp", False, False), ("sigmoid", True, False), ("plain", True, True)],
)
def test_results_and_gradients(form: str, carried: bool, check_vma: bool) -> None:
    """Outputs, the final state and all gradients, those of the initial state too, are those of one device."""
    x = leaves_of(problem(form, dtype=torch.float32, f_mean=4.0, carried=carried, **SHAPE))
    found = jax.jit(jax.value_and_grad(functools.partial(loss, divided(x, form, check_vma))))(x)
    wide = {name: a.astype(jnp.float64) for name, a in x.items()}
    whole = functools.partial(call, form, backend="chunkwise")
    agree(found, jax.jit(jax.value_and_grad(functools.partial(loss, whole)))(wide), 10 * TOLERANCE[torch.float32])
    # The cotangents of C and of n are exchanged one after the other.
    spans = ["own_max", "join_max", *SPANS] * (form == "exp") + 2 * SPANS
    ran = [name for name in InterpretedPlan.ran if name.startswith(("own_", "join_"))]
    assert sorted(ran) == sorted(spans * DEVICES) or not ran  # they are not recorded on a GPU


def test_padded_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that kernels of other sizes compute give the results, the states and the gradients of their own size."""
    monkeypatch.setattr(exchanging, "kernel_head_dims", lambda *_: (32, 32))
    x = leaves_of(problem("exp", dtype=torch.float32, f_mean=4.0, **SHAPE | {"B": 1, "H": 1}))
    run = divided(x, "exp")
    found = jax.jit(jax.value_and_grad(functools.partial(loss, run)))(x)
    wide = {name: a.astype(jnp.float64) for name, a in x.items()}
    whole = functools.partial(call, "exp", backend="chunkwise")
    agree(found, jax.jit(jax.value_and_grad(functools.partial(loss, whole)))(wide), 10 * TOLERANCE[torch.float32])


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_packed_sequences(form: str) -> None:
    """Packed sequences run the launches of a dense batch, with gates that are closed where they start."""
    lengths = (3, 0, 60, 50 * DEVICES - 63)
    x = leaves_of(problem(form, dtype=torch.float32, f_mean=4.0, carried=False, lengths=lengths, **SHAPE | {"B": 1}))
    at = jnp.cumsum(jnp.array([0, *lengths]))
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    run = functools.partial(call, form, return_state=False)
    part = jax.shard_map(
        lambda x, at: run(x, cu_seqlens=at, context_parallel="x", **OPTIONS), mesh=mesh,
        in_specs=(dict.fromkeys(x, P(None, "x")), P()), out_specs=P(None, "x"),
    )  # fmt: skip
    found = jax.jit(jax.value_and_grad(lambda x: jnp.sin(part(x, at)).sum()))(x)
    wide = {name: a.astype(jnp.float64) for name, a in x.items()}
    whole = jax.jit(jax.value_and_grad(lambda x: jnp.sin(run(x, cu_seqlens=at, backend="chunkwise")).sum()))
    agree(found, whole(wide), 10 * TOLERANCE[torch.float32])
    assert {"own_rows", "join_spans"} <= set(InterpretedPlan.ran) or not InterpretedPlan.ran


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_states_of_packed_sequences(form: str) -> None:
    """Each device launches a packed call of its own, whose first state has come from the devices before it."""
    lengths = (3, 0, 60, 50 * DEVICES - 64, 1)
    x = leaves_of(problem(form, dtype=torch.float32, f_mean=4.0, lengths=lengths, **SHAPE | {"B": 1}))
    at = tuple(np.cumsum([0, *lengths]).tolist())
    found = jax.jit(jax.value_and_grad(functools.partial(loss, divided(x, form, cu_seqlens=at))))(x)
    wide = {name: a.astype(jnp.float64) for name, a in x.items()}
    whole = functools.partial(call, form, backend="chunkwise", cu_seqlens=at)
    agree(found, jax.jit(jax.value_and_grad(functools.partial(loss, whole)))(wide), 10 * TOLERANCE[torch.float32])
    assert "o_dv_scan" in InterpretedPlan.ran or not InterpretedPlan.ran


def test_where_it_runs() -> None:
    """Without several tiles on each device, or without a shard_map over all axes, XLA computes the call."""
    x = leaves_of(problem("sigmoid", dtype=torch.float32, carried=False, **(SHAPE | {"T": 8 * DEVICES})))
    with pytest.raises(ValueError, match="backend: 'triton' cannot run this: with context_parallel it needs several"):
        divided(x, "sigmoid")(x)
    kernels.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="the kernels for GPUs do not run, with context_parallel it needs several"):
        divided(x, "sigmoid", backend=None)(x)
    x = leaves_of(problem("sigmoid", dtype=torch.float32, carried=False, **SHAPE))
    mesh = jax.make_mesh((2, DEVICES // 2), ("data", "x"), axis_types=(AxisType.Auto,) * 2)
    part = jax.shard_map(
        functools.partial(call, "sigmoid", context_parallel="x", **OPTIONS), mesh=mesh, axis_names={"x"},
        in_specs=(dict.fromkeys(x, P(None, "x")),), out_specs=(P(None, "x"), tfla.jax.State(P())),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"it needs a shard_map over all mesh axes, not without \['data'\]"):
        jax.jit(part)(x)
