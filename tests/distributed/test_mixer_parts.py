"""Mixers whose steps several processes share: packed sequences and documents that end anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pool import Pool, RankError

from tfla.distributed import ContextParallel
from tfla.nn import ModelConfig, SequenceMixer
from tfla.nn.mixers import MIXERS

CONFIG: dict[str, Any] = {
    "d_model": 16, "num_blocks": 1, "num_heads": 4, "vocab_size": 8, "num_kv_heads": 2, "mamba_head_dim": 8,
    "mamba_state_dim": 4,
}  # fmt: skip


def layer(mixer: str, window: int | None = None) -> SequenceMixer:
    torch.manual_seed(0)
    return MIXERS[mixer](ModelConfig(**CONFIG, mixer=mixer, window=window)).double()  # type: ignore[call-arg,arg-type]


def solve(
    group: dist.ProcessGroup,
    *,
    mixer: str,
    x: torch.Tensor,
    dy: torch.Tensor,
    window: int | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return this process's output, the gradient of its input, and those of the weights."""
    rank, parts = dist.get_rank(group), dist.get_world_size(group)
    module = layer(mixer, window)
    module.context_parallel = group  # type: ignore[assignment]
    mine, cotangent = (t.chunk(parts, 1)[rank].clone() for t in (x, dy))
    if "document_start" in options:
        options = {"document_start": options["document_start"].chunk(parts, 1)[rank]}
    y, _ = module(mine.requires_grad_(), **options)
    y.backward(cotangent)
    return y.detach(), mine.grad, [p.grad for p in module.parameters()]


CONVOLUTION = 3  # steps that the convolution reads from before a part


@settings(max_examples=40)
@given(data=st.data())
def test_parts_are_those_of_the_whole(pool: Pool, data: st.DataObject) -> None:
    mixer = data.draw(st.sampled_from([name for name in MIXERS if not name.startswith("mlstm")]), "mixer")
    parts = data.draw(st.integers(2, 4), "processes")
    least = CONVOLUTION if getattr(MIXERS[mixer], "has_convolution", False) else 1
    T = parts * data.draw(st.integers(least, 9), "steps of a process")
    window = data.draw(st.none() | st.integers(1, T), "window") if mixer == "attention" else None
    kind = data.draw(st.sampled_from(["plain", "document_start", "cu_seqlens"]))
    B = 1 if kind == "cu_seqlens" else 2
    starts = data.draw(st.lists(st.integers(1, T - 1), max_size=5), "starts")
    options: dict[str, Any] = {}
    if kind == "document_start":
        options[kind] = torch.zeros(B, T, dtype=torch.bool)
        options[kind][1, starts] = True
    elif kind == "cu_seqlens":
        options[kind] = torch.tensor([0, *sorted(starts), T])
    x, dy = torch.randn(2, B, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(T))
    module, whole = layer(mixer, window), x.clone().requires_grad_()
    y, _ = module(whole, **options)
    y.backward(dy)
    found = pool.run(parts, solve, mixer=mixer, x=x, dy=dy, window=window, options=options)
    torch.testing.assert_close(torch.cat([out for out, _, _ in found], 1), y.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([dx for _, dx, _ in found], 1), whole.grad, rtol=0, atol=1e-12)
    for p, *gradients in zip(module.parameters(), *(gradients for _, _, gradients in found), strict=True):
        torch.testing.assert_close(sum(gradients), p.grad, rtol=0, atol=1e-11)


def _refused(group: dist.ProcessGroup, *, mixer: str, case: str) -> None:
    module, x = layer(mixer), torch.zeros(1, 2 if case == "short" else 4, 16, dtype=torch.float64)
    zigzag = ContextParallel(group, order="zigzag")
    module.context_parallel = zigzag if case == "zigzag" else group  # type: ignore[assignment]
    if case == "state":
        module(x, module.initial_state(1, x.device))
    module(x)


@pytest.mark.parametrize(
    ("mixer", "case", "message"),
    [
        ("mamba2", "zigzag", "context_parallel: got the order 'zigzag', expected 'contiguous' for this mixer"),
        ("mamba2", "short", "x: got 2 steps with context parallelism, expected at least 3"),
        ("retnet", "state", "state: got one with context parallelism, expected neither state nor return_state"),
        (
            "attention",
            "zigzag",
            "context_parallel: got order 'zigzag' and lengths None, expected equal parts in order 'contiguous'",
        ),
        ("attention", "state", "state: got one, or return_state, expected neither with context_parallel in attention"),
    ],
)
def test_what_cannot_be_shared_is_named(pool: Pool, mixer: str, case: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(2, _refused, mixer=mixer, case=case)
