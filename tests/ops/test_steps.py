"""Steps one at a time compute the same function as whole sequences."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, FORMS, Problem, call, check, error, gradients, problem, truth, truth_m
from torch import Tensor

import tfla


def step(p: Problem, leaves: dict[str, Tensor], t: int, state: tfla.State) -> tuple[Tensor, tfla.State]:
    q, k, v, i, f = (leaves[name][:, t] for name in "qkvif")
    if p.form in ("exp", "sigmoid"):
        return tfla.mlstm_step(q, k, v, i, f, state, input_gate=p.form, scale=p.scale)
    return tfla.linear_attention_step(q, k, v, f, state, i, normalize=p.normalize, scale=p.scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_steps_equal_the_whole(device: str, form: str, dtype: torch.dtype) -> None:
    p = problem(form, dtype=dtype, Hq=2, H=4).but(scale=0.7)
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in p.leaves.items()}
    state = tfla.State(leaves["C0"], leaves.get("n0"), leaves.get("m0"))
    hs = []
    for t in range(p.v.shape[1]):
        h, state = step(p, leaves, t, state)
        hs.append(h)
    found = gradients(p, leaves, torch.stack(hs, 1), state, truth_m(p))
    check(found, truth(p), dtype)
    assert found["h"].dtype == dtype
    assert state.C.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_steps_after_a_whole(device: str, form: str) -> None:
    """Decoding after a prompt."""
    p = problem(form, carried=False)
    leaves = {name: x.to(device) for name, x in p.leaves.items()}
    h, state = call(p, {name: x[:, :30] for name, x in leaves.items()})
    hs = [h]
    for t in range(30, 37):
        h, state = step(p, leaves, t, state)
        hs.append(h[:, None])
    assert error(torch.cat(hs, 1).cpu(), truth(p)["h"]) < 1e-12


@pytest.mark.parametrize("normalize", [True, False])
def test_steps_from_nothing(device: str, normalize: bool) -> None:
    p = problem("normalized" if normalize else "plain", carried=False)
    leaves = {name: x.to(device) for name, x in p.leaves.items()}
    state = tfla.State.zeros(2, 2, 5, 7, normalize=normalize, dtype=torch.float64, device=device)
    for t in range(37):
        h, state = step(p, leaves, t, state)
    assert error(h.cpu(), truth(p)["h"][:, -1]) < 1e-12


def test_step_without_input_gate(device: str) -> None:
    p = problem("plain")
    q, k, v, f = (getattr(p, name)[:, 0].to(device) for name in "qkvf")
    state = p.state.to(device)
    a, _ = tfla.linear_attention_step(q, k, v, f, state)
    b, _ = tfla.linear_attention_step(q, k, v, f, state, torch.zeros_like(f))
    assert torch.equal(a, b)


def test_step_under_autocast(device: str) -> None:
    """q, k, v are cast; gates, state and arithmetic stay in float32."""
    p = problem(dtype=torch.float32)
    q, k, v, i, f = (getattr(p, name)[:, 0].to(device) for name in "qkvif")
    low = [x.bfloat16() for x in (q, k, v)]
    expected = tfla.mlstm_step(*low, i, f, p.state.to(device))
    with torch.autocast(device, dtype=torch.bfloat16):
        found = tfla.mlstm_step(q, k, v, i, f, p.state.to(device))
    assert found[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True))
