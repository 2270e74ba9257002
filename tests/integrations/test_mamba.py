"""mamba_ssm's interface: the published recurrence in float64, states, packed sequences, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from torch import Tensor

from tfla.integrations.mamba import mamba_chunk_scan_combined, selective_state_update

SHARED = ("A", "D", "dt_bias")
LOG_GATES = ("log_f", "log_i")  # zeros, for the gradients of those that the operator is given
BATCH, T, HEADS, HEADDIM, GROUPS, DSTATE = 2, 41, 4, 6, 2, 8


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def problem(device: str, dtype: torch.dtype, batch: int = BATCH, states: int = BATCH) -> dict[str, Tensor]:
    """Everything that has a gradient."""
    torch.manual_seed(0)
    x = {
        "x": draw(batch, T, HEADS, HEADDIM), "B": draw(batch, T, GROUPS, DSTATE), "C": draw(batch, T, GROUPS, DSTATE),
        "z": draw(batch, T, HEADS, HEADDIM), "dt": draw(batch, T, HEADS) - 1,
        "A": -torch.rand(HEADS, dtype=torch.float64) - 0.5, "D": draw(HEADS), "dt_bias": draw(HEADS),
        "initial_states": draw(states, HEADS, HEADDIM, DSTATE),
    }  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.to(device, dtype if name in "xBCz" else wide).requires_grad_() for name, t in x.items()}


def leaves_of_the_truth(p: dict[str, Tensor]) -> dict[str, Tensor]:
    """In float64 on the CPU; what all steps share as a copy for each."""
    exact = {name: t.detach().cpu().double() for name, t in p.items()}
    exact |= {name: exact[name].expand(exact["dt"].shape).clone() for name in SHARED}
    exact |= {name: torch.zeros_like(exact["dt"]) for name in LOG_GATES}
    return {name: t.requires_grad_() for name, t in exact.items()}


def by_formula(
    p: dict[str, Tensor], starts: list[list[tuple[int, int | None]]], limit: tuple[float, float], softplus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Step by step: state <- exp(dt A) state + dt x B^T, y = state C + D x, times silu(z).

    `starts`, of each row: steps at which a sequence begins, with the row of its initial state, None being zero.
    A, D and dt_bias are expanded to every step. Returns y, the states behind all sequences and dt.
    """
    x, z, D = p["x"], p["z"], p["D"]
    group = HEADS // GROUPS
    B, C = (p[name].repeat_interleave(group, 2) for name in "BC")
    dt = p["dt"] + p["dt_bias"]
    dt = (F.softplus(dt) if softplus else dt).clamp(*limit)
    ys, states = [], []
    for row, begins in enumerate(starts):
        ends = [*(at for at, _ in begins[1:]), x.shape[1]]
        y = []
        for (begin, first), end in zip(begins, ends, strict=True):
            state = x.new_zeros(HEADS, HEADDIM, DSTATE) if first is None else p["initial_states"][first]
            for t in range(begin, end):
                update = (
                    torch.einsum("hp,hn->hpn", x[row, t], B[row, t]) * (dt * p["log_i"].exp())[row, t, :, None, None]
                )
                state = torch.exp((dt * p["A"] + p["log_f"])[row, t])[:, None, None] * state + update
                y.append(torch.einsum("hpn,hn->hp", state, C[row, t]) + D[row, t, :, None] * x[row, t])
            states.append(state)
        ys.append(torch.stack(y) * F.silu(z[row]))
    return torch.stack(ys), torch.stack(states), dt


