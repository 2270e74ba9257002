"""The reference of all tests is the paper's function: the recurrences with and without stabilization agree."""

from __future__ import annotations

import pytest
import torch
from cases import FORMS, Problem, error, gradients, problem, truth, truth_m

import tfla
from tfla.backends import reference, reference_delta


def unstabilised(p: Problem) -> dict[str, torch.Tensor]:
    """C_t = f_t C_{t-1} + i_t k_t v_t^T, n_t likewise, h_t = C_t^T q_t scale / max(|n_t^T q_t scale|, 1)."""
    leaves = {name: x.clone().requires_grad_() for name, x in p.leaves.items()}
    q, k, v, i, f = (leaves[name] for name in "qkvif")
    input_gate = {"exp": torch.exp, "sigmoid": torch.sigmoid}.get(p.form, torch.exp)(i)
    forget_gate = torch.sigmoid(f) if p.form in ("exp", "sigmoid") else torch.exp(f)
    scale = q.shape[-1] ** -0.5
    C = leaves["C0"]
    n = torch.zeros_like(C[..., 0])
    if p.normalize:
        C, n = C * leaves["m0"].exp()[..., None, None], leaves["n0"] * leaves["m0"].exp()[..., None]
    hs = []
    for t in range(q.shape[1]):
        i_t, f_t = input_gate[:, t, :, None], forget_gate[:, t, :, None]
        C = f_t[..., None] * C + i_t[..., None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        n = f_t * n + i_t * k[:, t]
        h = (C * q[:, t, :, :, None]).sum(-2) * scale
        hs.append(h / ((n * q[:, t]).sum(-1, keepdim=True) * scale).abs().clamp(min=1) if p.normalize else h)
    state = tfla.State(C, n, torch.zeros_like(n[..., 0])) if p.normalize else tfla.State(C)
    return gradients(p, leaves, torch.stack(hs, 1), state, truth_m(p))


def test_truth_is_the_recurrence() -> None:
    for form in FORMS:
        p = problem(form)
        found = unstabilised(p)
        assert all(error(x, truth(p)[name]) < 1e-12 for name, x in found.items()), form


@pytest.mark.parametrize("dims", [(8, 16), (16, 32), (24, 8), (5, 7)])
def test_a_step_has_the_same_bits_for_any_leading_dimensions_of_1(dims: tuple[int, int]) -> None:
    """Whole sequences compute their steps without a dimension of the batch, and decoding with one."""
    K, V = dims
    torch.manual_seed(0)
    q, k, v, C, n, gate = (torch.randn(3, *d) for d in ((K,), (K,), (V,), (K, V), (K,), ()))
    log_f, beta = -gate.abs(), torch.rand(3)

    def results(*lead: int) -> list[torch.Tensor]:
        def shaped(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [t.view(*lead, *t.shape) for t in tensors]

        found = []
        for normalize in (False, True):
            h, d, state = reference.step(*shaped(q, k, v, gate, log_f, C, n, gate), 0.5, normalize)
            found += [h, d, *state]
        found += reference_delta.step(*shaped(q, k, v, beta, log_f[:, None], k, C), 0.5, True, False)
        return [t.flatten() for t in found]

    for once, other in zip(results(), results(1), strict=True):
        assert torch.equal(once, other)
