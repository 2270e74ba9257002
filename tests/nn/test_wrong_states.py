"""States that do not fit a call of a model are found before a block runs, by a sentence that names the entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from invariant_models import CASES, RECURRENT, build, leaves, tokens
from torch import Tensor

import tfla
from tfla.nn import KeyValues, LanguageModel, MixerState, ModelConfig


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


def model_of(case: str) -> LanguageModel:
    return build(case, torch.float64, batch_invariant=False)


def used_pool(model: LanguageModel) -> Any:
    """A pool of four rows that have read prompts."""
    pool = model(tokens(4, 3), return_state=True)[1]
    return tuple(each.reserve(9) if isinstance(each, KeyValues) else each for each in pool)


def calls(model: LanguageModel, ids: Tensor, state: Any, **pool: Any) -> dict[str, Any]:
    """The calls that continue a state, by name."""
    return {
        "forward": lambda: model.hidden(ids, state, return_state=True, **pool),
        "prefill": lambda: model.prefill(ids, state, states_every=2, **pool),
        "step": lambda: model.step(ids[:, 0], state, **pool),
        "steps": lambda: model.steps(ids, state, **pool),
    }


@torch.no_grad()
@pytest.mark.parametrize("held", [1, 3])
def test_states_of_another_number_of_sequences(case: str, held: int) -> None:
    """As those of a pool without state_indices are; a position of one sequence was taken for that of all."""
    model = model_of(case)
    state = model.initial_state(held, capacity=9)
    for name, call in calls(model, tokens(2, 3), state).items():
        with pytest.raises(ValueError, match=rf"^state\[0\]\.\S+: got shape \({held}, .*expected \(2, "):
            pytest.fail(f"{name} took it: {call()}")


@torch.no_grad()
def test_states_of_another_model(case: str) -> None:
    """Without and with a pool, of which no row is overwritten where a later block's state does not fit."""
    model, ids = model_of(case), tokens(2, 3)
    other = build("attention" if case in RECURRENT else "gla", torch.float64).initial_state(4, capacity=9)
    pool = used_pool(model)
    mixed = (*pool[:-1], other[0])
    before = [t.clone() for t in leaves(mixed)]
    at = len(pool) - 1
    for given in ({}, {"state_indices": torch.tensor([2, 0])}):
        state = mixed if given else tuple(each.gather([0, 1]) for each in mixed)
        for name, call in calls(model, ids, state, **given).items():
            with pytest.raises(TypeError, match=rf"^state\[{at}\]: got \w+, expected \w+$"):
                pytest.fail(f"{name} took it: {call()}")
    assert all(torch.equal(t, old) for t, old in zip(leaves(mixed), before, strict=True))


@torch.no_grad()
def test_states_of_another_width(case: str) -> None:
    model = model_of(case)
    state = build(case, torch.float64, d_model=96, batch_invariant=False).initial_state(2, capacity=9)
    if case == "mamba2":
        state = tuple(each._replace(recurrence=model.initial_state(2)[0].recurrence) for each in state)
    for name, call in calls(model, tokens(2, 3), state).items():
        with pytest.raises(ValueError, match=r"^state\[0\]\.\S+: got shape \(2, .*expected \(2, "):
            pytest.fail(f"{name} took it: {call()}")


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in RECURRENT if not case.startswith("mlstm")])
def test_layers_name_parts_that_do_not_fit(case: str) -> None:
    """So do layers without a model."""
    model = model_of(case)
    mixer = model.blocks[0].mixer
    x = torch.randn(2, 3, model.config.d_model, dtype=torch.float64)
    good = mixer.initial_state(2, torch.device("cpu"))
    wrong: dict[str, tuple[MixerState, type[Exception]]] = {
        "convolution": (good._replace(convolution=(*good.convolution, good.recurrence.C)), ValueError),
        "position": (good._replace(position=None if good.position is not None else torch.zeros(2)), TypeError),
    }
    if good.convolution:
        wrong[r"convolution\[0\]"] = good._replace(convolution=tuple(t[:1] for t in good.convolution)), ValueError
    if good.position is not None:
        wrong[r"position"] = good._replace(position=good.position[:1]), ValueError
    for part, (state, kind) in wrong.items():
        for call in (lambda s: mixer(x, s), lambda s: mixer.step(x[:, 0], s), lambda s: mixer.steps(x, s)):
            with pytest.raises(kind, match=rf"^state\.{part}: got "):
                call(state)


