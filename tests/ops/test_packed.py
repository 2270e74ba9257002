"""Sequences packed along time are computed as if each were alone, whatever their lengths and their neighbors."""

from __future__ import annotations

import pytest
import torch
from cases import (
    FORMS,
    PER_STEP,
    TOLERANCE,
    Implementation,
    Problem,
    check,
    check_nothing_leaks,
    error,
    params,
    problem,
    solve,
    truth,
)

import tfla

LENGTHS = {
    "one": (37,),
    "two": (20, 17),
    "first empty": (0, 9, 20),
    "middle empty": (9, 0, 0, 20),
    "last empty": (9, 20, 0),
    "all but one empty": (0, 0, 7, 0),
    "single steps": (1, 1, 1, 1),
    "around half a tile": (31, 32, 33, 1),
    "around a tile": (63, 64, 65, 1, 130),
}
INTERPRETED = ("middle empty", "single steps", "around half a tile")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", params(LENGTHS, INTERPRETED))
def test_lengths(implementation: Implementation, form: str, lengths: tuple[int, ...]) -> None:
    p = problem(form, dtype=implementation.widest, lengths=lengths, Hq=1, H=2)
    check(solve(p, implementation), truth(p), p.dtype)


@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_chunks_of_packed_sequences(implementation: Implementation, chunk_size: int) -> None:
    p = problem(dtype=implementation.widest, lengths=(0, 5, 1, 0, 40, 16, 0))
    check(solve(p, implementation, chunk_size=chunk_size), truth(p), p.dtype)


def test_many_short_sequences(implementation: Implementation) -> None:
    lengths = tuple(int(x) for x in torch.randint(0, 5, (60,), generator=torch.Generator().manual_seed(0)))
    p = problem(dtype=implementation.widest, lengths=lengths, K=3, V=2)
    check(solve(p, implementation), truth(p), p.dtype)


def test_without_initial_states(implementation: Implementation) -> None:
    p = problem("sigmoid", dtype=implementation.widest, lengths=(9, 0, 20), carried=False)
    check(solve(p, implementation), truth(p), p.dtype)


def test_int32(implementation: Implementation) -> None:
    p = problem(dtype=implementation.widest, lengths=(9, 0, 20))
    check(solve(p.but(cu_seqlens=p.cu_seqlens.int()), implementation), truth(p), p.dtype)


def alone(p: Problem, s: int) -> Problem:
    """Sequence s of a packed problem as a batch of one."""
    a, b = p.cu_seqlens[s : s + 2].tolist()
    steps = {name: getattr(p, name)[:, a:b] for name in ("q", "k", "v", "i", "f", "dh")}
    states = {name: tfla.State(*(x[s : s + 1] for x in getattr(p, name))) for name in ("state", "dstate")}
    return p.but(**steps, **states, cu_seqlens=None)


def test_equals_each_alone(implementation: Implementation) -> None:
    p = problem(dtype=implementation.widest, lengths=(9, 70, 1))
    packed = solve(p, implementation)
    for s, (a, b) in enumerate([(0, 9), (9, 79), (79, 80)]):
        for name, x in solve(alone(p, s), implementation).items():
            part = packed[name][:, a:b] if name in PER_STEP else packed[name][s : s + 1]
            assert error(part, x) <= TOLERANCE[p.dtype], name


@pytest.mark.parametrize("value", [3.0, torch.nan], ids=["other numbers", "nan"])
@pytest.mark.parametrize("changed", [0, 1, 2])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_nothing_leaks_into_neighbours(implementation: Implementation, form: str, changed: int, value: float) -> None:
    check_nothing_leaks(
        problem(form, dtype=implementation.widest, lengths=(20, 30, 70)), implementation, changed, value
    )
