"""Spans of steps compose to what the recurrence makes of all of them, forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import FORMS, Problem, error, problem, recurrence, start_state
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tfla.ops.context_parallel import own_states, spans
from tfla.ops.gates import clamp, log_gates

EXACT = 1e-12


def gates(p: Problem) -> tuple[Tensor | None, Tensor]:
    if p.form in ("plain", "normalized"):
        return None if p.i is None else clamp(p.i), clamp(p.f)
    assert p.i is not None
    return log_gates(p.i, p.f, p.form)  # type: ignore[arg-type]


def cuts(T: int) -> Any:
    return st.lists(st.integers(1, T - 1), unique=True, max_size=5).map(lambda at: [0, *sorted(at), T])


def own(p: Problem, a: int, b: int) -> spans.Span:
    log_i, log_f = gates(p)
    start = None
    if a == 0 and p.state is not None:
        start = own_states.Start(*(t[: len(p.dstate.C)] if t is not None else None for t in p.state))
    part = None if log_i is None else log_i[:, a:b]
    return own_states.own_state(p.k[:, a:b], p.v[:, a:b], part, log_f[:, a:b], p.normalize, start, a == 0)


def true(span: spans.Span) -> list[Tensor]:
    if span.m is None or span.n is None:
        return [span.C]
    weight = span.m.double().exp()
    return [span.C * weight[..., None, None], span.n * weight[..., None]]


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_spans_compose_to_the_final_state(form: str, data: st.DataObject) -> None:
    carried, shared = data.draw(st.booleans()), data.draw(st.booleans())
    p = problem(form, T=23, H=4, Hq=2 if shared else 4, carried=carried, seed=data.draw(st.integers(0, 9)))
    ends = data.draw(cuts(23))
    whole = spans.compose(spans.stack([own(p, a, b) for a, b in itertools.pairwise(ends)]))
    _, final = recurrence(p, {name: x.double() for name, x in p.leaves.items()})
    expected = spans.Span(whole.log_decay, final.C, final.n, final.m)
    for ours, exact in zip(true(whole), true(expected), strict=True):
        assert error(ours, exact) < EXACT
    if whole.m is not None and final.m is not None:
        torch.testing.assert_close(whole.m, final.m, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_composition_is_associative(form: str, data: st.DataObject) -> None:
    p = problem(form, T=23, carried=False, seed=data.draw(st.integers(0, 9)))
    ends = data.draw(cuts(23))
    every = spans.stack([own(p, a, b) for a, b in itertools.pairwise(ends)])
    cut = data.draw(st.integers(0, len(ends) - 1))
    halves = [spans.compose(part) for part in (every.at(slice(cut)), every.at(slice(cut, None))) if len(part.C)]
    for one, two in zip(true(spans.compose(every)), true(spans.compose(spans.stack(halves))), strict=True):
        assert error(two, one) < EXACT


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_cotangents_of_spans_add_up_to_that_of_the_initial_state(form: str, data: st.DataObject) -> None:
    T = 23
    p = problem(form, T=T, H=4, Hq=2, seed=data.draw(st.integers(0, 9)))
    leaves = {name: x.double().requires_grad_(name in ("C0", "n0")) for name, x in p.leaves.items()}
    h, _ = recurrence(p, leaves)
    states = [leaves[name] for name in ("C0", "n0") if name in leaves]
    exact = torch.autograd.grad(h, states, p.dh)
    log_i, log_f = gates(p)
    ends, parts, decays = data.draw(cuts(T)), [], []
    for a, b in itertools.pairwise(ends):
        # The state before the span, and its outputs, by the recurrence over all steps before it.
        leading = p.but(v=p.v[:, :a])
        given = {n: x[:, :a] if x.shape[1:2] == (T,) else x for n, x in p.leaves.items()}
        m = start_state(p, p.leaves)[2]
        if a:
            m = recurrence(leading, given)[1].m
        m = m if p.normalize else None
        upto = {n: x[:, :b] if x.shape[1:2] == (T,) else x for n, x in p.leaves.items()}
        d = denominators(p.but(v=p.v[:, :b]), upto)[:, a:b] if p.normalize else None
        out = own_states.Outputs(h[:, a:b].detach(), d, p.dh[:, a:b])
        part = None if log_i is None else log_i[:, a:b]
        parts.append(own_states.own_cotangent(p.q[:, a:b], part, log_f[:, a:b], m, out, p.q.shape[3] ** -0.5, True))
        decays.append(log_f[:, a:b].double().sum(1))
    together = spans.Cotangent(*(None if t[0] is None else torch.stack(t) for t in zip(*parts, strict=True)))  # type: ignore[arg-type]
    before = spans.exclusive_sums(torch.stack(decays), after=False)
    found = spans.carry_back(together, before, parts[0].m)
    for ours, truth in zip([x for x in found if x is not None], exact, strict=True):
        assert error(ours, truth) < 1e-11


def denominators(p: Problem, leaves: dict[str, Tensor]) -> Tensor:
    """Return the stabilized denominators of all steps, (B, T, H)."""
    from tfla.backends.reference import recurrent

    log_i, log_f = gates(p)
    assert log_i is not None
    T, group = p.v.shape[1], p.v.shape[2] // p.q.shape[2]
    found = []
    C, n, m = start_state(p, leaves)
    for row in range(p.v.shape[0]):
        q, k = (leaves[name][row].repeat_interleave(group, 1) for name in "qk")
        steps = q, k, leaves["v"][row], log_i[row, :T], log_f[row, :T]
        found.append(recurrent(*steps, (C[row], n[row], m[row]), p.q.shape[3] ** -0.5, True)[1])
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("normalize", [False, True])
def test_rows_hold_what_they_are_made_of(dtype: torch.dtype, normalize: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    C, n = torch.randn(3, 2, 4, 5, 6, generator=draw, dtype=dtype), torch.randn(3, 2, 4, 5, generator=draw, dtype=dtype)
    m, g = n[..., 0] * 30, torch.randn(3, 2, 4, generator=draw, dtype=torch.float64) * 1e3
    rows = spans.to_rows(C, n if normalize else None, m if normalize else None, g)
    assert rows.shape == (3, 2, 4, spans.row_width(5, 6, normalize))
    assert rows.dtype == dtype
    back = spans.from_rows(rows, 5, 6)
    assert torch.equal(back.C, C)
    torch.testing.assert_close(back.log_decay, g, rtol=1e-13, atol=0)  # two float32 numbers hold 48 bits
    if normalize:
        assert back.n is not None
        assert back.m is not None
        assert torch.equal(back.n, n)
        assert torch.equal(back.m, m)
    else:
        assert back.n is None
