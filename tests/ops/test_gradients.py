"""Gradients are exact: they agree with finite differences, for any subset of inputs. One option leaves out a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import FORMS, Implementation, Problem, call, check, error, leaves_on, problem, solve, truth
from torch import Tensor

SMALL: dict[str, dict[str, Any]] = {
    "batch": {"B": 2, "T": 4, "Hq": 1, "H": 1},
    "grouped heads": {"B": 1, "T": 3, "Hq": 1, "H": 2},
    "packed": {"lengths": (3, 0, 1), "Hq": 1, "H": 1},
    "no initial state": {"B": 1, "T": 4, "Hq": 1, "H": 1, "carried": False},
}


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL.keys())
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(implementation: Implementation, form: str, shape: dict[str, Any], chunk_size: int | None) -> None:
    p = problem(form, K=2, V=3, f_mean=1.0, **shape)
    leaves = leaves_on(implementation, p)

    def true_values(*values: Tensor) -> tuple[Tensor, ...]:
        h, state = call(p, dict(zip(leaves, values, strict=True)), **implementation.options, chunk_size=chunk_size)
        if state.m is None or state.n is None:
            return h, state.C
        return h, state.m.exp()[..., None, None] * state.C, state.m.exp()[..., None] * state.n

    assert torch.autograd.gradcheck(true_values, tuple(leaves.values()), fast_mode=implementation.small_only)


@pytest.mark.parametrize("lengths", [None, (20, 0, 17)], ids=["batch", "packed"])
@pytest.mark.parametrize("form", ["exp", "normalized"])
def test_paper_convention(implementation: Implementation, form: str, lengths: tuple[int, ...] | None) -> None:
    """normalizer_grad=False is the gradient with the denominator of (4) held constant, and not the exact one."""
    exact = problem(form, dtype=implementation.widest, lengths=lengths)
    paper = exact.but(normalizer_grad=False)
    found = solve(paper, implementation)
    check(found, truth(paper), paper.dtype)
    assert all(error(found[name], truth(exact)[name]) > 0.01 for name in ("dq", "dk", "di", "df"))
    assert all(torch.equal(found[name], solve(exact, implementation)[name]) for name in ("h", "C", "n"))


def test_normalizer_grad_changes_nothing_without_a_normalizer(implementation: Implementation) -> None:
    p = problem("sigmoid", dtype=implementation.widest)
    exact, paper = solve(p, implementation), solve(p.but(normalizer_grad=False), implementation)
    assert all(torch.equal(x, paper[name]) for name, x in exact.items())


@pytest.mark.parametrize(
    "wanted", [{"q"}, {"k", "C0"}, {"v"}, {"i"}, {"f", "m0"}, {"n0"}], ids=lambda names: "+".join(sorted(names))
)
def test_only_some_inputs_want_gradients(implementation: Implementation, wanted: set[str]) -> None:
    p = problem(dtype=implementation.widest)
    leaves = {name: x.requires_grad_(name in wanted) for name, x in leaves_on(implementation, p).items()}
    h, state = call(p, leaves, **implementation.options)
    torch.autograd.backward([h, state.C, state.n], [x.to(h) for x in (p.dh, p.dstate.C, p.dstate.n)])
    every = leaves_on(implementation, p)
    h, state = call(p, every, **implementation.options)
    torch.autograd.backward([h, state.C, state.n], [x.to(h) for x in (p.dh, p.dstate.C, p.dstate.n)])
    for name, x in leaves.items():
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or torch.equal(x.grad, every[name].grad)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", ["plain", "normalized"])
def test_input_gate_left_out(implementation: Implementation, form: str) -> None:
    """log_i=None is log_i = 0, and has no gradient."""
    p = problem(form, dtype=implementation.widest).but(i=None)
    zeros: Problem = p.but(i=torch.zeros_like(p.f))
    found, ref = solve(p, implementation), solve(zeros, implementation)
    ref.pop("di")
    check(found, truth(p), p.dtype)
    assert all(torch.equal(x, ref[name]) for name, x in found.items())
