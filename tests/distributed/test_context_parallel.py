"""One sequence on several processes gives the results of one process, whatever the cuts and the packing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import FORMS, Implementation, error, problem, solve, truth_m
from context_cuts import compare, cuts, each_share, sequences, whole
from context_parts import collectives, compiled_sizes, heads_and_steps, outputs_alone, refused, solve_part
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pool import Pool

ONE = Implementation("chunkwise", "segmented", "cpu")
EXACT = 1e-12


@st.composite
def problems(draw: Any, form: str, total: int) -> dict[str, Any]:
    """Arguments of `problem` with that many steps: a dense batch or packed sequences."""
    heads = draw(st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 4)]))
    chosen = {
        "form": form,
        "Hq": heads[0],
        "H": heads[1],
        "carried": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }
    return {**chosen, **draw(sequences(total))}


@settings(max_examples=15)
@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_results_are_those_of_one_process(pool: Pool, form: str, data: st.DataObject) -> None:
    size, order, lengths = data.draw(cuts())
    chosen = data.draw(problems(form, sum(lengths)))
    p = problem(**chosen)
    exact = solve(p, ONE)
    found = pool.run(size, solve_part, each_share(data, size), given=chosen, order=order, lengths=lengths, m=truth_m(p))
    compare(whole(found, order, lengths), exact, EXACT)


@given(data=st.data())
def test_outputs_without_gradients_and_states(pool: Pool, data: st.DataObject) -> None:
    size, order, lengths = data.draw(cuts())
    chosen = data.draw(problems(data.draw(st.sampled_from(FORMS)), sum(lengths)))
    found = pool.run(size, outputs_alone, given=chosen, order=order, lengths=lengths)
    parts = [{"h": h} for h in found]
    compare(whole(parts, order, lengths), {"h": solve(problem(**chosen), ONE)["h"]}, EXACT)


@pytest.mark.parametrize("form", ["exp", "plain"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_without_the_gradient_of_the_denominator(pool: Pool, form: str, order: str) -> None:
    lengths = (5, 8, 3, 4) if order == "zigzag" else (12, 8)
    chosen = {"form": form, "T": 20, "Hq": 1}
    p = problem(**chosen).but(normalizer_grad=False)
    found = pool.run(
        2, solve_part, given=chosen, order=order, lengths=lengths, m=truth_m(p), share=0.5, normalizer_grad=False
    )
    compare(whole(found, order, lengths), solve(p, ONE), EXACT)


GATES = {"closing": {"i_mean": -30.0, "f_mean": -20.0}, "large": {"i_mean": 60.0}, "open": {"f_mean": 40.0}}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_extreme_gates(pool: Pool, form: str, gates: str) -> None:
    lengths = (7, 1, 9, 4)
    chosen = {"form": form, "T": 21, "positive_qk": True, **GATES[gates]}
    p = problem(**chosen)
    found = pool.run(4, solve_part, given=chosen, order="contiguous", lengths=lengths, m=truth_m(p), share=0.25)
    compare(whole(found, "contiguous", lengths), solve(p, ONE), 1e-10)  # of cancelling terms


@pytest.mark.parametrize("form", FORMS)
def test_float32(pool: Pool, form: str) -> None:
    lengths, chosen = (40, 70, 20, 61), {"form": form, "T": 191, "K": 16, "V": 16}
    p = problem(**chosen, dtype=torch.float32)
    exact = solve(problem(**chosen), ONE)
    found = pool.run(
        4, solve_part, given=chosen, order="contiguous", lengths=lengths, m=truth_m(p), share=0.25, dtype=torch.float32
    )
    one = {name: error(x, exact[name]) for name, x in solve(p, ONE).items()}
    for name, x in whole(found, "contiguous", lengths).items():
        assert error(x, exact[name]) <= 2 * one[name] + 5e-7, name


@pytest.mark.parametrize(
    ("form", "packed", "order"),
    [("exp", False, "contiguous"), ("exp", True, "zigzag"), ("plain", True, "contiguous"), ("plain", False, "zigzag")],
)
def test_compiled(pool: Pool, form: str, packed: bool, order: str) -> None:
    chosen = {"form": form, "lengths": (3, 0, 4, 5)} if packed else {"form": form, "T": 12}
    p, lengths = problem(**chosen), (7, 5) if order == "contiguous" else (3, 3, 3, 3)
    found = pool.run(2, solve_part, given=chosen, order=order, lengths=lengths, m=truth_m(p), share=0.5, compiled=True)
    compare(whole(found, order, lengths), solve(p, ONE), EXACT)


@pytest.mark.parametrize(("order", "packed"), [("contiguous", True), ("zigzag", False)])
def test_compiled_once_for_all_sizes(pool: Pool, order: str, packed: bool) -> None:
    for worst, graphs in pool.run(2, compiled_sizes, order=order, packed=packed):
        assert worst == 0
        assert graphs <= 3  # the first sizes, and the sizes that have changed


@pytest.mark.parametrize("compiled", [False, True])
def test_a_group_alone_means_equal_contiguous_parts(pool: Pool, compiled: bool) -> None:
    p = problem("exp", lengths=(5, 13), H=2)
    found = pool.run(
        3, solve_part, given={"form": "exp", "lengths": (5, 13), "H": 2}, order="contiguous", lengths=(6, 6, 6),
        m=truth_m(p), share=1 / 3, bare=True, compiled=compiled,
    )  # fmt: skip
    compare(whole(found, "contiguous", (6, 6, 6)), solve(p, ONE), EXACT)


@pytest.mark.parametrize("kernel", ["recurrent", "parallel", "chunkwise"])
def test_every_backend_takes_it(pool: Pool, kernel: str) -> None:
    p = problem("exp", T=15)
    found = pool.run(
        3, solve_part, given={"form": "exp", "T": 15}, order="contiguous", lengths=(4, 6, 5), m=truth_m(p),
        share=1 / 3, backend="reference", kernel=kernel,
    )  # fmt: skip
    compare(whole(found, "contiguous", (4, 6, 5)), solve(p, ONE), 1e-11)


def test_results_repeat_bit_for_bit(pool: Pool) -> None:
    chosen = {"form": "exp", "lengths": (30, 3, 40), "H": 4, "Hq": 2}
    m = truth_m(problem(**chosen))
    for order, lengths in (("contiguous", (20, 30, 23)), ("zigzag", (10, 10, 12, 18, 11, 12))):
        runs = [
            pool.run(3, solve_part, given=chosen, order=order, lengths=lengths, m=m, share=1.0, dtype=torch.float32)
            for _ in range(2)
        ]
        for one, two in zip(*runs, strict=True):
            assert all(torch.equal(x, two[name]) for name, x in one.items())


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_one_collective_forward_and_one_backward_after_that_of_the_check(pool: Pool, form: str) -> None:
    for count, numbers in pool.run(2, collectives, form=form):
        # Of each head: a state, a log-decay as two numbers, and with a normalizer m and n; the backward has m and the
        # log-decay twice.
        state, n, m = 5 * 7 + 2, 5, 1
        expected = [state + n + m, state + m + n + 2 + m] if form == "exp" else [state] * 2
        check = 6  # numbers that say which part the process has
        assert (count, numbers) == (1 + len(expected), [check, *(2 * 3 * each for each in expected)])


BAD = {
    "type": r"context_parallel: got str, expected a process group, a one-dimensional DeviceMesh or tfla\.distributed",
    "mesh": r"context_parallel: got a DeviceMesh of 2 dimensions \('a', 'b'\), expected one dimension",
    "order": r"order: got 'ring', allowed are 'contiguous', 'zigzag'",
    "lengths": r"lengths: got \(3, 4, 5\), expected 2 numbers of at least 1",
    "length type": r"lengths: got \(3, 4\.5\), expected ints",
    "steps": r"q: got 6, 6 steps on the 2 processes of context_parallel, expected 5, 5, by its lengths \(5, 5\)",
    "odd": r"q: got T = 5, expected an even number of steps with order 'zigzag'",
    "offsets": r"cu_seqlens: goes from 0 to 6, expected from 0 to 12, the steps of all 2 processes",
    "falling": r"cu_seqlens: got \[0, 9, 4, 12\], expected values that never fall",
    "batch": r"q: got batch 2, expected 1 with cu_seqlens",
    "state": r"initial_state\.C: got shape \(3, 2, 5, 7\), expected \(2, 2, 5, 7\)",
    "transform": r"context_parallel: torch\.func transforms and forward-mode AD have no rule for it",
    "outside": r"context_parallel: got a process group without this process, expected one with it",
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_are_named(pool: Pool, what: str) -> None:
    for message in pool.run(1 if what == "outside" else 2, refused, what=what):
        assert re.search(BAD[what], message), message


def test_a_second_derivative_is_refused(pool: Pool) -> None:
    assert all("the gradient has no derivative" in message for message in pool.run(2, refused, what="twice"))


def test_meshes_and_sharded_heads(pool: Pool) -> None:
    """A mesh of two dimensions: heads over one, as DTensors, and steps over the other."""
    p = problem("exp", B=2, T=12, H=4, Hq=2)
    exact = solve(p, ONE)
    for found in pool.run(4, heads_and_steps):
        for name, x in found.items():
            assert error(x, exact[name]) < EXACT, name
