"""Training on two GPUs: the curve of one GPU in every layout, and runs that one GPU continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import Job, copy_run, curve, make_config, run_jobs, weights, write_texts

from tfla.train.config import Model, Parallel, TrainConfig
from tfla.train.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LAYOUTS = {"fsdp": Parallel(), "cp": Parallel(cp=2), "tp": Parallel(tp=2)}
RUNS = [("fsdp", "float32"), ("cp", "float32"), ("tp", "float32"), ("fsdp", "bfloat16"), ("cp", "bfloat16")]
AGAIN = [("fsdp", "float32"), ("cp", "bfloat16")]
STEPS = 20
CLOSE = {"float32": 1e-3, "bfloat16": 2e-2}  # relative errors of losses, which grow over the steps


def config_of(folder: Path, name: str, **changes: Any) -> TrainConfig:
    sizes: dict[str, Any] = {
        "steps": STEPS, "context": 128, "eval_every": 10, "checkpoint_every": 10, "device": "cuda", "threads": 1,
        "model": Model(d_model=128, num_blocks=2, num_heads=2),
    }  # fmt: skip
    return make_config(folder, name, **sizes | changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_texts(folder)
    for precision in CLOSE:
        train(config_of(folder, f"one-{precision}", precision=precision))
    jobs = [
        Job(config_of(folder, f"{layout}-{precision}", precision=precision, parallel=LAYOUTS[layout]))
        for layout, precision in RUNS
    ]
    again = [
        Job(replace(job.config, run=folder / f"again-{job.config.run.name}"), (job.config.run, 10))
        for job, run in zip(jobs, RUNS, strict=True)
        if run in AGAIN
    ]
    run_jobs(2, jobs + again, folder)
    return folder


def losses(run: Path) -> dict[tuple[str, int], float]:
    return {key: values[0] for key, values in curve(run).items()}


@pytest.mark.parametrize(("layout", "precision"), RUNS)
def test_two_gpus_have_the_curve_of_one(runs: Path, layout: str, precision: str) -> None:
    expected, found = losses(runs / f"one-{precision}"), losses(runs / f"{layout}-{precision}")
    assert len(found) == STEPS + 3
    assert found == pytest.approx(expected, rel=CLOSE[precision])
    assert expected["train", STEPS] < 0.9 * expected["train", 1]


@pytest.mark.parametrize(("layout", "precision"), AGAIN)
def test_a_run_continues_bit_for_bit_on_two_gpus(runs: Path, layout: str, precision: str) -> None:
    name = f"{layout}-{precision}"
    assert curve(runs / f"again-{name}") == curve(runs / name)
    again, whole = weights(runs / f"again-{name}", STEPS), weights(runs / name, STEPS)
    assert all(torch.equal(again[key], whole[key]) for key in whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_gpu_continues_a_run_of_two(runs: Path, layout: str) -> None:
    copy_run(runs / f"{layout}-float32", runs / f"{layout}-one", 10)
    train(config_of(runs, f"{layout}-one", precision="float32"))
    assert losses(runs / f"{layout}-one") == pytest.approx(losses(runs / "one-float32"), rel=CLOSE["float32"])
