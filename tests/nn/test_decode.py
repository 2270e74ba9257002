"""Decoding with a state that stays where it is."""

from __future__ import annotations

from collections.abc import Callable

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
def test_sequences_come_and_go(mixer: str, make_model: Make, close: Callable, ids: Tensor) -> None:
    """A sequence leaves its place to another and goes on elsewhere; each has what it has alone."""
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


def test_attention_has_no_single_states(make_model: Make) -> None:
    model = make_model("attention")
    decoder = Decoder(model, model.initial_state(2))
    for call in (lambda: decoder.gather([0]), lambda: decoder.reset([0]), lambda: decoder.scatter([0], ())):
        with pytest.raises(TypeError, match=r"^state: got attention's cache"):
            call()


def test_graphs_are_for_mlstms_on_gpus(make_model: Make, ids: Tensor) -> None:
    for mixer, why in (("mlstm_exp", "a model on cpu"), ("attention", "attention, whose cache grows")):
        with pytest.raises(ValueError, match=rf"^cuda_graph: got True with {why}, expected an mLSTM on a GPU"):
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
