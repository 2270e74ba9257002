"""Mixers whose steps several processes share: packed sequences and documents that end anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import error
from context_parts import own_steps
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
    order: str,
    lengths: tuple[int, ...],
    given: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return this process's output, the gradient of its input, and those of the weights.

    Args:
        group: the processes.
        mixer, window: the layer.
        x, dy: its whole input, and the cotangent of its whole output.
        options: further arguments of the layer.
        order: of the spans.
        lengths: the steps of each span.
        given: whether the layer gets the lengths.
    """
    module = layer(mixer, window)
    module.context_parallel = ContextParallel(group, order=order, lengths=lengths if given else None)  # type: ignore[assignment]
    steps = own_steps(dist.get_rank(group), dist.get_world_size(group), order, lengths)
    mine, cotangent = x[:, steps], dy[:, steps]
    if "document_start" in options:
        options = {"document_start": options["document_start"][:, steps]}
    y, _ = module(mine.requires_grad_(), **options)
    y.backward(cotangent)
    return y.detach(), mine.grad, [p.grad for p in module.parameters()]


EXACT = 1e-12
CONVOLUTION = 3  # steps that the convolution reads from before a span


@settings(max_examples=80)
@given(data=st.data())
def test_parts_are_those_of_the_whole(pool: Pool, data: st.DataObject) -> None:
    mixer = data.draw(st.sampled_from(list(MIXERS)), "mixer")
    parts = data.draw(st.integers(2, 4), "processes")
    order = data.draw(st.sampled_from(["contiguous", "zigzag"]), "order")
    least = CONVOLUTION if getattr(MIXERS[mixer], "has_convolution", False) else 1
    spans, equal = parts * (2 if order == "zigzag" else 1), data.draw(st.booleans(), "equal spans")
    each = st.integers(least, 9)
    lengths = (data.draw(each),) * spans if equal else tuple(data.draw(st.tuples(*[each] * spans), "lengths"))
    given = not equal or data.draw(st.booleans(), "lengths are given")
    T = sum(lengths)
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
    found = pool.run(
        parts, solve, mixer=mixer, x=x, dy=dy, window=window, options=options, order=order, lengths=lengths,
        given=given,
    )  # fmt: skip
    in_time = torch.cat([own_steps(rank, parts, order, lengths) for rank in range(parts)]).argsort()
    h, dx = (torch.cat([part[k] for part in found], 1)[:, in_time] for k in (0, 1))  # type: ignore[misc]
    assert error(h, y.detach()) <= EXACT
    assert error(dx, whole.grad) <= EXACT
    for p, *gradients in zip(module.parameters(), *(gradients for _, _, gradients in found), strict=True):
        assert error(sum(gradients), p.grad) <= EXACT


def _compiled(group: dist.ProcessGroup, *, mixer: str, order: str) -> float:
    """Return the largest difference of output and gradient between a compiled layer and the layer itself."""
    module = layer(mixer)
    module.context_parallel = ContextParallel(group, order=order)  # type: ignore[assignment]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, starts: module(x, document_start=starts)[0], backend="aot_eager", fullgraph=True)
    worst = 0.0
    for T in (8, 12):
        x = torch.randn(1, T, 16, dtype=torch.float64, requires_grad=True)
        starts = torch.zeros(1, T, dtype=torch.bool)
        starts[0, 3 + dist.get_rank(group)] = True
        found = []
        for call in (compiled, lambda x, starts: module(x, document_start=starts)[0]):
            y = call(x, starts)
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
        worst = max(worst, *(error(a, b) for a, b in zip(*found, strict=True)))
    return worst


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mixer", ["attention", "mamba2", "retnet"])
def test_compiled_layers(pool: Pool, mixer: str, order: str) -> None:
    assert max(pool.run(2, _compiled, mixer=mixer, order=order)) <= EXACT


def _refused(group: dist.ProcessGroup, *, mixer: str, case: str) -> None:
    T = {"short": 2, "zigzag": 4, "odd": 5}.get(case, 4)
    module, x = layer(mixer), torch.zeros(1, T, 16, dtype=torch.float64)
    zigzag = ContextParallel(group, order="zigzag")
    module.context_parallel = zigzag if case in ("zigzag", "odd") else group  # type: ignore[assignment]
    if case == "state":
        module(x, module.initial_state(1, x.device))
    module(x)


@pytest.mark.parametrize(
    ("mixer", "case", "message"),
    [
        ("mamba2", "zigzag", "x: got a span of 2 steps with context parallelism, expected at least 3"),
        ("mamba2", "short", "x: got a span of 2 steps with context parallelism, expected at least 3"),
        ("mamba2", "odd", "x: got T = 5, expected an even number of steps with order 'zigzag' and no lengths"),
        ("retnet", "state", "state, return_state: got one of them with context parallelism, expected neither"),
        ("attention", "odd", "x: got T = 5, expected an even number of steps with order 'zigzag' and no lengths"),
        ("attention", "state", "state, return_state: got one with context_parallel, expected neither in attention"),
    ],
)
def test_what_cannot_be_shared_is_named(pool: Pool, mixer: str, case: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(2, _refused, mixer=mixer, case=case)
