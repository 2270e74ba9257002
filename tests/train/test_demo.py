"""The demo, with short runs on small texts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tfla._util.errors import UserError
from tfla.cli import main
from tfla.train import demo as demo_module
from tfla.train import loop
from tfla.train.config import DemoConfig
from tfla.train.data import Tokens
from tfla.train.demo import ByteTrigram, affordable_steps, demo, demo_config, order_2
from tfla.train.documents import find_files
from tfla.train.evaluation import evaluate
from tfla.train.tokenizer import ByteTokenizer


@pytest.fixture
def short(monkeypatch, texts):
    """Make the demo train a tiny model on tiny texts."""
    real = demo_config

    def make(config: DemoConfig):
        full = real(config)
        return dataclasses.replace(
            full,
            data=dataclasses.replace(full.data, paths=(texts,), suffixes=(".txt",)),
            model=dataclasses.replace(full.model, d_model=32, num_blocks=1),
            context=32, batch_size=4,
        )  # fmt: skip

    monkeypatch.setattr(demo_module, "demo_config", make)


def test_the_demo_reports_what_it_promises(short, tmp_path, capsys):
    config = DemoConfig(run=tmp_path / "demo", steps=20, threads=1)
    trained = demo(config)
    out = capsys.readouterr().out
    rows = {line[:46].strip(): float(line[46:]) for line in out.splitlines() if line.startswith("  ")}
    uniform, counted, before, after = rows.values()
    assert uniform == 8
    assert 1 < counted < 6
    assert before > 7.5
    assert after < before
    assert "def read(" in out
    for name in ("curves.png", "checkpoints", "metrics.jsonl"):
        assert str(tmp_path / "demo" / name) in out
        assert (tmp_path / "demo" / name).exists()
    assert demo(config).run == tmp_path / "demo-2"  # a finished one stays
    assert trained.run == tmp_path / "demo"


def test_an_unfinished_demo_continues(short, tmp_path, monkeypatch, capsys):
    config = DemoConfig(run=tmp_path / "demo", steps=20, threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(demo_module, "ByteTrigram", None)  # fails before the first step
        with pytest.raises(TypeError):
            demo(config)
    assert demo(config).run == tmp_path / "demo"


def test_an_interrupted_demo_says_so_and_fails(short, tmp_path, monkeypatch, capsys):
    real, calls = loop.token_losses, []

    def ask(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "token_losses", ask)
        assert main(["demo", "--run", str(tmp_path / "demo"), "--steps", "20"]) == 143
    out, err = capsys.readouterr()
    assert "Held-out files" not in out
    assert "stopped at step 3 of 20, which is saved" in err
    assert main(["demo", "--run", str(tmp_path / "demo"), "--steps", "20"]) == 0
    assert str(tmp_path / "demo" / "curves.png") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": float("nan")}, "seconds: got nan"),
        ({"seconds": float("inf")}, "seconds: got inf"),
        ({"seconds": -1.0}, "seconds: got -1.0"),
        ({"steps": 0}, "steps: got 0"),
        ({"threads": 100_000}, "threads: got 100000"),
    ],
)
def test_options_out_of_range_are_named(short, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        demo(DemoConfig(run=tmp_path / "demo", **changes))
    assert not (tmp_path / "demo").exists()


def test_folders_of_demos_are_numbered(short, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert demo(DemoConfig(run=Path("."), steps=20)).run == tmp_path / "here-2"


def test_the_number_of_steps_fits_the_time(short, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "MIN_STEPS", 3)
    monkeypatch.setattr(demo_module, "MAX_STEPS", 50)
    config = demo_module.demo_config(DemoConfig(run=tmp_path / "demo", threads=1))
    assert affordable_steps(config, 0) == 3
    assert affordable_steps(config, 1e6) == 50
    clock = itertools.count()
    monkeypatch.setattr(demo_module.time, "perf_counter", lambda: float(next(clock)))  # a second from call to call
    assert affordable_steps(config, 20) == 20 * demo_module.TRAINING_SHARE


def test_an_unfinished_demo_keeps_its_steps_on_a_slower_machine(short, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "MIN_STEPS", 5)
    monkeypatch.setattr(demo_module, "MAX_STEPS", 20)
    with monkeypatch.context() as patch:
        patch.setattr(demo_module, "ByteTrigram", None)  # fails before the first step
        with pytest.raises(TypeError):
            demo(DemoConfig(run=tmp_path / "demo", seconds=1e6))
    trained = demo(DemoConfig(run=tmp_path / "demo", seconds=0))
    assert (trained.run, trained.step) == (tmp_path / "demo", 20)
    trained = demo(DemoConfig(run=tmp_path / "demo", seconds=0))
    assert (trained.run, trained.step) == (tmp_path / "demo-2", 5)


def test_both_models_are_measured_on_the_same_bytes(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, 5000)
    ids[::300] = 256
    tokens = Tokens(ids[:3000], ids[3000:], (ids[3000:] != 256).astype(int), ByteTokenizer(), "here")
    config = dataclasses.replace(demo_config(DemoConfig(run=tmp_path)), context=16, eval_windows=20)
    counted = order_2(tokens, config)

    learned = evaluate(lambda i, document_start: torch.zeros(*i.shape, 257), tokens, 16, batch_size=4, max_windows=20)
    assert (counted.tokens, counted.bytes) == (learned.tokens, learned.bytes)
    everything = order_2(tokens, dataclasses.replace(config, eval_windows=None))
    nats = ByteTrigram(tokens.train).nats(tokens.heldout)
    assert everything.loss == pytest.approx(nats.mean())
    assert everything.bytes == tokens.heldout_bytes[1:].sum()


def test_the_demo_reads_pythons_own_source():
    files = find_files(demo_config(DemoConfig()).data)
    assert len(files) > 300
    assert {"argparse.py", "typing.py"} <= {path.name for path in files}
    assert not [path for path in files if "site-packages" in path.parts]
