"""The state that the steps of a span leave by themselves, and the cotangent that its outputs send to its start.

Both are one product over the steps, weighted by the gates (docs/mathematics.md):

    exp(m) S = sum_t exp(sum of log_f after t + log_i_t) k_t v_t^T             (39)-(43) for the whole span
    dC_in    = sum_t exp(sum of log_f up to t) scale q_t dnum_t^T              (B2), from the outputs of the span alone

Steps are read in blocks, so that no copy of k or q is larger than a block. Exponents are float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends.chunkwise.gates import max_state
from tfla.ops.context_parallel.spans import Cotangent, Span

BLOCK = 2048  # steps whose weighted keys or queries are in memory at once
BLOCK_ON_GPU = 16384  # the same on a GPU, where a block has to fill it


class Start(NamedTuple):
    """The state before a span; without a normalizer n and m are None."""

    C: Tensor  # (B, H, dqk, dhv)
    n: Tensor | None  # (B, H, dqk)
    m: Tensor | None  # (B, H)


class Outputs(NamedTuple):
    """The outputs of a span and their cotangents."""

    h: Tensor  # (B, T, H, dhv)
    d: Tensor | None  # (B, T, H), stabilized denominators; None without a normalizer
    dh: Tensor  # (B, T, H, dhv)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of states."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _each_head(x: Tensor, heads: int) -> Tensor:
    """Return q or k (B, T, Hq, dqk) repeated for the heads of v that share one, in the dtype of states."""
    x = x.to(_wide(x))
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def weighted_product(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over steps of weight_t x_t y_t^T, (B, H, dqk, dhv).

    Args:
        x: (B, T, Hq, dqk).
        y: (B, T, H, dhv).
        weight: (B, T, H), float64.
    """
    (B, _, H, V), K = y.shape, x.shape[3]
    found = y.new_zeros(B * H, K, V, dtype=_wide(x))
    # Tensor cores multiply 16-bit numbers and add up float32 ones, as in the kernels; CPUs multiply float32.
    low = y.is_cuda and y.dtype.itemsize == 2
    for at in _blocks(x):
        weighted = _each_head(x[:, at], H) * weight[:, at].to(found.dtype).unsqueeze(-1)
        a = weighted.permute(0, 2, 3, 1).flatten(0, 1)  # (B H, dqk, L)
        b = y[:, at].transpose(1, 2).flatten(0, 1)  # (B H, L, dhv)
        if low:
            found += torch.bmm(a.to(y.dtype), b, out_dtype=torch.float32)
        else:
            found.baddbmm_(a, b.to(found.dtype))
    return found.unflatten(0, (B, H))


def _blocks(x: Tensor) -> Iterator[slice]:
    """Yield the blocks of steps of x (B, T, ...)."""
    block = BLOCK_ON_GPU if x.is_cuda else BLOCK
    for start in range(0, x.shape[1], block):
        yield slice(start, start + block)


def weighted_sum_over_steps(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over steps of weight_t x_t, (B, H, dqk), from x (B, T, Hq, dqk) and weight (B, T, H)."""
    found = torch.zeros(x.shape[0], weight.shape[2], x.shape[3], dtype=_wide(x), device=x.device)
    for at in _blocks(x):
        found += (_each_head(x[:, at], weight.shape[2]) * weight[:, at].to(found.dtype).unsqueeze(-1)).sum(1)
    return found


def own_state(
    k: Tensor, v: Tensor, log_i: Tensor | None, log_f: Tensor, normalize: bool, start: Start | None, first: bool
) -> Span:
    """Return the action of a span.

    Args:
        k: (B, T, Hq, dqk).
        v: (B, T, H, dhv).
        log_i, log_f: (B, T, H), clamped log-gates; log_i None is 0.
        normalize: whether there are n and m.
        start: the state before the span, where the sequences start with it; None is zero.
        first: whether the sequences start with the span. The result then contains their initial state.
    """
    log_f = log_f.double()
    after = F.pad(log_f[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
    log_decay = log_f.sum(1)
    weight = after if log_i is None else after + log_i
    m = None
    if normalize:
        m = weight.amax(1) if weight.shape[1] else torch.full_like(log_decay, -torch.inf)
        if first:
            m = torch.maximum(m, log_decay if start is None or start.m is None else log_decay + start.m)
        m = m.to(_wide(k))
        weight = weight - m.unsqueeze(1)
    weight = weight.exp()
    C = weighted_product(k, v, weight)
    n = weighted_sum_over_steps(k, weight) if normalize else None
    if first and start is not None:
        passed = log_decay if m is None or start.m is None else log_decay + start.m - m
        passed = passed.exp().to(C.dtype)
        C = C + passed[..., None, None] * start.C
        n = n if n is None or start.n is None else n + passed[..., None] * start.n
    return Span(log_decay, C, n, m)


def own_max(log_i: Tensor | None, log_f: Tensor, m: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
    """Return the log-decay of a span and the max state that it leaves, (B, H), as of :func:`own_state`.

    They have the dtype of the gates, since any number near the maximum serves as max state.

    Args:
        log_i, log_f, first: as in :func:`own_state`.
        m: (B, H), the given max state before the span; None is zero.
    """
    after = F.pad(log_f[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
    log_decay = log_f.sum(1)
    found = (after if log_i is None else after + log_i).amax(1)
    if first:
        found = torch.maximum(found, log_decay if m is None else log_decay + m)
    return log_decay, found


def own_cotangent(
    q: Tensor, log_i: Tensor | None, log_f: Tensor, m: Tensor | None, out: Outputs, scale: float, normalizer_grad: bool
) -> Cotangent:
    """Return the cotangent of the state before a span, from the cotangents of its outputs alone.

    Args:
        q: (B, T, Hq, dqk).
        log_i, log_f: (B, T, H), clamped log-gates; log_i None is 0.
        m: (B, H), the max state before the span; None without a normalizer.
        out: the outputs of the span and their cotangents.
        scale: the factor of q.
        normalizer_grad: whether the denominator has a gradient.
    """
    weight = log_f.double().cumsum(1)
    if m is None or out.d is None:
        return Cotangent(weighted_product(q, out.dh, weight.exp() * scale), None, None)
    m_t = _max_states(log_i, log_f, m)
    # (T4) and (T7): the numerator and the denominator of an output are divided by D = max(|d|, exp(-m)).
    floor = m_t.neg().exp().clamp(min=torch.finfo(m.dtype).tiny)
    d = out.d.double()
    D = torch.maximum(d.abs(), floor)
    weight = (m.unsqueeze(1) + weight - m_t).exp() * scale / D
    C = weighted_product(q, out.dh, weight)
    if not normalizer_grad:
        return Cotangent(C, torch.zeros_like(C[..., 0]), m)
    wide = _wide(q)
    delta = -d.sign() * (out.dh.to(wide) * out.h.to(wide)).sum(-1)
    n = weighted_sum_over_steps(q, torch.where(d.abs() > floor, weight * delta, 0.0))
    return Cotangent(C, n, m)


def _max_states(log_i: Tensor | None, log_f: Tensor, m: Tensor) -> Tensor:
    """Return m_t of (1), (B, T, H) float64, from log-gates and the max state before the first step."""
    log_f = log_f.double().transpose(1, 2)
    given = torch.zeros_like(log_f) if log_i is None else log_i.double().transpose(1, 2)
    found = max_state(given.flatten(0, 1), log_f.flatten(0, 1), m.double().flatten())
    return found.unflatten(0, log_f.shape[:2]).transpose(1, 2)
