"""Log-gates above 0: a growing state is correct as long as it fits in float32."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from cases import (
    INTERPRETED,
    TOLERANCE,
    Implementation,
    Problem,
    check,
    check_beside_terms,
    params,
    problem,
    solve,
    truth,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tfla

LINEAR = ("plain", "normalized")
LENGTHS: dict[str, tuple[int, ...] | None] = {"batch": None, "packed": (23, 0, 40, 1)}


def growing(form: str, log_f: Tensor, log_i: Tensor | None = None, **shape: Any) -> Problem:
    """A float32 problem whose log-gates (T,) are those given, the same in all heads.

    With a normalizer all terms of it are positive, since exp(-m) is too small to bound a denominator that cancels.
    """
    p = problem(form, T=log_f.shape[0], K=16, V=16, dtype=torch.float32, positive_qk=form == "normalized", **shape)
    if p.state is not None and p.state.n is not None:
        p = p.but(state=p.state._replace(n=p.state.n.abs()))

    def every_head(gate: Tensor) -> Tensor:
        return gate.to(p.f.dtype)[None, :, None].expand_as(p.f).clone()

    return p.but(f=every_head(log_f), i=p.i if log_i is None else every_head(log_i))


def slopes(*parts: tuple[int, float]) -> Tensor:
    """Log-gates that are constant over so many steps."""
    return torch.cat([torch.full((steps,), value) for steps, value in parts])


# Log-gates of the forget and of the input gate, whose weights stay below 1e38.
PATHS: dict[str, tuple[Tensor, Tensor | None]] = {
    "steadily": (slopes((64, 1.0)), None),
    "fast": (slopes((20, 4.0), (44, -0.1)), None),
    "up and down": (slopes((20, 2.0), (20, -3.0), (24, 1.5)), None),
    "down and up": (slopes((24, -2.0), (20, 3.0), (20, -1.0)), None),
    "in one step": (slopes((30, -0.2), (1, 60.0), (33, -0.2)), None),
    "resets in between": (slopes((20, 3.0), (1, -1e5), (22, 3.0), (1, -1e5), (20, 3.0)), None),
    "input gates above 0": (slopes((64, -1.5)), slopes((20, 0.0), (20, 50.0), (24, 20.0))),
    "input gates against forget gates": (slopes((64, -1.2)), torch.linspace(70.0, 0.0, 64)),
    "input gates below a growing state": (slopes((64, 1.2)), torch.linspace(0.0, -70.0, 64)),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("path", params(PATHS, interpreted={"steadily", "up and down"}))
@pytest.mark.parametrize("form", LINEAR)
def test_growth(
    implementation: Implementation, form: str, path: tuple[Tensor, Tensor | None], lengths: tuple[int, ...] | None
) -> None:
    log_f, log_i = path
    p = growing(form, log_f, log_i, lengths=lengths)
    found = solve(p, implementation)
    assert all(x.isfinite().all() for x in found.values())
    check_beside_terms(found, p, TOLERANCE[torch.float32])


def test_growth_of_a_state_that_was_tiny(implementation: Implementation) -> None:
    """A state grows by more than the range of float32, from the lower end of that range to the upper one."""
    p = growing("plain", torch.full((64,), 2.0), H=1, Hq=1)
    assert p.state is not None
    p = p.but(k=p.k * 1e-20, v=p.v * 1e-12, dh=p.dh * 1e-24, state=tfla.State(p.state.C * 1e-30))
    p = p.but(dstate=tfla.State(p.dstate.C * 1e-24))
    check(solve(p, implementation), truth(p), p.dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", LINEAR)
@settings(max_examples=ceil(settings.default.max_examples / 2))
@given(
    slope=st.lists(st.tuples(st.integers(1, 25), st.floats(-4.0, 3.0)), min_size=1, max_size=3 if INTERPRETED else 6),
    log_i=st.floats(-30.0, 5.0),
    packed=st.booleans(),
    carried=st.booleans(),
    chunk_size=st.none() | st.integers(1, 80),
    seed=st.integers(0, 1000),
)
@example(
    [(12, 1.0), (6, -2.0), (1, 0.0), (3, 3.0)], 0.0, False, False, 6, 0
)  # little passes a tile, but of huge states
def test_any_growth(
    implementation: Implementation,
    form: str,
    slope: list[tuple[int, float]],
    log_i: float,
    packed: bool,
    carried: bool,
    chunk_size: int | None,
    seed: int,
) -> None:
    """A state that grows and decays by as much as float32 holds."""
    log_f = slopes(*slope)
    most = log_f.clamp(min=0.0).sum().item()
    log_f *= min(1.0, 75.0 / max(most, 1.0))
    lengths = (log_f.shape[0] // 3, log_f.shape[0] - log_f.shape[0] // 3) if packed else None
    p = growing(form, log_f, None, lengths=lengths, carried=carried, seed=seed, H=1, Hq=1)
    p = p.but(i=p.i + log_i)
    found = solve(p, implementation, chunk_size=chunk_size)
    assert all(x.isfinite().all() for x in found.values())
    check_beside_terms(found, p, 4 * TOLERANCE[torch.float32])
