"""Several devices: batch and heads are divided without communication, the sequence with one exchange of states."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax_delta_cases
import numpy as np
import pytest
import torch
from cases import TOLERANCE, problem
from delta_cases import delta_problem
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import call, leaves_of

import tfla.jax

COLLECTIVES = ("all-gather(", "all-to-all(", "collective-permute(")
STEPS, STATES = ("q", "k", "v", "i", "f"), ("C0", "n0", "m0")
DIVIDED = {"batch": (P("x"), P("x")), "heads": (P(None, None, "x"), P(None, "x"))}


def mesh(devices: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])


def loss(x: dict[str, Any], form: str = "exp", run: Any = None) -> Any:
    """Return a scalar function of h and of the true final state."""
    h, state = (functools.partial(call, form) if run is None else run)(x)
    weight = 1.0 if state.m is None else jnp.exp(state.m)[..., None, None]
    total = jnp.sin(h).sum() + jnp.cos(state.C * weight).sum()
    return total if state.n is None else total + jnp.sin(state.n * weight[..., 0]).sum()


ON_ONE_DEVICE = jax.jit(jax.value_and_grad(loss), static_argnames="form")  # compiled once for all tests


def agree(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def specs(x: dict[str, Any], steps: P, states: P) -> dict[str, P]:
    return {name: steps if name in STEPS else states for name in x}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("divided", DIVIDED)
def test_automatic_partitioning(divided: str, kind: AxisType) -> None:
    """jit divides the work by itself, and the operator needs no communication."""
    x = leaves_of(problem(T=20, Hq=2, H=4))
    expected = ON_ONE_DEVICE(x)
    devices = mesh(2, kind)
    with jax.set_mesh(devices):
        placed = {name: jax.device_put(x[name], NamedSharding(devices, spec)) for name, spec in
                  specs(x, *DIVIDED[divided]).items()}  # fmt: skip
        compiled = jax.jit(jax.value_and_grad(loss)).lower(placed).compile()
        found = compiled(placed)
    agree(found, expected, 1e-9)
    assert not any(name in compiled.as_text() for name in COLLECTIVES)
    assert found[1]["q"].sharding.is_equivalent_to(placed["q"].sharding, 4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("divided", DIVIDED)
def test_shard_map(divided: str, check_vma: bool) -> None:
    x = leaves_of(problem("sigmoid", T=20))
    steps, states = DIVIDED[divided]
    run = jax.shard_map(
        functools.partial(call, "sigmoid"), mesh=mesh(2), in_specs=(specs(x, steps, states),),
        out_specs=(steps, tfla.jax.State(states)), check_vma=check_vma,
    )  # fmt: skip
    found = jax.jit(jax.value_and_grad(functools.partial(loss, run=run)))(x)
    agree(found, ON_ONE_DEVICE(x, form="sigmoid"), 1e-9)


def test_shard_map_without_initial_state() -> None:
    """What the operator makes by itself, such as states of zero, varies over devices as the inputs do."""
    x = leaves_of(problem(T=20, carried=False))
    run = jax.shard_map(lambda x: tfla.jax.mlstm(*x), mesh=mesh(2), in_specs=([P("x")] * 5,), out_specs=P("x"))
    arguments = [x[name] for name in STEPS]
    grads = jax.jit(jax.grad(lambda x: jnp.sin(run(x)).sum()))(arguments)
    agree(grads, jax.jit(jax.grad(lambda x: jnp.sin(tfla.jax.mlstm(*x)).sum()))(arguments), 1e-9)
    step = jax.shard_map(
        lambda x: tfla.jax.mlstm_step(*(t[:, 0] for t in x), tfla.jax.State.zeros(1, 2, 5, 7))[0],
        mesh=mesh(2), in_specs=([P("x")] * 5,), out_specs=P("x"),
    )  # fmt: skip
    agree(step(arguments), run(arguments)[:, 0], 1e-9)


def in_context_parallel(x: dict[str, Any], form: str, devices: int, check_vma: bool = True) -> Any:
    state = tfla.jax.State(P(), *(P() if name in x else None for name in ("n0", "m0")))
    return jax.shard_map(
        functools.partial(call, form, context_parallel="x"), mesh=mesh(devices),
        in_specs=(specs(x, P(None, "x"), P()),), out_specs=(P(None, "x"), state), check_vma=check_vma,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("form", "dtype", "devices", "check_vma"),
    [
        ("exp", torch.float64, 4, True),
        ("exp", torch.float64, 2, False),
        ("plain", torch.float64, 4, True),
        ("exp", torch.float32, 4, True),
    ],
    ids=str,
)
def test_context_parallel(form: str, dtype: torch.dtype, devices: int, check_vma: bool) -> None:
    """Outputs, the final state and all gradients, those of the initial state too, are those of one device."""
    x = leaves_of(problem(form, T=80, Hq=1, H=2, dtype=dtype, f_mean=4.0))
    run = in_context_parallel(x, form, devices, check_vma)
    compiled = jax.jit(jax.value_and_grad(functools.partial(loss, run=run))).lower(x).compile()
    expected = ON_ONE_DEVICE(x, form=form)
    agree(compiled(x), expected, 10 * TOLERANCE[dtype])
    assert "all-gather" in compiled.as_text()


def test_context_parallel_with_extreme_gates() -> None:
    """A device whose gates are all closed passes nothing on, and one with huge input gates dominates the next ones."""
    p = problem(T=80, Hq=1, H=2, dtype=torch.float32, positive_qk=True)
    i, f = p.i.clone(), p.f.clone()
    f[:, 25] = -1e4
    i[:, 40:60] = -torch.inf
    i[:, 10] = 80.0
    i[1, 30] = 1e4
    x = leaves_of(p.but(i=i, f=f))
    run = jax.jit(in_context_parallel(x, "exp", 4))
    agree(run(x)[0], jax.jit(functools.partial(call, "exp"))(x)[0], 1e-5)
    found = jax.jit(jax.grad(lambda x: jnp.sin(run(x)[0]).sum()))(x)
    assert all(jnp.isfinite(g).all() for g in found.values())


LENGTHS = (3, 0, 31, 1, 26, 19)  # 80 steps, of which devices have 20
OFFSETS = tuple(np.cumsum((0, *LENGTHS)).tolist())


def packed_loss(run: Any, x: dict[str, Any], traced: bool) -> Any:
    """Return a loss of an operator of packed sequences that are divided over four devices, and its gradients."""
    steps = {name: P(None, "x") if t.ndim > 2 else P() for name, t in x.items()}

    def part(x: dict[str, Any], at: Any) -> Any:
        return run(x, cu_seqlens=at if traced else OFFSETS, context_parallel="x")

    divided = jax.shard_map(part, mesh=mesh(4), in_specs=(steps, P()), out_specs=P(None, "x"))
    return jax.jit(jax.value_and_grad(lambda x: jnp.sin(divided(x, jnp.asarray(OFFSETS))).sum()))(x)


@pytest.mark.parametrize(
    ("form", "dtype", "traced"),
    [("exp", torch.float64, True), ("sigmoid", torch.float64, False), ("exp", torch.float32, False),
     ("plain", torch.float32, True)],
    ids=str,
)  # fmt: skip
def test_context_parallel_of_packed_sequences(form: str, dtype: torch.dtype, traced: bool) -> None:
    """Sequences that start and end anywhere on four devices have the outputs and gradients of one device."""
    x = leaves_of(problem(form, lengths=LENGTHS, Hq=1, H=2, dtype=dtype, f_mean=4.0, carried=False))
    run = functools.partial(call, form, return_state=False)
    wide = {name: t.astype(jnp.float64) for name, t in x.items()}
    whole = jax.jit(jax.value_and_grad(lambda x: jnp.sin(run(x, cu_seqlens=OFFSETS)).sum()))
    agree(packed_loss(run, x, traced), whole(wide), 10 * TOLERANCE[dtype])


def test_steps_after_the_last_packed_sequence_are_zero() -> None:
    x = leaves_of(problem("exp", T=20, B=1, Hq=1, H=2, carried=False))
    run = jax.shard_map(
        lambda x, at: tfla.jax.mlstm(*x, context_parallel="x", cu_seqlens=at),
        mesh=mesh(2), in_specs=([P(None, "x")] * 5, P()), out_specs=P(None, "x"),
    )  # fmt: skip
    h = jax.jit(run)([x[name] for name in STEPS], jnp.array([0, 4, 13]))
    expected = tfla.jax.mlstm(*(x[name][:, :13] for name in STEPS), cu_seqlens=(0, 4, 13))
    agree(h[:, :13], expected, 1e-9)
    assert not h[:, 13:].any()


@pytest.mark.parametrize(
    ("form", "dtype", "lengths", "check_vma"),
    [
        ("exp", torch.float64, LENGTHS, True),
        ("exp", torch.float32, (0, 80, 0), False),
        ("sigmoid", torch.float64, (20, 0, 40, 20), False),
        ("plain", torch.float64, (0, 7, 70, 3, 0), True),
        ("normalized", torch.float64, (1,) * 41 + (39,), True),
    ],
    ids=str,
)
def test_states_of_packed_sequences_in_context_parallel(
    form: str, dtype: torch.dtype, lengths: tuple[int, ...], check_vma: bool
) -> None:
    """Final states and gradients of initial states are those of one device, wherever sequences start and end."""
    x = leaves_of(problem(form, lengths=lengths, Hq=1, H=2, dtype=dtype, f_mean=4.0))
    at = jnp.cumsum(jnp.array([0, *lengths]))
    run = jax.shard_map(
        lambda x, at: call(form, x, cu_seqlens=at, context_parallel="x"), mesh=mesh(4),
        in_specs=(specs(x, P(None, "x"), P()), P()), check_vma=check_vma,
        out_specs=(P(None, "x"), tfla.jax.State(P(), *(P() if name in x else None for name in ("n0", "m0")))),
    )  # fmt: skip
    found = jax.jit(jax.value_and_grad(lambda x: loss(x, run=lambda x: run(x, at))))(x)
    wide = {name: t.astype(jnp.float64) for name, t in x.items()}
    whole = jax.jit(jax.value_and_grad(lambda x: loss(x, run=functools.partial(call, form, cu_seqlens=at))))
    agree(found, whole(wide), 10 * TOLERANCE[dtype])


def test_max_states_far_below_0_of_packed_sequences_in_context_parallel() -> None:
    x = leaves_of(problem("exp", lengths=(0, 72, 8), Hq=1, H=2, f_mean=60.0))
    x |= {"i": x["i"] - 100, "m0": x["m0"] - 100}
    at = jnp.array([0, 0, 72, 80])
    run = jax.shard_map(
        lambda x: call("exp", x, cu_seqlens=at, context_parallel="x"), mesh=mesh(4),
        in_specs=(specs(x, P(None, "x"), P()),), out_specs=(P(None, "x"), tfla.jax.State(P(), P(), P())),
    )  # fmt: skip
    (h, found), (whole, expected) = jax.jit(run)(x), jax.jit(lambda x: call("exp", x, cu_seqlens=at))(x)
    agree((h, found.m), (whole, expected.m), 1e-9)
    agree((found.C, found.n), (expected.C, expected.n), 1e-9)
    assert jnp.linalg.norm(expected.C[1]) > 0.1


@pytest.mark.parametrize("asked", ["initial", "final"])
def test_one_state_of_packed_sequences_in_context_parallel(asked: str) -> None:
    """An initial state without a final one, and the other way round, with static offsets."""
    x = leaves_of(problem("exp", lengths=LENGTHS, Hq=1, H=2, carried=asked == "initial"))
    one = functools.partial(call, "exp", return_state=asked == "final", cu_seqlens=OFFSETS)
    state = tfla.jax.State(P(), P(), P())
    run = jax.shard_map(
        functools.partial(one, context_parallel="x"), mesh=mesh(4), in_specs=(specs(x, P(None, "x"), P()),),
        out_specs=(P(None, "x"), state) if asked == "final" else P(None, "x"),
    )  # fmt: skip
    found, expected = jax.jit(run)(x), jax.jit(one)(x)
    if asked == "final":
        assert expected[1].m is not None
        found, expected = (
            (h, jnp.exp(m)[..., None, None] * C, jnp.exp(m)[..., None] * n) for h, (C, n, m) in (found, expected)
        )
    agree(found, expected, 1e-9)


def test_explanation_of_packed_sequences_in_context_parallel() -> None:
    x = leaves_of(problem("exp", lengths=LENGTHS, Hq=1, H=2, carried=False))
    found = []

    def part(x: list[Any]) -> Any:
        found.append(tfla.jax.explain(*x, cu_seqlens=OFFSETS, context_parallel="x", return_state=True))
        return x[0]

    jax.shard_map(part, mesh=mesh(4), in_specs=([P(None, "x")] * 5,), out_specs=P(None, "x"))(
        [x[name] for name in STEPS]
    )
    assert (found[0].backend, found[0].kernel) == ("chunkwise", "segmented")


DELTA: dict[str, Any] = {"B": 2, "T": 40, "H": 4, "K": 4, "V": 3}
DELTA_STEPS = ("q", "k", "v", "beta", "log_f", "read_key")


def delta_leaves(model: str, **changed: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a problem, and a scalar function of what its model or another function makes of them."""
    x = jax_delta_cases.leaves_of(delta_problem(model, **DELTA | changed))
    one = functools.partial(jax_delta_cases.call, model, chunk_size=8)
    return x, lambda x, run=one: loss(x, run=run)


