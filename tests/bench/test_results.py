"""Errors about invalid stored results name the file and what is wrong with it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfla._util.errors import UserError
from tfla.bench import report, results, schema
from tfla.bench.stored import load
from tfla.cli import main
from tfla.paper import benchmark_claims, benchmarks, profiled_traffic, time_bounds, training
from tfla.paper.chunk_timings import sig_forward
from tfla.paper.numerics import figures as numerics
from tfla.paper.report_types import Options

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STORED = ("cpu", "fig4", "fig5", "traffic", "numerics", "training")


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """A few rows of each kind of result."""
    found = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in STORED}
    for name in ("fig4", "fig5"):
        timed = [row for row in found[name]["rows"] if "seconds" in row]
        found[name]["rows"] = [*timed[:2], *(row for row in found[name]["rows"] if "error" in row)][:3]
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_is_drawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfla.bench.figures.figure_of", lambda result: None)
        patch.setattr(benchmarks, "figure_of", lambda result: None)
        yield


def put(folder: Path, found: dict[str, Any]) -> None:
    for name, result in found.items():
        (folder / f"{name}.json").write_text(result if isinstance(result, str) else json.dumps(result))


def read_benchmark(config: Options) -> None:
    report.run(report.Report(config.results, config.results / "page.md"))
    benchmarks.figures(benchmarks.Config(out=config.out, results=config.results))
    benchmark_claims.claims(config)
    sig_forward(config)
    for result in load(config.results, complete=True).values():
        time_bounds.compare_with_bounds(result)


def read_training(config: Options) -> None:
    training.claims(training.Config(out=config.out, results=config.results))


READERS: dict[str, Callable[[Options], object]] = {
    "cpu": read_benchmark, "fig4": read_benchmark, "fig5": read_benchmark, "traffic": profiled_traffic.claim_values,
    "numerics": numerics.claims, "training": read_training,
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"), ("{", "Expecting property name"), ("[]", ""),
        ("[" * 100_000, ""), ('{"rows": NaN', "Expecting"), ("\xff\xfe", "Expecting value"),
    ],
)  # fmt: skip
def test_files_that_are_no_json_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str,
                                        why: str) -> None:  # fmt: skip
    put(tmp_path, {name: text})
    subject = {"traffic": "counting", "fig4": "benchmarks", "fig5": "theory", "cpu": "benchmarks"}.get(name, name)
    for args in (["bench", "report", "--out", str(tmp_path / "page.md")], ["analyze", subject, "--out", str(tmp_path)]):
        assert main([*args, "--results", str(tmp_path)]) == 1
        err = capsys.readouterr().err
        assert err.startswith("tfla: error: ")
        assert f"{name}.json" in err
        assert why in err
        assert err.count("\n") == 1
    assert not (tmp_path / "page.md").exists()


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of fields of a result: up to two entries of each list, and up to four levels."""
    if len(path) == 4:
        return
    items = found.items() if isinstance(found, dict) else enumerate(found[:2]) if isinstance(found, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@settings(max_examples=150)
@given(data=st.data())
def test_a_field_that_is_missing_or_of_another_kind_is_said(
    small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is done to a field, all is read or the file is named: nothing else is raised."""
    name = data.draw(st.sampled_from(STORED))
    found = copy.deepcopy(small[name])
    *inside, last = data.draw(st.sampled_from(list(places(found))))
    at = found
    for key in inside:
        at = at[key]
    value = data.draw(st.sampled_from(["missing", None, [], {}, "x", -1, 0, float("nan"), True, 3, [[]], [{}]]))
    if value == "missing":
        del at[last]
    else:
        at[last] = value
    folder = tmp_path_factory.mktemp("results")
    put(folder, {name: found})
    said = f"{name}.json"
    try:
        READERS[name](Options(out=folder, results=folder))
    except UserError as error:
        said = str(error)
    assert said.count("\n") == 0
    assert f"{name}.json" in said or "there are none in" in said  # a file that says of another kind that it is


@settings(max_examples=40)
@given(data=st.data())
def test_some_of_the_training_runs_make_claims(
    small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whichever runs there are so far, some of them stopped or failed, as `tfla experiment NAME` leaves them."""
    runs = small["training"]["runs"]
    kept = [dict(runs[n]) for n in sorted(data.draw(st.sets(st.integers(0, len(runs) - 1))))]
    for row in kept:
        what = data.draw(st.sampled_from(["done", "done", "stopped", "failed", "not begun"]))
        if what == "stopped":
            row["evals"] = row.get("evals", [])[: data.draw(st.integers(0, 3))]
        elif what == "failed":
            row["failed"] = "no"
        elif what == "not begun":
            for key in schema.RUN:
                row.pop(key, None)
    folder = tmp_path_factory.mktemp("results")
    put(folder, {"training": small["training"] | {"runs": kept}})
    assert len(training.claims(training.Config(out=folder, results=folder))) > 5


def test_whole_results_are_read(small: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path, small)
    for read in READERS.values():
        read(Options(out=tmp_path, results=tmp_path))
    assert (tmp_path / "page.md").stat().st_size > 1000


def test_what_is_wrong_is_said(small: dict[str, Any], tmp_path: Path) -> None:
    for change, why in (
        ({"environment": {}}, "environment.device: got nothing, expected a text"),
        ({"config": {"repeats": "3"}}, "config.repeats: got '3', expected a whole number of at least 1"),
        ({"rows": []}, "rows: got none, expected one or more"),
        ({"rows": [3]}, r"rows\[0\]: got 3, expected an object"),
        (
            {"rows": [{"name": "a", "seconds": 1.0, "direction": "forward"}]},
            r"rows\[0\]\.x: got nothing, expected a whole",
        ),
        ({"rates": {"copy": {}, "gemm": {}}}, r"rates\.copy\.rested: got nothing, expected a finite number above 0"),
    ):
        put(tmp_path, {"fig4": small["fig4"] | change})
        with pytest.raises(UserError, match=rf"fig4\.json: cannot be read as a result of tfla bench gpu: {why}"):
            report.run(report.Report(tmp_path, tmp_path / "page.md"))


def test_the_folder_of_the_working_directory_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert results.default_folder().resolve() == RESULTS
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    assert results.default_folder() == Path("benchmarks/results")
