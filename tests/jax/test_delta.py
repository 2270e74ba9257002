"""The delta rule and gates by channel on JAX are the recurrence of delta_cases.py: outputs, states and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from delta_cases import GATES, MODELS, check_beside_terms, delta_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_cases import to_jax
from jax_delta_cases import call, leaves_of, solve
from ops.test_delta_rule import check
from ops.test_delta_rule import solve as solve_by_torch

import tfla.jax

PUBLIC = [model for model in MODELS if model != "simple"]  # the mLSTM's operator has gates by step
SMALL: dict[str, Any] = {"B": 1, "T": 20, "Hq": 1, "H": 2, "K": 4, "V": 3}  # shared, so that tests share functions
STATIC: dict[str, Any] = {"chunk_size": 8}  # three chunks of a tile of eight steps


@pytest.mark.parametrize("model", PUBLIC)
def test_every_model(model: str) -> None:
    p = delta_problem(model, **SMALL)
    check(p, solve(p, **STATIC))


@pytest.mark.parametrize(("model", "dtype"), [("gdn", torch.bfloat16), ("kda", torch.float16), ("kda", torch.float32)])
def test_dtype(model: str, dtype: torch.dtype) -> None:
    """Chunks of two tiles of 64 steps."""
    p = delta_problem(model, T=200, B=1, H=4, dtype=dtype)
    found = solve(p, chunk_size=130)
    check(p, found)
    assert {found[name].dtype for name in ("h", "dq", "dk", "dv")} == {dtype}


@pytest.mark.parametrize("kernel", ["recurrent", "parallel"])
@pytest.mark.parametrize("model", ["deltanet", "comba", "gla", "before"])
def test_reference(model: str, kernel: str) -> None:
    lengths = (9, 0, 4) if model in ("comba", "gla") else None
    p = delta_problem(model, T=9, Hq=1, lengths=lengths)
    check(p, solve(p, backend="reference", kernel=kernel))


@pytest.mark.parametrize("chunk_size", [1, 3, 1024])
def test_chunk_size(chunk_size: int) -> None:
    p = delta_problem("comba", **SMALL | {"T": 7})
    check(p, solve(p, chunk_size=chunk_size))


def test_without_initial_state() -> None:
    p = delta_problem("kda", carried=False, **SMALL)
    check(p, solve(p, **STATIC))


def test_write_strength_by_its_logarithm() -> None:
    """GLA with log_i is the rule without a correction and beta = exp(log_i)."""
    p = delta_problem("gla", **SMALL)
    log_i = torch.linspace(-3, 0.5, 40, dtype=torch.float64).reshape(1, 20, 2)
    weighted = replace(p, x=p.x._replace(beta=log_i.exp()))
    expected = solve_by_torch(weighted)
    found = solve(p, {"log_i": log_i}, **STATIC)
    expected["dlog_i"] = expected.pop("dbeta") * log_i.exp()
    assert found.keys() == expected.keys()
    assert all((found[n] - x).norm() <= 1e-12 * x.norm() for n, x in expected.items())


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("model", ["gdn", "kda", "gla"])
def test_gates(model: str, gates: str) -> None:
    """Long and short memories, closed gates, resets, in float32."""
    p = delta_problem(model, gates=gates, T=70, B=1, H=2, Hq=1, dtype=torch.float32)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keys_that_are_alike(dtype: torch.dtype) -> None:
    p = delta_problem("gdn", alike=0.9, gates="long", T=70, B=1, H=2, Hq=1, K=16, dtype=dtype)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_limits_of_the_write_strength(beta: float) -> None:
    p = delta_problem("kda", **SMALL)
    p = replace(p, x=p.x._replace(beta=torch.full_like(p.x.v[..., 0], beta)))
    check_beside_terms(p, solve(p, **STATIC))


@settings(max_examples=10)
@given(
    model=st.sampled_from(["gdn", "before"]), gates=st.sampled_from(GATES), seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_any_problem(model: str, gates: str, seed: int, dtype: torch.dtype) -> None:
    p = delta_problem(model, gates=gates, seed=seed, dtype=dtype, **SMALL)
    check_beside_terms(p, solve(p, **STATIC))


@pytest.mark.parametrize("lengths", [(5, 0, 14, 1), (0, 20, 0, 0), (8, 8, 3, 1)], ids=str)
@pytest.mark.parametrize("model", ["kda", "comba"])
def test_packed_sequences(model: str, lengths: tuple[int, ...]) -> None:
    """One compiled function serves all lengths."""
    p = delta_problem(model, lengths=lengths, **SMALL)
    check(p, solve(p, **STATIC))


def test_static_offsets() -> None:
    p = delta_problem("gdn", lengths=(5, 0, 14, 1), **SMALL)
    check(p, solve(p, cu_seqlens=(0, 5, 5, 19, 20), **STATIC))


def test_gates_of_minus_infinity() -> None:
    """A gate of -inf forgets all before it, and no result or gradient is NaN."""
    for model in ("gdn", "kda", "gla"):
        p = delta_problem(model, **SMALL)
        log_f = p.leaves["log_f"].clone()
        log_f[:, 11] = -torch.inf
        closed = replace(p, x=p.x._replace(log_f=log_f))
        found = solve(closed, **STATIC)
        assert all(x.isfinite().all() for x in found.values())
        after = {name: x[:, 11:] for name, x in leaves_of(p).items() if name != "C"}
        h = call(model, after, scale=p.scale, **STATIC)[0]
        np.testing.assert_allclose(found["h"][:, 11:], h, rtol=1e-10)


@pytest.mark.parametrize("bias_by_channel", [False, True])
@pytest.mark.parametrize("activation", ["softplus", "sigmoid"])
def test_activations(activation: str, bias_by_channel: bool) -> None:
    """They are those of PyTorch's operator, with gradients of their parameters."""
    draw = torch.Generator().manual_seed(1)
    p = delta_problem("kda" if bias_by_channel else "comba", **SMALL)
    more = {"A_log": torch.randn(2, generator=draw, dtype=torch.float64)}
    more["dt_bias"] = torch.randn(2, *[4] * bias_by_channel, generator=draw, dtype=torch.float64)
    given: dict[str, Any] = {
        "normalize_qk": True, "beta_activation": "2sigmoid" if bias_by_channel else "sigmoid",
        "gate_activation": activation, "lower_bound": -5.0 if activation == "sigmoid" else None,
    }  # fmt: skip
    leaves = {name: t.detach().clone().requires_grad_() for name, t in (p.leaves | more).items()}
    h, state = tfla.delta_rule(
        *(leaves[name] for name in ("q", "k", "v", "beta", "log_f")), read_key=leaves.get("read_key"), scale=p.scale,
        read_before_decay=p.read_before_decay, A_log=leaves["A_log"], dt_bias=leaves["dt_bias"], return_state=True,
        initial_state=tfla.State(leaves["C"]), **given,
    )  # fmt: skip
    grads = torch.autograd.grad((h, state.C), list(leaves.values()), (p.dh, p.dC))
    expected = {"h": h, "C": state.C} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    found = solve(p, more, **given, **STATIC)
    assert found.keys() == expected.keys()
    assert all((found[name] - x).norm() <= 1e-10 * x.norm() for name, x in expected.items())


