"""Rounding errors do not accumulate over a sequence of 2^20 steps."""

from __future__ import annotations

import pytest
import torch
from cases import TOLERANCE
from gpus import taking_turns

import tfla
from tfla.backends import BACKENDS, Inputs

T, K, V = 2**20, 128, 128

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60e9,
        reason="needs a GPU with 60 GB",
    ),
]


@pytest.fixture(scope="module")
def leaves() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Inputs and the cotangent of h: gates that remember for thousands of steps."""
    torch.manual_seed(0)
    q, k, v, dh = (torch.randn(1, T, 1, d, device="cuda", dtype=torch.bfloat16) for d in (K, K, V, V))
    i, f = torch.randn(1, T, 1, device="cuda") - 2, torch.randn(1, T, 1, device="cuda") + 7
    return [x.requires_grad_() for x in (q, k, v, i, f)], dh


def results(leaves: list[torch.Tensor], dh: torch.Tensor, gate: str, **options: object) -> list[torch.Tensor]:
    """h and all gradients."""
    h = tfla.mlstm(*leaves, input_gate=gate, **options)  # type: ignore[call-overload]
    return [h.detach(), *torch.autograd.grad(h, leaves, dh)]


@pytest.fixture(scope="module", params=["exp", "sigmoid"])
def exact(request: pytest.FixtureRequest, leaves: tuple[list[torch.Tensor], torch.Tensor]) -> tuple[str, list]:
    """Return the results in float64."""
    gate, dh = request.param, leaves[1].double()
    with taking_turns():
        truth = results([x.detach().double().requires_grad_() for x in leaves[0]], dh, gate, backend="chunkwise")
    return gate, truth


@pytest.mark.parametrize("chunk_size", [None, 4096])
@pytest.mark.parametrize(("backend", "kernel"), [("hopper", "fused"), ("triton", "fused"), ("triton", "tfla")])
def test_a_million_steps(
    leaves: tuple[list[torch.Tensor], torch.Tensor], exact: tuple[str, list], backend: str, kernel: str,
    chunk_size: int | None,
) -> None:  # fmt: skip
    gate, truth = exact
    if why := BACKENDS[backend].unsupported(Inputs(*(x.detach() for x in leaves[0]), None, None, None, None)):
        pytest.skip(why)
    found = results(*leaves, gate, backend=backend, kernel=kernel, chunk_size=chunk_size)
    sizes = [x.norm().item() for x in truth]
    sizes[5] = max(sizes[4], sizes[5])  # the forget gate's gradient is made of differences of the input gate's
    errors = [((a.double() - b).norm() / size).item() for a, b, size in zip(found, truth, sizes, strict=True)]
    assert all(e <= TOLERANCE[torch.bfloat16] for e in errors), [f"{e:.1e}" for e in errors]
