"""Decoder: steps, states of single sequences and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tfla.nn import Decoder, LanguageModel, generate

Make = Callable[..., LanguageModel]
MLSTM = ["mlstm_exp", "mlstm_sig"]


def advance(decoder: Decoder, ids: Tensor) -> Tensor:
    return torch.stack([decoder.step(token).clone() for token in ids.T], 1)


@torch.no_grad()
def test_steps_are_those_of_the_model(mixer: str, make_model: Make, close: Callable, ids: Tensor) -> None:
    model = make_model(mixer)
    _, state = model(ids[:, :9], return_state=True)
    before = [t.clone() for part in state for t in part if t is not None]
    close(advance(Decoder(model, state), ids[:, 9:]), model(ids)[:, 9:])
    after = [t for part in state for t in part if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("mixer", MLSTM)
def test_sequences_can_be_replaced_and_moved(mixer: str, make_model: Make, close: Callable, ids: Tensor) -> None:
    """A sequence is replaced by another and continued in another row; each gives what it gives alone."""
    model = make_model(mixer)
    alone = model(ids)
    decoder = Decoder(model, model.initial_state(3))
    padding = torch.zeros(1, 19, dtype=torch.int64)
    first = advance(decoder, torch.cat([padding, ids[:1], padding])[:, :5])
    close(first[1], alone[0, :5])
    paused = decoder.gather([1])
    _, prompt = model(ids[1:, :8], return_state=True)
    decoder.scatter([1], prompt)
    decoder.scatter([2], paused)
    decoder.reset([0])
    second = advance(decoder, torch.stack([ids[0, :6], ids[1, 8:14], ids[0, 5:11]]))
    close(second[0], alone[0, :6])
    close(second[1], alone[1, 8:14])
    close(second[2], alone[0, 5:11])


def test_rows_of_attention_caches_cannot_be_replaced(make_model: Make) -> None:
    model = make_model("attention")
    decoder = Decoder(model, model.initial_state(2))
    for call in (lambda: decoder.gather([0]), lambda: decoder.reset([0]), lambda: decoder.scatter([0], ())):
        with pytest.raises(TypeError, match=r"^state: got attention's cache"):
            call()


def test_graphs_are_for_mlstms_on_gpus(make_model: Make, ids: Tensor) -> None:
    for mixer, why in (("mlstm_exp", "a model on cpu"), ("attention", "attention, whose cache grows")):
        with pytest.raises(ValueError, match=rf"^cuda_graph: got True with {why}, expected recurrent mixers on a GPU"):
            next(generate(make_model(mixer), ids, 2, cuda_graph=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.no_grad()
@pytest.mark.parametrize("mixer", MLSTM)
def test_a_graph_steps_as_the_model_does(mixer: str, make_model: Make, close: Callable, ids: Tensor) -> None:
    model, ids = make_model(mixer, torch.float32).cuda(), ids.cuda()
    decoder = Decoder(model, model.initial_state(2))
    assert decoder._graph is not None
    alone = model(ids)
    close(advance(decoder, ids[:, :7]), alone[:, :7])
    decoder.scatter([0], decoder.gather([1]))
    swapped = advance(decoder, ids[[1, 1], 7:])
    close(swapped[0], alone[1, 7:])
    decoder.reset([0, 1])
    close(advance(decoder, ids), alone)
    greedy = torch.stack(list(generate(model, ids, 9, temperature=0)), 1)
    assert torch.equal(greedy, torch.stack(list(generate(model, ids, 9, temperature=0, cuda_graph=False)), 1))
    with torch.autocast("cuda", torch.bfloat16):
        low = torch.stack(list(generate(model, ids, 9, temperature=0)), 1)
        assert torch.equal(low, torch.stack(list(generate(model, ids, 9, temperature=0, cuda_graph=False)), 1))


OTHERS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("mlstm_exp", {"num_blocks": 3}, ValueError, r"^state: got 3 entries, expected one for each of the 2 blocks"),
    ("mlstm_exp", {"num_heads": 4}, ValueError, r"^state\[0\]\.C: got shape \(2, 4, 4, 8\), expected \(2, 2, 8, 16\)"),
    ("mlstm_exp", {"qk_factor": 1.0}, ValueError, r"^state\[0\]\.C: got shape .*, expected \(2, 2, 8, 16\)"),
    ("mlstm_sig", {}, TypeError, r"^state\[0\]\.n: got NoneType, expected a float tensor"),
    ("attention", {}, TypeError, r"^state\[0\]: got KeyValues, expected State"),
]


@pytest.mark.parametrize(("mixer", "fields", "kind", "message"), OTHERS)
def test_a_state_of_another_model_is_refused(
    make_model: Make, mixer: str, fields: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model, other = make_model(), make_model(mixer, **fields)
    with pytest.raises(kind, match=message):
        Decoder(model, other.initial_state(2))
    decoder = Decoder(model, model.initial_state(2))
    with pytest.raises(kind, match=message):
        decoder.scatter([0, 1], other.initial_state(2))


@pytest.mark.parametrize(
    ("mixer", "other", "fields", "message"),
    [
        ("mlstm_sig", "mlstm_exp", {}, r"^state\[0\]\.n: got a tensor of torch.float32, expected None"),
        ("attention", "mlstm_exp", {}, r"^state\[0\]: got State, expected KeyValues"),
        ("attention", "attention", {"num_heads": 4}, r"^state\[0\]\.k: got shape \(2, 0, 4, 8\)"),
    ],
)
def test_states_of_other_mixers_are_refused(
    make_model: Make, mixer: str, other: str, fields: dict, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Decoder(make_model(mixer), make_model(other, torch.float32, **fields).initial_state(2))


def test_values_of_other_types_are_refused_as_states(make_model: Make) -> None:
    model = make_model()
    state = model.initial_state(2)
    one, two = state[0], model.initial_state(3)[1]
    for wrong, kind, message in (
        (one, TypeError, r"^state: got State, expected a tuple"),
        (None, TypeError, r"^state: got NoneType"),
        ((one, two), ValueError, r"^state\[1\]\.C: got shape \(3, .*, expected \(2, "),
        ((one, one._replace(m=one.m[:1])), ValueError, r"^state\[1\]\.m: got shape \(1, 2\), expected \(2, 2\)"),
        ((one, one._replace(C=one.C.long())), TypeError, r"^state\[1\]\.C: got a tensor of torch.int64"),
        ((one, one.to("meta")), ValueError, r"^state\[1\]\.C: got device meta, expected that of the model, cpu"),
    ):
        with pytest.raises(kind, match=message):
            Decoder(model, wrong)
    with pytest.raises(TypeError, match=r"^model: got str, expected a LanguageModel"):
        Decoder("model", state)
    with pytest.raises(TypeError, match=r"^cuda_graph: got 'no', expected None, True or False"):
        Decoder(model, state, cuda_graph="no")


def test_invalid_ids_are_refused(mixer: str, make_model: Make) -> None:
    model = make_model(mixer)
    decoder = Decoder(model, model.initial_state(2))
    for wrong, kind, message in (
        (torch.zeros(2), TypeError, r"^ids: got a tensor of torch.float32"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"^ids: got shape \(3,\), expected \(2,\)"),
        (torch.zeros(2, 1, dtype=torch.int64), ValueError, r"^ids: got shape \(2, 1\), expected \(B,\)"),
        (torch.tensor([0, 23]), ValueError, r"^ids: got tokens from 0 to 23, expected from 0 to 22"),
    ):
        with pytest.raises(kind, match=message):
            decoder.step(wrong)