def compare(p: dict[str, Tensor], found: list[Tensor], starts: Any, limit: Any, softplus: bool, rows: Any) -> None:
    """Outputs and all gradients, the truth being that of the inputs as rounded.

    Rounding stays where large terms cancel: in gradients of D and dt_bias, sums over all steps, and in that of A, the
    sum of dt dlog_f, which itself is a sum of differences of the size of dlog_i.
    """
    exact = leaves_of_the_truth(p)
    y, states, dt = by_formula(exact, starts, limit, softplus)
    truth = [y, states[rows]][: len(found)]
    cotangents = [torch.randn_like(t) for t in truth]
    grads = torch.autograd.grad(
        found, list(p.values()), [c.to(f) for c, f in zip(cotangents, found, strict=True)], allow_unused=True
    )  # fmt: skip
    *true, dlog_f, dlog_i = torch.autograd.grad(truth, list(exact.values()), cotangents, allow_unused=True)
    allowed = TOLERANCE[p["x"].dtype]
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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_is_the_published_recurrence(device: str, dtype: torch.dtype) -> None:
    p = problem(device, dtype)
    y, states = mamba_chunk_scan_combined(**p, chunk_size=16, dt_softplus=True, return_final_states=True)
    assert y.dtype == dtype
    starts = [[(0, row)] for row in range(BATCH)]
    compare(p, [y, states], starts, (0.0, float("inf")), True, slice(None))


def test_dt_without_softplus_is_clamped(device: str) -> None:
    p = problem(device, torch.float32)
    limit = (0.1, 0.8)
    y = mamba_chunk_scan_combined(**p, chunk_size=16, dt_limit=limit)
    compare(p, [y], [[(0, row)] for row in range(BATCH)], limit, False, slice(None))


def test_steps_of_no_length_have_the_right_gradient(device: str) -> None:
    p = problem(device, torch.float32)
    p["dt"] = p["dt"].detach().clone()
    p["dt"][:, ::3] = 0.0
    p["dt_bias"] = torch.zeros_like(p["dt_bias"]).requires_grad_()
    p["dt"].requires_grad_()
    infinite = (-float("inf"), float("inf"))  # a step of exactly 0 is not cut off
    y = mamba_chunk_scan_combined(**{**p, "dt": p["dt"].abs()}, chunk_size=16)
    exact = leaves_of_the_truth(p)
    true, _, _ = by_formula({**exact, "dt": exact["dt"].abs()}, [[(0, row)] for row in range(BATCH)], infinite, False)
    cotangent = torch.randn_like(true)
    (ours,) = torch.autograd.grad(y, p["x"], cotangent.to(y), retain_graph=True)
    (theirs,) = torch.autograd.grad(true, exact["x"], cotangent, retain_graph=True)
    assert error(ours.cpu(), theirs) <= TOLERANCE[torch.float32]
    assert torch.isfinite(torch.autograd.grad(y, p["dt"], cotangent.to(y))[0]).all()


@pytest.mark.parametrize("ids", [(0, 0, 3), (1, 4, 4)], ids=str)
def test_seq_idx_keeps_sequences_apart(device: str, ids: tuple[int, int, int]) -> None:
    p = problem(device, torch.float32)
    lengths = torch.tensor([11, 13, 17])
    seq_idx = torch.tensor(ids, dtype=torch.int32).repeat_interleave(lengths).expand(BATCH, T).to(device)
    changes = [(0, None)] + [(int(at), None) for at in lengths.cumsum(0)[:-1] if seq_idx[0, at] != seq_idx[0, at - 1]]
    starts = [[(0, row if ids[0] == 0 else None), *changes[1:]] for row in range(BATCH)]
    y, states = mamba_chunk_scan_combined(
        **p, chunk_size=16, seq_idx=seq_idx, dt_softplus=True, return_final_states=True
    )  # fmt: skip
    compare(p, [y, states], starts, (0.0, float("inf")), True, slice(len(changes) - 1, None, len(changes)))


@pytest.mark.parametrize("states", [1, 3])
def test_packed_sequences(device: str, states: int) -> None:
    p = problem(device, torch.float32, batch=1, states=states)
    cu_seqlens = torch.tensor([0, 11, 24, T], device=device)
    firsts = [row if row < states else None for row in range(3)]
    starts = [list(zip(cu_seqlens.tolist()[:-1], firsts, strict=True))]
    options = {"chunk_size": 16, "cu_seqlens": cu_seqlens, "dt_softplus": True}
    y, last, each = mamba_chunk_scan_combined(**p, **options, return_final_states=True, return_varlen_states=True)
    assert torch.equal(each[-1:], last)
    compare(p, [y, each], starts, (0.0, float("inf")), True, slice(None))


