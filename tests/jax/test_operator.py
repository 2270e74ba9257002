"""The operator on JAX is the recurrence of cases.py: outputs, final states and all gradients, in every form."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch
from cases import FORMS, TOLERANCE, Problem, check, check_beside_terms, problem, size_of_terms, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_cases import SHAPE, solve
from ops.test_extreme_gates import EXTREMES, with_extremes
from ops.test_growing_gates import PATHS, growing

import tfla

REFERENCE = ("recurrent", "parallel", "chunkwise")
SHAPES: dict[str, dict[str, Any]] = {
    "one step": {"T": 1},
    "prime head dims": {"K": 13, "V": 29},
    "three values to a key": {"B": 1, "Hq": 2, "H": 6},
}


LOW = {"exp": torch.bfloat16, "sigmoid": torch.float16, "plain": torch.bfloat16, "normalized": torch.float16}
FORMS_AND_DTYPES = [(form, dtype) for form in FORMS for dtype in (torch.float64, torch.float32, LOW[form])]


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES, ids=str)
def test_form_and_dtype(form: str, dtype: torch.dtype) -> None:
    p = problem(form, dtype=dtype, **SHAPE)
    found = solve(p)
    check(found, truth(p), dtype)
    assert {found[name].dtype for name in ("h", "dq", "dk", "dv")} == {dtype}
    assert found["di"].dtype == p.i.dtype


@pytest.mark.parametrize(
    ("form", "kernel"), [("exp", "recurrent"), ("exp", "chunkwise"), ("plain", "parallel"), ("sigmoid", "recurrent")]
)
def test_reference(form: str, kernel: str) -> None:
    p = problem(form, **SHAPE)
    check(solve(p, backend="reference", kernel=kernel, chunk_size=16), truth(p), p.dtype)


@pytest.mark.parametrize("kernel", REFERENCE)
def test_reference_of_packed_sequences(kernel: str) -> None:
    p = problem(lengths=(9, 0, 20), Hq=1)
    check(solve(p, backend="reference", kernel=kernel, chunk_size=16), truth(p), p.dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shape(shape: dict[str, Any]) -> None:
    p = problem(**shape)
    check(solve(p), truth(p), p.dtype)


@pytest.mark.parametrize(("T", "chunk_size"), [(300, 128), (70, 16), (7, 1)])
def test_chunk_size(T: int, chunk_size: int) -> None:
    """Chunks of more tiles than one, of less than one, of one step."""
    p = problem(T=T)
    check(solve(p, chunk_size=chunk_size), truth(p), p.dtype)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scale(scale: float) -> None:
    p = problem("normalized", T=9).but(scale=scale)
    check(solve(p), truth(p), p.dtype)


def test_states_that_are_stored_in_bfloat16() -> None:
    """h is the same; gradients are as coarse as bfloat16."""
    p = problem(T=200, dtype=torch.float32)
    found, exact = solve(p, chunk_size=128, store_dtype=jnp.bfloat16), solve(p, chunk_size=128)
    assert torch.equal(found["h"], exact["h"])
    assert not torch.equal(found["dq"], exact["dq"])
    check_beside_terms(found, p, TOLERANCE[torch.bfloat16])


def test_without_gradient_of_the_normalizer() -> None:
    p = problem(**SHAPE).but(normalizer_grad=False)
    check(solve(p), truth(p), p.dtype)
    check(solve(p, backend="reference"), truth(p), p.dtype)


@pytest.mark.parametrize("form", ["exp", "plain"])
def test_without_initial_state(form: str) -> None:
    p = problem(form, carried=False, **SHAPE)
    found, ref = solve(p), truth(p)
    for name, x in found.items():
        assert (x - ref[name]).norm() <= TOLERANCE[p.dtype] * max(ref[name].norm().item(), 1.0), name
    assert not found["df"][:, 0].any()
    assert found["df"].any()


def test_input_gate_left_out() -> None:
    p = problem("plain", T=9).but(i=None)
    check(solve(p), truth(p), p.dtype)


def test_gate_dtypes() -> None:
    p = problem(T=9, dtype=torch.float32, i_dtype=torch.bfloat16, f_dtype=torch.float16)
    found = solve(p)
    check(found, truth(p), p.dtype)
    assert (found["di"].dtype, found["df"].dtype) == (torch.bfloat16, torch.float16)


def of_shape(form: str, dtype: torch.dtype = torch.float32, **gates: Any) -> Problem:
    return problem(form, dtype=dtype, positive_qk=True, **SHAPE, **gates)


@pytest.mark.parametrize(
    ("form", "gate", "value"),
    [(form, gate, value) for form, gates in EXTREMES.items() for gate, values in gates.items() for value in values],
)
def test_extreme_gate(form: str, gate: str, value: float) -> None:
    p = with_extremes(of_shape(form), gate, (value,))
    check(solve(p), truth(p), p.dtype)


@pytest.mark.parametrize("form", FORMS)
def test_all_extremes_at_once(form: str) -> None:
    for dtype in (torch.float64, torch.float32):
        p = of_shape(form, dtype)
        for gate, values in EXTREMES[form].items():
            p = with_extremes(p, gate, values)
        found = solve(p)
        assert all(x.isfinite().all() for x in found.values())
        check(found, truth(p), dtype)


@pytest.mark.parametrize("lowest", [-50.0, 50.0])
def test_input_gates_that_jump(lowest: float) -> None:
    p = of_shape("exp", f_mean=6.0)
    i = p.i.clone()
    i[:, 20:60] += lowest
    i[:, 40] += 50
    i[:, 80:] += torch.linspace(0, 100, 20)[:, None]
    p = p.but(i=i)
    check(solve(p), truth(p), p.dtype)


@pytest.mark.parametrize("m", [1e4, 60.0, -60.0, -1e4])
def test_state_after_extreme_gates(m: float) -> None:
    p = of_shape("normalized")
    p = p.but(state=p.state._replace(n=p.state.n.abs(), m=p.state.m + m))
    check(solve(p), truth(p), p.dtype)


@settings(max_examples=12)
@pytest.mark.parametrize("form", ["exp", "plain"])
@given(
    gates=st.sampled_from([(0.0, 2.0), (-10.0, 5.0), (1.0, 0.0), (0.0, -5.0), (-3.0, 9.0)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_any_gates(form: str, gates: tuple[float, float], dtype: torch.dtype, seed: int) -> None:
    p = problem(form, dtype=dtype, i_mean=gates[0], f_mean=gates[1], seed=seed, **SHAPE)
    sizes = size_of_terms(p)
    for name, x in solve(p).items():
        assert (x - truth(p)[name]).norm() <= 4 * TOLERANCE[dtype] * sizes[name], name


@pytest.mark.parametrize("f_mean", [7.0, 0.0, -6.0, -20.0])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_gradients_of_gates_cost_what_rounding_costs(form: str, f_mean: float) -> None:
    """Errors are at most 20 roundings to float32, or three times those of dq and dk."""
    p = problem(form, B=1, T=100, K=32, V=32, i_mean=-2.0, f_mean=f_mean, carried=False, positive_qk=form == "exp",
                dtype=torch.float32)  # fmt: skip
    p = p.but(dstate=tfla.State(*(None if x is None else torch.zeros_like(x) for x in p.dstate)))
    found, exact = solve(p), truth(p)
    errors = {n: ((found[n].double() - exact[n]).norm() / exact[n].norm()).item() for n in ("dq", "dk", "di", "df")}
    allowed = max(20 * torch.finfo(torch.float32).eps / 2, 3 * errors["dq"], 3 * errors["dk"])
    assert max(errors["di"], errors["df"]) <= allowed, errors


def test_no_batch_rows() -> None:
    p = problem(T=9, carried=False)
    none = p.but(**{name: getattr(p, name)[:0] for name in ("q", "k", "v", "i", "f", "dh")},
                 dstate=tfla.State(*(x[:0] for x in p.dstate)))  # fmt: skip
    found = solve(none)
    assert found["h"].shape == (0, 9, 2, 7)
    assert found["dq"].shape == none.q.shape


@pytest.mark.parametrize("form", ["plain", "normalized"])
def test_growth(form: str) -> None:
    """Log-gates above 0: a state that grows is right as long as float32 holds it."""
    for log_f, log_i in PATHS.values():
        p = growing(form, log_f, log_i)
        found = solve(p)
        assert all(x.isfinite().all() for x in found.values())
        check_beside_terms(found, p, TOLERANCE[torch.float32])


def test_growth_of_a_state_that_was_tiny() -> None:
    """A state grows by more than the range of float32, from the lower end of that range to the upper one."""
    p = growing("plain", torch.full((64,), 2.0))
    p = p.but(k=p.k * 1e-20, v=p.v * 1e-12, dh=p.dh * 1e-24, state=tfla.State(p.state.C * 1e-30))
    p = p.but(dstate=tfla.State(p.dstate.C * 1e-24))
    check(solve(p), truth(p), p.dtype)
