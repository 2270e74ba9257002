"""Options of all commands but those that train, with values that users get wrong: one line each, never a traceback."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from bad_options import fields_of, option_name, options, run_command
from hypothesis import given
from hypothesis import strategies as st

import tfla.paper.experiments.run as experiments
import tfla.tune.run as tune
from tfla.bench import cpu, gpu
from tfla.bench.options import GpuBench
from tfla.bench.report import Report
from tfla.bench.tune_command import TuneOptions
from tfla.bench.worker_pool import WorkerDied
from tfla.cli import main
from tfla.integrations.transformers.export import ExportConfig
from tfla.nn import LanguageModel, ModelConfig
from tfla.ops import tuned
from tfla.ops.tuned import cpu_name
from tfla.paper import claims, report
from tfla.paper.evidence.run import EvidenceConfig
from tfla.paper.experiments.run import ExperimentConfig
from tfla.paper.report_types import Options
from tfla.paper.sections import SECTIONS, Section
from tfla.train.config import GenerateConfig
from tfla.train.warmup import WarmupConfig
from tfla.tune.measure import Measured
from tfla.tune.predict import Candidate, Machine

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def died(*args: Any) -> None:
    raise WorkerDied("it is not run here")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_computed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the tests' own, and commands that stop where their work would begin."""
    folder = tmp_path_factory.mktemp("options")
    model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=300))
    model.save_pretrained(folder / "model")
    (folder / "results").mkdir()
    (folder / "results" / "cpu.json").write_bytes((RESULTS / "cpu.json").read_bytes())

    def measured(p: Any, gate: str, c: Candidate, repeats: int, left: float) -> Measured:
        return Measured(c, c.seconds, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TFLA_CACHE_DIR", str(folder / "cache"))
        patch.setattr(sys.modules["tfla.nn.generate"], "_tokens", lambda *args, **options: iter(()))
        patch.setattr(tune, "this_machine", lambda device: Machine(cpu_name(), 1e11, 1e10, 2))
        patch.setattr(tune, "measured", measured)
        patch.setattr(cpu, "measure", lambda *args: [])
        patch.setattr(cpu, "peak_memory", lambda T: 0)
        patch.setattr(torch, "set_num_threads", lambda number: None)
        patch.setattr(gpu.Run, "machine", died)
        patch.setattr(Section, "draw", lambda self, config: [])
        patch.setattr(report, "write", lambda config: report.Written(config.out, 0, []))
        patch.setattr(claims, "write", lambda config: config.out)
        patch.setattr(experiments, "prepare_tokens", lambda *args: SimpleNamespace(train=b"", heldout=b""))
        patch.setattr(experiments, "train_all", lambda *args: 0)
        patch.setattr("tfla.support_table.page", lambda: "")
        tuned.clear_entries()
        yield folder
    tuned.clear_entries()


def refused(args: list[str], *words: str) -> None:
    """A command line that has to be refused, with a message that has these words."""
    code, said = run_command(main, args)
    assert code != 0, args
    assert all(word in said for word in words), (args, said)


GENERATE = ["generate", "--checkpoint", "model", "--tokenizer", "bytes", "--device", "cpu"]
EXPORT = ["export", "--checkpoint", "model", "--tokenizer", "bytes", "--to", "exported"]
TUNE = ["tune", "--length", "100", "--dqk", "4", "--dhv", "4", "--device", "cpu"]


@given(words=options(GenerateConfig))
def test_generate(words: list[str]) -> None:
    run_command(main, [*GENERATE, *words])


@given(words=options(ExportConfig, leave_out=("to",)))
def test_export(words: list[str]) -> None:
    run_command(main, [*EXPORT, *words])


def test_export_names_its_folder_before_it_reads_a_model() -> None:
    refused([*EXPORT, "--checkpoint", "nope", "--to", "/dev/null/x"], "tfla: error: to: /dev/null/x cannot be written")


@given(words=options(WarmupConfig))
def test_warmup(words: list[str]) -> None:
    for own in (["--checkpoint", "model"], ["--shape", "1", "64", "2", "16", "16"], []):
        run_command(main, ["warmup", "--device", "cpu", *own, *words])


@given(words=options(TuneOptions))
def test_tune(words: list[str]) -> None:
    run_command(main, [*TUNE, *words])


@given(data=st.data(), section=st.sampled_from(list(SECTIONS)))
def test_analyze(data: st.DataObject, section: str) -> None:
    run_command(main, ["analyze", section, *data.draw(options(SECTIONS[section].config))])


@given(words=options(Options), section=st.sampled_from(["all", "claims"]))
def test_analyze_all(words: list[str], section: str) -> None:
    run_command(main, ["analyze", section, *words])


@given(words=options(ExperimentConfig), name=st.sampled_from(["table6", "all"]))
def test_experiment(words: list[str], name: str) -> None:
    run_command(main, ["experiment", name, "--device", "cpu", *words])


@given(words=options(cpu.CpuBench))
def test_bench_cpu(words: list[str]) -> None:
    run_command(main, ["bench", "cpu", "--lengths", "64", *words])


@given(words=options(gpu.GpuBench, leave_out=("suite",)))
def test_bench_gpu(words: list[str]) -> None:
    run_command(main, ["bench", "gpu", "smoke", *words])


@given(words=options(Report))
def test_bench_report(words: list[str]) -> None:
    run_command(main, ["bench", "report", "--results", "results", "--out", "page.md", *words])


@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9), max_size=3)
)
def test_words_that_are_no_commands(words: list[str]) -> None:
    for command in ([], ["analyze"], ["experiment"], ["bench"], ["bench", "gpu"], ["support"], ["tune"], ["generate"]):
        run_command(main, [*command, *words])


