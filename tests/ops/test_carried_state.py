"""A sequence may be cut anywhere: with the state carried over, outputs and gradients are those of the whole."""

from __future__ import annotations

import pytest
import torch
from cases import (
    DTYPES,
    FORMS,
    Implementation,
    Problem,
    call,
    check,
    error,
    gradients,
    leaves_on,
    params,
    problem,
    truth,
    truth_m,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tfla


def solve_in_pieces(
    p: Problem, implementation: Implementation, cuts: list[int], *, detach: bool = False, chunk_size: int | None = None
) -> dict[str, Tensor]:
    leaves = leaves_on(implementation, p)
    given_state = {name: x for name, x in leaves.items() if name.endswith("0")}
    outputs = []
    for a, b in zip([0, *cuts], [*cuts, p.v.shape[1]], strict=True):
        part = {name: leaves[name][:, a:b] for name in "qkvif"} | given_state
        h, state = call(p, part, **implementation.options, chunk_size=chunk_size)
        outputs.append(h)
        carried = state.detach() if detach else state
        given_state = {f"{name}0": x for name, x in carried._asdict().items() if x is not None}
    return gradients(p, leaves, torch.cat(outputs, 1), state, truth_m(p))


@given(data=st.data())
@pytest.mark.parametrize("form", FORMS)
def test_cut_anywhere(implementation: Implementation, form: str, data: st.DataObject) -> None:
    T = data.draw(st.integers(2, 40), "T")
    cuts = sorted(data.draw(st.sets(st.integers(1, T - 1), min_size=1, max_size=4), "cuts"))
    chunk_size = data.draw(st.none() | st.integers(1, 50), "chunk_size")
    p = problem(form, dtype=implementation.widest, T=T, Hq=1, H=2, K=3, V=4, seed=data.draw(st.integers(0, 9), "seed"))
    check(solve_in_pieces(p, implementation, cuts, chunk_size=chunk_size), truth(p), p.dtype)


@pytest.mark.parametrize("dtype", params({str(dtype): dtype for dtype in DTYPES}, {"torch.float16"}))
def test_cut_in_every_dtype(implementation: Implementation, dtype: torch.dtype) -> None:
    p = problem(dtype=dtype, T=100)
    check(solve_in_pieces(p, implementation, [1, 30, 64, 99]), truth(p), dtype)


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_detached_state_ends_the_gradient(implementation: Implementation, form: str) -> None:
    p = problem(form, dtype=implementation.widest, f_mean=4.0)
    found, ref = solve_in_pieces(p, implementation, [20], detach=True), truth(p)
    check({name: found[name] for name in ("h", "C")}, {name: ref[name] for name in ("h", "C")}, p.dtype)
    check({"dk": found["dk"][:, 20:]}, {"dk": ref["dk"][:, 20:]}, p.dtype)
    assert all(error(found[name][:, :20], ref[name][:, :20]) > 0.05 for name in ("dk", "dv", "di", "df"))
    assert error(found["dC0"], ref["dC0"]) > 0.05


@pytest.mark.interpreter
def test_max_state_is_free_to_choose(implementation: Implementation) -> None:
    """(C, n, m) and (C e^a, n e^a, m - a) are one state; the gradient of m is that of the scale of both."""
    p = problem(dtype=implementation.widest)
    C, n, m = p.state
    a = torch.linspace(-30, 20, m.numel(), dtype=m.dtype).reshape(m.shape)
    other = p.but(state=tfla.State(C * a.exp()[..., None, None], n * a.exp()[..., None], m - a))
    leaves = leaves_on(implementation, other)
    found, ref = gradients(p, leaves, *call(other, leaves, **implementation.options), truth_m(p)), dict(truth(p))
    ref["dC0"] = ref["dC0"] / a.exp()[..., None, None]
    ref["dn0"] = ref["dn0"] / a.exp()[..., None]
    check(found, ref, p.dtype)


@pytest.mark.parametrize("lengths", [None, (10, 0, 27)], ids=["batch", "packed"])
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_state_is_only_returned_when_asked_for(
    implementation: Implementation, form: str, lengths: tuple[int, ...] | None
) -> None:
    p = problem(form, dtype=implementation.widest, lengths=lengths)
    leaves = leaves_on(implementation, p)
    h, state = call(p, leaves, **implementation.options)
    initial = tfla.State(leaves["C0"], leaves.get("n0"), leaves.get("m0"))
    alone = tfla.mlstm(
        *(leaves[name] for name in "qkvif"), input_gate=form, initial_state=initial, **implementation.options,
        cu_seqlens=None if p.cu_seqlens is None else p.cu_seqlens.to(implementation.device),
    )  # fmt: skip
    assert torch.equal(h, alone)
    N = 2 if lengths is None else 3
    assert [None if x is None else tuple(x.shape) for x in state] == (
        [(N, 2, 5, 7), (N, 2, 5), (N, 2)] if form == "exp" else [(N, 2, 5, 7), None, None]
    )
    assert state.m is None or not state.m.requires_grad


@pytest.mark.interpreter
@pytest.mark.parametrize("part", ["h", "C", "n"])
def test_gradient_of_one_output_alone(implementation: Implementation, part: str) -> None:
    """h or a state that is not used has no cotangent."""
    p = problem(dtype=implementation.widest)
    leaves = leaves_on(implementation, p)
    h, state = call(p, leaves, **implementation.options)
    used = h if part == "h" else getattr(state, part)
    cotangent = p.dh if part == "h" else getattr(p.dstate, part)
    found = torch.autograd.grad(used, [*leaves.values()], cotangent.to(used))
    others = p.but(dh=torch.zeros_like(p.dh), dstate=tfla.State(*(torch.zeros_like(x) for x in p.dstate)))
    if part == "h":
        others = others.but(dh=p.dh)
    else:  # the problem's cotangents belong to states on the truth's scale
        scale = torch.exp(truth_m(p) - state.m.cpu().double())
        scaled = cotangent * scale.reshape(*scale.shape, *[1] * (cotangent.dim() - 2))
        others = others.but(dstate=others.dstate._replace(**{part: scaled}))
    ref = truth(others)
    for name, x in zip(leaves, found, strict=True):
        if ref[f"d{name}"].any():
            check({name: x.cpu()}, {name: ref[f"d{name}"]}, p.dtype)
        else:
            assert not x.any(), name
