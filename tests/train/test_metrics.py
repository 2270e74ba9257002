"""Metrics and the figure of the curves."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tfla.nn import LanguageModel, ModelConfig
from tfla.train.input_gates import InputGateMonitor
from tfla.train.layout import compiled
from tfla.train.logging import METRICS_FILE, Metrics, plot_curves, read_metrics


def test_records_are_lines_of_json_with_exact_floats(tmp_path):
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    values = [0.1 + 0.2, 1 / 3, 2.0**-1070]
    for step, value in enumerate(values, 1):
        metrics.write("train", step, loss=value, max_input_gate=None)
    assert [r["loss"] for r in read_metrics(tmp_path)] == values  # before close: nothing waits in a buffer
    metrics.close()
    assert json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[0]) == {
        "kind": "train", "step": 1, "loss": values[0], "max_input_gate": None,
    }  # fmt: skip


def test_continuing_deletes_later_records_and_truncated_lines(tmp_path):
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    for step in range(5):
        metrics.write("train", step, loss=step / 3)
    metrics.close()
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"kind": "train", "step": 1, "lo')
    metrics = Metrics(tmp_path, 2, tensorboard=False)
    metrics.write("train", 3, loss=9.0)
    metrics.close()
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(0, 0.0), (1, 1 / 3), (2, 2 / 3), (3, 9.0)]
    Metrics(tmp_path, 0, tensorboard=False).close()
    assert read_metrics(tmp_path) == []


def test_tensorboard_shows_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, losses in ((0, [0.25, 0.5, 0.75]), (1, [5.0, 6.0])):  # the second process goes on after step 1
        metrics = Metrics(tmp_path, start, tensorboard=True)
        for step, loss in enumerate(losses, start + 1):
            metrics.write("train", step, loss=loss, max_input_gate=None)
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()  # while it is still written
        metrics.close()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.25), (2, 5.0), (3, 6.0)]
    assert events.Tags()["scalars"] == ["train/loss"]


@pytest.mark.parametrize(
    "how", [lambda m: m, lambda m: torch.compile(m, backend="eager"), lambda m: compiled(m, "eager")]
)
def test_the_largest_input_gate_is_recorded(how):
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=2, num_heads=2, vocab_size=9, input_gate_bias=-3.0))
    with torch.no_grad():
        model.blocks[1].mixer.input_gate.bias[1] = 2.0
    monitor = InputGateMonitor(model)
    forward = how(model)
    for _ in range(2):
        forward(torch.randint(0, 9, (2, 5)))
        assert monitor.take() == pytest.approx(15 * torch.tensor(2 / 15).tanh().item(), rel=1e-5)
    assert monitor.take() is None


def test_models_without_gates_have_no_largest():
    monitor = InputGateMonitor(nn.Linear(2, 2))
    assert monitor.take() is None


@pytest.mark.parametrize("gates", [True, False])
def test_the_figure_shows_the_run(tmp_path, gates):
    image = pytest.importorskip("matplotlib.image")
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    metrics.write("eval", 0, loss=5.5, bits_per_byte=8.1, tokens=100, bytes=98)
    for step in range(1, 101):
        metrics.write(
            "train", step, loss=5.5 / step**0.3, lr=1e-3, grad_norm=1 / step, max_input_gate=-9.0 if gates else None
        )
    metrics.write("eval", 100, loss=1.4, bits_per_byte=2.1, tokens=100, bytes=98)
    metrics.close()
    plot_curves(tmp_path, tmp_path / "a.png", clip=0.5, baselines={"counting": 2.7})
    plot_curves(tmp_path, tmp_path / "b.png", clip=0.5, baselines={})
    a, b = image.imread(tmp_path / "a.png"), image.imread(tmp_path / "b.png")
    assert a.shape == b.shape
    assert min(a.shape[:2]) > 500
    assert (a != b).any()  # the line of the baseline


def test_no_metrics_make_no_figure(tmp_path):
    plot_curves(tmp_path, tmp_path / "a.png", clip=0.5, baselines={})
    assert not (tmp_path / "a.png").exists()
