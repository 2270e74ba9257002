"""Pre-activations of gates by products of bfloat16 are those in float32, and on a GPU the layer computes them so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tfla.nn import gate_product
from tfla.nn.layers import GatePreactivation

CAP = 15.0


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """Return the bound of the error of a sum of so many terms; tensor cores round such sums towards zero."""
    return 2e-6 + 1e-10 * terms if dtype == torch.float32 else 4e-3


def problem(
    dtype: torch.dtype, device: str, rows: tuple[int, ...] = (2, 300), channels: int = 520, heads: int = 5
) -> tuple[list[Tensor], Tensor]:
    """Return x, weight and bias, and dy."""
    x = torch.randn(*rows, channels, device=device).bfloat16()
    weight = (torch.randn(heads, channels, device=device) * channels**-0.5 * 5).to(dtype)
    bias = torch.linspace(-10, 6, heads, device=device).to(dtype)
    return [t.requires_grad_() for t in (x, weight, bias)], torch.randn(*rows, heads, device=device)


def check(found: Tensor, truth: Tensor, tolerance: float) -> None:
    assert found.shape == truth.shape
    error = (found.detach().double() - truth.detach()).norm()
    assert error <= tolerance * truth.detach().norm(), error / truth.detach().norm()


def exact(leaves: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return x, weight and bias in float64, and the pre-activations of them."""
    wide = [t.detach().double().requires_grad_() for t in leaves]
    return wide, CAP * torch.tanh(torch.nn.functional.linear(*wide) / CAP)


def check_call(leaves: list[Tensor], dy: Tensor) -> None:
    y = gate_product.preactivations(*leaves, CAP)
    gradients = torch.autograd.grad(y, leaves, dy)
    assert [t.dtype for t in (y, *gradients)] == [torch.float32, *(t.dtype for t in leaves)]
    wide, truth = exact(leaves)
    for found, expected in zip((y, *gradients), (truth, *torch.autograd.grad(truth, wide, dy.double())), strict=True):
        check(found, expected, tolerance(found.dtype, dy.numel() // dy.shape[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(2, 300), (1,), (3, 1, 7), (0, 4)])
def test_float32(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    check_call(*problem(dtype, "cpu", rows))


def test_gradient_of_x_has_no_error_of_the_parts() -> None:
    """In float32, before it is rounded, the gradient of x is as exact as a float32 product."""
    (x, weight, bias), dy = problem(torch.float32, "cpu")
    found: list[Tensor] = []
    product = gate_product._product

    def keep(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        found.append(product(a, b, torch.float32))
        return found[-1].to(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_product, "_product", keep)
        gate_product.preactivations(x, weight, bias, CAP).backward(dy)
    wide, truth = exact([x, weight, bias])
    (dx,) = torch.autograd.grad(truth, wide[:1], dy.double())
    check(found[1].view(x.shape), dx, 1e-6)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_tensors_get_no_gradient(frozen: int) -> None:
    leaves, dy = problem(torch.float32, "cpu")
    leaves[frozen].requires_grad_(False)
    gate_product.preactivations(*leaves, CAP).backward(dy)
    assert [t.grad is None for t in leaves] == [n == frozen for n in range(3)]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_compiled(compiler: str, frozen: int | None) -> None:
    """A graph has one operator for each direction, and the bits of eager calls, for any number of rows."""
    torch._dynamo.reset()
    compiled = torch.compile(gate_product.preactivations, fullgraph=True, backend=compiler, dynamic=True)
    for rows in ((2, 300), (3, 7)):
        leaves, dy = problem(torch.float32, "cpu", rows)
        if frozen is not None:
            leaves[frozen].requires_grad_(False)
        wanted = [t for t in leaves if t.requires_grad]
        found = []
        for call in (gate_product.preactivations, compiled):
            y = call(*leaves, CAP)
            found.append((y, *torch.autograd.grad(y, wanted, dy)))
        for eager, mine in zip(*found, strict=True):
            assert torch.equal(eager, mine)


def test_operators() -> None:
    (x, weight, bias), dy = problem(torch.bfloat16, "cpu")
    operators, y = torch.ops.tfla, gate_product.preactivations(x, weight, bias, CAP).detach()
    torch.library.opcheck(operators.gate_preactivations.default, (x, weight, bias, CAP))
    plain = [t.detach() for t in (dy, x, weight, bias, y)]
    for wanted in ([True] * 3, [False, True, False]):
        torch.library.opcheck(operators.gate_preactivations_backward.default, (*plain, CAP, wanted))


def test_second_derivatives() -> None:
    found = []
    leaves, _ = problem(torch.float32, "cpu", (6,), 8, 3)
    for call in (lambda: (leaves, gate_product.preactivations(*leaves, CAP)), lambda: exact(leaves)):
        given, y = call()
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(torch.stack([t.float().square().sum() for t in first]).sum(), given))
    for once, other in zip(*found, strict=True):
        check(once, other, 2e-2)  # the first gradient of x is bfloat16


def test_what_it_does_not_take() -> None:
    (x, weight, bias), _ = problem(torch.float32, "cpu")
    assert gate_product.unsupported(x, weight, bias) == "all tensors are on one NVIDIA GPU"
    assert "bfloat16" in str(gate_product.unsupported(x.float(), weight, bias))
    assert "bfloat16" in str(gate_product.unsupported(x, weight.double(), bias.double()))
    with torch.device("meta"):
        layer = GatePreactivation(8, 2, (0.0, 1.0), CAP)
    assert layer(torch.empty(3, 8, dtype=torch.bfloat16, device="meta")).shape == (3, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestGpu:
    """Products of tensor cores."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("rows", [(2, 300), (1,), (0, 4), (4, 8192)])
    def test_float32(self, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
        check_call(*problem(dtype, "cuda", rows))
        check_call(*problem(dtype, "cuda", rows, 2048, 8))

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_layer(self, autocast: bool, compiled: bool) -> None:
        """The layer keeps no copy of its input in float32, and repeats its bits."""
        torch._dynamo.reset()
        layer = GatePreactivation(2048, 8, (-10.0, 6.0), CAP, "cuda")
        torch.nn.init.normal_(layer.weight, std=0.1)
        call = torch.compile(layer, fullgraph=True) if compiled else layer
        x = torch.randn(4, 4096, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy, found = torch.randn(4, 4096, 8, device="cuda"), []
        leaves = [x, layer.weight, layer.bias]
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                y = call(x)
            gradients = torch.autograd.grad(y, leaves, dy)
            peak = torch.cuda.max_memory_allocated() - before
            found.append((y, *gradients))
        assert (
            peak < 1.2 * x.numel() * 2
        )  # dx, and what has the size of gates; the first call makes cuBLAS's workspaces
        for once, again in zip(*found, strict=True):
            assert torch.equal(once, again)
        wide, truth = exact(leaves)
        for once, expected in zip(found[0], (truth, *torch.autograd.grad(truth, wide, dy.double())), strict=True):
            check(once, expected, tolerance(once.dtype, 4 * 4096))
