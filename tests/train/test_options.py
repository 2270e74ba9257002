"""Bad values of every option of ``tfla train`` and ``tfla demo`` give one line that says why, and write nothing."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bad_options import options, run_command
from hypothesis import given, settings

from tfla.cli import main
from tfla.train import demo as demo_module
from tfla.train import loop
from tfla.train.config import DemoConfig, TrainConfig
from tfla.train.demo import demo_config

REACHED = -1  # a code for commands that would have begun their work


class Reached(Exception):
    """The exception in place of a run's first evaluation, which shows that its options passed all checks."""


BASE = {
    "model.d-model": "32", "model.num-blocks": "1", "model.num-heads": "2", "batch-size": "2", "context": "16",
    "steps": "4", "device": "cpu", "data.heldout": "0.2",
}  # fmt: skip
NAMED = [
    (["--model.backend", "triton"], "model.backend: 'triton' cannot run these inputs"),
    (["--model.backend", "nope"], "model.backend: got 'nope', allowed are"),
    (["--model.chunk-size", "0"], "model: chunk_size: got 0"),
    (["--model.input-gate-bias", "1e200"], "model.input_gate_bias: got 1e+200"),
    (["--model.num-heads", "3"], "model: num_heads: got 3"),
    (["--optim.betas", "2", "3"], "optim.betas: got (2.0, 3.0), expected two numbers from 0 and below 1"),
    (["--optim.betas", "nan", "0.9"], "optim.betas: got (nan, 0.9)"),
    (["--optim.final-fraction", "7"], "optim.final_fraction: got 7.0, expected a number from 0 to 1"),
    (["--optim.weight-decay", "-1"], "optim.weight_decay: got -1.0, expected a finite number of at least 0"),
    (["--optim.lr", "inf"], "optim.lr: got inf, expected a finite number above 0"),
    (["--optim.eps", "nan"], "optim.eps: got nan"),
    (["--optim.clip", "nan"], "optim.clip: got nan, expected a number above 0, or inf"),
    (["--optim.warmup-steps", "-1"], "optim.warmup_steps: got -1, expected at least 0"),
    (["--optim.warmup-steps", "5"], "optim.warmup_steps, optim.cooldown_steps: got 5 and 0"),
    (["--seed", "-1"], "seed: got -1, expected at least 0"),
    (["--seed", str(2**63)], f"seed: got {2**63}, expected "),
    (["--threads", "100000"], "threads: got 100000, expected a whole number from 1 to "),
    (["--threads", "0"], "threads: got 0"),
    (["--data.heldout", "0"], "data.heldout: got 0.0, expected a number above 0 and below 1"),
    (["--data.heldout", "nan"], "data.heldout: got nan"),
    (["--data.heldout", "1e-300"], "nothing is held out"),
    (["--data.split-seed", str(2**63)], "data.split_seed: got "),
    (["--data.dataset", "x"], "data.paths, data.dataset: got both, expected one of them"),
    (["--data.dataset-files", "x"], "data.dataset_files: got ('x',) without data.dataset"),
    (["--data.bos-token", "x"], "data.bos_token: got 'x', expected None for bytes"),
    (["--data.tokenizer", "x", "--data.binary"], "data.binary: got True with the tokenizer 'x', expected bytes"),
    (["--data.paths", ""], "data.paths: got '', expected a path; the current folder is '.'"),
    (["--data.paths", "there", ""], "data.paths: got '', expected a path"),
    (["--run", ""], "run: got '', expected a path"),
    (["--run-folder="], "run: got '', expected a path"),
    (["--init-from", ""], "init_from: got '', expected a path"),
    (["--data.dataset", ""], "data.dataset: got '', expected a name or a folder"),
    (["--data.dataset", "x", "--data.dataset-files", ""], "data.dataset_files: got ('',), expected names of files"),
    (["--data.tokenizer", ""], "data.tokenizer: got '', expected "),
    (["--data.paths", "/dev/zero"], "/dev/zero: neither a file nor a folder nor a pipe"),
    (["--data.paths", "a" * 300], "cannot be read: File name too long"),
    (["--device", "meta"], "device: got 'meta'"),
    (["--device", ""], "device: got ''"),
    (["--run", "/dev/null/x"], "/dev/null/x: Not a directory"),
    (["--run", "a" * 300], "config.json: cannot be read: File name too long"),
    (["--context", str(2**62)], "tokens to train on, but one batch needs "),
    (["--steps", "0"], "steps: got 0, expected at least 1"),
    (["--keep-every", "-1"], "keep_every: got -1"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text that suffices for a few batches."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a query, a key and a value at the gate of a chunk\n" * 40)
    return path


@pytest.fixture(scope="module", autouse=True)
def _no_training(text: Path) -> Iterator[None]:
    """End runs before their first evaluation, allow no server, and let the demo read a small text."""

    def reached(*args: object, **kwargs: object) -> None:
        raise Reached

    def small(config: DemoConfig) -> TrainConfig:
        full = demo_config(config)
        return dataclasses.replace(
            full, data=dataclasses.replace(full.data, paths=(text,)), context=16, batch_size=2,
            model=dataclasses.replace(full.model, d_model=32, num_blocks=1),
        )  # fmt: skip

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "evaluate", reached)
        patch.setattr(demo_module, "demo_config", small)
        patch.setattr(demo_module, "affordable_steps", lambda config, seconds: 400)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        pytest.importorskip("datasets")
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield
    torch.set_num_threads(threads)


