"""Tests of the cross-entropy of soft-capped logits, and of the unembedding that pads rows of logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import INTERPRETED, error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tfla.nn import LanguageModel, ModelConfig, capped_loss
from tfla.nn.layers import Unembedding

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
on_kernels = (
    [pytest.mark.interpreter]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
CAP = 30.0
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
EPSILON = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of rounding dx, at most


def drawn(tokens: int, vocabulary: int, dtype: torch.dtype, padding: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits of both signs, some of them beyond the cap, and targets, of which the first one has no loss.

    With `padding`, rows of logits are that many numbers further apart than the vocabulary is large.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 20.0 * torch.randn(tokens, vocabulary + padding, generator=generator)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[0] = capped_loss.IGNORED
    return x.to(DEVICE, dtype)[:, :vocabulary], targets.to(DEVICE)


def check(x: Tensor, targets: Tensor) -> None:
    """Compare losses and gradients with those in float64 of the same rounded logits."""
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    found, expected = capped_loss.losses(leaf, targets, CAP), capped_loss.losses(exact, targets, CAP)
    assert found.dtype == torch.float32
    assert expected.dtype == torch.float64
    dloss = torch.linspace(-1.0, 2.0, len(x), device=x.device)
    (dx,), (exact_dx,) = torch.autograd.grad(found, leaf, dloss), torch.autograd.grad(expected, exact, dloss.double())
    assert found[0] == 0
    assert error(found, expected) < 2e-6
    assert dx.dtype == x.dtype
    assert error(dx, exact_dx) < EPSILON[x.dtype]
    assert not dx[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "vocabulary", "padding"), [(3, 5000, 0), (5, 4096, 0), (7, 257, 7), (4, 1, 0)])
class TestKernels:
    pytestmark = on_kernels

    def test_losses_and_gradients(self, tokens: int, vocabulary: int, padding: int, dtype: torch.dtype) -> None:
        x, targets = drawn(tokens, vocabulary, dtype, padding)
        assert capped_loss.unsupported(x, targets, CAP) is None
        check(x, targets)


class TestAnyLogits:
    pytestmark = on_kernels

    @given(st.integers(1, 9), st.integers(1, 600), st.integers(0, 3), st.sampled_from(DTYPES), st.integers(0, 99))
    @settings(max_examples=20)
    def test_losses_and_gradients(
        self, tokens: int, vocabulary: int, padding: int, dtype: torch.dtype, seed: int
    ) -> None:  # fmt: skip
        check(*drawn(tokens, vocabulary, dtype, padding, seed))

    def test_extremes(self) -> None:
        """An infinite logit counts as the cap; a NaN, or a target that is no token, makes the loss of its token NaN."""
        x = torch.tensor([[torch.inf, 0.0, -torch.inf], [1.0, torch.nan, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
        targets = torch.tensor([2, 0, 3, 1])
        found = capped_loss.losses(x.to(DEVICE), targets.to(DEVICE), CAP).cpu()
        assert found[0].item() == pytest.approx(60.0)
        assert found[1:3].isnan().all()
        assert found[3].item() == pytest.approx(capped_loss.plain_losses(x[3:], targets[3:], CAP).item())

    @pytest.mark.parametrize("cap", [0.1, 1.0, 300.0, 1e4, 1e8])
    def test_caps_of_any_size(self, cap: float) -> None:
        x, targets = (t.to(DEVICE) for t in drawn(3, 65, torch.float32))
        leaf, exact = x.requires_grad_(), x.detach().double().requires_grad_()
        found, expected = capped_loss.losses(leaf, targets, cap), capped_loss.losses(exact, targets, cap)
        assert (capped_loss.unsupported(x, targets, cap) is None) == (cap <= 1000)
        assert error(found, expected) < 2e-6
        assert error(*(torch.autograd.grad(t.sum(), s)[0] for t, s in ((found, leaf), (expected, exact)))) < 2e-6

    def test_second_derivatives(self) -> None:
        x, targets = drawn(3, 20, torch.float32)
        leaf, same = x.requires_grad_(), x.detach().clone().requires_grad_()
        seconds = []
        for t, losses in ((leaf, capped_loss.losses), (same, capped_loss.plain_losses)):
            (dx,) = torch.autograd.grad(losses(t, targets, CAP).sum(), t, create_graph=True)
            seconds.append(torch.autograd.grad(dx.square().sum(), t)[0])
        assert error(*seconds) < 1e-5

    def test_transforms_take_the_operations(self) -> None:
        x, targets = drawn(3, 20, torch.float32)
        expected = capped_loss.plain_losses(x, targets, CAP)
        torch.testing.assert_close(
            torch.vmap(lambda a, t: capped_loss.losses(a[None], t[None], CAP)[0])(x, targets), expected
        )


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.interpreter
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("options", [{}, {"recompute": False}, {"tokens_per_pass": 5}], ids=str)
def test_losses_of_a_model(device: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=51)).to(device)
    ids = torch.randint(51, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    found, logits = model.losses(ids[:, :-1], ids[:, 1:], **options), model(ids[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(2, 8)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    parameters = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(t.sum(), parameters) for t in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"^recompute: got 'no', "):
        model.losses(ids[:, :-1], ids[:, 1:], recompute="no")  # type: ignore[arg-type]


def check_padding(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, autocast: bool) -> None:
    """Compare logits and gradients of an unembedding with a padded weight with those of one without."""
    layer = Unembedding(32, 51, 0.02).to(device, torch.float32 if autocast else dtype)
    plain = copy.deepcopy(layer)
    x = torch.randn(600, 32, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    results = []
    for module, pads in ((layer, True), (plain, False)):
        monkeypatch.setattr(Unembedding, "_pads", lambda self, x, pads=pads: pads)
        leaf = x.detach().requires_grad_()
        with torch.autocast(device, dtype, enabled=autocast):
            y = module(leaf)
        assert y.shape == (600, 51)
        assert y.is_contiguous() is not pads
        y.float().square().sum().backward()
        results.append((y, leaf.grad, module.weight.grad))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) < 1e-2


@pytest.mark.parametrize("autocast", [False, True])
def test_padded_rows(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    check_padding(monkeypatch, "cpu", torch.bfloat16, autocast)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_are_padded_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Unembedding(32, 51, 0.02).cuda().bfloat16()
    many, few = (torch.randn(n, 32, device="cuda", dtype=torch.bfloat16) for n in (600, 20))
    assert not layer(many).is_contiguous()
    assert layer(few).is_contiguous()
    assert layer.float()(many.float()).is_contiguous()
    with torch.autocast("cuda", torch.bfloat16):
        assert not layer(many).is_contiguous()
    for autocast in (False, True):
        check_padding(monkeypatch, "cuda", torch.bfloat16, autocast)
