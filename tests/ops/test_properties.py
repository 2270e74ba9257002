"""Results are correct for all combinations of shape, gates, packing, dtype and chunk size that hypothesis tries."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from cases import DTYPES, FORMS, INTERPRETED, TOLERANCE, Implementation, problem, size_of_terms, solve, truth
from hypothesis import assume, given, settings
from hypothesis import strategies as st

MOST = 1 if INTERPRETED else 3  # heads to a key, batch rows: a simulated GPU has them one after another


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """However short the sequence, initial states and cotangents of final states keep most gradients away from zero."""
    heads = draw(st.integers(1, MOST))
    shape = {
        "Hq": heads,
        "H": heads * draw(st.integers(1, MOST)),
        "K": draw(st.integers(1, 20)),
        "V": draw(st.integers(1, 20)),
    }
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
        assume(sum(lengths))
        return shape | {"lengths": tuple(lengths)}
    return shape | {"B": draw(st.integers(1, MOST)), "T": draw(st.integers(1, 90))}


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=ceil(settings.default.max_examples / len(FORMS)))  # one process would compile for minutes
@given(
    shape=shapes(),
    dtype=st.sampled_from(DTYPES),
    gates=st.sampled_from([(0.0, 2.0), (-10.0, 5.0), (1.0, 0.0), (0.0, -5.0), (-3.0, 9.0)]),
    chunk_size=st.none() | st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_any_problem(
    implementation: Implementation,
    form: str,
    shape: dict[str, Any],
    dtype: torch.dtype,
    gates: tuple[float, float],
    chunk_size: int | None,
    seed: int,
) -> None:
    assume(implementation.refusal(dtype) is None)
    i_mean, f_mean = gates
    p = problem(form, dtype=dtype, i_mean=i_mean, f_mean=f_mean, seed=seed, **shape)
    sizes = size_of_terms(p)
    for name, x in solve(p, implementation, chunk_size=chunk_size).items():
        assert (x - truth(p)[name]).norm() <= 4 * TOLERANCE[dtype] * sizes[name], name
