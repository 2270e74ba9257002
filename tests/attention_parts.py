"""Attention over steps that processes share, computed in rounds, and its errors against float64 on one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import error
from context_parts import own_steps

from tfla.distributed import ContextParallel
from tfla.nn.mixers.attend import attend
from tfla.nn.mixers.ring import ring_attention
from tfla.nn.mixers.spans import Spans

CASES: dict[str, dict[str, Any]] = {
    "plain": {"window": None, "sinks": False, "offsets": None},
    "window": {"window": 150, "sinks": True, "offsets": None},
    "packed": {"window": None, "sinks": True, "offsets": [0, 130, 500, 1000]},
}


def solve_attention(
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    device: str,
    order: str,
    lengths: tuple[int, ...],
    window: int | None,
    sinks: bool,
    offsets: list[int] | None,
) -> dict[str, float]:
    """Return the errors of this process's part of the attention and its gradients, by name.

    Args:
        group: the processes.
        dtype, device: of q, k and v.
        order, lengths: the spans.
        window: the number of last keys that a query sees; None is all.
        sinks: whether there are attention sinks.
        offsets: the offsets of packed sequences; None is one sequence.
    """
    draw = torch.Generator().manual_seed(0)
    T, (H, Hkv, d) = sum(lengths), (4, 2, 64)
    given = [torch.randn(1, T, heads, d, generator=draw).to(dtype) for heads in (H, Hkv, Hkv, H)]
    logits = torch.randn(H, generator=draw) if sinks else None
    first = None
    if offsets is not None:
        first = torch.tensor([max(a for a in offsets if a <= t) for t in range(T)])[None]

    *whole, dh = (x.double().requires_grad_() for x in given)
    sink = None if logits is None else logits.double().requires_grad_()
    h = attend(*whole, first, window, sink)
    leaves = [*whole, *([] if sink is None else [sink])]
    expected = [h.detach(), *torch.autograd.grad(h, leaves, dh)]

    steps = own_steps(dist.get_rank(group), dist.get_world_size(group), order, lengths)
    *own, dh = (x[:, steps].to(device).requires_grad_() for x in given)
    sink = None if logits is None else logits.to(device).requires_grad_()
    spans = Spans(ContextParallel(group, order=order, lengths=lengths), len(steps))
    packed = None if offsets is None else torch.tensor(offsets)
    place = None if first is None else first[:, steps].to(device)
    h = ring_attention(*own, place, sink, packed, spans, window)
    found = [h.detach(), *torch.autograd.grad(h, [*own, *([] if sink is None else [sink])], dh)]
    names = ["h", "dq", "dk", "dv"]
    errors = {n: error(a.cpu().double(), b[:, steps]) for n, a, b in zip(names, found, expected, strict=False)}
    if sink is not None:
        total = found[4].double()
        dist.all_reduce(total, group=group)
        errors["dsinks"] = error(total.cpu(), expected[4])
    return errors