COUNTS = ("0", "-1", "x", "1.5", "nan", "")
WARMUP = ["warmup", "--checkpoint", "model", "--device", "cpu"]


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        (GENERATE, "max-new-tokens", COUNTS),
        (GENERATE, "temperature", ("-1", "nan", "inf", "x", "")),
        (GENERATE, "top-k", COUNTS),
        (GENERATE, "top-p", ("0", "-1", "1.01", "nan", "x")),
        (GENERATE, "seed", ("x", "1.5", str(2**64), str(-(2**63) - 1))),
        (GENERATE, "device", ("foo", "", "meta")),
        (GENERATE, "tokenizer", ("nope", "")),
        (GENERATE, "checkpoint", ("nope", "/dev/null", "x" * 300)),
        (EXPORT, "checkpoint", ("nope", "/dev/null", "x" * 300)),
        (EXPORT, "tokenizer", ("nope", "")),
        (EXPORT, "dtype", ("int8", "")),
        (EXPORT, "to", ("/dev/null", "/dev/null/x", "x" * 300, "model/config.json")),
        (WARMUP, "checkpoint", ("nope", "/dev/null", "x" * 300)),
        (WARMUP, "dtype", ("int8", "")),
        (WARMUP, "device", ("foo", "", "meta")),
        *((WARMUP, name, COUNTS) for name in ("prompts", "batches", "states-every", "capacity", "pool")),
        *((TUNE, name, COUNTS) for name in ("batch", "length", "heads", "dqk", "dhv", "repeats")),
        (TUNE, "dtype", ("int8", "")),
        (TUNE, "gate", ("relu",)),
        (TUNE, "suite", ("decode", "nope")),
        (TUNE, "device", ("foo", "meta")),
        (TUNE, "backend", ("nope", "reference", "hopper")),
        (TUNE, "kernel", ("nope",)),
        (TUNE, "memory-limit", ("0", "-1", "nan", "inf", "x")),
        (TUNE, "accelerator", ("nope", "")),
        (TUNE, "stored", ("nowhere", "model")),
        (TUNE, "budget", ("0", "-1", "nan", "x")),
        (TUNE, "file", ("/dev/null", "/dev/null/x", "x" * 300, "model")),
        *((["analyze", name], "out", ("/dev/null", "/dev/null/x", "x" * 300)) for name in (*SECTIONS, "all", "claims")),
        *((["analyze", name], "results", ("nowhere", "/dev/null")) for name in (*SECTIONS, "all", "claims")),
        (["analyze", "counting"], "format", ("jpg", "")),
        *((["analyze", "counting"], name, COUNTS) for name in ("T", "dqk", "dhv")),
        (["analyze", "transfer"], "step", ("0", "-1", "nan", "inf", "x", "1e-9")),
        *((["analyze", "transfer"], name, ("0", "-1", "nan", "inf", "x")) for name in ("eps", "gate-soft-cap")),
        (["analyze", "transfer"], "input-gate-bias", ("nan", "inf", "x")),
        (["experiment", "fig8"], "size", ("large",)),
        (["experiment", "fig8"], "processes", (*COUNTS, "100000")),
        (["experiment", "fig8"], "budget", ("0", "-1", "nan", "x")),
        (["experiment", "fig8"], "device", ("foo", "meta")),
        (["experiment", "fig8"], "folder", ("/dev/null", "/dev/null/x")),
        (["experiment", "fig8"], "out", ("/dev/null", "/dev/null/x", "model")),
        (["bench", "cpu"], "lengths", (*COUNTS, "2000000000")),
        (["bench", "cpu"], "repeats", COUNTS),
        (["bench", "cpu"], "threads", (*COUNTS, "100000")),
        (["bench", "cpu"], "out", ("/dev/null", "/dev/null/x", "model")),
        *((["bench", "gpu", "smoke", "--device", "cpu"], name, COUNTS) for name in ("lengths", "repeats")),
        (["bench", "gpu", "smoke", "--device", "cpu"], "warmup", COUNTS[1:]),
        *(
            (["bench", "gpu", "smoke", "--device", "cpu"], name, ("-1", "nan", "inf", "x", ""))
            for name in ("pause", "patience", "sustained", "limit", "budget")
        ),
        (["bench", "gpu", "smoke"], "device", ("foo", "")),
        (["bench", "gpu", "smoke", "--device", "cpu"], "only", ("no such implementation",)),
        (["bench", "gpu", "smoke", "--device", "cpu"], "out", ("/dev/null", "model")),
        (["bench", "report", "--results", "results"], "out", ("/dev/null", "/dev/null/x", "model")),
        (["bench", "report", "--results", "results"], "images", ("/dev/null", "/dev/null/x")),
        (["bench", "report", "--results", "results"], "readme", ("nowhere", "model")),
        (["bench", "report"], "results", ("nowhere", "/dev/null", "model")),
    ],
    ids=lambda x: " ".join(x[:3]) if isinstance(x, list) else x if isinstance(x, str) else "",
)
def test_values_out_of_range_are_refused(command: list[str], option: str, values: tuple[str, ...]) -> None:
    """The message names the option, or the file."""
    before = sorted(Path().rglob("*"))
    for value in values:
        file = option in ("checkpoint", "results", "stored", "accelerator") or value == "reference"
        names = () if file or value == "" else (option,)
        code, said = run_command(main, [*command, f"--{option}={value}"])
        assert code != 0, value
        assert all(
            name.replace("-", "").replace("_", "") in said.replace("-", "").replace("_", "") for name in names
        ), said
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (GENERATE, GenerateConfig), (EXPORT, ExportConfig), (WARMUP, WarmupConfig), (TUNE, TuneOptions),
        *((["analyze", name], SECTIONS[name].config) for name in SECTIONS),
        *((["analyze", name], Options) for name in ("all", "claims")),
        (["experiment", "table6"], ExperimentConfig), (["experiment", "recall"], EvidenceConfig),
        (["bench", "cpu"], cpu.CpuBench), (["bench", "gpu", "smoke"], GpuBench), (["bench", "report"], Report),
    ],
    ids=lambda x: " ".join(x[:2]) if isinstance(x, list) else "",
)  # fmt: skip
def test_empty_paths_are_not_the_current_folder(command: list[str], kind: type) -> None:
    """An unset variable of a shell gives an empty word; each option of a path refuses it by its name."""
    paths = [name for name, found in fields_of(kind) if Path in (found, *get_args(found))]
    assert paths
    for name in paths:
        found = run_command(main, [*command, option_name(name), ""])
        assert found == (1, f"tfla: error: {name}: got '', expected a path; the current folder is '.'\n")