def test_several_writes_in_a_step() -> None:
    """DeltaProduct and DPLR are those of PyTorch, with gradients, states and packed sequences."""
    p = delta_problem("kda", **SMALL | {"Hq": 2})
    x = p.leaves
    of_product = [x["q"][:, :10], x["k"], x["v"], x["beta"], x["log_f"][:, :10]]
    of_dplr = [x["q"], 0.5 * x["k"], x["v"], -x["k"], 0.3 * x["k"], x["log_f"]]
    for name, inputs, more in (("delta_product", of_product, {"writes": 2}), ("dplr", of_dplr, {})):
        leaves = [t.detach().clone().requires_grad_() for t in (*inputs, x["C"])]
        steps = inputs[0].shape[1]
        h, state = getattr(tfla, name)(
            *leaves[:-1], initial_state=tfla.State(leaves[-1]), return_state=True, **more
        )  # fmt: skip
        grads = torch.autograd.grad(h.sin().sum() + state.C.sum(), leaves)

        @jax.jit
        def total(leaves: list[Any], name: str = name, more: dict[str, int] = more) -> Any:
            h, state = getattr(tfla.jax, name)(
                *leaves[:-1], initial_state=tfla.jax.State(leaves[-1]), return_state=True, chunk_size=8, **more
            )
            return jnp.sin(h).sum() + state.C.sum(), h

        arrays = [to_jax(t) for t in leaves]
        found, h_found = jax.grad(total, has_aux=True)(arrays)
        close([h_found, *found], [to_jax(t) for t in (h, *grads)])
        packed = getattr(tfla.jax, name)(*arrays[:-1], cu_seqlens=(0, 3, steps), chunk_size=8, **more)
        expected = getattr(tfla, name)(*inputs, cu_seqlens=torch.tensor([0, 3, steps]), **more)
        close(packed, to_jax(expected))
        none = getattr(tfla.jax, name)(*(t[:0] for t in arrays[:-1]), **more)
        assert none.shape == (0, steps, *inputs[2].shape[2:])
    for wrong, kind in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match=r"^writes: got "):
            tfla.jax.delta_product(*map(to_jax, of_product), writes=wrong)  # type: ignore[arg-type]


