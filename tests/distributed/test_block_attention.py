"""Attention to blocks of keys, merged: results and gradients are those of float64 on all keys at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import TOLERANCE, error
from torch import Tensor

from tfla.nn.mixers.attend import attend
from tfla.nn.mixers.block_attention import Block, attend_block, block_gradients, merge

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 64
SPANS = (slice(0, 130), slice(130, 330))
"""Of the keys; the queries are those of the second span, whose block is causal."""
STEPS = SPANS[-1].stop
CASES: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": 90}, "first": {"first": 61}}


def _compute(given: list[Tensor], window: int | None, first: int | None) -> dict[str, Tensor]:
    """Return the attention of the queries of the second span, and the gradients, from blocks of keys."""
    queries, (q, k, v, dh) = SPANS[-1], (x.transpose(1, 2) for x in given)
    q, dh = q[:, :, queries], dh[:, :, queries]
    visible = None if first is None else torch.full((1, q.shape[2]), first, device=q.device)
    blocks = [Block(queries.start, span.start, visible, window) for span in SPANS]
    parts = [attend_block(q, k[:, :, s], v[:, :, s], block) for s, block in zip(SPANS, blocks, strict=True)]
    out, lse = merge(*parts[0], *parts[1])
    # A process with several spans has their log-sum-exps in one tensor.
    of_all = torch.full((BATCH, HEADS, STEPS), torch.nan, dtype=lse.dtype, device=q.device)
    of_all[:, :, queries] = lse
    delta = (dh.to(out.dtype) * out).sum(-1)
    saved = out.to(q.dtype), of_all[:, :, queries], dh, delta
    found = [block_gradients(q, k[:, :, s], v[:, :, s], *saved, block) for s, block in zip(SPANS, blocks, strict=True)]
    dk, dv = (torch.cat(each, 2) for each in ([g.k for g in found], [g.v for g in found]))
    return {"h": out, "dq": found[0].q + found[1].q, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_add_up_to_the_whole(device: str, case: str, dtype: torch.dtype) -> None:
    """On GPUs torch's flash attention computes blocks without a mask in 16 bits. It knows no strides of lse."""
    options = {"window": None, "first": None, **CASES[case]}
    draw = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    given = [torch.randn(BATCH, STEPS, h, SIZE, generator=draw).to(dtype) for h in heads]
    q, k, v, dh = (x.double() for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = None if options["first"] is None else torch.full((1, q.shape[1]), options["first"])
    queries = SPANS[-1]
    h = attend(*leaves, first, options["window"])[:, queries]
    gradients = torch.autograd.grad(h, leaves, dh[:, queries])
    expected = dict(zip(("h", "dq", "dk", "dv"), (h.detach(), gradients[0][:, queries], *gradients[1:]), strict=True))
    found = _compute([x.to(device) for x in given], **options)
    errors = {name: error(found[name].transpose(1, 2).cpu(), x) for name, x in expected.items()}
    assert {name: e for name, e in errors.items() if not e <= TOLERANCE[dtype]} == {}
