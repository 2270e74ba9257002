"""The operators on DTensors sharded over the batch or the heads: results of plain tensors, and no communication."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import FORMS
from process_pool import Pool
from sharded_parts import make_meshes, refused, solve_sharded, solve_sharded_steps

EXACT = 1e-12


@pytest.fixture(scope="module", autouse=True)
def meshes(pool: Pool) -> None:
    pool.run(4, make_meshes)


LAYOUTS = {  # for each dimension of a mesh: what is sharded
    "batch": ((4,), ("batch",)),
    "heads": ((2,), ("heads",)),
    "both": ((2, 2), ("batch", "heads")),
    "heads twice": ((2, 2), ("heads", "heads")),
    "nothing": ((2,), ("nothing",)),
    "half": ((2, 2), ("nothing", "batch")),
}


def check(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank.pop("collectives") == 0
        assert all(error <= EXACT for error in of_rank.values()), of_rank


def solve(pool: Pool, layout: str, form: str, heads: tuple[int, int]) -> None:
    sizes, shards = LAYOUTS[layout]
    count = 4 if len(sizes) == 2 else sizes[0]
    given = {"form": form, "B": 4, "Hq": heads[0], "H": heads[1], "T": 11}
    check(pool.run(count, solve_sharded, given=given, sizes=sizes, shards=shards))


@pytest.mark.parametrize("heads", [(4, 4), (4, 8), (1, 4)], ids=["equal", "grouped", "one shared"])
@pytest.mark.parametrize("form", FORMS)
def test_results_are_those_of_plain_tensors(pool: Pool, form: str, heads: tuple[int, int]) -> None:
    solve(pool, "both", form, heads)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "both"])
@pytest.mark.parametrize("form", ["exp", "plain"])  # with all arguments, and with the fewest
def test_layouts(pool: Pool, form: str, layout: str) -> None:
    for heads in ((4, 8), (1, 4)):
        solve(pool, layout, form, heads)


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the problem, and options
    "grouped": ({}, {}),
    "rows that are not divided evenly": ({"B": 3}, {"sizes": (2,), "shards": ("batch",)}),
    "made in the graph": ({"form": "plain"}, {"remade": True}),
    "symbolic sizes": ({}, {"dynamic": True}),
    "symbolic sizes and a shared head": ({"form": "plain", "Hq": 1}, {"dynamic": True}),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(pool: Pool, name: str) -> None:
    given, options = COMPILED[name]
    given = {"form": "exp", "B": 4, "Hq": 2, "H": 4, "T": 11, **given}
    options = {"sizes": (1, 2), "shards": ("batch", "heads"), **options}
    check(pool.run(2, solve_sharded, given=given, compiled=True, **options))


def test_rows_need_not_be_divided_evenly(pool: Pool) -> None:
    given = {"form": "exp", "B": 3, "Hq": 1, "H": 2, "T": 11}
    check(pool.run(4, solve_sharded, given=given, sizes=(2, 2), shards=("batch", "heads")))


def test_packed_sequences_over_heads(pool: Pool) -> None:
    given = {"form": "exp", "lengths": (3, 0, 7), "Hq": 2, "H": 4}
    check(pool.run(2, solve_sharded, given=given, sizes=(2,), shards=("heads",)))


@pytest.mark.parametrize("kind", ["step", "in place", "steps", "lengths", "outputs"])
def test_decoding_steps(pool: Pool, kind: str) -> None:
    for form in FORMS:
        given = {"form": form, "B": 4, "Hq": 2, "H": 4, "T": 1 if kind in ("step", "in place") else 3}
        check(pool.run(4, solve_sharded_steps, given=given, kind=kind, sizes=(2, 2)))


@pytest.mark.parametrize("kind", ["in place", "lengths"])
def test_compiled_decoding_steps(pool: Pool, kind: str) -> None:
    given = {"form": "exp", "B": 4, "Hq": 2, "H": 4, "T": 1 if kind == "in place" else 2}
    check(pool.run(2, solve_sharded_steps, given=given, kind=kind, sizes=(1, 2), compiled=True))


BAD = {
    "steps": (r"q: got placements \(Shard\(dim=1\),\), expected Replicate\(\) or Shard\(0\) \(batch\) or Shard\(2\)"),
    "sizes": r"k: got placements \(Shard\(dim=3\),\), expected Replicate\(\)",
    "values": r"v: got placements \(Shard\(dim=1\),\), expected Replicate\(\)",
    "partial": r"f: got placements \(Partial\(sum\),\), expected Replicate\(\)",
    "mismatch": r"i: got placements \(Shard\(dim=0\),\), expected Shard\(dim=2\) on dimension 0 .* v shards its heads",
    "state": r"initial_state\.C: got placements \(Shard\(dim=0\),\), expected Shard\(dim=1\) on dimension 0",
    "replicated keys": r"k: got placements \(Replicate\(\),\), expected Shard\(dim=2\)",
    "odd heads": r"v: got 3 heads sharded over 2 processes, expected a multiple of 2",
    "plain": r"v: got Tensor, expected a DTensor, as other arguments are",
    "plain q": r"k: got a DTensor, expected a plain tensor, as q is",
    "mesh": r"k: got a DTensor on .*, expected one on the mesh of v",
    "packed": r"cu_seqlens: got it with v sharded over the batch",
    "lengths": r"lengths: got Tensor with v sharded over the batch, expected a DTensor",
}


@pytest.mark.parametrize("what", BAD)
def test_placements_that_need_communication_are_refused(pool: Pool, what: str) -> None:
    for message in pool.run(2, refused, what=what):
        assert re.search(BAD[what], message), message


@pytest.mark.parametrize(
    "what", ["steps", "values", "partial", "mismatch", "state", "odd heads", "plain", "mesh", "lengths"]
)
def test_compiled_calls_are_refused_alike(pool: Pool, what: str) -> None:
    for message in pool.run(2, refused, what=what, compiled=True):
        assert re.search(BAD[what], message), message