def test_no_batch_rows() -> None:
    p = delta_problem("kda", **SMALL | {"carried": False})
    none = {name: x[:0] for name, x in leaves_of(p).items()}
    h, state = call("kda", none)
    assert h.shape == (0, 20, 2, 3)
    assert state.C.shape == (0, 2, 4, 3)


# Transforms of JAX.


def arguments(model: str = "kda") -> list[Any]:
    x = leaves_of(delta_problem(model, **SMALL))
    return [x[name] for name in ("q", "k", "v", "beta", "log_f")]


def loss(x: list[Any], **given: Any) -> Any:
    return jnp.sin(tfla.jax.delta_rule(*x, **STATIC | given)).sum()


def close(a: Any, b: Any, rtol: float = 1e-9) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-11)


def test_vmap_and_checkpoint() -> None:
    x = arguments()
    run = jax.jit(jax.grad(loss))
    expected = run(x)
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(x), expected)
    both = [jnp.stack([a, a[:, ::-1]]) for a in x]
    found = jax.jit(jax.vmap(jax.grad(loss)))(both)
    close([g[0] for g in found], expected)
    close([g[1] for g in found], run([a[1] for a in both]))


def test_options_as_static_arguments_of_jit() -> None:
    x = arguments()
    run = jax.jit(tfla.jax.delta_rule, static_argnames=("return_state", "chunk_size", "beta_activation"))
    h, state = run(*x, return_state=True, chunk_size=8, beta_activation="sigmoid")
    assert isinstance(state, tfla.jax.State)
    close(h, tfla.jax.delta_rule(*x, beta_activation="sigmoid"))


def test_derivatives_of_gradients_and_forward_mode() -> None:
    """Products with the Hessian are those of the reference, which JAX differentiates twice by itself."""
    x = [a[:, :5] for a in arguments()]
    direction = [jnp.cos(a) for a in x]

    def slope(x: list[Any], **given: Any) -> Any:
        return sum((g * d).sum() for g, d in zip(jax.grad(loss)(x, **given), direction, strict=True))

    by_forward = jax.jit(lambda x, d: jax.jvp(lambda x: loss(x, backend="reference"), (x,), (d,))[1])(x, direction)
    value, products = jax.jit(jax.value_and_grad(slope))(x)
    close(by_forward, value)
    close(products, jax.jit(jax.grad(lambda x: slope(x, backend="reference")))(x), 1e-7)


def test_float32_where_x64_is_off() -> None:
    x = arguments()
    with jax.enable_x64(False):
        low = [jnp.asarray(np.asarray(a)) for a in x]
        h, state = tfla.jax.delta_rule(*low, return_state=True, **STATIC)
    assert h.dtype == state.C.dtype == jnp.float32
    np.testing.assert_allclose(h, tfla.jax.delta_rule(*x), rtol=1e-4, atol=1e-5)
