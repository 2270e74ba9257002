"""States of single sequences in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfla


def state(batch: int, normalize: bool = True, seed: int = 0) -> tfla.State:
    generator = torch.Generator().manual_seed(seed)
    return tfla.State(
        *(
            torch.randn(x.shape, generator=generator)
            for x in tfla.State.zeros(batch, 2, 3, 5, normalize=normalize)
            if x is not None
        )
    )


def parts(s: tfla.State) -> list[torch.Tensor]:
    return [x for x in s if x is not None]


@pytest.mark.parametrize("normalize", [True, False])
def test_gather_is_a_copy_of_rows(normalize: bool) -> None:
    whole = state(4, normalize)
    for rows in ([2, 0, 2], torch.tensor([2, 0, 2]), (2, 0, 2)):
        some = whole.gather(rows)
        assert all(torch.equal(a, b[[2, 0, 2]]) for a, b in zip(parts(some), parts(whole), strict=True))
    before = whole.clone()
    for x in parts(some):
        x.zero_()
    assert all(torch.equal(a, b) for a, b in zip(parts(whole), parts(before), strict=True))


@pytest.mark.parametrize("normalize", [True, False])
def test_scatter_overwrites_rows_and_no_others(normalize: bool) -> None:
    whole, new = state(4, normalize), state(2, normalize, seed=1)
    before = whole.clone()
    whole.scatter([3, 1], new)
    for a, b, c in zip(parts(whole), parts(before), parts(new), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])
        assert torch.equal(a[[3, 1]], c)


def test_reset_is_the_state_before_the_first_step() -> None:
    whole = state(3)
    before = whole.clone()
    whole.reset([1])
    zeros = tfla.State.zeros(1, 2, 3, 5)
    assert all(torch.equal(a, b) for a, b in zip(whole.gather([1]), zeros, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.gather([0, 2]), before.gather([0, 2]), strict=True))


@pytest.mark.parametrize(
    ("rows", "kind", "text"),
    [
        (1, TypeError, "rows: got 1, expected a tensor or a list"),
        (
            [True, False, False, True],
            TypeError,
            "rows: got [True, False, False, True], expected a tensor or a list of integers",
        ),
        ([np.True_, np.False_], TypeError, "expected a tensor or a list of integers"),
        ([0, True], TypeError, "mask.nonzero().flatten()"),
        (torch.tensor([True]), TypeError, "mask.nonzero().flatten()"),
        (torch.tensor([0, 4]), ValueError, "rows: got 4, expected from 0 to 3"),
        (torch.tensor([-1]), ValueError, "rows: got -1, expected from 0 to 3"),
        ([0.5], TypeError, "rows: got [0.5], expected a tensor or a list"),
        ([4], ValueError, "rows: got 4, expected from 0 to 3"),
        ([-1], ValueError, "rows: got -1, expected from 0 to 3"),
        (torch.tensor([True]), TypeError, "rows: got dtype torch.bool, expected int32 or int64"),
        (torch.tensor([[1]]), ValueError, "rows: got shape (1, 1), expected one dimension"),
    ],
    ids=str,
)
def test_wrong_rows_are_named(rows: Any, kind: type[Exception], text: str) -> None:
    for call in (state(4).gather, state(4).reset, lambda rows: state(4).scatter(rows, state(1))):
        with pytest.raises(kind) as caught:
            call(rows)
        assert text in str(caught.value)


@pytest.mark.parametrize("rows", [[1, 1], torch.tensor([1, 1]), [np.int64(1), 1]], ids=repr)
def test_a_sequence_that_is_overwritten_twice(rows: Any) -> None:
    whole = state(4)
    before = whole.clone()
    with pytest.raises(ValueError, match=r"^rows: got 1 more than once, expected each sequence once"):
        whole.scatter(rows, state(2))
    assert all(torch.equal(a, b) for a, b in zip(whole, before, strict=True))
    assert torch.equal(whole.gather(rows).C, whole.C[[1, 1]])
    whole.reset(rows)
    assert not whole.C[1].any()


def test_lists_of_rows_do_not_depend_on_the_default_device() -> None:
    whole, new = state(4), state(1, seed=1)
    with torch.device("meta"):
        assert torch.equal(whole.gather([2]).C, whole.C[2:3])
        whole.scatter([1], new)
        whole.reset([3])
        with pytest.raises(ValueError, match=r"^rows: got 4, expected from 0 to 3"):
            whole.gather([4])
    assert torch.equal(whole.C[1:2], new.C)
    assert not whole.C[3].any()


@pytest.mark.parametrize("normalize", [True, False])
def test_a_file_has_a_state(tmp_path: Path, normalize: bool) -> None:
    torch.save([state(4, normalize)], tmp_path / "state.pt")
    (found,) = torch.load(tmp_path / "state.pt")
    assert type(found) is tfla.State
    assert all(torch.equal(a, b) for a, b in zip(parts(found), parts(state(4, normalize)), strict=True))


@pytest.mark.parametrize("normalize", [True, False])
def test_an_exported_program_with_a_state_is_saved(tmp_path: Path, normalize: bool) -> None:
    class Step(torch.nn.Module):
        def forward(self, q: torch.Tensor, v: torch.Tensor, f: torch.Tensor, s: tfla.State) -> Any:
            return tfla.linear_attention_step(q, q, v, f, s, normalize=normalize)

    q, v, f = torch.randn(4, 2, 3), torch.randn(4, 2, 5), -torch.rand(4, 2)
    torch.export.save(torch.export.export(Step(), (q, v, f, state(4, normalize))), tmp_path / "step.pt2")
    h, found = torch.export.load(tmp_path / "step.pt2").module()(q, v, f, state(4, normalize))
    expected = Step()(q, v, f, state(4, normalize))
    assert type(found) is tfla.State
    assert all(torch.equal(a, b) for a, b in zip([h, *parts(found)], [expected[0], *parts(expected[1])], strict=True))


def test_compile() -> None:
    def run(whole: tfla.State, rows: torch.Tensor) -> tfla.State:
        whole.scatter(rows, tfla.State(*(t[:2] for t in whole)))  # views of what is overwritten
        whole.reset([3])
        return whole.gather([1, 2])

    compiled, expected, rows = state(4), state(4), torch.tensor([1, 0])
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(compiled, rows)
    for a, b in ((found, run(expected, rows)), (compiled, expected)):
        assert all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))


def test_scatter_of_what_is_no_state() -> None:
    with pytest.raises(TypeError, match=r"^states: got tuple, expected tfla.State"):
        state(4).scatter([0], tuple(state(1)))


def test_states_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"^states.C: got shape \(2, 2, 3, 5\), expected \(1, 2, 3, 5\)"):
        state(4).scatter([0], state(2))
    with pytest.raises(ValueError, match=r"^states.n: got None, expected a tensor"):
        state(4).scatter([0], state(1, normalize=False))
    with pytest.raises(ValueError, match=r"^states.n: got a tensor, expected None"):
        state(4, normalize=False).scatter([0], state(1))
