"""The delta rule and gates by channel on several processes give the results of one, for any cuts and packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import error
from context_cuts import compare, cuts, each_share, sequences, whole
from delta_cases import MODELS, delta_problem, truth
from delta_parts import outputs_alone, solve, solve_part
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pool import Pool

EXACT = 1e-12
PUBLIC = [model for model in MODELS if model != "simple"]  # which is called by another operator


@st.composite
def problems(draw: Any, model: str, total: int) -> dict[str, Any]:
    """Arguments of `delta_problem` with that many steps."""
    Hq, H = draw(st.sampled_from([(1, 1), (2, 2), (1, 2)]))
    return {
        "model": model, "Hq": Hq, "H": H, "K": 5, "V": 3, "carried": draw(st.booleans()),
        "gates": draw(st.sampled_from(["medium", "long", "resets"])), "seed": draw(st.integers(0, 99)),
        **draw(sequences(total)),
    }  # fmt: skip


@settings(max_examples=15)
@pytest.mark.parametrize("model", PUBLIC)
@given(data=st.data())
def test_results_are_those_of_one_process(pool: Pool, model: str, data: st.DataObject) -> None:
    size, order, lengths = data.draw(cuts())
    chosen = data.draw(problems(model, sum(lengths)))
    found = pool.run(size, solve_part, each_share(data, size), given=chosen, order=order, lengths=lengths)
    compare(whole(found, order, lengths), truth(delta_problem(**chosen)), EXACT)


@settings(max_examples=10)
@given(data=st.data())
def test_outputs_without_gradients_and_states(pool: Pool, data: st.DataObject) -> None:
    size, order, lengths = data.draw(cuts())
    chosen = data.draw(problems(data.draw(st.sampled_from(PUBLIC)), sum(lengths)))
    found = pool.run(size, outputs_alone, given=chosen, order=order, lengths=lengths)
    parts = [{"h": h} for h in found]
    compare(whole(parts, order, lengths), {"h": truth(delta_problem(**chosen))["h"]}, EXACT)


@pytest.mark.parametrize("model", ["gdn", "kda", "gla"])
def test_spans_of_several_tiles(pool: Pool, model: str) -> None:
    lengths, chosen = (130, 70, 200), {"model": model, "B": 1, "T": 400, "gates": "long"}
    p = delta_problem(**chosen)
    found = pool.run(3, solve_part, given=chosen, order="contiguous", lengths=lengths, share=1 / 3, chunk_size=128)
    compare(whole(found, "contiguous", lengths), solve(p), EXACT)


@pytest.mark.parametrize("gates", ["closed", "half", "short"])
@pytest.mark.parametrize("model", ["gdn", "kda", "gla"])
def test_gates_that_close(pool: Pool, model: str, gates: str) -> None:
    lengths, chosen = (7, 1, 9, 4), {"model": model, "T": 21, "gates": gates}
    found = pool.run(4, solve_part, given=chosen, order="contiguous", lengths=lengths, share=0.25)
    compare(whole(found, "contiguous", lengths), truth(delta_problem(**chosen)), 1e-10)  # of cancelling terms


@pytest.mark.parametrize("model", ["deltanet", "gdn", "kda", "gla"])
def test_float32(pool: Pool, model: str) -> None:
    lengths, chosen = (40, 70, 20, 61), {"model": model, "T": 191, "K": 16, "V": 16}
    exact = truth(delta_problem(**chosen))
    one = {name: error(x, exact[name]) for name, x in solve(delta_problem(**chosen, dtype=torch.float32)).items()}
    found = pool.run(4, solve_part, given=chosen, order="contiguous", lengths=lengths, share=0.25, dtype=torch.float32)
    for name, x in whole(found, "contiguous", lengths).items():
        assert error(x, exact[name]) <= 2 * one[name] + 5e-7, name


@pytest.mark.parametrize(
    ("model", "packed", "order"),
    [("gdn", True, "zigzag"), ("kda", False, "contiguous"), ("gla", True, "contiguous"), ("gla", False, "zigzag")],
)
def test_compiled(pool: Pool, model: str, packed: bool, order: str) -> None:
    chosen = {"model": model, **({"lengths": (3, 0, 4, 5)} if packed else {"T": 12})}
    lengths = (7, 5) if order == "contiguous" else (3, 3, 3, 3)
    found = pool.run(2, solve_part, given=chosen, order=order, lengths=lengths, share=0.5, compiled=True)
    compare(whole(found, order, lengths), truth(delta_problem(**chosen)), EXACT)


@pytest.mark.parametrize("kernel", ["recurrent", "parallel"])
def test_the_reference_takes_it(pool: Pool, kernel: str) -> None:
    lengths, chosen = (4, 6, 5), {"model": "kda", "T": 15}
    found = pool.run(
        3, solve_part, given=chosen, order="contiguous", lengths=lengths, share=1 / 3, backend="reference",
        kernel=kernel,
    )  # fmt: skip
    compare(whole(found, "contiguous", lengths), truth(delta_problem(**chosen)), 1e-11)


def test_results_repeat_bit_for_bit(pool: Pool) -> None:
    chosen = {"model": "kda", "lengths": (30, 3, 40), "H": 4, "Hq": 2}
    for order, lengths in (("contiguous", (20, 30, 23)), ("zigzag", (10, 10, 12, 18, 11, 12))):
        runs = [
            pool.run(3, solve_part, given=chosen, order=order, lengths=lengths, share=1.0, dtype=torch.float32)
            for _ in range(2)
        ]
        for one, two in zip(*runs, strict=True):
            assert all(torch.equal(x, two[name]) for name, x in one.items())
