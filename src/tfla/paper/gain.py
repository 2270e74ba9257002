"""The gain of the mLSTM for constant gates, before and after the norm (26), by this library's operator and norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

import tfla
from tfla.nn.layers import HeadNorm
from tfla.ops.gates import INPUT_GATES, InputGate, log_gates

T, HEAD_DIM = 512, 128  # Appendix D.2
EPSILONS = (1e-2, 1e-6, 1e-8)
Normalizer = Literal["bounded", "absolute", "plain", "none"]
NORMALIZERS: dict[Normalizer, str] = {
    "bounded": "max(|nᵀq|, 1)",  # in stabilized form max(|n̄ᵀq|, exp(-m)), (4)
    "absolute": "|nᵀq|",
    "plain": "nᵀq",
    "none": "1",
}
VARIANTS: dict[InputGate, tuple[Normalizer, ...]] = {  # Figures 6 and 7, the default first
    "exp": ("bounded", "absolute", "plain"),
    "sigmoid": ("none", "bounded", "absolute", "plain"),
}
PER_CALL = 128  # points of the grid at once


@dataclass(frozen=True)
class Gains:
    """The averages over time of max|h| / max|v| and max|NORM(h)| / max|v|, for a grid of gate pre-activations."""

    i: tuple[float, ...]
    f: tuple[float, ...]
    before: Tensor
    """The gains before the norm, (input gates, forget gates), float64."""
    after: dict[float, Tensor]
    """The gains after the norm by its epsilon, (input gates, forget gates), float64."""


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k, v ~ N(0, 1), each (1, T, 1, 128), float32."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, T, 1, HEAD_DIM, generator=generator) for _ in range(3))  # type: ignore[return-value]


def outputs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, gate: InputGate, normalizer: Normalizer) -> Tensor:
    """Return h before the norm, (B, T, H, dhv).

    The default normalizer of a gate is that of :func:`tfla.mlstm`. For the others, the unnormalized operator runs with
    a column of ones in v, which gives n^T q.

    Args:
        q, k, v: (B, T, H, d), float32 or float64.
        i, f: pre-activations of the gates (B, T, H).
        gate: the input gate.
        normalizer: the normalizer.
    """
    if normalizer == VARIANTS[gate][0]:
        return tfla.mlstm(q, k, v, i, f, input_gate=gate)
    log_i, log_f = log_gates(i, f, gate)
    return normalized(unnormalized(q, k, v, log_f, log_i), normalizer)


def unnormalized(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor) -> Tensor:
    """Return C^T q and n^T q, concatenated to (B, T, H, dhv + 1)."""
    out = tfla.linear_attention(q, k, torch.cat([v, torch.ones_like(v[..., :1])], -1), log_f, log_i)
    assert isinstance(out, Tensor)
    return out


def normalized(out: Tensor, normalizer: Normalizer) -> Tensor:
    """Divide C^T q by the normalizer of n^T q: (B, T, H, dhv + 1) -> (B, T, H, dhv)."""
    h, d = out[..., :-1], out[..., -1:]
    if normalizer == "bounded":
        d = d.abs().clamp(min=1)
    return h / (d.abs() if normalizer == "absolute" else d)


def gain(h: Tensor, v: Tensor) -> Tensor:
    """Return max|h_t| / max|v_t| averaged over time and heads (26): (B, T, H, d) -> (B,), float64."""
    return (h.abs().amax(-1) / v.abs().amax(-1)).double().mean((1, 2))


def over_input_gates(
    q: Tensor, k: Tensor, v: Tensor, i: Sequence[float], f: Tensor, gate: InputGate, normalizer: Normalizer
) -> Iterator[Tensor]:
    """Yield h for one input gate after the other, for all forget gates f (F,) at once: (F, T, 1, d).

    Without a normalizer in the operator, a constant input gate is a factor, so that the operator runs once.
    """
    if normalizer == VARIANTS[gate][0]:
        for values in torch.tensor(i).split(max(1, PER_CALL // len(f))):
            pairs = torch.cartesian_prod(values, f).reshape(-1, 2)
            at = [x.expand(len(pairs), -1, -1, -1) for x in (q, k, v)]
            gates = [x[:, None, None].expand(-1, T, 1).contiguous() for x in pairs.unbind(1)]
            h = outputs(at[0], at[1], at[2], gates[0], gates[1], gate, normalizer)
            yield from h.unflatten(0, (len(values), len(f)))
        return
    at = [x.expand(len(f), -1, -1, -1) for x in (q, k, v)]
    forget_gates = f[:, None, None].expand(-1, T, 1).contiguous()
    log_i, log_f = log_gates(torch.tensor(i), forget_gates, gate)
    whole = unnormalized(at[0], at[1], at[2], log_f, torch.zeros_like(log_f))
    for weight in log_i.exp():
        yield normalized(whole * weight, normalizer)


@torch.no_grad()
def gains(
    gate: InputGate, normalizer: Normalizer, i: Sequence[float], f: Sequence[float], epsilons: Sequence[float],
    kind: Literal["rms", "layer"] = "rms", seed: int = 0,
) -> Gains:  # fmt: skip
    """Return the gains on the grid of constant pre-activations i and f.

    Args:
        gate: the input gate.
        normalizer: the normalizer.
        i: pre-activations of the input gate.
        f: pre-activations of the forget gate.
        epsilons: the epsilons of the norm.
        kind: the norm over the dims of a head.
        seed: the seed of q, k, v.

    Raises:
        ValueError: the gate or the normalizer is unknown.
    """
    if gate not in INPUT_GATES:
        raise ValueError(f"gate: got {gate!r}, allowed are {', '.join(map(repr, INPUT_GATES))}")
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer: got {normalizer!r}, allowed are {', '.join(map(repr, NORMALIZERS))}")
    q, k, v = draw(seed)
    norms = {eps: HeadNorm(1, HEAD_DIM, eps, kind) for eps in epsilons}
    before, after = list[Tensor](), {eps: list[Tensor]() for eps in epsilons}
    for part in torch.tensor(f).split(PER_CALL):
        rows = [
            torch.stack([gain(h, v), *(gain(norm(h), v) for norm in norms.values())])
            for h in over_input_gates(q, k, v, i, part, gate, normalizer)
        ]  # fmt: skip
        columns = torch.stack(rows, 1)  # before and after each norm, input gates, forget gates
        before.append(columns[0])
        for eps, column in zip(norms, columns[1:], strict=True):
            after[eps].append(column)
    return Gains(
        tuple(i), tuple(f), torch.cat(before, 1), {eps: torch.cat(found, 1) for eps, found in after.items()}
    )  # fmt: skip


def transition(found: Gains, eps: float) -> list[float | None]:
    """Return, for each forget gate, the input gate at which the gain after the norm is half of its maximum.

    It is interpolated between grid points, and None where the gain does not cross half of its maximum.
    """
    at: list[float | None] = []
    for column in found.after[eps].T.tolist():
        half = max(column) / 2
        where = None
        points = list(zip(found.i, column, strict=True))
        for (x0, y0), (x1, y1) in pairwise(points):
            if y0 < half <= y1:
                where = x0 + (x1 - x0) * (half - y0) / (y1 - y0)
                break
        at.append(where)
    return at
