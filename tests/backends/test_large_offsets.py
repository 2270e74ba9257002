"""The kernels address tensors of more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cases import TOLERANCE, Implementation, error
from gpus import taking_turns

import tfla

H, K, V = 16, 128, 256
T, TAIL = 2**31 // (H * V) + 1000, 700  # v's last steps lie after element 2^31


@pytest.fixture
def large(implementation: Implementation) -> Iterator[Implementation]:
    """Implementations that can have such tensors; 30 GB are taken in turns."""
    if (
        implementation.device == "cpu"
        or implementation.small_only
        or torch.cuda.get_device_properties(0).total_memory < 60e9
    ):
        pytest.skip("needs a GPU with 60 GB")
    with taking_turns():
        yield implementation


def test_last_steps_of_a_huge_tensor(large: Implementation) -> None:
    """A reset before them makes them a sequence of their own."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, T, *shape, device="cuda", dtype=torch.bfloat16) for shape in ((H, K), (H, K), (H, V))]
    gates = [torch.randn(1, T, H, device="cuda") for _ in range(2)]
    gates[1][:, -TAIL] = -1e4
    whole = [x.requires_grad_() for x in (*leaves, *gates)]
    tail = [x.detach()[:, -TAIL:] for x in whole]
    dh = torch.randn(1, TAIL, H, V, device="cuda", dtype=torch.bfloat16)
    results = []
    for given in (whole, [x.detach().float().requires_grad_() for x in tail]):  # the tail in float32 is the truth
        h = tfla.mlstm(*given, **large.options)[:, -TAIL:]
        h.backward(dh.to(h.dtype))
        results.append([h.detach(), *(x.grad[:, -TAIL:] for x in given)])
    for a, b in zip(*results, strict=True):
        assert error(a, b) <= TOLERANCE[torch.bfloat16]
