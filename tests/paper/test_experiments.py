"""The small training experiments: their plans, interrupted runs, and the results that are stored."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfla._util.errors import UserError
from tfla.cli import main
from tfla.paper.experiments import run as runner
from tfla.paper.experiments.outcome import FAILED, finished, outcome
from tfla.paper.experiments.plans import BIASES, EXPERIMENTS, SIZES, Variant, unique
from tfla.paper.experiments.run import ExperimentConfig
from tfla.paper.experiments.worker_pool import train_all
from tfla.paper.report_types import Missing
from tfla.paper.training import Config, claims, figures
from tfla.paper.training_runs import TrainingRuns, load, mean_text, running_median, spikes, table_of, title_of
from tfla.train.config import TrainConfig
from tfla.train.data import prepare_tokens

TINY = replace(SIZES["smoke"], d_model=16, context=16, batch_size=4, steps=4, eval_windows=4)


def config(variant: Variant, folder: Path) -> TrainConfig:
    """Return the configuration of a run of seconds, on the text of this repository."""
    found = variant.config(TINY, folder, "cpu")
    return replace(found, data=replace(found.data, paths=(Path(__file__).parent.parent,)), eval_every=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Variant]]:
    """Train two runs in a worker process, one of which fails."""
    folder = tmp_path_factory.mktemp("experiments")
    variants = [Variant("mlstm_exp", heads=1), Variant("mlstm_sig", heads=1, backend="hopper")]
    configs = [config(v, folder) for v in variants]
    prepare_tokens(configs[0].data, folder / "tokens")
    assert train_all(configs, folder / "tokens", 1, None, print) == 0
    return folder, variants


@pytest.mark.parametrize("size", SIZES)
def test_plans(size: str) -> None:
    """Check that every variant has a valid training configuration and a name of its own."""
    for experiment in EXPERIMENTS.values():
        for variant in experiment.at(SIZES[size]):
            found = variant.config(SIZES[size], Path("runs"), "cpu")
            found.check()
            found.model.build(257)
    every = unique(v for e in EXPERIMENTS.values() for v in e.at(SIZES[size]))
    assert len({v.name for v in every}) == len(every)


def test_gate_experiments_have_the_papers_biases() -> None:
    for name in ("fig8", "fig9"):
        found = {(v.bias, v.trainable) for v in EXPERIMENTS[name].variants}
        assert found == {(bias, trainable) for bias in BIASES for trainable in (True, False)}
    shared = [set(EXPERIMENTS[name].variants) for name in ("table2", "fig8", "fig10")]
    assert set.intersection(*shared) == {Variant("mlstm_exp")}


def test_longer_contexts_have_the_same_tokens() -> None:
    plain, longer = (Variant("mlstm_exp", longer=n).config(SIZES["small"], Path("runs"), "cpu") for n in (1, 4))
    assert longer.context == 4 * plain.context
    assert longer.context * longer.batch_size == plain.context * plain.batch_size


def test_outcomes(trained: tuple[Path, list[Variant]]) -> None:
    folder, (good, bad) = trained
    row = outcome(good, config(good, folder))
    assert [e["step"] for e in row["evals"]] == [0, 2, 4]
    assert len(row["grad_norm"]) == TINY.steps
    assert row["parameters"] > 0
    assert "failed" not in row
    assert "cannot run these inputs" in outcome(bad, config(bad, folder))["failed"]


def test_finished_runs_are_left_alone(trained: tuple[Path, list[Variant]]) -> None:
    folder, variants = trained
    configs = [config(v, folder) for v in variants]
    assert all(map(finished, configs))
    said: list[str] = []
    assert train_all(configs, folder / "tokens", 1, None, said.append) == 0
    assert said == ["2 of 2 runs are finished already"]


def test_a_spent_budget_leaves_runs_that_go_on(tmp_path: Path, trained: tuple[Path, list[Variant]]) -> None:
    variant = Variant("mlstm_exp", heads=1)
    long = replace(config(variant, tmp_path), steps=100_000, checkpoint_every=100_000)
    assert train_all([long], trained[0] / "tokens", 1, 3.0, print) == 1
    assert not (long.run / FAILED).exists()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Check the file that the command writes, without training."""
    monkeypatch.setattr(runner, "train_all", lambda *args: 0)
    out = tmp_path / "training.json"
    assert main(["experiment", "table6", "--device", "cpu", "--folder", str(tmp_path), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["size"]["name"] == "smoke"
    assert found["config"]["optim"]["clip"] == 0.5
    assert found["runs"] == []
    assert main(["experiment", "table1"]) == 2
    assert "table2" in capsys.readouterr().err


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="experiment: got 'x'"):
        runner.run("x", ExperimentConfig(folder=tmp_path))
    with pytest.raises(UserError, match="processes: got 0"):
        runner.run("fig8", ExperimentConfig(folder=tmp_path, processes=0))
    with pytest.raises(ValueError, match="longer: got 3"):
        Variant("mlstm_exp", longer=3).config(TINY, tmp_path, "cpu")


def test_what_runs_found(trained: tuple[Path, list[Variant]], tmp_path: Path) -> None:
    folder, (good, bad) = trained
    rows = [outcome(v, config(v, folder)) for v in (good, bad)]
    found = TrainingRuns({"size": {"steps": TINY.steps}, "runs": rows})
    assert found.last(good, "bits_per_byte") == rows[0]["evals"][-1]["bits_per_byte"]
    assert found.last(bad, "bits_per_byte") is None
    assert found.all_of([good, bad, Variant("attention")]) == [rows[0]["evals"][-1]["bits_per_byte"]]
    assert mean_text([1.0, 3.0], 1) == "2.0 ± 1.4"


def test_runs_that_were_stopped_are_compared_where_all_of_them_are() -> None:
    def row(variant: Variant, *steps: int) -> dict[str, Any]:
        evals = [{"step": n, "bits_per_byte": 8.0 - n, "perplexity": 9.0 - n} for n in steps]
        return {"parameters": 10**6, "evals": evals} | dataclasses.asdict(variant)

    exp, sig, attention = (v for v in EXPERIMENTS["table5"].variants)
    found = TrainingRuns({"size": {"steps": 6}, "runs": [row(exp, 0, 2, 4), row(sig, 0, 2), row(attention, 0)]})
    assert found.reached([exp, sig, attention]) == 2
    assert found.reached([exp]) == 4
    assert found.reached([attention]) == 0
    assert found.all_of([exp, sig, attention], step=2) == [6.0, 6.0]
    assert found.all_of([exp, sig]) == []
    assert [line[0] for line in table_of(found).rows] == ["Table 5, 4 times the context; after 2 of 6 steps"] * 2
    assert title_of("x", found, 6) == "x"
    assert TrainingRuns({"size": {"steps": 4}, "runs": [row(exp, 0, 2, 4), row(sig, 0, 2)]}).reached([exp, sig]) == 4


def test_spikes_stand_out_from_the_steps_around_them() -> None:
    norms = [50.0] * 5 + [1.0] * 95
    assert spikes(norms) == []
    norms[10], norms[50], norms[60] = 9.0, 7.0, 4.0
    assert spikes(norms) == [7.0]
    assert running_median([1.0, 9.0, 2.0], 3) == [5.0, 2.0, 5.5]


def test_figures_say_what_is_missing(tmp_path: Path) -> None:
    (missing,) = figures(Config(out=tmp_path, results=tmp_path))
    assert "tfla experiment all" in missing.why
    assert claims(Config(results=tmp_path)) == []
    (tmp_path / "x.json").write_text('{"kind": "other"}')
    with pytest.raises(UserError, match=r"x\.json cannot be read"):
        load(Config(training=tmp_path / "x.json"))


def test_claims_of_the_stored_runs() -> None:
    found = claims(Config())
    assert "mLSTMsig learns as well as mLSTMexp" in [c.title for c in found]
    assert not any("nan" in c.here for c in found)


def test_a_run_that_failed_at_once_has_no_figure(tmp_path: Path) -> None:
    """Check that an experiment whose only run has no step has no figure, and raises nothing."""
    stored = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "training.json").read_text())
    variant = EXPERIMENTS["fig8"].variants[0]
    row = {"name": variant.name, **dataclasses.asdict(variant), "failed": "no"}
    (tmp_path / "training.json").write_text(json.dumps(stored | {"runs": [row]}))
    found = figures(Config(out=tmp_path, results=tmp_path))
    assert [(type(f), f.name) for f in found] == [(Missing, name) for name in ("fig8", "fig9", "fig10", "fig11")]
