"""A sequence has the same bits alone and in any batch with `batch_invariant`, in prefill and in decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from invariant_models import CASES, SMALL, build, leaves, tokens
from torch import Tensor

from tfla.distributed.parallel_model import check_model
from tfla.nn import Decoder, LanguageModel, ModelConfig, batch_invariance

LENGTHS = (37, 1, 130, 64, 7)


def check_equal(found: Any, expected: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(leaves(found), leaves(expected), strict=True))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16], ids=["float32", "float64", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@torch.no_grad()
def test_rows_of_a_batch_are_those_of_each_sequence_alone(case: str, dtype: torch.dtype) -> None:
    model, ids = build(case, dtype), tokens(5, 70)
    logits, state = model(ids, return_state=True)
    for row in (0, 2, 4):
        own, after = model(ids[row : row + 1], return_state=True)
        assert torch.equal(logits[row], own[0])
        check_equal([t[row : row + 1] for t in leaves(state)], after)
    order = torch.tensor([3, 0, 4, 1])
    assert torch.equal(model(ids[order]), logits[order])


@torch.no_grad()
def test_packed_sequences_are_those_of_each_sequence_alone(case: str) -> None:
    model, ids = build(case), tokens(1, sum(LENGTHS))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    logits, state = model(ids, cu_seqlens=offsets, return_state=True)
    steps, _ = model.step(tokens(len(LENGTHS)), state)
    for n, length in enumerate(LENGTHS):
        own = slice(int(offsets[n]), int(offsets[n]) + length)
        alone, after = model(ids[:, own], return_state=True)
        assert torch.equal(logits[:, own], alone), length
        assert torch.equal(model.step(tokens(len(LENGTHS))[n : n + 1], after)[0], steps[n : n + 1])


@torch.no_grad()
def test_decoding_in_a_batch_is_decoding_alone(case: str, dtype: torch.dtype) -> None:
    model, ids, more = build(case, dtype), tokens(5, 11), tokens(6, 5)
    _, state = model(ids, return_state=True)
    batch = Decoder(model, state)
    _, own = model(ids[3:4], return_state=True)
    alone, pair = Decoder(model, own), Decoder(model, model(ids[[1, 3]], return_state=True)[1])
    for token in more:
        logits = batch.step(token)
        assert torch.equal(logits[3:4], alone.step(token[3:4]))
        assert torch.equal(logits[[1, 3]], pair.step(token[[1, 3]]))


@torch.no_grad()
@pytest.mark.parametrize("in_place", [False, True])
def test_proposed_tokens_in_a_batch_are_those_alone(case: str, in_place: bool) -> None:
    model, ids, proposed = build(case), tokens(3, 11), tokens(3, 6)

    def run(rows: slice, lengths: Tensor) -> tuple[Tensor, Any]:
        _, state = model(ids[rows], return_state=True)
        room = tuple(own.reserve(20) if hasattr(own, "reserve") else own.clone() for own in state)
        logits, accept = model.steps(proposed[rows], room, in_place=in_place)
        return logits, accept(lengths[rows])

    lengths = torch.tensor([2, 0, 6])
    logits, after = run(slice(None), lengths)
    for row in range(3):
        own, own_after = run(slice(row, row + 1), lengths)
        assert torch.equal(own[0], logits[row])
        check_equal([t[row : row + 1] for t in leaves(after)], own_after)


@torch.no_grad()
def test_losses_and_autocast_do_not_depend_on_the_batch() -> None:
    model, ids, targets = build("mlstm_exp"), tokens(5, 40), tokens(5, 40).flip(1)
    losses = model.losses(ids, targets)
    assert torch.equal(model.losses(ids[2:3], targets[2:3])[0], losses[2])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(ids)[4], model(ids[4:])[0])


@pytest.mark.parametrize("dtype", [torch.float64], ids=["float64"])
def test_outputs_and_gradients_are_those_of_the_model_without_it(case: str, dtype: torch.dtype) -> None:
    model, plain, ids = build(case, dtype), build(case, dtype, batch_invariant=False), tokens(3, 33)
    found = []
    for each in (model, plain):
        logits = each(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        found.append((logits, [p.grad for p in each.parameters()]))
    (logits, grads), (expected, expected_grads) = found
    assert (logits - expected).norm() <= 1e-10 * expected.norm()
    for g, e in zip(grads, expected_grads, strict=True):
        assert (g is None) == (e is None)
        assert g is None or (g - e).norm() <= 1e-9 * e.norm() + 1e-14


@torch.no_grad()
@pytest.mark.parametrize("carried", [False, True], ids=["start", "carried"])
def test_empty_sequences_keep_their_states(case: str, carried: bool) -> None:
    model, plain = (build(case, torch.float64, batch_invariant=b) for b in (True, False))
    offsets = torch.tensor([0, 0, 5, 5, 12])
    if "attention" in str(CASES[case]):  # it carries no state past packed sequences
        expected = plain(tokens(1, 12), cu_seqlens=offsets)
        assert (model(tokens(1, 12), cu_seqlens=offsets) - expected).norm() <= 1e-10 * expected.norm()
        return
    start = plain(tokens(4, 5), return_state=True)[1] if carried else None
    results = [m(tokens(1, 12), start, cu_seqlens=offsets, return_state=True) for m in (model, plain)]
    for found, wanted in zip(*map(leaves, results), strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).double().norm() <= 1e-10 * wanted.double().norm() + 1e-12


def test_recording_gradients_changes_no_bit(case: str) -> None:
    model, ids = build(case), tokens(2, 70)
    with torch.no_grad():
        expected = model(ids)
    assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [name for name in CASES if name not in ("attention", "window and sinks", "hybrid")])
def test_training_prefill_and_decoding_have_equal_bits_in_recurrent_form(case: str, dtype: torch.dtype) -> None:
    model, ids = build(case, dtype, backend="reference"), tokens(3, 75)
    trained = model(ids).detach()
    with torch.no_grad():
        logits, state = model(ids[:, :33], return_state=True)
        assert torch.equal(logits, trained[:, :33])
        decoder = Decoder(model, state)
        for t in range(33, 60):
            assert torch.equal(decoder.step(ids[:, t]), trained[:, t]), t
        logits, _ = model.steps(ids[:, 60:70], decoder.state)
        assert torch.equal(logits, trained[:, 60:70])


# KDA's factors of tiles are chosen for whole blocks, and attention has kernels by length.
@torch.no_grad()
@pytest.mark.parametrize("case", ["mlstm_exp", "mlstm_sig", "mamba2", "retnet", "gla", "delta_net", "gated_delta_net"])
def test_a_prompt_in_parts_of_whole_tiles_has_equal_bits(case: str) -> None:
    model, ids = build(case), tokens(2, 200)
    whole, state, parts = model(ids), None, []
    for start in range(0, 200, 64):
        logits, state = model(ids[:, start : start + 64], state, return_state=True)
        parts.append(logits)
    assert torch.equal(torch.cat(parts, 1), whole)


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 50), st.integers(0, 39), st.booleans())
def test_a_row_of_a_product_depends_on_no_other_row(rows: int, K: int, N: int, at: int, bias: bool) -> None:
    x, weight = torch.randn(rows, K), torch.randn(N, K)
    b = torch.randn(N) if bias else None
    at %= rows
    y = batch_invariance.linear(x, weight, b)
    assert torch.equal(y[at], batch_invariance.linear(x[at : at + 1], weight, b)[0])
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    assert (y - exact).norm() <= 1e-5 * exact.norm()


@given(st.integers(1, 100), st.integers(0, 99), st.sampled_from(["sigmoid", "silu", "softplus"]))
def test_an_activation_of_an_element_depends_on_no_other_element(size: int, at: int, name: str) -> None:
    at %= size
    x = 30 * torch.randn(size)
    y = getattr(batch_invariance, name)(x)
    assert torch.equal(y[at:], getattr(batch_invariance, name)(x[at:].clone()))
    exact = (torch.sigmoid if name == "sigmoid" else getattr(F, name))(x.double())
    assert ((y - exact).abs() <= 2e-5 * exact.abs() + 1e-37).all()


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_gradients_of_activations_are_exact_and_finite(name: str) -> None:
    x = torch.tensor([-300.0, -90, -20, -1, 0, 1, 20, 90, 300], requires_grad=True)
    wide = x.detach().double().requires_grad_()
    getattr(batch_invariance, name)(x).sum().backward()
    (torch.sigmoid if name == "sigmoid" else getattr(F, name))(wide).sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert ((x.grad - wide.grad).abs() <= 2e-5 * wide.grad.abs() + 1e-37).all()


def test_the_option_is_checked_and_kept() -> None:
    with pytest.raises(ValueError, match="batch_invariant: got 1, expected True or False"):
        ModelConfig(**SMALL | {"batch_invariant": 1})
    config = ModelConfig.from_dict(SMALL)
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="mesh: got tp of size 3, expected 1 for a model with batch_invariant=True"):
        check_model(LanguageModel(config), {"tp": 3})
