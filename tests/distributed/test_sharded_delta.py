"""The delta rule and gates by channel on DTensors: results of plain tensors, and no communication."""

from __future__ import annotations

import re
from typing import Any

import pytest
from delta_cases import MODELS
from process_pool import Pool
from sharded_delta_parts import heads_and_steps, refused, solve_sharded, solve_sharded_steps
from sharded_parts import make_meshes

EXACT = 1e-12
PUBLIC = [model for model in MODELS if model != "simple"]  # which is called by another operator
LAYOUTS = {  # the sizes of a mesh, and what each of its dimensions shards
    "batch": ((4,), ("batch",)),
    "heads": ((2,), ("heads",)),
    "both": ((2, 2), ("batch", "heads")),
    "half": ((2, 2), ("nothing", "batch")),
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "delta product": {"function": "delta_product", "writes": 3},
    "dplr": {"function": "dplr", "by_channel": True},
}


@pytest.fixture(scope="module", autouse=True)
def meshes(pool: Pool) -> None:
    pool.run(4, make_meshes)


def check(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank.pop("collectives") == 0
        assert len(of_rank) >= 2
        assert all(error <= EXACT for error in of_rank.values()), of_rank


def solve(pool: Pool, layout: str, given: dict[str, Any], **options: Any) -> None:
    sizes, shards = LAYOUTS[layout]
    count = 4 if len(sizes) == 2 else sizes[0]
    check(pool.run(count, solve_sharded, given={"B": 4, "T": 9, **given}, sizes=sizes, shards=shards, **options))


@pytest.mark.parametrize("heads", [(4, 4), (4, 8), (1, 4)], ids=["equal", "grouped", "one shared"])
@pytest.mark.parametrize("model", PUBLIC)
def test_results_are_those_of_plain_tensors(pool: Pool, model: str, heads: tuple[int, int]) -> None:
    solve(pool, "both", {"model": model, "Hq": heads[0], "H": heads[1]})


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "both"])
@pytest.mark.parametrize("model", ["gdn2", "gla"])  # with all arguments of each operator
def test_layouts(pool: Pool, model: str, layout: str) -> None:
    for heads in ((4, 8), (1, 4)):
        solve(pool, layout, {"model": model, "Hq": heads[0], "H": heads[1]})


