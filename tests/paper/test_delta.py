"""The counts of the delta rule and of GLA in tiles, and their figures."""

import csv
import json

import pytest

from tfla.bench.options import GpuBench
from tfla.measure.problem import BOTH, FORWARD
from tfla.measure.roofline import delta_roofline_seconds
from tfla.ops import flops
from tfla.paper import delta
from tfla.paper.algorithms.delta import TileForm
from tfla.paper.report_types import Figure, Missing

TOKENS = 65_536
SHAPES = [("gdn", 16, 128, 128), ("gdn", 16, 128, 256), ("kda", 32, 128, 128), ("gla", 8, 256, 512)]


@pytest.mark.parametrize(
    ("shape", "tera", "giga"),
    [
        (SHAPES[0], (0.139, 0.458), (1.08, 2.98)),
        (SHAPES[1], (0.260, 0.854), (1.62, 4.32)),
        (SHAPES[2], (0.279, 0.917), (2.69, 7.54)),
        (SHAPES[3], (0.301, 1.049), (1.88, 5.10)),
    ],
)
def test_whole_shapes(shape, tera, giga):
    """TFLOP and GB of 65,536 tokens, forward and with the backward, counted apart from this library."""
    model, heads, dqk, dhv = shape
    sizes = {"L": 64, "dqk": dqk, "dhv": dhv}
    tiles = heads * TOKENS // 64
    forms = [TileForm(model, direction) for direction in ("forward", "backward")]
    products = [form.matrix_flops(**sizes, causal=65 / 128) * tiles / 1e12 for form in forms]
    moved = [form.bytes(**sizes) * tiles / 1e9 for form in forms]
    assert (products[0], sum(products)) == pytest.approx(tera, abs=6e-4)
    assert (moved[0], sum(moved)) == pytest.approx(giga, abs=6e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_as_the_flop_counter_and_the_roofline_count(shape):
    model, _, dqk, dhv = shape
    count = (
        (flops.forward_flops, flops.backward_flops)
        if model == "gla"
        else (flops.delta_forward_flops, flops.delta_backward_flops)
    )
    forms = [TileForm(model, direction) for direction in ("forward", "backward")]
    for form, expected in zip(forms, count, strict=True):
        assert form.matrix_flops(L=64, dqk=dqk, dhv=dhv) == pytest.approx(expected(64, 1, dqk, dhv), rel=1e-5)
    for backward in (False, True):
        seconds = delta_roofline_seconds(model, 64, 1, dqk, dhv, float("inf"), 1.0, backward=backward)
        assert seconds == sum(form.bytes(L=64, dqk=dqk, dhv=dhv) for form in forms[: 1 + backward])


def test_gates_by_channel_add_elementwise_work_alone():
    """Six levels of 64 steps, two factors for each of q, k and the read keys, and an exponential for each gate."""
    sizes = {"L": 64, "dqk": 128, "dhv": 128}
    kda, gdn = TileForm("kda", "forward"), TileForm("gdn", "forward")
    assert kda.matrix_flops(**sizes) == gdn.matrix_flops(**sizes)
    assert kda.flops(**sizes) - kda.matrix_flops(**sizes) == 64 * 128 * (1 + 3 * 6)
    assert kda.intensity(**sizes) < gdn.intensity(**sizes)


def test_figures(tmp_path):
    """Without a stored result the measured times are missing; with one they are drawn."""
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    results.mkdir()
    config = delta.Config(out=tmp_path / "out", results=results)
    parts, intensity, missing = delta.figures(config)
    assert isinstance(parts, Figure)
    assert isinstance(intensity, Figure)
    assert isinstance(missing, Missing)
    assert "tfla bench gpu delta" in missing.why
    rows = list(csv.DictReader(parts.data_path.open()))
    forward = [r for r in rows if (r["direction"], r["model"]) == ("forward", "KDA")]
    assert sum(float(r["MFLOP"]) for r in forward) * 1e6 == pytest.approx(
        TileForm("kda", "forward").flops(L=64, dqk=128, dhv=128)
    )
    timed = {"samples": 5, "seconds": 2e-3, "floor_seconds": 1e-3, "x": 8192, "group": "KDA, 32 × 128 × 128"}
    rates = {"rested": 4e12, "sustained": 4e12}
    stored = {
        "suite": "delta", "axis": "T", "title": "t", "config": vars(GpuBench("delta")),
        "rates": {"copy": rates, "gemm": rates},
        "environment": {"device": "a GPU", "date": "today", "versions": {}},
        "rows": [timed | {"name": n, "direction": d} for n in ("tfla", "fla") for d in (FORWARD, BOTH)],
    }  # fmt: skip
    (results / "delta.json").write_text(json.dumps(stored))
    drawn = delta.measured(config)
    assert isinstance(drawn, Figure)
    assert "a GPU, today" in drawn.caption
    assert drawn.path.read_bytes().startswith(b"\x89PNG")
