"""Attention to a block of keys, with the log-sum-exp by which results of several blocks are merged, and its gradients.

Where no key of a block is hidden, or a block is that of the queries themselves, torch's flash attention computes it.
All else is computed in tiles with a mask. With L the log-sum-exp of the logits of all blocks and D = dh . out,

    P = exp(scale q k^T - L),  dv = P^T dh,  dS = scale P (dh v^T - D),  dq = dS k,  dk = dS^T q

so that the gradients of one block need nothing of the others but L and D.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES, KEYS = 256, 4096  # of a tile, whose logits are in memory at once


class Block(NamedTuple):
    """The place of queries and of a block of keys in the sequence, and what the queries see of the block."""

    query: int
    """The first query."""
    key: int
    """The first key."""
    first: Tensor | None = None
    """(B, Tq) or (1, Tq) int64, the first key that each query may see; None is no such bound."""
    window: int | None = None
    """The number of last keys that a query sees, its own included; None is all."""


class Gradients(NamedTuple):
    """The gradients that a block contributes, in the dtype of accumulators."""

    q: Tensor
    k: Tensor
    v: Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over tensors of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend_block(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of a block alone, and the log-sum-exp of the logits.

    Args:
        q: (B, H, Tq, d).
        k, v: (B, Hkv, Tk, d), of which each head serves H / Hkv heads of q.
        block: the place of both.

    Returns:
        (B, H, Tq, d) and (B, H, Tq) in the dtype of accumulators; 0 and -inf where a query sees no key.
    """
    dtype, causal = accumulator_dtype(q.dtype), _plain(q, k, block)
    if causal is not None:
        if q.is_cuda:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
        else:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out.to(dtype), lse.to(dtype)
    found = []
    for queries in _query_tiles(q):
        rows = _grouped(q[:, :, queries], k)
        out, lse = torch.zeros_like(rows, dtype=dtype), torch.full_like(rows[..., 0], -torch.inf, dtype=dtype)
        for keys in _key_tiles(queries, k, block):
            logits = _logits(rows, k, queries, keys, block)
            of_tile = logits.logsumexp(-1)
            weights = (logits - _finite(of_tile)[..., None]).exp()
            out, lse = merge(out, lse, _product(weights.to(v.dtype), v[:, :, keys]), of_tile)
        shape = queries.stop - queries.start
        found.append((_heads(out, shape), _heads(lse[..., None], shape)[..., 0]))
    return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)


def merge(out: Tensor, lse: Tensor, of_block: Tensor, lse_of_block: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of two blocks, from that to each of them and its log-sum-exp."""
    both = torch.logaddexp(lse, lse_of_block)
    new = _finite(both)
    return out * (lse - new).exp()[..., None] + of_block * (lse_of_block - new).exp()[..., None], both


def block_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dh: Tensor, delta: Tensor, block: Block
) -> Gradients:
    """Return the gradients that a block contributes.

    Args:
        q, k, v, block: as in :func:`attend_block`.
        out: (B, H, Tq, d), attention to the keys of all blocks.
        lse: (B, H, Tq), the log-sum-exp of the logits of all blocks.
        dh: (B, H, Tq, d), the cotangent of out.
        delta: (B, H, Tq), the sum of dh times out over the last dimension.
    """
    dtype, causal = accumulator_dtype(q.dtype), _plain(q, k, block)
    if causal is not None:
        if q.is_cuda:
            unused = q.new_empty((), dtype=torch.int64)  # the state of dropout
            whole = lse.contiguous()  # the kernel takes no strides of it, and lse may be a part of a larger one
            found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                dh, q, k, v, out, whole, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
            )
        else:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dh, q, k, v, out, lse, 0.0, causal
            )
        return Gradients(*(t.to(dtype) for t in found))
    scale, dqs = q.shape[-1] ** -0.5, []
    dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (k, v))
    for queries in _query_tiles(q):
        rows, drows = (_grouped(t[:, :, queries], k) for t in (q, dh))
        lse_rows, delta_rows = (_grouped(t[:, :, queries, None], k) for t in (lse, delta))
        dq = torch.zeros_like(rows, dtype=dtype)
        for keys in _key_tiles(queries, k, block):
            p = (_logits(rows, k, queries, keys, block) - lse_rows).exp()
            ds = (scale * p * (_product(drows, v[:, :, keys].mT) - delta_rows)).to(q.dtype)
            dq = dq + _product(ds, k[:, :, keys])
            dk[:, :, keys] += _product(ds.mT, rows)
            dv[:, :, keys] += _product(p.to(v.dtype).mT, drows)
        dqs.append(_heads(dq, queries.stop - queries.start))
    return Gradients(torch.cat(dqs, 2), dk, dv)


def _plain(q: Tensor, k: Tensor, block: Block) -> bool | None:
    """Return whether torch's flash attention computes a block with the causal mask; None where it cannot compute it."""
    Tq, Tk, d = q.shape[2], k.shape[2], q.shape[3]
    if block.first is not None or (q.is_cuda and (q.element_size() != 2 or d % 8 or d > 256)):
        return None
    if block.window is not None and block.key <= block.query + Tq - 1 - block.window:
        return None
    if block.key + Tk - 1 <= block.query:
        return False
    return True if block.key == block.query and Tk == Tq else None


def _query_tiles(q: Tensor) -> Iterator[slice]:
    """Return the tiles of queries (B, H, Tq, d)."""
    T = q.shape[2]
    return (slice(at, min(at + QUERIES, T)) for at in range(0, T, QUERIES))


def _key_tiles(queries: slice, k: Tensor, block: Block) -> Iterator[slice]:
    """Return the tiles of the keys of a block that some query of a tile may see."""
    low, stop = 0, min(k.shape[2], block.query + queries.stop - block.key)
    if block.window is not None:
        low = max(low, block.query + queries.start - block.window + 1 - block.key)
    return (slice(at, min(at + KEYS, stop)) for at in range(low, stop, KEYS))


def _logits(rows: Tensor, k: Tensor, queries: slice, keys: slice, block: Block) -> Tensor:
    """Return the logits of a tile, (B, Hkv, H / Hkv x queries, keys), -inf where a query does not see a key."""
    logits = _product(rows, k[:, :, keys].mT) * rows.shape[-1] ** -0.5
    query = torch.arange(block.query + queries.start, block.query + queries.stop, device=k.device)[:, None]
    key = torch.arange(block.key + keys.start, block.key + keys.stop, device=k.device)
    hidden = key > query
    if block.window is not None:
        hidden = hidden | (key <= query - block.window)
    if block.first is not None:
        hidden = (hidden | (key < block.first[:, queries, None]))[:, None, None]
    of_heads = logits.unflatten(2, (-1, queries.stop - queries.start))
    return of_heads.masked_fill(hidden, -torch.inf).flatten(2, 3)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return queries (B, H, T, n) by the heads of k: (B, Hkv, H / Hkv x T, n)."""
    return x.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _heads(x: Tensor, T: int) -> Tensor:
    """Return what :func:`_grouped` was made of."""
    return x.unflatten(2, (-1, T)).flatten(1, 2)


def _finite(lse: Tensor) -> Tensor:
    """Return a log-sum-exp with 0 in place of -inf, where nothing is seen."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of (B, H, m, n) and (B, H, n, p) in the dtype of accumulators."""
    dtype = accumulator_dtype(a.dtype)
    if a.is_cuda and a.element_size() == 2 and hasattr(torch.ops.aten.bmm, "dtype"):  # since PyTorch 2.8
        found: Tensor = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=dtype)
        return found.unflatten(0, a.shape[:2])
    return a.to(dtype) @ b.to(dtype)
