"""The operator in plain differentiable PyTorch, for transforms that the kernels do not support.

These transforms are forward-mode AD and derivatives of the backward. The operator is the chunkwise form, (36)-(56),
without operations in place, so that every transform of PyTorch composes with it. Steps are processed in tiles of L
steps; states pass from tile to tile by a recurrence. The logarithm of a weight is a sum of log-gates inside one tile,
added up directly and never the difference of two long sums. Weights and their tangents are therefore exact over
sequences of any length. States, sums and tangents are float32, or float64 if q is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import TILE, Inputs, Outputs, Spec, input_gate, sequence_bounds
from tfla.backends.reference import bounded_denominator
from tfla.ops.autocast import without_autocast
from tfla.ops.gates import clamp, log_gates

BLOCK = 16 * TILE  # steps whose weights are in memory at once


class Sequences(NamedTuple):
    """Sequences of equal length T: heads are (Hq, G), the G heads of v that share one head of q and k."""

    q: Tensor  # (B, Hq, 1, T, dqk)
    k: Tensor  # (B, Hq, 1, T, dqk)
    v: Tensor  # (B, Hq, G, T, dhv)
    log_i: Tensor  # (B, Hq, G, T)
    log_f: Tensor  # (B, Hq, G, T)


class Carried(NamedTuple):
    """The state between two tiles, as in :class:`tfla.State`; n and m are None without a normalizer."""

    C: Tensor  # (B, Hq, G, dqk, dhv)
    n: Tensor | None  # (B, Hq, G, dqk)
    m: Tensor | None  # (B, Hq, G)


def blocks(T: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first step, end, steps of a tile): blocks of whole tiles, then what is left as one shorter tile."""
    whole = T - T % TILE
    for start in range(0, whole, BLOCK):
        yield start, min(start + BLOCK, whole), TILE
    if whole < T:
        yield whole, T, T - whole


def max_states(log_i: Tensor, log_f: Tensor, m: Tensor) -> Tensor:
    """Return m_t = max(log_f_t + m_{t-1}, log_i_t) (1), (..., T), from the initial m (...), as constants.

    Any number near the maximum serves as m_t, since m cancels out of every result: rounding of these sums does no harm.
    """
    log_i, log_f = log_i.detach(), log_f.detach()
    b = log_f.cumsum(-1)
    return b + torch.maximum((log_i - b).cummax(-1).values, m[..., None])


def block(x: Sequences, state: Carried, L: int, spec: Spec) -> tuple[Tensor, Tensor | None, Carried]:
    """Compute one block of whole tiles of L steps: h (B, Hq, G, T, dhv), d (B, Hq, G, T) or None, and the new state."""
    log_i, log_f, floor_of, m_end = x.log_i, x.log_f, None, None
    if state.m is not None:
        # With F = log_f + m_{t-1} - m_t and I = log_i - m_t, (6) and (7), the stabilized form is one without m.
        m = max_states(log_i, log_f, state.m)
        log_f = log_f + (torch.cat([state.m[..., None], m[..., :-1]], -1) - m)
        log_i = log_i - m
        floor_of, m_end = m.unflatten(-1, (-1, L)), m[..., -1]
    q, k, v = (t.unflatten(-2, (-1, L)) for t in (x.q, x.k, x.v))  # (B, Hq, G, tiles, L, d)
    log_i, log_f = (t.unflatten(-1, (-1, L)) for t in (log_i, log_f))  # (B, Hq, G, tiles, L)

    causal = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
    between = log_f[..., :, None].expand(*log_f.shape, L).masked_fill(~causal.tril(-1), 0.0).cumsum(-2)
    D = (between + log_i[..., None, :]).masked_fill(~causal, -torch.inf).exp()  # (27)-(30)
    inter = log_f.cumsum(-1).exp()  # weight of the state before the tile in each step, (B, Hq, G, tiles, L)
    weighted_k = k * D[..., -1, :, None]
    decay = inter[..., -1]

    S = (q @ k.mT) * (spec.scale * D)
    C, before = _pass_on(state.C, decay[..., None, None], weighted_k.mT @ v)
    num = S @ v + (spec.scale * inter)[..., None] * (q @ before)
    if state.n is None or floor_of is None:
        return num.flatten(-3, -2), None, Carried(C, None, None)
    n, n_before = _pass_on(state.n, decay[..., None], weighted_k.sum(-2))
    d = S.sum(-1) + spec.scale * inter * (q * n_before[..., None, :]).sum(-1)
    denominator = bounded_denominator(d, floor_of)
    if not spec.normalizer_grad:
        denominator = denominator.detach()
    h = num / denominator[..., None]
    return h.flatten(-3, -2), d.flatten(-2), Carried(C, n, m_end)


