"""`LanguageModel.prefill`: the states after every n tokens of a prompt, for all mixers."""

from __future__ import annotations

import pytest
import torch
from invariant_models import CASES, build, leaves, tokens

from tfla.nn import generate


@torch.no_grad()
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_prompts_that_stop_there(case: str, invariant: bool) -> None:
    model, ids = build(case, torch.float64, batch_invariant=invariant), tokens(2, 50)
    _, carried = model(tokens(2, 7), return_state=True)
    for start in (None, carried):
        hidden, last, states = model.prefill(ids, start, states_every=12)
        expected, final = model.hidden(ids, start, return_state=True)
        assert (hidden - expected).norm() <= 1e-10 * expected.norm()
        assert len(states) == 4
        for j, state in enumerate([*states, last]):
            stop = min((j + 1) * 12, 50)
            _, stopped = model.hidden(ids[:, :stop], start, return_state=True)
            assert [t.shape for t in leaves(state)] == [t.shape for t in leaves(stopped)]
            after = model.step(tokens(2), state)[0]
            reference = model.step(tokens(2), stopped)[0]
            assert (after - reference).norm() <= 1e-10 * reference.norm(), stop
        assert [t.shape for t in leaves(last)] == [t.shape for t in leaves(final)]


@torch.no_grad()
def test_a_prompt_that_is_shorter_has_none() -> None:
    model, ids = build("mlstm_exp"), tokens(1, 9)
    hidden, last, states = model.prefill(ids, states_every=10)
    assert states == []
    assert torch.equal(hidden, model.hidden(ids)[0])
    assert torch.equal(model.logits(hidden), model(ids))
    assert len(list(generate(model, ids, 2, temperature=0))) == 2
    assert len(last) == 2


def test_errors() -> None:
    model = build("mlstm_exp")
    with pytest.raises(ValueError, match="states_every: got 0, expected at least 1"):
        model.prefill(tokens(1, 9), states_every=0)
    with pytest.raises(TypeError, match="ids: got a tensor of"):
        model.prefill(torch.zeros(1, 9), states_every=3)