@pytest.mark.parametrize("heads", [(4, 8), (1, 4)], ids=["grouped", "one shared"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_several_writes(pool: Pool, name: str, heads: tuple[int, int]) -> None:
    for layout in ("both", "half"):
        solve(pool, layout, {**FUNCTIONS[name], "Hq": heads[0], "H": heads[1]})


@pytest.mark.parametrize("activation", ["softplus", "sigmoid"])
@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_parameters_of_gates(pool: Pool, model: str, activation: str) -> None:
    for layout in ("both", "half"):
        solve(pool, layout, {"model": model, "Hq": 2, "H": 4, "activation": activation})


@pytest.mark.parametrize("given", [{"model": "gdn", "activation": "softplus"}, {"model": "gla"}, FUNCTIONS["dplr"]])
def test_compiled(pool: Pool, given: dict[str, Any]) -> None:
    given = {"B": 4, "T": 9, "Hq": 2, "H": 4, **given}
    check(pool.run(2, solve_sharded, given=given, sizes=(1, 2), shards=("batch", "heads"), compiled=True))


def test_compiled_with_symbolic_sizes(pool: Pool) -> None:
    given = {"model": "gdn", "B": 4, "T": 9, "Hq": 2, "H": 4}
    options = {"sizes": (1, 2), "shards": ("batch", "heads"), "compiled": True, "dynamic": True}
    check(pool.run(2, solve_sharded, given=given, **options))


@pytest.mark.parametrize("given", [{"model": "kda"}, {"model": "gla"}, *FUNCTIONS.values()])
def test_packed_sequences_over_heads(pool: Pool, given: dict[str, Any]) -> None:
    given = {"lengths": (3, 0, 7), "Hq": 2, "H": 4, **given}
    check(pool.run(2, solve_sharded, given=given, sizes=(2,), shards=("heads",)))


def test_rows_need_not_be_divided_evenly(pool: Pool) -> None:
    given = {"model": "gdn", "B": 3, "Hq": 1, "H": 2, "T": 9}
    check(pool.run(4, solve_sharded, given=given, sizes=(2, 2), shards=("batch", "heads")))


@pytest.mark.parametrize("kind", ["step", "in place", "steps", "lengths", "outputs"])
def test_decoding_steps(pool: Pool, kind: str) -> None:
    for model in ("deltanet", "gdn", "comba", "gdn2", "gla"):
        given = {"model": model, "B": 4, "Hq": 2, "H": 4, "T": 1 if kind in ("step", "in place") else 3}
        check(pool.run(4, solve_sharded_steps, given=given, kind=kind, sizes=(2, 2)))


@pytest.mark.parametrize(("kind", "model"), [("in place", "gla"), ("lengths", "kda")])
def test_compiled_decoding_steps(pool: Pool, kind: str, model: str) -> None:
    given = {"model": model, "B": 4, "Hq": 2, "H": 4, "T": 1 if kind == "in place" else 2}
    check(pool.run(2, solve_sharded_steps, given=given, kind=kind, sizes=(1, 2), compiled=True))


@pytest.mark.parametrize("given", [{"model": "kda", "activation": "softplus"}, {"model": "gla"}, *FUNCTIONS.values()])
def test_heads_and_steps_are_shared(pool: Pool, given: dict[str, Any]) -> None:
    """A mesh of two dimensions: steps over one by context parallelism, and heads over the other as DTensors."""
    for found in pool.run(4, heads_and_steps, given={"B": 2, "T": 12, "Hq": 2, "H": 4, **given}):
        assert all(error <= EXACT for error in found.values()), found


BAD = {
    "channels": r"log_f: got placements \(Shard\(dim=3\),\), expected Replicate\(\) or Shard\(0\) \(batch\) or Shard",
    "gla steps": r"log_f: got placements \(Shard\(dim=1\),\), expected Replicate\(\)",
    "beta": r"beta: got placements \(Shard\(dim=0\),\), expected Shard\(dim=2\) on dimension 0 .* v shards its heads",
    "read key": r"read_key: got placements \(Replicate\(\),\), expected Shard\(dim=2\)",
    "bias": r"dt_bias: got placements \(Replicate\(\),\), expected Shard\(dim=0\) on dimension 0",
    "dplr": r"b: got placements \(Shard\(dim=3\),\), expected Replicate\(\)",
    "partial": r"beta: got placements \(Partial\(sum\),\), expected Replicate\(\)",
    "plain": r"k: got Tensor, expected a DTensor, as other arguments are",
    "gla plain": r"k: got Tensor, expected a DTensor, as other arguments are",
    "dplr plain": r"k: got Tensor, expected a DTensor, as other arguments are",
    "plain q": r"k: got a DTensor, expected a plain tensor, as q is",
    "indices": r"state_indices: got them with q of type DTensor, expected plain tensors",
    "gla indices": r"state_indices: got them with DTensors, expected plain tensors",
    "gla states": r"states_every: got it with q of type DTensor, expected plain tensors",
    "dplr states": r"states_every: got it with q of type DTensor, expected plain tensors",
    "step indices": r"state_indices: got them with DTensors, expected plain tensors",
}


@pytest.mark.parametrize("what", BAD)
def test_placements_that_need_communication_are_refused(pool: Pool, what: str) -> None:
    for message in pool.run(2, refused, what=what):
        assert re.search(BAD[what], message), message


@pytest.mark.parametrize("what", ["beta", "bias", "dplr", "gla plain", "step indices"])
def test_compiled_calls_are_refused_alike(pool: Pool, what: str) -> None:
    for message in pool.run(2, refused, what=what, compiled=True):
        assert re.search(BAD[what], message), message
