"""The operator on JAX is the recurrence of cases.py: outputs, final states and all gradients, in every form.

The cases that it shares with PyTorch's operator are in test_shared_cases.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from cases import TOLERANCE, check, check_beside_terms, problem, size_of_terms, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_cases import SHAPE, solve

import tfla

REFERENCE = ("recurrent", "parallel", "chunkwise")


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


@pytest.mark.parametrize(("T", "chunk_size"), [(300, 128), (70, 16), (7, 1)])
def test_chunk_size(T: int, chunk_size: int) -> None:
    """Chunks of more tiles than one, of less than one, of one step."""
    p = problem(T=T)
    check(solve(p, chunk_size=chunk_size), truth(p), p.dtype)


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


def test_gate_dtypes() -> None:
    p = problem(T=9, dtype=torch.float32, i_dtype=torch.bfloat16, f_dtype=torch.float16)
    found = solve(p)
    check(found, truth(p), p.dtype)
    assert (found["di"].dtype, found["df"].dtype) == (torch.bfloat16, torch.float16)


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


def test_no_batch_rows() -> None:
    p = problem(T=9, carried=False)
    none = p.but(**{name: getattr(p, name)[:0] for name in ("q", "k", "v", "i", "f", "dh")},
                 dstate=tfla.State(*(x[:0] for x in p.dstate)))  # fmt: skip
    found = solve(none)
    assert found["h"].shape == (0, 9, 2, 7)
    assert found["dq"].shape == none.q.shape
