"""Training: the loss falls, a stopped run continues bit for bit, and errors are named."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tfla._util.errors import UserError
from tfla.train import loop
from tfla.train.config import Data, Model, Optim
from tfla.train.logging import Metrics, read_metrics
from tfla.train.loop import train
from tfla.train.recipe import Schedule
from tfla.train.run_folder import read_run_config


def losses(run) -> list[tuple]:
    """Return the records of a run that must be bitwise equal, in order."""
    return [(r["kind"], r["step"], r["loss"], r.get("grad_norm"), r.get("max_input_gate")) for r in read_metrics(run)]


@pytest.fixture
def fail_at(monkeypatch):
    """Return a function that makes the process fail when it records a step, as if it had been killed there."""

    def arrange(step: int, error: BaseException) -> None:
        write = Metrics.write

        def failing(self, kind, at, **values):
            if kind == "train" and at == step:
                raise error
            write(self, kind, at, **values)

        monkeypatch.setattr(Metrics, "write", failing)

    return arrange


def test_it_learns_and_records_everything(tiny):
    config = tiny(steps=60, eval_every=30, checkpoint_every=20, tensorboard=True)
    trained = train(config)
    records = read_metrics(config.run)
    steps = [r for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    assert [r["step"] for r in steps] == list(range(1, 61))
    assert [r["step"] for r in evals] == [0, 30, 60]
    assert evals[-1]["bits_per_byte"] < 0.75 * evals[0]["bits_per_byte"]
    assert set(steps[0]) == {
        "kind", "step", "loss", "lr", "grad_norm", "max_input_gate", "tokens_per_s", "tokens_per_s_per_process",
        "peak_memory", "elapsed",
    }  # fmt: skip
    assert steps[0]["lr"] == pytest.approx(1.5e-3)
    assert -11 < steps[0]["max_input_gate"] < -8  # softcap(-10) = -8.7
    assert all(a["elapsed"] < b["elapsed"] for a, b in pairwise(steps))
    assert (config.run / "curves.png").stat().st_size > 10_000
    assert list((config.run / "tensorboard").iterdir())
    assert sorted(p.name for p in (config.run / "checkpoints").iterdir()) == ["step-00000040", "step-00000060"]
    assert trained.step == 60


def small(**changes) -> Model:
    return Model(**{"d_model": 32, "num_blocks": 1, "num_heads": 2, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "reset": "cu_seqlens",
            "accumulate": 2,
            "model": small(mixer="mlstm_sig"),
        },
        {"precision": "bfloat16", "model": small(mixer="attention")},
    ],
    ids=["exp", "sig, packed, accumulated", "attention, bfloat16"],
)
@pytest.mark.parametrize("step", [1, 6])
def test_an_unfinished_run_continues_bit_for_bit(tiny, tmp_path, fail_at, monkeypatch, changes, step):
    whole, broken = tiny(run=tmp_path / "whole", **changes), tiny(run=tmp_path / "broken", **changes)
    train(whole)
    fail_at(step, SystemExit())
    with pytest.raises(SystemExit):
        train(broken)
    monkeypatch.undo()
    assert len(losses(broken.run)) < len(losses(whole.run))
    torch.rand(7)  # the state of the random generator must not matter
    train(broken)
    assert losses(broken.run) == losses(whole.run)


def test_a_finished_run_stays_as_it_is(tiny):
    config = tiny()
    train(config)
    before = losses(config.run)
    assert train(config).step == config.steps
    assert losses(config.run) == before


def test_accumulation_gives_the_same_updates(tiny, tmp_path):
    found = []
    for parts in (1, 4):
        config = tiny(run=tmp_path / str(parts), accumulate=parts, steps=4)
        train(config)
        found.append([(r["loss"], r["grad_norm"]) for r in read_metrics(config.run) if r["kind"] == "train"])
    assert torch.allclose(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_first(tiny, tmp_path, monkeypatch, number):
    whole, stopped = tiny(run=tmp_path / "whole"), tiny(run=tmp_path / "stopped", checkpoint_every=100)
    train(dataclasses.replace(whole))
    write = Metrics.write

    def ask(self, kind, at, **values):
        write(self, kind, at, **values)
        if (kind, at) == ("train", 2):  # while step 3 is computed
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", ask)
        assert train(stopped).step == 3
    assert [p.name for p in (stopped.run / "checkpoints").iterdir()] == ["step-00000003"]
    assert train(stopped).step == 8
    assert losses(stopped.run) == losses(whole.run)


def test_a_run_whose_checkpoints_were_damaged_keeps_what_it_saves(tiny, tmp_path, capsys):
    """The complete checkpoints count, wherever the damaged ones are."""
    whole, run = (
        tiny(run=tmp_path / "whole", steps=12),
        tiny(run=tmp_path / "run", steps=12, checkpoint_every=1, keep_every=4),
    )
    train(whole)
    train(run)
    folder = run.run / "checkpoints"
    assert sorted(p.name[-2:] for p in folder.iterdir()) == ["04", "08", "11", "12"]
    for name in ("08", "11", "12"):
        (folder / f"step-000000{name}" / "model.safetensors").write_bytes(b"")
    for step in ("11", "12"):  # which stay where they are while steps 5 to 10 are saved and pruned
        (folder / f"step-000000{step}").rename(folder / f"step-000001{step}")
    train(run)
    assert losses(run.run) == losses(whole.run)
    assert sorted(p.name[-3:] for p in folder.iterdir()) == ["004", "008", "011", "012", "111", "112"]
    assert "step-00000111: skipped: model.safetensors has 0 bytes" in capsys.readouterr().err


def test_a_run_with_nothing_but_broken_checkpoints_ends_with_one_line(tiny):
    config = tiny()
    train(config)
    for path in (config.run / "checkpoints").iterdir():
        (path / "training.pt").unlink()
    before = losses(config.run)
    with pytest.raises(
        UserError, match=r"no checkpoint is complete, .*step-00000006: training\.pt cannot be read: No such"
    ):
        train(config)
    assert losses(config.run) == before


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tiny, monkeypatch):
    config = tiny()
    real = loop.token_losses
    calls = []

    def spoilt(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs) * (float("nan") if torch.is_grad_enabled() and len(calls) > 5 else 1)

    monkeypatch.setattr(loop, "token_losses", spoilt)
    with pytest.raises(UserError, match=r"loss nan, gradient norm nan: training has failed; .* checkpoint is .*/step-"):
        train(config)
    monkeypatch.undo()
    train(config)
    assert losses(config.run)[-1][1] == 8


def test_a_disk_that_fills_up_ends_with_one_line(tiny, tmp_path, fail_at, monkeypatch):
    whole, full = tiny(run=tmp_path / "whole", steps=30), tiny(run=tmp_path / "full", steps=30)
    train(whole)

    def fails(limit: int, what: str, **changes) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # files stop growing there
        try:
            with pytest.raises(UserError, match=what) as caught:
                train(dataclasses.replace(full, **changes))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "\n" not in str(caught.value)
        assert not list(full.run.rglob(".tmp-*"))

    fails(4_000, r"full/tokens: cannot be written: File too large$")
    fails(100_000, r"step-00000002: the checkpoint cannot be written: .*File too large.*; there is no checkpoint yet$")
    fail_at(3, SystemExit())
    with pytest.raises(SystemExit):
        train(full)
    monkeypatch.undo()
    good = r"the last good checkpoint is .*/full/checkpoints/step-00000002; start again to continue from it$"
    fails(200_000, rf"step-00000004: the checkpoint cannot be written: File too large; {good}")
    fails(4_000, rf"full: File too large; {good}", checkpoint_every=100)
    train(full)
    assert losses(full.run) == losses(whole.run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": small(num_heads=3)}, "model: num_heads: got 3"),
        ({"model": small(backend="triton")}, r"model\.backend: 'triton' cannot run"),
        ({"model": small(num_blocks=10**9)}, "model: .* does not fit on cpu"),
        ({"model": small(d_model=2**30)}, "which no computer can hold|does not fit on cpu"),
        ({"optim": Optim(betas=(2.0, 3.0))}, r"optim\.betas: got \(2\.0, 3\.0\)"),
        (
            {"optim": Optim(warmup_steps=5, cooldown_steps=4)},
            r"optim\.warmup_steps, optim\.cooldown_steps: got 5 and 4",
        ),
        ({"seed": -1}, "seed: got -1, expected at least 0"),
        ({"device": "nonsense"}, "device: got 'nonsense'"),
        ({"context": 20_000}, "one batch needs 80001"),
        ({"data": Data(paths=(Path("nowhere"),))}, "nowhere: no such file"),
        ({"data": Data(paths=(Path(__file__),), tokenizer="nowhere.json")}, r"data\.tokenizer: nowhere\.json"),
        ({"init_from": Path("nowhere")}, "nowhere: neither a run nor a checkpoint"),
    ],
)
def test_a_first_attempt_with_a_mistake_leaves_nothing(tiny, monkeypatch, tmp_path, changes, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=message) as caught:
        train(tiny(**changes))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run").iterdir())


def test_a_run_without_checkpoints_may_change(tiny, texts, fail_at, monkeypatch, capsys):
    """A second attempt with other options and another text must equal a first one."""
    fail_at(1, SystemExit())
    with pytest.raises(SystemExit):
        train(tiny(optim=Optim(lr=1.0), model=small(mixer="attention")))
    monkeypatch.undo()
    (texts / "00.txt").unlink()
    second = tiny(data=Data(paths=(texts,), heldout=0.3))
    trained = train(second)
    assert "model.mixer: mlstm_exp from here on, attention before" in capsys.readouterr().err
    fresh = tiny(run=second.run.with_name("fresh"), data=second.data)
    train(fresh)
    assert losses(second.run) == losses(fresh.run)
    assert len(trained.tokens.heldout) > 500


def test_a_finished_run_can_be_extended(tiny, tmp_path, fail_at, monkeypatch):
    """The run continues with the learning rates of the new length, killed or not."""
    optim = Optim(warmup_steps=2, cooldown_steps=3)
    config = tiny(optim=optim)
    train(config)
    before = losses(config.run)
    shutil.copytree(config.run, tmp_path / "killed")
    longer = dataclasses.replace(config, steps=20)
    assert train(longer).step == 20
    assert losses(config.run)[: len(before)] == before
    rates = [r["lr"] for r in read_metrics(config.run) if r["kind"] == "train"]
    assert rates[:8] == [Schedule(optim, 8)(step) for step in range(8)]
    assert rates[8:] == [Schedule(optim, 20)(step) for step in range(8, 20)]
    assert read_run_config(config.run).steps == 20

    killed = dataclasses.replace(longer, run=tmp_path / "killed")
    for step in (9, 13):  # before and after a checkpoint
        with monkeypatch.context():
            fail_at(step, SystemExit())
            with pytest.raises(SystemExit):
                train(killed)
        monkeypatch.undo()
    train(killed)
    assert losses(killed.run) == losses(config.run)
    with pytest.raises(UserError, match="steps: got 19, expected at least 20, which this run has done already"):
        train(dataclasses.replace(config, steps=19))


def test_tokens_of_another_text_are_mentioned(tiny, texts, capsys):
    config = tiny()
    train(config)
    (config.run / "tokens" / "train.bin").write_bytes(b"ab")
    with pytest.raises(
        UserError, match=r"tokens: its tokens cannot be read: train\.bin has 2 bytes, not \d+; delete it"
    ):
        train(config)
    shutil.rmtree(config.run / "tokens")
    train(config)
    assert "its text has changed" not in capsys.readouterr().err
    (texts / "00.txt").write_text("another text")
    shutil.rmtree(config.run / "tokens")
    train(dataclasses.replace(config, steps=10))
    found = "tokens: not the tokens that this run was trained on up to step 8: its text has changed"
    assert found in capsys.readouterr().err
    train(dataclasses.replace(config, steps=12))
    assert "its text has changed" not in capsys.readouterr().err


@pytest.mark.parametrize("step", [3, 4])
def test_memory_that_runs_out_ends_with_one_line(tiny, monkeypatch, step):
    real, calls = loop.token_losses, []

    def fill(*args, **kwargs):
        calls.append(1)
        if len(calls) == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore.")
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "token_losses", fill)
    message = rf"^step {step}: out of memory on cpu: .*20\.00 GiB.* smaller batch_size .*step-00000002"
    with pytest.raises(UserError, match=message):
        train(tiny())


def test_too_little_text_is_named(tiny, texts):
    with pytest.raises(UserError, match=rf"{texts}: \d+ tokens to train on, but one batch needs 80001"):
        train(tiny(context=20_000))


def test_missing_devices_are_named(tiny):
    with pytest.raises(UserError, match="device: got 'nonsense', expected 'cpu'"):
        train(tiny(device="nonsense"))


def test_training_with_a_hugging_face_tokenizer(tiny, texts, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.train_from_iterator(
        (p.read_text() for p in texts.iterdir()),
        tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "[BOS]"]),
    )
    inner.save(str(tmp_path / "words.json"))
    config = tiny(
        data=Data(paths=(texts,), heldout=0.2, tokenizer=str(tmp_path / "words.json")),
        optim=Optim(lr=1e-2, warmup_steps=2, cooldown_steps=2), steps=40, eval_every=40, eval_windows=None,
    )  # fmt: skip
    trained = train(config)
    last = read_metrics(config.run)[-1]
    assert last["tokens"] == len(trained.tokens.heldout) - 1
    documents = int((trained.tokens.heldout == trained.tokens.tokenizer.bos).sum())
    assert last["bytes"] > 3 * (last["tokens"] - documents)  # words, not bytes
    losses = [r["loss"] for r in read_metrics(config.run) if r["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.2
    assert last["bits_per_byte"] == pytest.approx(last["loss"] * last["tokens"] / last["bytes"] / 0.6931471805599453)
