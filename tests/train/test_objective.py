"""The loss, the reset of the memory at documents' starts, and the evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfla.nn import LanguageModel, ModelConfig
from tfla.train.data import Tokens
from tfla.train.evaluation import document_cu_seqlens, evaluate, token_losses
from tfla.train.loop import train
from tfla.train.ranks import StepsPart
from tfla.train.tokenizer import ByteTokenizer

BOS = 9


def model(mixer: str, dtype: torch.dtype, backend: str | None = None) -> LanguageModel:
    """Return a model whose logits depend on its gates and its memory."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_blocks": 2, "num_heads": 2, "vocab_size": 10}
    net = LanguageModel(ModelConfig.from_dict(sizes | {"mixer": mixer, "input_gate_bias": 0, "backend": backend}))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return net.to(dtype)


def windows() -> torch.Tensor:
    """Return rows whose documents start at the beginning, in the middle, twice in a row, at the end, and nowhere."""
    ids = torch.randint(0, 9, (5, 13), generator=torch.Generator().manual_seed(1))
    ids[0, 0] = ids[1, 5] = ids[2, 4] = ids[2, 5] = ids[3, 11] = ids[3, 12] = BOS
    return ids


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig"])
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"), [("reference", torch.float64, 1e-13), (None, torch.float32, 1e-5)]
)
def test_both_resets_give_the_same_losses_and_gradients(mixer, backend, dtype, tolerance):
    found = []
    for reset in ("gate", "cu_seqlens"):
        net = model(mixer, dtype, backend)
        losses = token_losses(net, windows(), BOS, reset)
        losses.mean().backward()
        found.append((losses.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig", "attention"])
@pytest.mark.parametrize("reset", ["gate", "cu_seqlens"])
def test_a_document_does_not_depend_on_the_one_before(mixer, reset):
    net, ids = model(mixer, torch.float32), windows()
    other = ids.clone()
    other[1, :5] = (ids[1, :5] + 1) % 9
    with torch.no_grad():
        a, b, leaky = token_losses(net, ids, BOS, reset), token_losses(net, other, BOS, reset), net(ids[:, :-1])
        assert torch.allclose(a[1, 5:], b[1, 5:], rtol=1e-5)
        assert not torch.allclose(leaky[1, 5:], net(other[:, :-1])[1, 5:], rtol=1e-3)  # it would without the reset


def test_rows_and_documents_start_sequences():
    assert document_cu_seqlens(windows()[:4, :-1], BOS).tolist() == [0, 12, 17, 24, 28, 29, 36, 47, 48]


def heldout(n: int) -> Tokens:
    ids = np.random.default_rng(0).integers(0, 256, n)
    ids[::17] = 256
    return Tokens(ids, ids, (ids != 256).astype(int), ByteTokenizer(), "here")


def test_a_uniform_model_costs_eight_bits_and_the_starts():
    tokens = heldout(100)
    found = evaluate(lambda ids, document_start: torch.zeros(*ids.shape, 257), tokens, 16, batch_size=3)
    assert (found.tokens, found.bytes) == (99, int(tokens.heldout_bytes[1:].sum()))
    assert found.loss == pytest.approx(math.log(257))
    assert found.perplexity == pytest.approx(257)
    assert found.bits_per_byte == pytest.approx(math.log2(257) * 99 / found.bytes)


def test_evaluation_does_not_depend_on_the_batch():
    torch.manual_seed(0)
    net = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=257))
    tokens = heldout(100)
    found = [evaluate(net, tokens, 16, batch_size=n, reset=r) for n, r in ((1, "gate"), (7, "gate"), (4, "cu_seqlens"))]
    assert found[0].tokens == found[1].tokens == found[2].tokens == 99
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-5)
    assert found[2].loss == pytest.approx(found[0].loss, rel=1e-5)
    assert evaluate(net, tokens, 16, batch_size=2, max_windows=2).tokens < 99


@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from(["contiguous", "zigzag"]), st.integers(1, 5))
def test_short_windows_are_padded_to_spans_that_convolutions_take(
    steps: int, parts: int, order: str, shortest: int
) -> None:
    part = StepsPart(0, parts, order)
    width = part.padded(steps, shortest)
    if parts == 1:
        assert width == steps
        return
    assert width >= steps
    assert width % part.spans == 0
    assert width // part.spans >= shortest
    assert width - part.spans < steps or width == part.spans * shortest  # no shorter one would do


@pytest.mark.parametrize("checkpointing", [False, True])
def test_evaluations_of_a_run_hold_the_logits_that_its_steps_hold(tiny, monkeypatch, checkpointing):
    """With activation checkpointing the memory of a run has the logits of a part of the tokens, also in evaluations."""
    real, gave = LanguageModel.losses, set()

    def losses(self, *args, recompute, **options):
        gave.add((torch.is_grad_enabled(), recompute))
        return real(self, *args, recompute=recompute, **options)

    monkeypatch.setattr(LanguageModel, "losses", losses)
    train(tiny(steps=4, activation_checkpointing=checkpointing))
    assert gave == {(True, checkpointing), (False, checkpointing)}
