"""Tasks on what models can do, the models of equal size, the runs and their results."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfla._util.errors import UserError
from tfla.bench.results import read
from tfla.cli import main
from tfla.nn import LanguageModel
from tfla.nn.config import Mixer
from tfla.paper.evidence import worker_pool
from tfla.paper.evidence.figures import FIGURES, Config, figures
from tfla.paper.evidence.models import LABELS, MODELS, Shape, model_config, state_size
from tfla.paper.evidence.needle import DEPTHS, Needle
from tfla.paper.evidence.plans import EXPERIMENTS, PLAIN
from tfla.paper.evidence.recall import Recall
from tfla.paper.evidence.results import Results, Row, description
from tfla.paper.evidence.run import EvidenceConfig
from tfla.paper.evidence.run import run as run_experiment
from tfla.paper.evidence.summary import groups, load, setting
from tfla.paper.evidence.tables import MARK, TABLES, renew
from tfla.paper.evidence.task import IGNORED, answers, losses
from tfla.paper.evidence.text import Text
from tfla.paper.evidence.tracking import Tracking, group_table, products
from tfla.paper.evidence.training import Run, train_and_measure
from tfla.paper.report_types import Figure, Missing

SMALL = Shape(d_model=16, state_dim=8)
SIZES = [
    (name, size, n) for name, e in EXPERIMENTS.items() for size in ("smoke", "full")
    for n in range(len(e.size(size).shapes))
]  # fmt: skip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny(model: str = "mamba2", seed: int = 0, lr: float = 1e-2, **fields: Any) -> Run:
    run = Run(model, Recall(8, (2,), 8), SMALL, batch_size=4, steps=4, lr=lr, seed=seed, sequences=4)
    return replace(run, **fields)


@pytest.mark.parametrize(("name", "size", "shape"), SIZES)
def test_models_of_an_experiment_are_of_equal_size(name: str, size: Any, shape: int) -> None:
    plan = EXPERIMENTS[name].size(size)
    for task in plan.tasks:
        configs = {model: model_config(model, plan.shapes[shape], task.vocab_size) for model in plan.models}
        with torch.device("meta"):
            parameters = [LanguageModel(config).num_parameters() for config in configs.values()]
        assert max(parameters) <= 1.02 * min(parameters)
        assert min(config.ffn_dim for config in configs.values()) >= plan.shapes[shape].d_model // 2
        states = {state_size(config) for config in configs.values()} - {None}
        assert len(states) == 1
    assert set(plan.models) >= set(PLAIN)
    shown = {mixer for model in MODELS.values() for mixer in (*model.get("layers", ()), *[model.get("mixer")]) if mixer}
    assert shown == set(get_args(Mixer))


@given(st.integers(0, 2**31), st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True))
def test_recall_asks_for_values_of_its_own_pairs(seed: int, pairs: list[int]) -> None:
    task = Recall(keys=16, pairs=tuple(pairs), length=24)
    ids, targets = task.sampler(5, generator(seed))()
    for row, asked in zip(ids.tolist(), targets.tolist(), strict=True):
        count = next(n for n, target in enumerate(asked) if target != IGNORED) // 2
        assert count in pairs
        stored = dict(zip(row[: 2 * count : 2], row[1 : 2 * count : 2], strict=True))
        assert len(stored) == count
        assert all(value >= task.keys for value in stored.values())
        assert asked[2 * count :] == [stored[key] for key in row[2 * count :]]
        assert set(asked[: 2 * count]) == {IGNORED}


def test_groups() -> None:
    for name, size in (("Z2", 2), ("Z5", 5), ("S3", 6), ("S5", 120)):
        table = group_table(name)
        assert table.shape == (size, size)
        assert all(len(set(row)) == size for row in [*table.tolist(), *table.T.tolist()])
        a, b, c = (torch.randint(size, (50,), generator=generator(n)) for n in range(3))
        assert torch.equal(table[table[a, b], c], table[a, table[b, c]])
    elements, table = list(permutations(range(3))), group_table("S3")
    assert elements[table[1, 3]] == tuple(elements[1][i] for i in elements[3])
    assert not torch.equal(table, table.T)
    for bad in ("S6", "Z1", "Zx", "", "A5"):
        with pytest.raises(ValueError, match="group: got"):
            group_table(bad)


@given(st.integers(0, 2**31), st.sampled_from(["Z2", "Z5", "S3", "S5"]), st.integers(1, 40))
def test_products_are_those_of_one_element_after_the_other(seed: int, group: str, length: int) -> None:
    ids, targets = Tracking(group, length, length).sampler(3, generator(seed))()
    table = group_table(group)
    for row, found in zip(ids.tolist(), targets.tolist(), strict=True):
        expected = [row[0]]
        for element in row[1:]:
            expected.append(int(table[expected[-1], element]))
        assert found == expected


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(16, 60))
def test_needles_are_asked_for_at_the_end(seed: int, needles: int, length: int) -> None:
    task = Needle(needles, 8, length, (length,))
    (ids, targets), depth = task._batch(3, length, generator(seed))
    for row, asked, parts in zip(ids.tolist(), targets.tolist(), depth.tolist(), strict=True):
        assert set(asked[:-needles]) <= {IGNORED}
        stored = {a: (b, n) for n, (a, b) in enumerate(pairwise(row[:-needles])) if a < 8 <= b < 16}
        assert len(stored) == needles
        for key, value, part in zip(row[-needles:], asked[-needles:], parts, strict=True):
            assert stored[key][0] == value
            assert part == stored[key][1] * DEPTHS // length


@pytest.mark.parametrize("model", MODELS)
def test_chunks_give_the_answers_of_a_whole_sequence(model: str) -> None:
    torch.manual_seed(0)
    found = LanguageModel(model_config(model, SMALL, 12)).double()
    ids = torch.randint(12, (3, 37), generator=generator())
    logits = found(ids)
    for kept in (37, 80, 1000):  # one sequence at a time, two, and all
        assert torch.equal(answers(found, ids, tokens=24, kept=kept), logits.argmax(-1))
        for last in (1, 5, 30):
            assert torch.equal(answers(found, ids, last, 24, kept), logits.argmax(-1)[:, -last:])
    whole = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    for kept in (37, 80, 1000):
        assert (losses(found, ids, ids, 24, kept) - whole).norm() <= 1e-12 * whole.norm()


def test_a_task_counts_right_answers() -> None:
    """Check the measurements with a model that knows the products of the first sixteen elements and no other."""

    class Oracle(torch.nn.Module):
        embedding = torch.nn.Embedding(2, 1)

        def hidden(self, ids: torch.Tensor, state: Any, return_state: bool) -> tuple[torch.Tensor, Any]:
            every = ids if state is None else torch.cat([state, ids], 1)
            return products(group_table("Z2"), every)[:, -ids.shape[1] :], every

        def logits(self, found: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(found, 2).double()

    rows = Tracking("Z2", 16, 64).measure(Oracle(), generator(), 50)  # type: ignore[arg-type]
    assert [row["end"] for row in rows] == [16, 32, 64]
    assert all(row["accuracy"] == row["last"] == 1.0 for row in rows)

    class Forgetful(Oracle):
        def logits(self, found: torch.Tensor) -> torch.Tensor:
            return super().logits(torch.where(torch.arange(found.shape[1]) < 16, found, 0))

    rows = Tracking("Z2", 16, 64).measure(Forgetful(), generator(), 50)  # type: ignore[arg-type]
    assert rows[0]["accuracy"] == 1.0
    assert all(0.4 < row["accuracy"] < 0.6 for row in rows[1:])


def test_training_lowers_the_loss_and_can_be_repeated() -> None:
    task = Tracking("Z2", 8, 16)
    run = Run("gated_delta_net_2", task, SMALL, batch_size=16, steps=40, lr=1e-2, seed=0, sequences=16)
    first, second = (train_and_measure(run, "cpu") for _ in range(2))
    assert first["losses"] == second["losses"]
    assert first["rows"] == second["rows"]
    assert first["losses"][-1] < 0.8 * first["losses"][0]
    assert first["losses"] != train_and_measure(replace(run, seed=1, steps=2), "cpu")["losses"]


def test_text(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for n in range(250):
        (tmp_path / "text" / f"{n}.txt").write_text(f"{n} abcdefgh" * 10)
    found = tmp_path / "out.json"
    command = ["experiment", "language", "--text", str(tmp_path / "text"), "--models", "retnet", "--steps", "3"]
    command += ["--device", "cpu", "--processes", "1", "--folder", str(tmp_path / "runs"), "--out", str(found)]
    assert main(command) == 0
    result = json.loads(found.read_text())
    assert result["text"]["source"] == ["text"]
    assert result["runs"][0]["run"]["task"] == {"length": 64, "longest": 64}
    assert 0 < result["runs"][0]["rows"][-1]["bits_per_byte"] < 10
    (tokens,) = (tmp_path / "runs" / "smoke").glob("tokens-*")
    task = Text(64, 1 << 20, str(tokens))
    with pytest.raises(UserError, match="no held-out document has 1048576 bytes"):
        task.measure(LanguageModel(model_config("retnet", SMALL, task.vocab_size)), generator(), 4)


def test_texts_of_the_same_name_are_different_texts(tmp_path: Path) -> None:
    losses = []
    for folder in ("a", "b"):
        (tmp_path / folder / "text").mkdir(parents=True)
        (tmp_path / folder / "text" / "1.txt").write_text(folder * 3000)
        (tmp_path / folder / "text" / "1.md").write_text("c" * 3000)
    for folder, suffix in (("a", ".txt"), ("b", ".txt"), ("b", ".md")):
        config = EvidenceConfig(
            folder=tmp_path / "runs", out=tmp_path / f"{folder}{suffix}.json", device="cpu", processes=1,
            models=("retnet",), steps=1, text=(tmp_path / folder / "text",), text_suffixes=(suffix,),
        )  # fmt: skip
        target, failed = run_experiment("language", config)
        assert failed == 0
        losses += json.loads(target.read_text())["runs"][0]["losses"]
    assert len(set(losses)) == 3


def test_finished_runs_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def train(run: Run, device: str, cuda_graph: bool) -> dict[str, Any]:
        if run.model == "kda":
            raise RuntimeError("it cannot be computed\nhere")
        trained.append(run.model)
        rows = [{"pairs": n, "accuracy": float("nan") if n == 2 else 0.5} for n in run.task.pairs]
        return {"parameters": 5, "state": 3, "seconds": 1.0, "tokens_per_second": 9, "losses": [1.0], "rows": rows}

    monkeypatch.setattr(worker_pool, "train_and_measure", train)
    config = EvidenceConfig(folder=tmp_path, device="cpu", processes=1, models=("retnet", "gla"))
    target, failed = run_experiment("recall", config)
    assert failed == 0
    assert trained == ["retnet", "gla"] * 2
    first = json.loads(target.read_text())
    _, failed = run_experiment("recall", replace(config, models=("retnet", "kda", "gla", "attention")))
    assert failed == 2
    assert trained[4:] == ["attention"] * 2
    result = json.loads(target.read_text())
    assert result["runs"][:4] == first["runs"]
    assert len(result["runs"]) == 6
    assert result["runs"][0]["rows"][0]["accuracy"] is None
    run_experiment("recall", config)
    assert len(trained) == 6
    target.write_text(json.dumps(first | {"size": "full"}))
    with pytest.raises(UserError, match="holds other results, by its size"):
        run_experiment("recall", config)


def test_any_number_of_seeds_and_no_more_than_there_is_of_the_rest() -> None:
    for size, own in (("smoke", 1), ("full", 3)):
        runs = {n: EvidenceConfig(size=size, seeds=n).runs("length") for n in (None, 1, 2, 5)}  # type: ignore[arg-type]
        assert {n: {run.seed for run in found} for n, found in runs.items()} == {n: set(range(n or own)) for n in runs}
        assert all(run in runs[5] for run in runs[2])  # so that finished runs count
    for options, message in (
        ({"lrs": 2}, "lrs: got 2, expected at most 1 for tracking of size smoke"),
        ({"tasks": 3}, "tasks: got 3, expected at most 2 for tracking of size smoke"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            EvidenceConfig(**options).runs("tracking")


def test_a_spent_budget_gives_up_what_has_not_ended(tmp_path: Path) -> None:
    started = list(worker_pool.train_runs([tiny(steps=10**6), tiny(steps=10**6, seed=1)], "cpu", False, 2, 5.0))
    assert started == []
    done = list(worker_pool.train_runs([tiny(), tiny(model="retnet", task=None)], "cpu", False, 1, 1000.0))
    assert isinstance(done[0][1], dict)
    assert isinstance(done[1][1], str)
    assert done[1][1].startswith("AttributeError")


def test_bad_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in (
        (["--models", "rwkv"], "models: got 'rwkv'"), (["--seeds", "0"], "seeds: got 0"),
        (["--budget", "-1"], "budget: got -1.0"), (["--out", "/dev/null/x"], "out: /dev/null/x cannot be written"),
        (["--steps", "0"], "steps: got 0"), (["--processes", "5000"], "processes: got 5000"),
    ):  # fmt: skip
        assert main(["experiment", "recall", "--folder", str(tmp_path), *options]) == 1
        assert word in capsys.readouterr().err
    with pytest.raises(ValueError, match="shape: got"):
        model_config("mamba2", Shape(d_model=16, state_dim=4096), 10)


def result_of(runs: list[tuple[Run, float]], rows: list[dict[str, Any]], **head: Any) -> dict[str, Any]:
    """Return results as the command writes them, with a loss for each run."""
    environment = {"device": "a device", "date": "2026-01-01"}
    return {
        "kind": "evidence", "size": "smoke", "environment": environment, **head,
        "runs": [
            {"run": description(run), "parameters": 100, "state": 64, "seconds": 1.0, "tokens_per_second": 1000 + n,
             "losses": [9.0, loss, loss], "rows": rows}
            for n, (run, loss) in enumerate(runs)
        ],
    }  # fmt: skip


def test_the_best_learning_rate_is_chosen_among_those_with_all_seeds() -> None:
    runs = [(tiny(seed=n, lr=lr), loss) for n, lr, loss in ((0, 0.1, 1.0), (1, 0.1, 3.0), (0, 0.2, 1.5), (1, 0.2, 1.5))]
    runs.append((tiny(lr=0.3), 0.1))
    (group,) = groups(result_of(runs, [{"pairs": 2, "accuracy": 0.5}], experiment="recall"))
    assert group.lr == 0.2
    assert len(group.runs) == 2
    assert group.texts("pairs", "accuracy") == {2: "0.50 ± 0.00"}


def test_the_table_of_recall_has_all_learning_rates() -> None:
    runs = [(tiny("gla", seed, lr=lr), loss) for seed, lr, loss in ((0, 0.1, 1.0), (1, 0.1, 1.0), (0, 0.2, 0.5))]
    found = result_of([*runs, (tiny("retnet", lr=0.1), 1.0)], [{"pairs": 2, "accuracy": 0.5}], experiment="recall")
    lines = TABLES["recall"](found).splitlines()
    assert lines[0].endswith(" | learning rate | 2 pairs at 0.1 | 2 pairs at 0.2 |"), lines[0]
    assert [line.split(" | ", 2)[2] for line in lines[2:]] == [
        "0.50 | 0.1 | 0.50 | - |", "0.50 ± 0.00 | 0.1 | 0.50 ± 0.00 | 0.50 |"
    ]  # fmt: skip


def test_figures_and_tables(tmp_path: Path) -> None:
    tasks = {
        "recall": (Recall(8, (2, 4), 16), [{"pairs": n, "accuracy": 0.25} for n in (2, 4)]),
        "tracking": (Tracking("S3", 8, 32), [{"end": n, "accuracy": 0.25, "last": 0.5} for n in (8, 16, 32)]),
        "length": (Text(8, 32), [{"end": n, "bits_per_byte": 0.25} for n in (8, 16, 32)]),
        "needle": (Needle(2, 8, 16, (16, 64)), [{"length": n, "accuracy": 0.25, "by_depth": [None]} for n in (16, 64)]),
        "language": (Text(8, 8), [{"end": n, "bits_per_byte": x} for n, x in ((1, 6), (2, 4), (4, 2), (8, 1))]),
    }
    page = tmp_path / "page.md"
    page.write_text("".join(f"About {name}.\n\n<!-- evidence: {name} -->\n\nMore.\n\n" for name in tasks))
    beside = tmp_path / "beside.md"
    beside.write_text("Before.\n\n<!-- evidence: mixers -->\n| model |\n| --- |\n| old |\n\nAfter.\n")
    for name, (task, rows) in tasks.items():
        runs = [(tiny(model, seed, task=task), 1.0) for model in ("retnet", "attention") for seed in (0, 1)]
        head = (
            {"text": {"source": "a text", "train_bytes": 5, "heldout_bytes": 5}}
            if name in ("length", "language")
            else {}
        )
        (tmp_path / f"evidence_{name}.json").write_text(json.dumps(result_of(runs, rows, experiment=name, **head)))
    options = Config(out=tmp_path / "drawn", results=tmp_path, page=page)
    drawn = figures(options)
    assert [type(figure) for figure in drawn] == [Figure] * len(tasks)
    text = page.read_text()
    assert text.count("| RetNet |") == len(tasks)
    assert text.count(" 0.25 ± 0.00") == 2 * (3 + 2 + 2)  # models, and columns of recall, tracking and needle
    assert text.count(" 0.250 ± 0.000 ") == 2 * 3  # of length
    assert text.count(" 2.250 ± 0.000 ") == 2  # of language: (6 + 4 + 2 * 2 + 4 * 1) / 8
    drawn_rows = (tmp_path / "drawn" / "evidence_language.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[-1]) for row in drawn_rows] == [2.25] * 4
    assert text.count("\n\nNot run: mLSTMexp; ") == len(tasks)
    assert text.count("; DeltaNet, β < 2; ") == 1  # which takes part in state tracking alone
    assert not any("RetNet" in line for line in text.splitlines() if line.startswith("Not run: "))
    lines = beside.read_text().splitlines()
    assert lines[3].startswith("| model | recall, most pairs | parity | ")
    two = "0.25 ± 0.00"
    cells = [two, "not run", "not run", f"{two}, {two}", "not run", "0.250 ± 0.000", two, "2.250 ± 0.000"]
    found = {line.split(" | ")[0]: line for line in lines[5:-2]}
    assert list(found) == [f"| {LABELS[model]}" for model in MODELS]
    for model in MODELS:
        expected = cells if model in ("retnet", "attention") else ["not run"] * len(cells)
        assert found[f"| {LABELS[model]}"] == " | ".join([f"| {LABELS[model]}", *expected]) + " |"
    assert (lines[0], lines[-2:]) == ("Before.", ["", "After."])
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "evidence_recall.png").touch()
    for _ in range(2):
        figures(options)
        assert page.read_text().count("](img/evidence_recall.png)\n\nMore.") == 1
    (tmp_path / "img" / "evidence_recall.png").unlink()
    figures(options)
    assert page.read_text() == text
    assert set(TABLES) == set(FIGURES) == set(EXPERIMENTS) == {mark[2] for mark in MARK.finditer(text)}


def test_runs_that_diverged_are_counted_below_their_table(tmp_path: Path) -> None:
    runs = [(tiny(model, seed), 1.0) for model in ("gla", "kda", "retnet") for seed in range(3)]
    found = result_of(runs, [{"pairs": 2, "accuracy": 0.25}], experiment="recall")
    for n in (1, 2, 3):
        found["runs"][n]["losses"][-1] = None
        found["runs"][n]["rows"] = [{"pairs": 2, "accuracy": 0.0}]
    page = tmp_path / "page.md"
    page.write_text("<!-- evidence: recall -->\n\nMore.\n")
    for _ in range(2):
        renew(page, {"recall": found})
        lines = page.read_text().splitlines()
        assert [line.split(" | ")[-1] for line in lines if line.startswith("| ")][2:] == [
            "0.25 ± 0.00 |", "0.25 |", "0.25 ± 0.00 |",
        ]  # fmt: skip
        assert [line for line in lines if line.startswith("Diverged")] == [
            "Diverged: 2 of 3 runs of GLA; 1 of 3 runs of KDA. The table has the other runs alone."
        ]
        assert lines[-3].startswith("Not run: ")
        assert lines[-2:] == ["", "More."]


def test_pages_have_the_tables_of_the_stored_results(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    results = {
        name: load(path)
        for name in FIGURES
        if (path := Config(results=root / "benchmarks" / "results").results_of(name)).exists()
    }
    pages = [page for page in sorted((root / "docs").glob("*.md")) if MARK.search(page.read_text())]
    assert {page.name for page in pages} == {"evidence.md", "models.md"}
    (tmp_path / "img").symlink_to(root / "docs" / "img")
    for page in pages:
        copy = tmp_path / page.name
        copy.write_text(MARK.sub(lambda mark: f"{mark[1]}\nold\n", page.read_text()))
        renew(copy, results)
        assert copy.read_text() == page.read_text()


def test_runs_that_diverged_are_trained_again_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[list[int]] = []

    def train(runs: list[Run], *options: Any) -> Iterator[tuple[Run, Row]]:
        trained.append([run.seed for run in runs])
        for run in runs:
            loss = math.nan if run.seed == 1 and len(trained) < 3 else 0.5
            measured = {"parameters": 100, "state": 64, "seconds": 1.0, "tokens_per_second": 1000, "rows": []}
            yield run, measured | {"losses": [1.0, loss]}

    monkeypatch.setattr("tfla.paper.evidence.run.train_runs", train)
    config = EvidenceConfig(folder=tmp_path, device="cpu", models=("gla",), tasks=1, seeds=3, lrs=1)
    for again in (False, False, True, True):
        path, _ = run_experiment("recall", replace(config, diverged_again=again))
    shapes = 2
    assert [sorted(seeds) for seeds in trained] == [sorted([0, 1, 2] * shapes), [], [1] * shapes, []]
    assert sorted(row["run"]["seed"] for row in load(path)["runs"]) == sorted([0, 1, 2] * shapes)
    assert all(row["losses"] == [1.0, 0.5] for row in load(path)["runs"])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    missing = figures(Config(out=tmp_path, results=tmp_path))
    assert all(isinstance(m, Missing) and "tfla experiment" in m.why for m in missing)
    (tmp_path / "x.json").write_text('{"kind": "other"}')
    with pytest.raises(UserError, match=r"x\.json: cannot be read as a result of tfla experiment"):
        load(tmp_path / "x.json")
    page = tmp_path / "page.md"
    page.write_text("<!-- evidence: recall -->\n")
    figures(Config(out=tmp_path, results=tmp_path, page=page))
    assert "No results are stored: `tfla experiment recall --size full`.\n" in page.read_text()
    page.write_text("<!-- evidence: memory -->\n")
    with pytest.raises(UserError, match="has a table of 'memory', expected mixers, recall, tracking"):
        figures(Config(out=tmp_path, results=tmp_path, page=page))


def test_results_are_known_by_all_fields(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.json", {"experiment": "recall"})
    results.add(tiny(), {"rows": []})
    again = Results(tmp_path / "x.json", {"experiment": "recall"})
    assert tiny() in again
    assert all(
        run not in again for run in (tiny(seed=1), tiny(lr=0.5), tiny(model="gla"), tiny(task=Recall(8, (2,), 9)))
    )
    text = tiny(task=Text(8, 8, "here"))
    results.add(text, {"rows": []})
    assert replace(text, task=Text(8, 8, "there")) in results


def test_runs_of_another_device_name_it_unless_speeds_are_compared(tmp_path: Path) -> None:
    def head(device: str, date: str, torch: str = "2.11.0") -> dict[str, Any]:
        environment = {"device": device, "date": date, "versions": {"torch": torch}}
        return {"experiment": "recall", "size": "smoke", "environment": environment}

    path = tmp_path / "x.json"
    found = {"parameters": 100, "losses": [1.0], "rows": []}
    Results(path, head("a", "2026-01-01")).add(tiny(), found)
    Results(path, head("b", "2026-01-02")).add(tiny(seed=1), found)
    Results(path, head("b", "2026-01-03")).add(tiny(seed=2), found)
    assert [row.get("device") for row in read(path)["runs"]] == [None, "b", "b"]
    assert "a, 2026-01-01; b, 2026-01-02 and 2026-01-03" in setting(read(path))
    with pytest.raises(UserError, match="by its environment; expected none, or those of the same experiment, size and"):
        Results(path, head("b", "2026-01-03", torch="2.13.0"))
    with pytest.raises(
        UserError, match="by its environment; expected none, or those of the same experiment, size, dev"
    ):
        Results(path, head("b", "2026-01-03"), timed=True)