def until_it_begins(arguments: list[str]) -> int:
    """Run a command up to its first evaluation."""
    try:
        return main(arguments)
    except Reached:
        return REACHED


def command(name: str, text: Path, arguments: list[str]) -> tuple[int, str, list[Path]]:
    """Run a command in an empty folder; return its exit code, its output to stderr, and the files that it left."""
    base = {} if name == "demo" else {**BASE, "data.paths": str(text)}
    flags = {word.partition("=")[0] for word in arguments}
    given = [word for flag, value in base.items() if f"--{flag}" not in flags for word in (f"--{flag}", value)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        place = [] if "--run" in flags else ["--run", "run"]
        code, said = run_command(until_it_begins, [name, *given, *place, *arguments])
        return code, said, list(Path(folder).rglob("*"))


def check_refusal(code: int, said: str, left: list[Path]) -> None:
    """Check that a refused command says why, in one line or in the parser's box, and leaves nothing."""
    if code in (0, REACHED):
        return
    assert not left
    if code == 1:
        assert said.startswith("tfla: error: ")
        assert said.count("\n") == 1
        assert len(said.strip()) > len("tfla: error: x:")
    else:
        assert code == 2
        assert said.strip()


@pytest.mark.parametrize(("arguments", "message"), NAMED, ids=[" ".join(a)[:40] for a, _ in NAMED])
def test_what_is_wrong_is_named_in_one_line(text, arguments, message):
    code, said, left = command("train", text, arguments)
    assert code == 1
    assert message in said
    check_refusal(code, said, left)


def test_the_demo_refuses_an_empty_folder(text):
    assert command("demo", text, ["--run", ""])[:2] == (
        1, "tfla: error: run: got '', expected a path; the current folder is '.'\n"
    )  # fmt: skip


def test_good_options_are_no_errors(text):
    code, said, left = command("train", text, ["--optim.clip", "inf", "--optim.betas", "0", "0.99", "--threads", "2"])
    assert code == REACHED
    assert "error" not in said
    assert {path.name for path in left} >= {"config.json", "tokens"}


@given(arguments=options(TrainConfig))
@settings(max_examples=80)
def test_no_bad_value_of_train_is_a_traceback(text, arguments):
    check_refusal(*command("train", text, arguments))


@given(arguments=options(DemoConfig))
@settings(max_examples=30)
def test_no_bad_value_of_the_demo_is_a_traceback(text, arguments):
    check_refusal(*command("demo", text, arguments))