def _pass_on(state: Tensor, decay: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state after the last tile and those before each tile, (B, Hq, G, tiles, ...), (39)-(43)."""
    before = []
    for decay_t, update_t in zip(decay.unbind(3), update.unbind(3), strict=True):
        before.append(state)
        state = decay_t * state + update_t
    return state, torch.stack(before, 3)


def _scan(x: Sequences, state: Carried, spec: Spec) -> tuple[Tensor, Tensor | None, Carried]:
    """Compute h, d and the final state of sequences of equal length T >= 1."""
    hs, ds = [], []
    for start, stop, L in blocks(x.v.shape[-2]):
        steps = (*(t[..., start:stop, :] for t in x[:3]), *(t[..., start:stop] for t in x[3:]))
        h, d, state = block(Sequences(*steps), state, L, spec)
        hs.append(h)
        if d is not None:
            ds.append(d)
    return torch.cat(hs, -2), torch.cat(ds, -1) if ds else None, state


def attend(x: Inputs, spec: Spec) -> Outputs:
    """Compute the results of a backend's `forward`, without stored states, as a differentiable function of x.

    Packed sequences are computed one after another, so that cu_seqlens are read on the host.
    """
    with without_autocast(x.q.device.type):
        return _attend(x, spec)


def _attend(x: Inputs, spec: Spec) -> Outputs:
    """Compute :func:`attend` with autocast off."""
    dtype, heads = x.acc_dtype, (x.q.shape[2], x.v.shape[2] // x.q.shape[2])
    if spec.gates == "log":
        log_f = clamp(x.log_f)
        log_i = clamp(input_gate(x))
    else:
        assert x.log_i is not None
        log_i, log_f = log_gates(x.log_i, x.log_f, spec.gates)
    q, k = (t.to(dtype).transpose(1, 2).unsqueeze(2) for t in (x.q, x.k))
    v = x.v.to(dtype).transpose(1, 2).unflatten(1, heads)
    log_i, log_f = (t.to(dtype).transpose(1, 2).unflatten(1, heads) for t in (log_i, log_f))
    N, K, V = x.sequences, x.q.shape[3], x.v.shape[3]
    first = _initial_state(x, spec)

    hs, ds, states = [], [], []
    bounds = sequence_bounds(x)
    spans = [(slice(None), *bounds[0][1:], slice(None))] if x.cu_seqlens is None and bounds else []
    if x.cu_seqlens is not None:
        spans = [(slice(0, 1), a, b, slice(s, s + 1)) for s, (_, a, b) in enumerate(bounds)]
    for rows, a, b, sequences in spans:
        state = Carried(*(None if t is None else t[sequences] for t in first))  # type: ignore[arg-type]
        if b > a:
            of_time = tuple(t[rows, :, :, a:b] for t in (q, k, v, log_i, log_f))
            h, d, state = _scan(Sequences(*of_time), state, spec)
            hs.append(h)
            if d is not None:
                ds.append(d)
        states.append(state)

    def merged(parts: list[Tensor], empty: tuple[int, ...], dim: int) -> Tensor:
        return torch.cat(parts, dim) if parts else v.new_zeros(empty)

    none = v.new_zeros(0)
    h = merged(hs, v.shape, 3).flatten(1, 2).transpose(1, 2).to(x.v.dtype).contiguous()  # strides as kernels leave them
    d = none.clone()
    if spec.save and spec.normalize:
        d = merged(ds, log_f.shape, 3).flatten(1, 2).transpose(1, 2).contiguous()
    found = [none.clone() for _ in range(3)]
    if spec.final_state:
        found[0] = merged([s.C for s in states], (N, *heads, K, V), 0).flatten(1, 2)
        if spec.normalize:
            found[1] = merged([s.n for s in states if s.n is not None], (N, *heads, K), 0).flatten(1, 2)
            found[2] = merged([s.m for s in states if s.m is not None], (N, *heads), 0).flatten(1, 2)
    C, n, m = found
    return Outputs(h, C, n, m, d, none.clone(), none.clone())


def _initial_state(x: Inputs, spec: Spec) -> Carried:
    """Return the initial state of all sequences, with a constant m; derivatives in m go through C and n."""
    dtype, heads = x.acc_dtype, (x.q.shape[2], x.v.shape[2] // x.q.shape[2])
    shape = x.sequences, *heads

    def start(given: Tensor | None, *dims: int) -> Tensor:
        if given is None:
            return x.q.new_zeros((*shape, *dims), dtype=dtype)
        return given.to(dtype).unflatten(1, heads)

    C = start(x.C, x.q.shape[3], x.v.shape[3])
    if not spec.normalize:
        return Carried(C, None, None)
    n, m = start(x.n, x.q.shape[3]), start(x.m)
    change = (m - m.detach()).exp()
    return Carried(change[..., None, None] * C, change[..., None] * n, m.detach())
