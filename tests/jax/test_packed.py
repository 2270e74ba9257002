"""Packed sequences on JAX are computed as if each were alone; one compiled function serves all lengths."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import PER_STEP, Problem, check, problem, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from jax_cases import leaves_of, solve

import tfla
import tfla.jax

TOTAL, COUNT = 130, 4
LENGTHS = {
    "first empty": (0, 9, 21, 100),
    "middle empty": (30, 0, 0, 100),
    "last empty": (65, 65, 0, 0),
    "all but one empty": (0, 0, 130, 0),
    "single steps": (1, 127, 1, 1),
    "around a tile": (63, 64, 1, 2),
}


def packed(form: str, lengths: tuple[int, ...], seed: int = 0) -> Problem:
    return problem(form, lengths=lengths, Hq=1, H=2, seed=seed)


@pytest.mark.parametrize("form", ["exp", "plain"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths(form: str, lengths: tuple[int, ...]) -> None:
    p = packed(form, lengths)
    check(solve(p), truth(p), p.dtype)


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, TOTAL), min_size=COUNT - 1, max_size=COUNT - 1), seed=st.integers(0, 99))
def test_any_lengths(cuts: list[int], seed: int) -> None:
    ends = [0, *sorted(cuts), TOTAL]
    p = packed("exp", tuple(b - a for a, b in itertools.pairwise(ends)), seed)
    check(solve(p), truth(p), p.dtype)


def test_chunks_of_packed_sequences() -> None:
    p = packed("exp", LENGTHS["single steps"])
    check(solve(p, chunk_size=8), truth(p), p.dtype)


def test_static_offsets_have_no_unused_tiles() -> None:
    p = packed("exp", LENGTHS["middle empty"])
    assert p.cu_seqlens is not None
    check(solve(p, cu_seqlens=tuple(p.cu_seqlens.tolist())), truth(p), p.dtype)


@pytest.mark.parametrize("value", [3.0, torch.nan], ids=["other numbers", "nan"])
def test_nothing_leaks_into_neighbors(value: float) -> None:
    p = packed("exp", (30, 33, 7, 60))
    changed = slice(30, 63)
    steps = {name: getattr(p, name).clone() for name in ("q", "k", "v", "i", "f", "dh")}
    for x in steps.values():
        x[:, changed] *= value
    before, after = solve(p), solve(p.but(**steps))
    others = torch.ones(TOTAL, dtype=torch.bool)
    others[changed] = False
    for name, x in before.items():
        if name in PER_STEP:
            assert torch.equal(x[:, others], after[name][:, others]), name
            assert not torch.equal(x[:, changed], after[name][:, changed]), name
        else:
            assert torch.equal(x[[0, 2, 3]], after[name][[0, 2, 3]]), name


def forward(p: Problem, at: list[int]) -> tuple[jax.Array, tfla.jax.State]:
    x = leaves_of(p)
    state = tfla.jax.State(x["C0"], x["n0"], x["m0"])
    return _forward(x["q"], x["k"], x["v"], x["i"], x["f"], state, jnp.asarray(at))


@jax.jit
def _forward(q, k, v, i, f, state, at):  # type: ignore[no-untyped-def]
    return tfla.jax.mlstm(q, k, v, i, f, initial_state=state, return_state=True, cu_seqlens=at)


def test_offsets_that_are_not_known_when_traced_are_clamped() -> None:
    """Offsets are clamped to [0, T] and to values that never fall, as on a GPU in PyTorch; steps outside get zeros."""
    p = packed("exp", (30, 33, 7, 60))
    for wrong, right in (
        ([-5, 30, 20, 70, 999], [0, 30, 30, 70, 130]),
        ([0, 30, 63, 70, 2000], [0, 30, 63, 70, 130]),
    ):
        for a, b in zip(jax.tree.leaves(forward(p, wrong)), jax.tree.leaves(forward(p, right)), strict=True):
            np.testing.assert_array_equal(a, b)
    h, state = forward(p, [10, 30, 63, 70, 100])
    assert not h[:, :10].any()
    assert not h[:, 100:].any()
    assert h[:, 10:100].all()
    same = slice(30, 70)
    np.testing.assert_array_equal(h[:, same], forward(p, [0, 30, 63, 70, 130])[0][:, same])
    assert state.C.shape == (COUNT, 2, 5, 7)


def test_offsets_of_numpy_are_static() -> None:
    p = packed("exp", LENGTHS["middle empty"])
    x = leaves_of(p)
    at = np.array([0, 30, 30, 30, 130])
    run = functools.partial(tfla.jax.mlstm, x["q"], x["k"], x["v"], x["i"], x["f"])
    h = run(cu_seqlens=at)
    np.testing.assert_allclose(h, run(cu_seqlens=jnp.asarray(at)), rtol=1e-12)
    assert jax.eval_shape(lambda: run(cu_seqlens=at)).shape == h.shape