def test_steps_follow_a_prompt(device: str) -> None:
    p = {name: t.detach() for name, t in problem(device, torch.float64).items()}
    whole, last = mamba_chunk_scan_combined(**p, chunk_size=16, dt_softplus=True, return_final_states=True)
    prompt = {name: t[:, :30] if name in ("x", "B", "C", "z", "dt") else t for name, t in p.items()}
    _, state = mamba_chunk_scan_combined(**prompt, chunk_size=16, dt_softplus=True, return_final_states=True)
    state = state.contiguous()
    steps = []
    for t in range(30, T):
        x, B, C, z, dt = (p[name][:, t] for name in ("x", "B", "C", "z", "dt"))
        steps.append(
            selective_state_update(
                state, x, dt[..., None].expand(-1, -1, HEADDIM), p["A"][:, None, None].expand(-1, HEADDIM, DSTATE),
                B, C, p["D"][:, None].expand(-1, HEADDIM), z, p["dt_bias"][:, None].expand(-1, HEADDIM), True,
            )
        )  # fmt: skip
    assert error(torch.stack(steps, 1), whole[:, 30:]) <= 1e-12
    assert error(state, last) <= 1e-12


def test_a_step_of_some_rows_of_the_state(device: str) -> None:
    p = {name: t.detach() for name, t in problem(device, torch.float32).items()}
    pool = torch.randn(5, HEADS, HEADDIM, DSTATE, device=device)
    rows = torch.tensor([3, 1], device=device)
    before, alone = pool.clone(), pool[rows].clone()
    step = [p[name][:, 0] for name in ("x", "dt")], [p[name][:, 0] for name in "BC"]
    options = {"dt_softplus": True}
    out = selective_state_update(pool, *step[0], p["A"], *step[1], **options, state_batch_indices=rows)
    assert torch.equal(out, selective_state_update(alone, *step[0], p["A"], *step[1], **options))
    assert torch.equal(pool[rows], alone)
    untouched = torch.tensor([0, 2, 4], device=device)
    assert torch.equal(pool[untouched], before[untouched])


def test_refuses_what_does_not_fit() -> None:
    p = {name: t.detach() for name, t in problem("cpu", torch.float32).items()}
    bad: dict[str, dict[str, Any]] = {
        "x": {"x": p["x"][0]}, "dt": {"dt": p["dt"][:, 1:]}, "A": {"A": p["A"][1:]}, "B": {"B": p["B"][:, :, :, 0]},
        "C": {"C": p["C"][..., 1:]}, "D": {"D": p["D"][1:]}, "z": {"z": p["z"][1:]},
        "dt_bias": {"dt_bias": p["dt_bias"][1:]}, "initial_states": {"initial_states": p["initial_states"][:, 1:]},
        "seq_idx": {"seq_idx": torch.zeros(BATCH, 3, dtype=torch.int32)}, "dt_limit": {"dt_limit": (-1.0, 1.0)},
        "cu_seqlens": {"return_varlen_states": True},
    }  # fmt: skip
    for name, change in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: got"):
            mamba_chunk_scan_combined(**{**p, **change}, chunk_size=16)
    with pytest.raises(TypeError, match=r"^B: got dtype"):
        mamba_chunk_scan_combined(**{**p, "B": p["B"].double()}, chunk_size=16)
    three = torch.zeros(BATCH, T, 3, DSTATE)
    with pytest.raises(ValueError, match=r"^B: got 3 groups"):
        mamba_chunk_scan_combined(**{**p, "B": three, "C": three}, chunk_size=16)
    state = torch.zeros(BATCH, HEADS, HEADDIM, DSTATE)
    x, dt, B, C = (p[name][:, 0] for name in ("x", "dt", "B", "C"))
    with pytest.raises(ValueError, match=r"^A: got strides"):
        selective_state_update(state, x, dt, torch.zeros(HEADS, HEADDIM, DSTATE), B, C)
    with pytest.raises(ValueError, match=r"^state: got shape"):
        selective_state_update(state[1:], x, dt, p["A"], B, C)
