"""Causal attention within documents and windows, without a mask of all queries and keys.

Queries are taken in blocks. Those of a block attend to the keys from the first to the last that any of them sees, with
a mask of the block alone; where all queries see all keys up to their own, there is no mask.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tfla.nn.layers import at_least_float32, recomputed
from tfla.ops.transforms import needs_dispatcher

QUERIES = 256  # queries of a block, whose mask is in memory at once
CPU_VECTOR = 16  # numbers of the widest registers of a CPU


def attend(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the visible keys; the queries are those of the last T of S keys.

    Args:
        q: (B, T, H, d).
        k, v: (B, S, Hkv, d), S >= T; each of the Hkv heads serves H / Hkv heads of q.
        first: (B, T), (1, T) or (B, 1) int64, the index of the first key that each query may see; None is 0.
        window: the number of last keys that a query sees, its own included; None is all.
        sinks: (H,), for each head the logit of a further key whose value is 0; None is no such key.

    Returns:
        (B, T, H, d).
    """
    T, S = q.shape[1], k.shape[1]
    if window is not None and window >= S:
        window = None
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if first is None and window is None and sinks is None:
        if T == S:
            return _grouped(q, k, v, None, True).transpose(1, 2)
        if T == 1:
            return _grouped(q, k, v, None, False).transpose(1, 2)
    blocks = [
        _attend_block(q[:, :, at : at + QUERIES], k, v, at + S - T, _columns(first, at), window, sinks, T > QUERIES)
        for at in range(0, T, QUERIES)
    ]
    return torch.cat(blocks, 2).transpose(1, 2)


def attend_alone(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Compute :func:`attend` for each sequence of a batch alone, on a CPU without the keys that it does not see."""
    found = []
    for row in range(q.shape[0]):
        own, low, begin = slice(row, row + 1), 0, None
        if first is not None:
            begin = first[own] if first.shape[0] > 1 else first
            if q.device.type == "cpu":
                low = max(0, int(begin.min()))
                begin = None if bool((begin <= low).all()) else begin - low
        with _same_kernel(sinks):
            found.append(attend(q[own].clone(), k[own, low:].clone(), v[own, low:].clone(), begin, window, sinks))
    return torch.cat(found)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Compute :func:`attend` for each packed sequence alone; the offsets are read on the host."""
    with _same_kernel(sinks):
        found = [
            attend(q[:, a:b].clone(), k[:, a:b].clone(), v[:, a:b].clone(), None, window, sinks)
            for a, b in itertools.pairwise(cu_seqlens.tolist())
            if a < b
        ]
    return torch.cat(found, 1)


def _same_kernel(sinks: Tensor | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a mask with the logits of sinks has one kernel, with gradients of it and without."""
    return contextlib.nullcontext() if sinks is None else sdpa_kernel(SDPBackend.MATH)


def _columns(first: Tensor | None, at: int) -> Tensor | None:
    """Return the columns of ``first`` of the queries from ``at`` on."""
    return first if first is None or first.shape[1] == 1 else first[:, at : at + QUERIES]


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, offset: int, first: Tensor | None, window: int | None, sinks: Tensor | None,
    recompute: bool,
) -> Tensor:  # fmt: skip
    """Attend to the keys that some query of the block sees; with ``recompute`` the backward makes the mask again.

    Args:
        q: (B, H, block, d), the queries of a block.
        k, v: (B, Hkv, S, d), all keys and values.
        offset: the key of the first query.
        first, window, sinks: as in :func:`attend`.
        recompute: whether the backward computes the block again.
    """
    low = 0 if window is None else max(0, offset - window + 1)
    if first is not None and first.numel() and first.device.type == "cpu" and not needs_dispatcher((q,)):
        low = max(low, int(first.min()))
    keys = slice(low, offset + q.shape[2])
    run = partial(_attend_masked, offset - low, low, window)
    inputs = (q, k[:, :, keys], v[:, :, keys], first, sinks)
    return recomputed(run, *inputs) if recompute else run(*inputs)


def _attend_masked(
    offset: int, low: int, window: int | None, q: Tensor, k: Tensor, v: Tensor, first: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend with a mask: the keys are those from ``low`` on, and ``offset`` of these is that of the first query."""
    key = torch.arange(k.shape[2], device=q.device)
    query = torch.arange(offset, offset + q.shape[2], device=q.device)[:, None]
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    if first is not None:
        mask = (mask & (key >= first[..., None] - low))[:, None]
    return attend_masked(q, k, v, mask if first is not None else mask[None, None], sinks)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Return attention with a mask.

    Args:
        q: (B, H, T, d).
        k, v: (B, Hkv, S, d).
        mask: (B, 1, T, S) or (1, 1, T, S) bool, True where a query sees a key.
        sinks: (H,) as in :func:`attend`, or None.

    Returns:
        (B, H, T, d).
    """
    if sinks is not None:
        logits = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
        logits = logits.expand(-1, q.shape[1], -1, -1)
        sink = sinks.to(q.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        mask = torch.cat([logits, sink], -1)
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
    return _grouped(q, k, v, mask, False)


def _grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return torch's attention of q (B, H, T, d), where each of the heads of k and v serves several of q."""
    group = q.shape[1] // k.shape[1]
    # On GPUs only flash attention groups heads, without a mask and in 16 bits; the other kernels need all heads.
    if group > 1 and (mask is not None or q.element_size() > 2):
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=group > 1)
    # torch's maximum over fewer scores than a register holds leaves NaN out, and a row of nothing else becomes zero.
    if found.device.type == "cpu" and _may_be_few(k.shape[2]):
        found = found.masked_fill(_sees_nan(q, k, mask, causal)[..., None], torch.nan)
    return found


def _may_be_few(keys: int) -> bool:
    """Return whether keys may be fewer than CPU_VECTOR, without binding a traced program to the answer."""
    if not torch.compiler.is_compiling():
        return 0 < keys < CPU_VECTOR
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not statically_known_true(keys >= CPU_VECTOR)


def _sees_nan(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Return (B, H, T) bool, whether a score of a query with one of the first keys that it sees is NaN.

    The arguments are those of `_grouped`. The first keys are all of fewer than CPU_VECTOR.
    """
    # Indices in place of a slice, whose bounds would bind an exported program to lengths on one side of CPU_VECTOR.
    first = torch.arange(CPU_VECTOR, device=k.device).clamp(max=k.shape[2] - 1)
    keys = at_least_float32(k.detach().index_select(2, first)).repeat_interleave(q.shape[1] // k.shape[1], 1)
    nan = (at_least_float32(q.detach()) / math.sqrt(q.shape[-1]) @ keys.mT).isnan()  # (B, H, T, CPU_VECTOR)
    if mask is not None:
        mask = mask.index_select(-1, first)
        nan = nan & (mask if mask.dtype == torch.bool else mask > -torch.inf)
    elif causal:
        nan = nan & (first <= torch.arange(q.shape[2], device=q.device)[:, None])
    return nan.any(-1)
