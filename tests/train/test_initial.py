"""Runs that start from a saved model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from tfla._util.errors import UserError
from tfla.cli import main
from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.config import SIZES
from tfla.train.config import Data, Model, Optim
from tfla.train.logging import Metrics, read_metrics
from tfla.train.loop import train
from tfla.train.run_folder import read_run_config

CHANGED = {"mixer": "mlstm_sig", "head_norm": "rms", "head_norm_eps": 1e-3, "chunk_size": 16}
BARE = {"qk_factor": 1.0, "norm_eps": 1e-5, "forget_gate_bias": (1.0, 2.0)}  # which no option of a run names


@pytest.fixture
def base(tiny, tmp_path):
    """Return a finished run whose options all differ from the defaults."""
    return train(tiny(run=tmp_path / "base", model=Model(d_model=32, num_blocks=1, num_heads=2, **CHANGED))).run


@pytest.fixture
def words_file(texts, tmp_path):
    """Return the file of a tokenizer whose tokens are words."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "[BOS]", "[MORE]"])
    inner.train_from_iterator((p.read_text() for p in texts.iterdir()), trainer)
    inner.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def command(texts, run, *options: object) -> list[str]:
    return [
        "train", f"--run={run}", "--data.paths", str(texts), "--data.heldout=0.2", "--batch-size=4", "--context=24",
        "--device=cpu", "--steps=4", "--eval-every=4", "--checkpoint-every=2", "--no-tensorboard", *map(str, options),
    ]  # fmt: skip


def first_loss(run) -> float:
    return next(r["loss"] for r in read_metrics(run) if r["kind"] == "eval")


@pytest.mark.parametrize("kind", ["run", "checkpoint", "model"])
def test_missing_options_are_those_of_the_saved_model(base, texts, tmp_path, kind, capsys):
    checkpoint = base / "checkpoints" / "step-00000008"
    model = LanguageModel.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "model")
    path = {"run": base, "checkpoint": checkpoint, "model": tmp_path / "model"}[kind]
    assert main(command(texts, tmp_path / "tuned", f"--init-from={path}")) == 0
    err = capsys.readouterr().err
    assert ("no tokenizer beside the model; bytes is taken" in err) == (kind == "model")
    config = read_run_config(tmp_path / "tuned")
    assert {name: getattr(config.model, name) for name in CHANGED} == CHANGED
    assert (config.model.d_model, config.model.num_blocks, config.model.num_heads) == (32, 1, 2)
    assert first_loss(tmp_path / "tuned") == read_metrics(base)[-1]["loss"]  # it starts where the other one ended
    rates = [r["lr"] for r in read_metrics(tmp_path / "tuned") if r["kind"] == "train"]
    assert len(rates) == 4
    assert main(command(texts, tmp_path / "tuned")) == 0  # its own folder names all it needs


def test_a_fine_tuned_run_continues_bit_for_bit(base, tiny, texts, tmp_path, monkeypatch):
    model = Model(d_model=32, num_blocks=1, num_heads=2, **CHANGED)
    optim = Optim(lr=1e-3, warmup_steps=1, cooldown_steps=1)
    whole = tiny(run=tmp_path / "whole", init_from=base, model=model, optim=optim)
    killed = dataclasses.replace(whole, run=tmp_path / "killed")
    train(whole)
    write = Metrics.write
    for step in (1, 4):
        with monkeypatch.context() as patch:

            def failing(self, kind, at, step=step, **values):
                if (kind, at) == ("train", step):
                    raise SystemExit
                write(self, kind, at, **values)

            patch.setattr(Metrics, "write", failing)
            with pytest.raises(SystemExit):
                train(killed)
    base.rename(tmp_path / "gone")  # once there is a checkpoint, the saved model is not needed
    train(killed)
    assert [r["loss"] for r in read_metrics(killed.run)] == [r["loss"] for r in read_metrics(whole.run)]


def test_fields_without_an_option_are_those_of_the_saved_model(texts, tmp_path):
    saved = ModelConfig(d_model=32, num_blocks=2, num_heads=2, vocab_size=300, **BARE)
    LanguageModel(saved).save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    options = [f"--init-from={tmp_path / 'model'}", "--model.chunk-size=8", "--model.no-input-gate-trainable"]
    assert main(command(texts, run, *options)) == 0
    newest = LanguageModel.from_pretrained(run / "checkpoints" / "step-00000004")
    assert newest.config == dataclasses.replace(saved, chunk_size=8, input_gate_trainable=False)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    gate = "blocks.1.mixer.input_gate.weight"
    assert torch.equal(newest.state_dict()[gate], weights[gate])  # it does not learn
    assert not torch.equal(newest.state_dict()["embedding.weight"], weights["embedding.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.d-model=64"], "model.d_model: got 64, expected 32, which "),
        (["--model.mixer=mlstm_exp"], "model.mixer: got 'mlstm_exp', expected 'mlstm_sig', which "),
        (["--model.size=160M"], f"model.d_model: got {SIZES['160M'].d_model}, expected 32, which "),
        (["--model.backend=nope"], "model.backend: got 'nope', allowed are "),
        (["--data.tokenizer=WORDS"], "data.tokenizer: got WORDS, whose tokens are not those of "),
        (["--init-from=nowhere"], "nowhere: neither a run nor a checkpoint nor a saved model"),
    ],
)
def test_what_does_not_fit_the_saved_model_is_named(base, texts, tmp_path, words_file, capsys, options, message):
    options = [option.replace("WORDS", str(words_file)) for option in options]
    assert main(command(texts, tmp_path / "tuned", f"--init-from={base}", *options)) == 1
    err = capsys.readouterr().err
    assert err.startswith("tfla: error: " + message.replace("WORDS", str(words_file)))
    assert err.count("\n") == 1
    assert not (tmp_path / "tuned").exists()


def test_a_tokenizer_comes_with_its_model(tiny, texts, tmp_path, words_file, capsys):
    data = Data(paths=(texts,), heldout=0.2, tokenizer=str(words_file), bos_token="[MORE]")
    base = train(tiny(run=tmp_path / "base", data=data)).run
    words_file.unlink()
    assert main(command(texts, tmp_path / "tuned", f"--init-from={base}")) == 0
    assert read_run_config(tmp_path / "tuned").data.bos_token == "[MORE]"
    assert first_loss(tmp_path / "tuned") == read_metrics(base)[-1]["loss"]
    capsys.readouterr()
    assert main(command(texts, tmp_path / "other", f"--init-from={base}", "--data.bos-token=[BOS]")) == 1
    assert "whose tokens are not those of" in capsys.readouterr().err


def test_a_started_run_does_not_start_again_from_the_saved_model(base, tiny):
    config = tiny()
    train(config)
    with pytest.raises(UserError, match=r"this run's init_from is None, not .*base"):
        train(dataclasses.replace(config, init_from=base))


def test_broken_weights_are_named(base, tiny, tmp_path):
    checkpoint = base / "checkpoints" / "step-00000008"
    LanguageModel.from_pretrained(checkpoint).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 100)
    model = Model(d_model=32, num_blocks=1, num_heads=2, **CHANGED)
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read: ") as caught:
        train(tiny(init_from=tmp_path / "model", model=model))
    assert "\n" not in str(caught.value)
