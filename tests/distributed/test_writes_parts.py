"""DeltaProduct and DPLR on several processes give the results of one: sequences are cut between steps, not writes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_cuts import compare, cuts, each_share, sequences, whole
from delta_parts import outputs_alone, problem_of, solve_part, truth_of_writes
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pool import Pool, RankError
from several_writes import WritesProblem, writes_problem

import tfla
from tfla.distributed import ContextParallel

EXACT = 1e-12
FUNCTIONS = ("delta_product", "dplr")


@st.composite
def problems(draw: Any, function: str, total: int) -> dict[str, Any]:
    """Arguments of `writes_problem` with that many steps."""
    Hq, H = draw(st.sampled_from([(1, 1), (2, 2), (1, 2)]))
    found = {"function": function, "Hq": Hq, "H": H, "carried": draw(st.booleans()), "seed": draw(st.integers(0, 99))}
    found |= {"gates": draw(st.sampled_from(["medium", "long", "resets"])), "by_channel": draw(st.booleans())}
    if function == "delta_product":
        found |= {"writes": draw(st.integers(1, 3)), "gates": draw(st.sampled_from([found["gates"], None]))}
    return {**found, **draw(sequences(total))}


def truth(chosen: dict[str, Any]) -> dict[str, torch.Tensor]:
    return truth_of_writes(writes_problem(**chosen))


@settings(max_examples=12)
@pytest.mark.parametrize("function", FUNCTIONS)
@given(data=st.data())
def test_results_are_those_of_one_process(pool: Pool, function: str, data: st.DataObject) -> None:
    size, order, lengths = data.draw(cuts(6))
    chosen = data.draw(problems(function, sum(lengths)))
    found = pool.run(size, solve_part, each_share(data, size), given=chosen, order=order, lengths=lengths)
    compare(whole(found, order, lengths), truth(chosen), EXACT)


@settings(max_examples=6)
@given(data=st.data())
def test_outputs_without_gradients_and_states(pool: Pool, data: st.DataObject) -> None:
    size, order, lengths = data.draw(cuts(6))
    chosen = data.draw(problems(data.draw(st.sampled_from(FUNCTIONS)), sum(lengths)))
    found = pool.run(size, outputs_alone, given=chosen, order=order, lengths=lengths)
    compare(whole([{"h": h} for h in found], order, lengths), {"h": truth(chosen)["h"]}, EXACT)


@pytest.mark.parametrize(
    ("function", "packed", "order"),
    [
        ("delta_product", True, "contiguous"), ("delta_product", False, "zigzag"), ("dplr", True, "zigzag"),
        ("dplr", False, "contiguous"),
    ],
)  # fmt: skip
def test_compiled(pool: Pool, function: str, packed: bool, order: str) -> None:
    chosen = {"function": function, "by_channel": function == "dplr"}
    chosen |= {"lengths": (3, 0, 4, 5)} if packed else {"T": 12}
    lengths = (7, 5) if order == "contiguous" else (3, 3, 3, 3)
    found = pool.run(2, solve_part, given=chosen, order=order, lengths=lengths, share=0.5, compiled=True)
    compare(whole(found, order, lengths), truth(chosen), EXACT)


def _bare(group: dist.ProcessGroup, *, given: dict[str, Any], order: str, T: int, compiled: bool = False) -> Any:
    """Return h of this rank's first steps with equal parts, as a group or a zigzag order without lengths."""
    p = problem_of(given)
    assert isinstance(p, WritesProblem)
    start = dist.get_rank(group) * T
    own = {name: x if name == "C0" else x[:, start : start + T] for name, x in p.leaves.items()}
    context = group if order == "contiguous" else ContextParallel(group, order=order)
    torch._dynamo.reset()
    call = torch.compile(p.call, backend="aot_eager", fullgraph=True) if compiled else p.call
    return call(own, context_parallel=context)


def test_equal_parts_need_no_lengths(pool: Pool) -> None:
    for chosen in ({"function": "dplr", "lengths": (5, 1, 6)}, {"function": "delta_product", "T": 12, "writes": 3}):
        found = pool.run(3, _bare, given=chosen, order="contiguous", T=4)
        compare({"h": torch.cat(found, 1)}, {"h": truth(chosen)["h"]}, EXACT)


@pytest.mark.parametrize(
    ("chosen", "order", "message"),
    [
        ({"T": 6}, "zigzag", r"q: got T = 3, expected an even number of steps with order 'zigzag' and no lengths"),
        ({"lengths": (5,)}, "contiguous", r"cu_seqlens: goes from 0 to 5, expected from 0 to 4, the steps of all 2 "),
    ],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_cuts_are_named_in_steps(
    pool: Pool, function: str, chosen: dict[str, Any], order: str, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(2, _bare, given={"function": function, **chosen}, order=order, T=3 if order == "zigzag" else 2)


def test_traced_cuts_lie_between_steps(pool: Pool) -> None:
    chosen = {"function": "dplr", "T": 6}  # 6 writes of each process would be even
    with pytest.raises(RankError, match="got T = 3, expected an even number of steps"):
        pool.run(2, _bare, given=chosen, order="zigzag", T=3, compiled=True)


def test_the_recurrence_is_that_of_one_process() -> None:
    for chosen in ({"function": "dplr", "by_channel": True, "Hq": 1}, {"function": "delta_product", "writes": 3}):
        p = writes_problem(**chosen)  # type: ignore[arg-type]
        h, state = p.call(p.leaves, return_state=True)
        exact = truth_of_writes(p)
        compare({"h": h, "C": state.C}, {"h": exact["h"], "C": exact["C"]}, EXACT)


def test_context_parallel_is_checked() -> None:
    q, v = torch.zeros(1, 4, 2, 3), torch.zeros(1, 4, 2, 5)
    for call in (
        lambda: tfla.dplr(q, q, v, q, q, v[..., 0], context_parallel=object()),  # type: ignore[call-overload]
        lambda: tfla.delta_product(q, q, v, None, writes=1, context_parallel=object()),  # type: ignore[call-overload]
    ):
        with pytest.raises(TypeError, match=re.escape("context_parallel: got object, expected a process group")):
            call()