def delta_specs(x: dict[str, Any], steps: P, states: P) -> dict[str, P]:
    return {name: steps if name in DELTA_STEPS else states for name in x}


@pytest.mark.parametrize(("divided", "kind"), [("batch", AxisType.Auto), ("heads", AxisType.Explicit)], ids=str)
def test_delta_rule_without_communication(divided: str, kind: AxisType) -> None:
    x, of_call = delta_leaves("kda")
    expected = jax.jit(jax.value_and_grad(of_call))(x)
    devices = mesh(2, kind)
    with jax.set_mesh(devices):
        placed = {name: jax.device_put(x[name], NamedSharding(devices, spec)) for name, spec in
                  delta_specs(x, *DIVIDED[divided]).items()}  # fmt: skip
        compiled = jax.jit(jax.value_and_grad(of_call)).lower(placed).compile()
        agree(compiled(placed), expected, 1e-9)
    assert not any(name in compiled.as_text() for name in COLLECTIVES)


@pytest.mark.parametrize("model", ["gdn", "kda", "comba", "deltanet", "activated"])
def test_delta_rule_in_context_parallel_of_packed_sequences(model: str) -> None:
    """A rule that reads before the decay finds nothing of the sequence before, and no rule decays into the next one."""
    x = leaves_of(problem("exp", lengths=LENGTHS, Hq=1, H=2, K=4, V=3, f_mean=4.0, carried=False))
    x |= {"A_log": jnp.array([0.1, -0.4]), "dt_bias": jnp.array([0.3, -0.2])} if model == "activated" else {}

    def run(x: dict[str, Any], **options: Any) -> Any:
        gate = None if model == "deltanet" else jax.nn.log_sigmoid(x["f"])
        options |= {"read_before_decay": model == "comba", "normalize_qk": True, "beta_activation": "sigmoid"}
        if model == "kda":
            gate = gate[..., None] * jnp.array([1.0, 0.1, 2.0, 0.0])
        if model == "activated":
            gate, gates = x["f"], {"A_log": x["A_log"], "dt_bias": x["dt_bias"]}
            options |= gates | {"gate_activation": "softplus"}
        return tfla.jax.delta_rule(x["q"], x["k"], x["v"], x["i"], gate, chunk_size=8, **options)

    whole = jax.jit(jax.value_and_grad(lambda x: jnp.sin(run(x, cu_seqlens=OFFSETS)).sum()))
    agree(packed_loss(run, x, model == "kda"), whole(x), 1e-9)


@pytest.mark.parametrize(
    ("model", "gates", "devices", "check_vma"),
    [("gdn", "long", 4, True), ("kda", "medium", 2, False), ("gla", "long", 4, True), ("comba", "half", 4, True),
     ("deltanet", "long", 2, True)],
)  # fmt: skip
def test_delta_rule_in_context_parallel(model: str, gates: str, devices: int, check_vma: bool) -> None:
    """Outputs, the final state and all gradients, those of the initial state too, are those of one device."""
    x, of_call = delta_leaves(model, gates=gates, Hq=2)
    run = jax.shard_map(
        functools.partial(jax_delta_cases.call, model, context_parallel="x", chunk_size=8), mesh=mesh(devices),
        in_specs=(delta_specs(x, P(None, "x"), P()),), out_specs=(P(None, "x"), tfla.jax.State(P())),
        check_vma=check_vma,
    )  # fmt: skip
    compiled = jax.jit(jax.value_and_grad(lambda x: of_call(x, run))).lower(x).compile()
    agree(compiled(x), jax.jit(jax.value_and_grad(of_call))(x), 1e-9)
    assert "all-gather" in compiled.as_text()
