"""The scans with gates by channel alone, on operands drawn at random, and the same in float64."""

from __future__ import annotations

import torch
from cases import INTERPRETED, error
from delta_cases import DeltaProblem
from torch import Tensor

from tfla.backends.delta import DeltaInputs
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.triton import channel_rule, delta
from tfla.backends.triton.channel_tiles import Operands
from tfla.backends.triton.correction_dtype import correction_dtype


def draw_operands(p: DeltaProblem, L: int, tiles: int, correct: bool, split: bool) -> Operands:
    """Operands of the sizes of a problem whose results stay near 1; `tiles` are those of a head."""
    B, T, H = p.x.v.shape[:3]
    K, dtype = p.x.q.shape[3], p.x.q.dtype
    draw = torch.Generator().manual_seed(5)

    def keys(size: float) -> Tensor:
        return (torch.randn(B, T, H, K, generator=draw) * size).to(dtype)

    def pairs(size: float, diagonal: int) -> Tensor:
        below = torch.arange(L) <= (torch.arange(T) % L)[:, None] + diagonal
        return torch.randn(B, T, H, L, generator=draw) * size * below[None, :, None]

    return Operands(
        keys(K**-0.5), keys(K**-0.5) if correct else None, keys(0.3), keys(1e-3) if split else None,
        pairs(0.2, 0).to(dtype), pairs(0.05, -1).to(correction_dtype(p.x)) if correct else None,
        torch.rand(H, tiles, K, generator=draw), torch.zeros(H, tiles, dtype=torch.int8),
    )  # fmt: skip


def exact_scans(p: DeltaProblem, given: Operands, L: int) -> dict[str, Tensor]:
    """h, E, C, states, dv, cotangents, dots and dC0 in float64; E is that of the problem's values."""
    q, r, k, k_low, P, X, decays = (None if t is None else t.double() for t in given[:7])
    assert q is not None
    assert k is not None
    assert P is not None
    assert decays is not None
    v, do = p.x.v.double(), p.dh.double()
    B, T, H, V = v.shape
    k = k if k_low is None else k + k_low
    count = -(-T // L)
    h, E, dv, dots = (torch.zeros_like(v) for _ in range(4))
    states, cotangents = (torch.zeros(H, B * count, V, q.shape[3], dtype=torch.float64) for _ in range(2))
    assert p.x.C is not None
    C, dC = p.x.C.double().clone(), p.dC.double().clone()
    for i in range(count):
        at, n = slice(i * L, min(T, (i + 1) * L)), min(T, (i + 1) * L) - i * L
        for b in range(B):
            for j in range(H):
                S = C[b, j]
                states[j, b * count + i] = S.T
                R = v[b, at, j] if r is None else v[b, at, j] - r[b, at, j] @ S
                E[b, at, j] = R if X is None else R - X[b, at, j, :n] @ R
                h[b, at, j] = q[b, at, j] @ S + P[b, at, j, :n] @ E[b, at, j]
                C[b, j] = decays[j, b * count + i][:, None] * S + k[b, at, j].T @ E[b, at, j]
    for i in reversed(range(count)):
        at, n = slice(i * L, min(T, (i + 1) * L)), min(T, (i + 1) * L) - i * L
        for b in range(B):
            for j in range(H):
                S = dC[b, j]
                cotangents[j, b * count + i] = S.T
                Y = P[b, at, j, :n].T @ do[b, at, j] + k[b, at, j] @ S
                dv[b, at, j] = Y if X is None else Y - X[b, at, j, :n].T @ Y
                dC[b, j] = decays[j, b * count + i][:, None] * S + q[b, at, j].T @ do[b, at, j]
                if r is not None:
                    dC[b, j] -= r[b, at, j].T @ dv[b, at, j]
    dots = (dv * E).sum(3)
    return {
        "h": h, "E": E, "C": C, "states": states, "dv": dv, "cotangents": cotangents, "dots": dots, "dC0": dC
    }  # fmt: skip


def check_scans(p: DeltaProblem, tolerance: float) -> None:
    """All that the scans compute of drawn operands is what it is in float64."""
    from tfla.backends.hopper import channel_dv, channel_h, channel_states

    device = "cpu" if INTERPRETED else "cuda"
    spec = p.spec("fused")
    x = DeltaInputs(*(None if t is None else t.to(device) for t in p.x))
    dh, dC = p.dh.to(device), p.dC.to(device).float()

    def context(*more: Tensor | None) -> channel_rule.ChannelContext:
        base, beta = delta.launch_context(LaunchRecorder([*x, dh, dC, *more]), x, spec)
        return channel_rule.context(base, x, spec, beta)

    ctx = context()
    drawn = draw_operands(p, ctx.base.L, ctx.base.tiles, spec.correct, ctx.split_keys)
    exact = exact_scans(p, drawn, ctx.base.L)
    operands = Operands(*(None if t is None else t.to(device) for t in drawn))  # type: ignore[arg-type]
    ctx = context(*operands)
    base = ctx.base
    assert channel_states.supports(ctx)
    h, E, dv = (base.new(*x.v.shape, dtype=x.v.dtype) for _ in range(3))
    C, dC0 = (base.new(x.sequences, base.H, base.K, base.V) for _ in range(2))
    states = ctx.new_tile_states()
    saved, errors = (E, E) if spec.correct else (None, x.v)
    channel_h.launch(ctx, operands, x.v, h, saved, None, x.C, C)
    channel_h.launch(ctx, operands, errors, None, None, states, x.C, None)
    cotangents, dots = channel_dv.launch(ctx, operands, dh, errors, dv, dC, dC0)
    found = {"h": h, "E": errors, "C": C, "states": states, "dv": dv, "cotangents": cotangents, "dC0": dC0}
    if dots is not None:
        found["dots"] = dots.sum(0)
    for name, t in found.items():
        assert error(t.cpu(), exact[name]) <= tolerance, name