@torch.no_grad()
@pytest.mark.parametrize(
    "lengths", [None, 2, [1, 1], torch.tensor([1.0, 1.0]), torch.tensor([1]), torch.tensor([4, 0])]
)
def test_wrong_lengths_accept_nothing(case: str, lengths: Any) -> None:
    """None advanced the recurrences of a pool's first block; then came an error of PyTorch."""
    model = model_of(case)
    right, pool = used_pool(model), used_pool(model)
    proposed = {"ids": tokens(2, 3), "state_indices": torch.tensor([2, 0])}
    model.steps(state=right, **proposed)[1](torch.tensor([3, 1]))
    accept = model.steps(state=pool, **proposed)[1]
    before = [t.clone() for t in leaves(pool)]
    with pytest.raises((TypeError, ValueError), match=r"^lengths: got "):
        accept(lengths)
    assert all(torch.equal(t, old) for t, old in zip(leaves(pool), before, strict=True))
    accept(torch.tensor([3, 1]))
    assert all(torch.equal(t, like) for t, like in zip(leaves(pool), leaves(right), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("pooled", [True, False])
def test_tokens_are_accepted_once(case: str, pooled: bool) -> None:
    """A second call advanced rows that the first had overwritten."""
    model = model_of(case)
    state = model.initial_state(2, capacity=9)
    given: dict[str, Any] = {"state_indices": torch.tensor([1, 0])} if pooled else {"in_place": True}
    _, accept = model.steps(tokens(2, 3), state, **given)
    accept(torch.tensor([1, 2]))
    before = [t.clone() for t in leaves(state)]
    with pytest.raises(ValueError, match=r"^accept: got a second call"):
        accept(torch.tensor([1, 2]))
    assert all(torch.equal(t, old) for t, old in zip(leaves(state), before, strict=True))


@pytest.mark.parametrize(
    ("cu_seqlens", "kind"),
    [(5, TypeError), ([0, 3], TypeError), (torch.tensor(3), ValueError), (torch.ones(2), TypeError)],
)
def test_offsets_of_a_wrong_type(case: str, cu_seqlens: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^cu_seqlens: got "):
        model_of(case)(tokens(1, 3), cu_seqlens=cu_seqlens)


def test_a_state_that_does_not_fit_in_n_leaves_c_as_it_is() -> None:
    state, new = tfla.State.zeros(3, 2, 4, 5), tfla.State.zeros(1, 2, 4, 5)
    wrong: list[Any] = [new.n[..., :1], None, 3]
    for n in wrong:
        with pytest.raises((TypeError, ValueError), match=r"^states\.n: got "):
            state.scatter([1], tfla.State(new.C + 1, n, new.m))
    assert not state.C.any()


def test_rows_of_the_state_itself_are_scattered() -> None:
    """They were an error of PyTorch about memory."""
    C = torch.randn(3, 2, 4, 5)
    state = tfla.State(C.clone())
    state.scatter([1, 2], tfla.State(state.C[:2]))
    assert torch.equal(state.C, C[[0, 0, 1]])


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("mlstm")])
def test_scatter_checks_all_parts_first(case: str) -> None:
    own = model_of(case).initial_state(3, capacity=4)[0]
    before = [t.clone() for t in leaves(own)]
    with pytest.raises(TypeError, match=r"^states: got State, expected "):
        own.scatter([0], tfla.State.zeros(1, 1, 1, 1))  # type: ignore[arg-type]
    if isinstance(own, MixerState):
        good = own.gather([0])
        full = good._replace(recurrence=tfla.State(good.recurrence.C + 1))
        wrong = [
            full._replace(convolution=(*full.convolution, full.recurrence.C)),
            full._replace(convolution=tuple(t[..., :1] for t in full.convolution)),
            full._replace(position=None if full.position is not None else torch.zeros(1)),
        ]
        for states in wrong[:: 1 if full.convolution else 2]:
            with pytest.raises((TypeError, ValueError), match=r"^states\.(convolution|position)\S*: got "):
                own.scatter([1], states)
    assert all(torch.equal(t, old) for t, old in zip(leaves(own), before, strict=True))


def test_states_are_compared_with_one_that_is_kept_until_the_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wider = (
        LanguageModel(ModelConfig(d_model=width, num_blocks=2, num_heads=2, vocab_size=8, mixer="gated_delta_net"))
        for width in (16, 32)
    )
    made: list[str] = []
    initial_state = LanguageModel.initial_state

    def counted(self: LanguageModel, *args: Any) -> Any:
        made.append(args[1])
        return initial_state(self, *args)

    monkeypatch.setattr(LanguageModel, "initial_state", counted)
    state, ids = initial_state(model, 1), torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        _, state = model.step(ids, state)
    assert made == ["meta"]
    for name, module in wider.named_children():
        setattr(model, name, module)
    with pytest.raises(ValueError, match=r"^state"):
        model.step(ids, state)
    model.step(ids, initial_state(wider, 1))
    assert made == ["meta"] * 2
