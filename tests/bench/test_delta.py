"""The suites of the delta rule: rooflines, runs on the CPU, calls of the other library, tables."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tfla.bench import delta, gpu, page_tables, stored
from tfla.bench.commands import bench
from tfla.bench.entries import DELTA_FORMS, TOKENS
from tfla.bench.options import GpuBench
from tfla.bench.suites import SUITES
from tfla.integrations import fla
from tfla.measure.problem import BOTH, FORWARD, Problem

QUICK = ["--device", "cpu", "--repeats", "2", "--warmup", "1", "--pause", "0", "--sustained", "0"]
RATES = {how: {"rested": rate, "sustained": rate} for how, rate in (("copy", 4.2e12), ("gemm", 7.9e14))}
SIZES = {"B": 2, "T": 9, "H": 2, "dqk": 4, "dhv": 6, "dtype": "float32", "device": "cpu"}


@pytest.mark.parametrize(
    ("group", "floor"),
    [
        ("Gated DeltaNet, 16 × 128 × 128", (0.26, 0.71)),
        ("Gated DeltaNet, 16 × 128 × 256", (0.39, 1.14)),
        ("Gated DeltaNet, 32 × 128 × 128", (0.51, 1.42)),
        ("KDA, 32 × 128 × 128", (0.64, 1.80)),
        ("GLA, 8 × 256 × 512", (0.45, 1.40)),
    ],
)
def test_rooflines_on_an_h200(group, floor):
    """The rooflines are those counted by hand, in milliseconds, for a copy of 4.2 TB/s and products of 790 TFLOP/s.

    The two counts differ in the diagonal of a tile, which the tolerance allows for.
    """
    suite = SUITES["delta"]
    entry = next(e for e in suite.entries if (e.name, e.group) == ("tfla", group))
    for x in (8192, TOKENS):
        problem = suite.problem(entry, x, "cuda")
        assert problem.B * problem.T == TOKENS
        found = [gpu.rooflines(problem, entry.form, d, RATES)["floor_seconds"] * 1e3 for d in (FORWARD, BOTH)]
        assert found == pytest.approx(floor, rel=0.03)


def test_what_is_timed_where():
    run = gpu.Run(GpuBench("delta"), SUITES["delta"], lambda text: None)
    sizes = {e.name: run.sizes(e) for e in SUITES["delta"].entries}
    assert sizes == {
        "tfla": (2048, 8192, TOKENS), "tfla, triton": (2048, 8192, TOKENS), "fla": (8192, TOKENS),
        "tfla, packed": (2048,), "fla, packed": (2048,), "tfla, activated": (8192,), "fla, activated": (8192,),
    }  # fmt: skip
    run.xs = (512, 8192)
    assert run.sizes(next(e for e in SUITES["delta"].entries if e.name == "tfla, packed")) == ()


def test_a_run_its_page_and_its_figure(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tyro")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "results" / "smoke_delta.json"
    assert bench(["gpu", "smoke_delta", *QUICK, "--only", "KDA", "--lengths", "48", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["group"], r["direction"]) for r in rows] == [("KDA", FORWARD), ("KDA", BOTH)]
    for row in rows:
        assert row["implementation"] == "chunkwise segmented"
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    page = tmp_path / "docs" / "performance.md"
    assert bench(["report", "--results", str(out.parent), "--out", str(page)]) == 0
    text = page.read_text()
    assert "#### KDA" in text
    assert "| roofline |" in text
    assert (page.parent / "img" / "smoke_delta.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model", DELTA_FORMS)
def test_both_libraries_get_the_same_call(model, monkeypatch):
    """The other library's functions are taken from its drop-in, which has its signatures."""
    calls = []

    def recorded(function):
        def call(**arguments):
            calls.append(arguments)
            return function(**arguments)

        return call

    module, name, _ = delta.FLA[model]
    fake = ModuleType(f"fla.ops.{module}")
    for kind in ("chunk", "fused_recurrent"):
        setattr(fake, f"{kind}_{name}", recorded(getattr(fla, f"{kind}_{name}")))
    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, f"fla.ops.{module}", fake)
    for ours, theirs, options in (
        (delta.chunk, delta.fla_chunk, {}), (delta.chunk, delta.fla_chunk, {"packed": True}),
        (delta.step, delta.fla_step, {}), *[(delta.chunk, delta.fla_chunk, {"activated": True})] * (model != "gla"),
    ):  # fmt: skip
        problem = Problem(**SIZES | ({"T": 1} if ours is delta.step else {}))
        works = []
        for make in (ours, theirs):
            torch.manual_seed(0)
            works.append(make(problem, model, **options))
        h, o = (work.run(*work.inputs) for work in works)
        if ours is delta.step:  # the states are drawn before or after the inputs
            assert h.shape == o[:, 0].shape
            continue
        torch.testing.assert_close(h, o)
    assert ["cu_seqlens" in call for call in calls] == [False, True, False, False][: len(calls)]
    assert calls[2]["output_final_state"]


def test_steps_in_place_change_the_state():
    torch.manual_seed(0)
    work = delta.step(Problem(**SIZES | {"T": 1}), "kda", in_place=True)
    with torch.no_grad():
        assert not torch.equal(work.run(*work.inputs), work.run(*work.inputs))


def test_table_of_a_page():
    def row(name, direction, seconds, **more):
        return {"name": name, "group": "KDA, 2 × 4 × 6", "x": 8192, "direction": direction, "seconds": seconds} | more

    rows = [
        row("tfla", FORWARD, 2e-3, floor_seconds=1e-3), row("tfla", BOTH, 8e-3, floor_seconds=2e-3, peak_bytes=2**31),
        row("tfla", FORWARD, 1e-3) | {"x": 2048},
        {k: v for k, v in row("fla", FORWARD, 0).items() if k != "seconds"} | {"error": "out of memory"},
        {"name": "fla, packed", "group": "KDA, 2 × 4 × 6", "error": "not installed (fla)"},
    ]  # fmt: skip
    result = {"rows": rows, "environment": {"device": "a GPU", "date": "today"}}
    found = page_tables.renew("<!-- table: delta -->\n", {"delta": result})
    assert "| a GPU, today | roofline | flash-linear-attention | **tfla** |" in found
    assert "| KDA, 2 × 4 × 6 | 1.000 / 2.000 | fails / - | 2.000 / 8.000 (2.0) |" in found


def test_stored_results_have_the_titles_of_their_suites(tmp_path):
    config = {"suite": "delta", "repeats": 3, "only": [], "lengths": []}
    environment = {"device": "a GPU", "date": "today"}
    rows = [{"name": "fla", "group": "GLA, 8 × 256 × 512", "error": "not installed (fla)"}]
    text = json.dumps({"suite": "delta", "config": config, "environment": environment, "rows": rows})
    (tmp_path / "delta.json").write_text(text)
    (found,) = stored.load(Path(tmp_path)).values()
    assert SimpleNamespace(**found).title == SUITES["delta"].title