def test_an_empty_name_of_a_tokenizer_is_not_the_current_folder(nothing_is_computed: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_info.json"):
        (nothing_is_computed / name).write_text("{}")
    try:
        refused([*GENERATE, "--tokenizer", ""], "tokenizer: got ''")
    finally:
        for name in ("tokenizer.json", "tokenizer_info.json"):
            (nothing_is_computed / name).unlink()


def test_right_options_go_through(nothing_is_computed: Path) -> None:
    """What stands in for the work is reached, so that refusals are not due to it."""
    assert run_command(main, GENERATE)[0] == 0
    assert run_command(main, TUNE)[0] == 0
    assert run_command(main, ["analyze", "counting"])[0] == 0
    assert run_command(main, ["analyze", "transfer", "--step", "0.5"])[0] == 0
    assert run_command(main, ["experiment", "table6", "--device", "cpu", "--budget", "5"])[0] == 0
    assert run_command(main, ["bench", "cpu", "--lengths", "64", "--out", "cpu.json"])[0] == 0
    assert run_command(main, ["bench", "report", "--results", "results", "--out", "page.md"])[0] == 0
    code, said = run_command(main, ["bench", "gpu", "smoke", "--device", "cpu"])
    assert (code, said) == (2, "tfla bench gpu: error: cpu: it is not run here\n")
    assert json.loads((nothing_is_computed / "cpu.json").read_text())["rows"] == []


@pytest.mark.parametrize("module", ["tfla.bench.traffic", "tfla.paper.numerics.run"])
@pytest.mark.parametrize("target", ["/dev/null/x", "model"])
def test_what_measures_for_figures_finds_a_bad_place_first(module: str, target: str) -> None:
    command = importlib.import_module(module).main
    code, said = run_command(command, ["--out", target])
    assert code == 2
    assert f"error: out: {target} cannot be written" in said
