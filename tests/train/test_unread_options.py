"""Options of ``tfla train`` that no part of a run reads are errors of a new run, and none of a run that has them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tfla._util.errors import UserError
from tfla.cli import main
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.config import Data, Model, TrainConfig
from tfla.train.documents import unread_options
from tfla.train.logging import read_metrics
from tfla.train.loop import train
from tfla.train.run_folder import read_run_config

OTHER = {
    "num_kv_heads": 1, "window": 4, "attention_sinks": True, "key_width": 0.5, "value_width": 0.5,
    "negative_eigenvalues": True, "mamba_head_dim": 16, "mamba_state_dim": 16, "input_gate_bias": -1.0,
    "input_gate_trainable": False, "head_norm": "rms", "head_norm_eps": 1e-3, "chunk_size": 16, "backend": "chunkwise",
}  # fmt: skip
OF_ALL = {"size", "d_model", "num_blocks", "num_heads", "mixer", "layers"}
READERS = {f.name: f.metadata["mixers"] for f in dataclasses.fields(ModelConfig) if f.metadata}
SIZES = {"d_model": 32, "num_blocks": 1, "num_heads": 2}


def rewrite(path, **fields):
    """Change fields of the model in a stored configuration, as an earlier version may have written them."""
    stored = json.loads(path.read_text())
    stored["model"] |= fields
    path.write_text(json.dumps(stored))


def test_every_option_of_the_model_is_tried():
    assert {f.name for f in dataclasses.fields(Model)} == OTHER.keys() | OF_ALL


@pytest.mark.parametrize("option", OTHER)
def test_an_option_that_no_mixer_reads_is_refused(tiny, option):
    """A new run names it; the run so far may have it; and a run of another mixer that has it reads it."""
    mixer = next(name for name in ("attention", "mlstm_exp", "gla") if name not in READERS[option])
    given = Model(**SIZES, mixer=mixer, **{option: OTHER[option]})
    config = tiny(model=given)
    with pytest.raises(UserError, match=f"^model: {option}: got .*, expected .* with '{mixer}': only "):
        train(config)
    assert not config.run.exists()
    assert getattr(given.build(257, given), option) == OTHER[option]
    with pytest.raises(UserError, match=f"^model: {option}: got "):
        given.build(257, Model(**SIZES, mixer=mixer))
    reading = dataclasses.replace(given, mixer=READERS[option][0])
    assert getattr(reading.build(257), option) == OTHER[option]


def test_the_command_names_the_option_and_the_mixers(texts, tmp_path, capsys):
    command = ["train", f"--run={tmp_path / 'run'}", "--data.paths", str(texts), "--model.size=160M", "--device=cpu"]
    layers = ["--model.layers", "gla", "kda"]
    assert main([*command, "--model.window=8", *layers]) == 1
    message = "tfla: error: model: window: got 8, expected None with 'gla', 'kda': only 'attention' has it\n"
    assert capsys.readouterr().err == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [0, 4])
def test_a_run_of_an_earlier_version_continues(tiny, steps, monkeypatch):
    """The run has options that no mixer reads, before its first checkpoint or after it."""
    given = Model(**SIZES, window=4, key_width=0.5)
    config = tiny(model=given, steps=steps or 8)
    with monkeypatch.context() as patch:
        patch.setattr(ModelConfig, "_check_unread", lambda *_: None)
        if steps:
            train(config)
        else:
            patch.setattr("tfla.train.loop.evaluate", lambda *_, **__: (_ for _ in ()).throw(SystemExit))
            with pytest.raises(SystemExit):
                train(config)
    saved = read_run_config(config.run)
    assert saved.model == given
    assert train(dataclasses.replace(saved, steps=8)).step == 8
    assert LanguageModel.from_pretrained(config.run / "checkpoints" / "step-00000008").config.window == 4


def test_a_saved_model_with_such_options_is_trained_on(texts, tmp_path, capsys):
    fields = SIZES | {"vocab_size": 257, "mixer": "attention", "chunk_size": 16, "head_norm": "rms"}
    LanguageModel(ModelConfig.from_dict(fields)).save_pretrained(tmp_path / "model")
    command = [
        "train", f"--run={tmp_path / 'run'}", "--data.paths", str(texts), "--data.heldout=0.2", "--batch-size=4",
        "--context=24", "--device=cpu", "--eval-every=4", "--checkpoint-every=2", "--no-tensorboard",
        f"--init-from={tmp_path / 'model'}",
    ]  # fmt: skip
    assert main([*command, "--steps=2", "--model.backend=chunkwise"]) == 1
    assert "model: backend: got 'chunkwise', expected None with 'attention'" in capsys.readouterr().err
    assert main([*command, "--steps=2"]) == 0
    rewrite(tmp_path / "run" / "config.json", backend="chunkwise")  # an earlier version took it
    assert main([*command, "--steps=4"]) == 0
    assert [r["step"] for r in read_metrics(tmp_path / "run") if r["kind"] == "train"] == [1, 2, 3, 4]
    newest = LanguageModel.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000004").config
    assert newest == ModelConfig.from_dict(fields | {"backend": "chunkwise"})


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ({}, set()),
        ({"dataset_split": "test"}, {"dataset_split"}),
        ({"dataset_field": "body"}, {"dataset_field"}),
        ({"dataset_field": "body", "paths": ("a.txt", "b.ndjson")}, set()),
        ({"dataset_field": "body", "suffixes": (".txt", "l")}, set()),
        ({"dataset_field": "body", "suffixes": ("part.jsonl",)}, set()),
        ({"suffixes": (".c",), "exclude": ("tests",), "binary": True}, set()),
        ({"dataset": "json", "dataset_split": "test", "dataset_field": "body", "dataset_files": ("a",)}, set()),
        ({"dataset": "json", "suffixes": (".c",)}, {"suffixes"}),
        ({"dataset": "json", "exclude": ("tests",)}, {"exclude"}),
        ({"dataset": "json", "binary": True}, {"binary"}),
        (
            {"dataset": "one", "dataset_files": ("a",), "dataset_config": "b", "dataset_split": "c"},
            {"dataset_files", "dataset_config", "dataset_split"},
        ),
        (
            {"dataset": "several", "dataset_files": ("a",), "dataset_config": "b", "dataset_split": "c"},
            {"dataset_files", "dataset_config"},
        ),
    ],
)
def test_options_of_another_text_are_unread(tmp_path, monkeypatch, options, unread):
    monkeypatch.chdir(tmp_path)
    for folder, file in (("one", "state.json"), ("several", "dataset_dict.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    assert unread_options(Data(**options)).keys() == unread


def test_options_of_another_text_are_errors_of_a_new_run(tiny):
    config: TrainConfig = tiny()
    data = dataclasses.replace(config.data, dataset_split="test")
    with pytest.raises(UserError, match=r"^data\.dataset_split: got 'test' without data\.dataset, which it is for$"):
        train(dataclasses.replace(config, data=data))
    assert not config.run.exists()
    train(dataclasses.replace(config, steps=4))
    path = config.run / "config.json"
    stored = json.loads(path.read_text())
    stored["data"]["dataset_split"] = "test"  # an earlier version took it
    path.write_text(json.dumps(stored))
    assert train(dataclasses.replace(config, data=data)).step == 8
