"""The action of a span of steps on the state, and the composition of spans.

A span of steps acts on the true state of a head by a number and a matrix (docs/mathematics.md):

    C_out = exp(g) C_in + exp(m) S        n_out = exp(g) n_in + exp(m) s

where g is the sum of log_f over the span, and exp(m) S is the state that its steps leave where they start from zero.
Spans compose: (g2, S2) after (g1, S1) is (g1 + g2, exp(g2) S1 + S2). Without a normalizer m is 0 and is left out.

The sums of log-gates are float64 whatever the dtype of states is, because they are exponents. In what processes
exchange, each is a pair of numbers of the dtype of states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_DECAY_PARTS = 2  # numbers of the dtype of states for one log-decay


class Span(NamedTuple):
    """The action of a span on the states of all heads, or of several spans along a leading dimension."""

    log_decay: Tensor  # (..., H), float64: g
    C: Tensor  # (..., H, dqk, dhv): S, stabilized by m
    n: Tensor | None  # (..., H, dqk): s; None without a normalizer
    m: Tensor | None  # (..., H); None without a normalizer

    def at(self, index: int | slice) -> Span:
        """Return the spans with these indices of the leading dimension."""
        return Span(*(None if t is None else t[index] for t in self))  # type: ignore[arg-type]


def stack(spans: list[Span]) -> Span:
    """Return spans along a new leading dimension."""
    return Span(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*spans, strict=True)))  # type: ignore[arg-type]


def concatenate(parts: list[Span]) -> Span:
    """Return spans after one another along the leading dimension that each has."""
    return Span(*(None if t[0] is None else torch.cat(t) for t in zip(*parts, strict=True)))  # type: ignore[arg-type]


def exclusive_sums(log_decay: Tensor, after: bool) -> Tensor:
    """Return the sums over all later (``after``) or all earlier indices of the leading dimension."""
    zero = torch.zeros_like(log_decay[:1])
    if after:
        return torch.cat([log_decay[1:].flip(0).cumsum(0).flip(0), zero])
    return torch.cat([zero, log_decay[:-1].cumsum(0)])


def weighted_sum(log_weight: Tensor, x: Tensor) -> Tensor:
    """Return the sum over the leading dimension of exp(log_weight) (P, ..., H) times x (P, ..., H, ...)."""
    weight = log_weight.exp().to(x.dtype)
    return (weight.reshape(*weight.shape, *[1] * (x.dim() - weight.dim())) * x).sum(0)


def compose(spans: Span, m: Tensor | None = None) -> Span:
    """Return the one span that successive spans, (P, ...) in the order of time, make together.

    Its max state is ``m`` where that is given, else the largest exponent of its parts.
    """
    log_weight = exclusive_sums(spans.log_decay, after=True)
    log_decay = spans.log_decay.sum(0)
    if spans.m is not None:
        log_weight = log_weight + spans.m
        if m is None:
            m = log_weight.amax(0).to(spans.m.dtype)  # rounded first, so that all that follows uses the same m
        log_weight = log_weight - m
    n = None if spans.n is None else weighted_sum(log_weight, spans.n)
    return Span(log_decay, weighted_sum(log_weight, spans.C), n, m)


class Cotangent(NamedTuple):
    """The cotangents exp(m) dL/dC and exp(m) dL/dn of the true state at some step, of one or several states."""

    C: Tensor  # (..., H, dqk, dhv)
    n: Tensor | None  # (..., H, dqk); None without a normalizer
    m: Tensor | None  # (..., H), the max state that they are stabilized with; None without a normalizer


def carry_back(parts: Cotangent, log_decay: Tensor, m: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the cotangents of C and n at one step from parts that reach the state at later steps.

    Args:
        parts: (P, ...), what each later step contributes.
        log_decay: (P, ..., H), float64, the sums of log_f from the step to each of those.
        m: (..., H), the max state at the step; None without a normalizer.
    """
    if m is not None and parts.m is not None:
        log_decay = log_decay + m - parts.m
    return weighted_sum(log_decay, parts.C), None if parts.n is None else weighted_sum(log_decay, parts.n)


# Rows: what processes exchange, one tensor (..., H, width) of the dtype of states.


def row_width(dqk: int, dhv: int, normalize: bool) -> int:
    """Return the numbers of one head in a row."""
    return dqk * dhv + LOG_DECAY_PARTS + (dqk + 1 if normalize else 0)


def to_rows(C: Tensor, n: Tensor | None, m: Tensor | None, log_decay: Tensor) -> Tensor:
    """Return states or cotangents and their log-decays as rows."""
    high = log_decay.to(C.dtype)
    low = (log_decay - high).to(C.dtype)
    parts = [C.flatten(-2), high.unsqueeze(-1), low.unsqueeze(-1)]
    if n is not None:
        parts.append(n)
    if m is not None:
        parts.append(m.to(C.dtype).unsqueeze(-1))
    return torch.cat(parts, -1)


def from_rows(rows: Tensor, dqk: int, dhv: int) -> Span:
    """Return what :func:`to_rows` was given; the states are views of the rows."""
    C, high, low, rest = rows.split([dqk * dhv, 1, 1, rows.shape[-1] - dqk * dhv - LOG_DECAY_PARTS], -1)
    n = rest[..., :-1] if rest.shape[-1] > 1 else None
    m = rest[..., -1] if rest.shape[-1] else None
    return Span((high.double() + low.double()).squeeze(-1), C.unflatten(-1, (dqk, dhv)), n, m)
