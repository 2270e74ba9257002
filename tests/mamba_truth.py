"""The recurrence of Mamba-2 in float64, step by step, and the comparison of results and all gradients with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from torch import Tensor

SHARED = ("A", "D", "dt_bias")  # inputs that are the same for all steps
LOG_GATES = ("log_f", "log_i")  # zeros, added to the log-gates to get gradients of these
INFINITE = (-float("inf"), float("inf"))
Starts = list[list[tuple[int, int | None]]]


def draw(*shape: int) -> Tensor:
    """Return normally distributed numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def convert(x: dict[str, Tensor], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the inputs as leaves: x, B, C and z in dtype, the others in at least float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.to(device, dtype if name in "xBCz" else wide).requires_grad_() for name, t in x.items()}


def leaves_of_the_truth(p: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs in float64 on the CPU, where those in SHARED have a copy for each step."""
    exact = {name: t.detach().cpu().double() for name, t in p.items()}
    steps = exact["dt"].shape[:2]
    exact |= {name: exact[name].expand(*steps, *exact[name].shape).clone() for name in SHARED if name in exact}
    exact |= {name: torch.zeros_like(exact["dt"]) for name in LOG_GATES}
    return {name: t.requires_grad_() for name, t in exact.items()}


def by_formula(
    p: dict[str, Tensor], starts: Starts, limit: tuple[float, float], softplus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute state <- exp(dt A) state + dt x B^T and y = (state C + D x) silu(z) step by step.

    Args:
        p: the inputs that :func:`leaves_of_the_truth` returns.
        starts: for each row of the batch, the steps at which its sequences start, each with the row of its initial
            state, or None for zeros.
        limit: the least and the greatest dt.
        softplus: take softplus of dt.

    Returns:
        y, the states after all sequences, and dt.
    """
    x = p["x"]
    group = x.shape[2] // p["B"].shape[2]
    B, C = (p[name].repeat_interleave(group, 2) for name in "BC")
    dt = p["dt"] + p.get("dt_bias", 0.0)
    dt = (F.softplus(dt) if softplus else dt).clamp(*limit)
    D = p.get("D", torch.zeros_like(dt))
    D = D if D.dim() == 4 else D[..., None]
    ys, states = [], []
    for row, begins in enumerate(starts):
        ends = [*(at for at, _ in begins[1:]), x.shape[1]]
        y = []
        for (begin, first), end in zip(begins, ends, strict=True):
            zero = x.new_zeros(*x.shape[2:], B.shape[-1])
            state = zero if first is None or "initial_states" not in p else p["initial_states"][first]
            for t in range(begin, end):
                scale = (dt * p["log_i"].exp())[row, t, :, None, None]
                update = torch.einsum("hp,hn->hpn", x[row, t], B[row, t]) * scale
                state = torch.exp((dt * p["A"] + p["log_f"])[row, t])[:, None, None] * state + update
                y.append(torch.einsum("hpn,hn->hp", state, C[row, t]) + D[row, t] * x[row, t])
            states.append(state)
        ys.append(torch.stack(y) * F.silu(p["z"][row]) if "z" in p else torch.stack(y))
    return torch.stack(ys), torch.stack(states), dt


def compare(
    p: dict[str, Tensor], found: Sequence[Tensor], starts: Starts, limit: Any, softplus: bool, rows: Any
) -> None:
    """Compare outputs and all gradients with those of the recurrence for the same rounded inputs.

    Where large terms cancel, errors are relative to the terms: the gradients of D and dt_bias are sums over all steps,
    and that of A is the sum of dt dlog_f, where dlog_f is a sum of differences of the size of dlog_i.

    Args:
        found: y, or y and the states.
        rows: the index that selects, from the states after all sequences, those in `found`.
    """
    exact = leaves_of_the_truth(p)
    y, states, dt = by_formula(exact, starts, limit, softplus)
    truth = [y, states[rows]][: len(found)]
    cotangents = [torch.randn_like(t) for t in truth]
    grads = torch.autograd.grad(
        found, list(p.values()), [c.to(f) for c, f in zip(cotangents, found, strict=True)], allow_unused=True
    )  # fmt: skip
    *true, dlog_f, dlog_i = torch.autograd.grad(truth, list(exact.values()), cotangents, allow_unused=True)
    allowed = max(TOLERANCE[p[name].dtype] for name in "xBC")
    for ours, theirs in zip(found, truth, strict=True):
        assert error(ours.detach().cpu(), theirs.detach()) <= allowed
    for name, ours, theirs in zip(p, grads, true, strict=True):
        if theirs is not None:
            assert ours is not None, name
            size = theirs.norm()
            if name in SHARED:
                theirs = theirs.sum((0, 1))
                size = max(size, theirs.norm())
            if name == "A":
                size = dt.norm() * max(dlog_f.norm(), dlog_i.norm())
            assert (ours.cpu() - theirs).norm() <= allowed * size, name


def step_by_formula(p: dict[str, Tensor], softplus: bool) -> tuple[Tensor, Tensor]:
    """Return y and the new state, from inputs with heads; dt, A, D and dt_bias must be expanded."""
    B, C = (p[name].repeat_interleave(p["x"].shape[1] // p["B"].shape[1], 1) for name in "BC")
    dt = p["dt"] + p.get("dt_bias", 0.0)
    dt = F.softplus(dt) if softplus else dt
    state = torch.exp(dt[..., None] * p["A"]) * p["state"] + torch.einsum("bhp,bhp,bhn->bhpn", dt, p["x"], B)
    y = torch.einsum("bhpn,bhn->bhp", state, C) + p.get("D", 0.0) * p["x"]
    return (y * F.silu(p["z"]) if "z" in p else y), state
