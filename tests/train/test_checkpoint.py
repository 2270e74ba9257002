"""Checkpoints are complete or absent, and restoring them gives everything back."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_alone

from tfla._util.errors import UserError, reason_not_written
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.checkpoint import Checkpoints, find_model, latest_checkpoint, restore, verify_manifest
from tfla.train.config import Optim
from tfla.train.recipe import optimizer
from tfla.train.tokenizer import ByteTokenizer


class Run:
    """A model and an optimizer with a few steps of training."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = LanguageModel(ModelConfig(d_model=16, num_blocks=1, num_heads=2, vocab_size=257))
        self.optimizer = optimizer(self.model, Optim())

    def advance(self) -> None:
        self.model(torch.randint(0, 257, (2, 5))).logsumexp(-1).mean().backward()
        self.optimizer.step()

    def save(self, checkpoints: Checkpoints, step: int) -> None:
        checkpoints.save(step, self.model, self.optimizer, ByteTokenizer(), {"elapsed": step / 2})

    def tensors(self) -> list[torch.Tensor]:
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        return [p.detach().clone() for p in self.model.parameters()] + [t.clone() for t in moments]


def steps(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(path.name[5:]) for path in checkpoints.directory.iterdir())


def test_everything_comes_back(tmp_path):
    run, other = Run(), Run(seed=1)
    run.advance()
    checkpoints = Checkpoints(tmp_path)
    run.save(checkpoints, 7)
    expected, noise = run.tensors(), torch.rand(3)
    latest = latest_checkpoint(tmp_path)
    assert latest.name == "step-00000007"
    assert restore(latest, other.model, other.optimizer) == (7, {"elapsed": 3.5})
    assert len(other.tensors()) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, other.tensors(), strict=True))
    assert torch.equal(noise, torch.rand(3))  # the random state is that of the moment of saving


def test_keep_last_and_keep_every(tmp_path):
    run, checkpoints = Run(), Checkpoints(tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 8):
        run.save(checkpoints, step)
    assert steps(checkpoints) == [4, 6, 7]


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_broken_checkpoints_are_skipped(tmp_path, capsys, file, damage):
    run, checkpoints = Run(), Checkpoints(tmp_path)
    run.save(checkpoints, 1)
    run.save(checkpoints, 2)
    path = tmp_path / "step-00000002" / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"?" + content[1:])
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    assert "step-00000002: skipped: " in capsys.readouterr().err
    with pytest.raises(UserError, match="step-00000002: "):
        find_model(tmp_path / "step-00000002")
    run.save(checkpoints, 2)  # the run comes by again
    assert latest_checkpoint(tmp_path).name == "step-00000002"


def damage(path) -> None:
    """Truncate the weights of a checkpoint to half."""
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def test_broken_checkpoints_do_not_count_among_those_that_are_kept(tmp_path, capsys):
    run, checkpoints = Run(), Checkpoints(tmp_path, keep_last=2)
    for step in (1, 8, 9):
        run.save(checkpoints, step)
    run.save(checkpoints, 7)  # older than the two newest ones: removed
    assert steps(checkpoints) == [8, 9]
    damage(tmp_path / "step-00000008")
    damage(tmp_path / "step-00000009")
    for again in (checkpoints, Checkpoints(tmp_path, keep_last=2)):  # the same process, and the next one
        for step in (2, 3, 4):
            run.save(again, step)
        assert steps(again) == [3, 4, 8, 9]
        assert again.latest().name == "step-00000004"
        err = capsys.readouterr().err
        for step in (8, 9):
            assert err.count(f"step-0000000{step}: skipped: model.safetensors has ") == 1
    run.save(again, 10)
    run.save(again, 11)
    assert steps(again) == [10, 11]


@given(
    events=st.lists(st.one_of(st.just("save"), st.just("start"), st.integers(0, 5)), max_size=12),
    keep_last=st.integers(1, 3),
)
def test_the_last_complete_checkpoint_is_never_deleted(events, keep_last):
    """An event that is a number damages one of the checkpoints; the last one saved and not damaged since must exist."""
    run = Run()
    with tempfile.TemporaryDirectory() as name:
        checkpoints, step, whole = Checkpoints(Path(name), keep_last), 0, set()
        for event in ["save", *events]:
            there = sorted(Path(name).iterdir())
            if event == "save":
                step += 1
                run.save(checkpoints, step)
                whole.add(step)
            elif event == "start":
                checkpoints = Checkpoints(Path(name), keep_last)
            elif whole:
                damage(there[event % len(there)])
                whole.discard(int(there[event % len(there)].name[5:]))
            if event == "save":
                assert checkpoints.latest().name == f"step-{step:08d}"
            kept = [n for n in sorted(whole) if (Path(name) / f"step-{n:08d}").exists()]
            assert kept == sorted(whole)[len(whole) - len(kept) :]  # the newest ones
            assert len(kept) >= min(keep_last, len(whole))
            assert [n for n in kept if verify_manifest(Path(name) / f"step-{n:08d}")] == []
            whole = set(kept)


def test_a_run_whose_checkpoints_are_all_broken_does_not_start_from_the_beginning(tmp_path):
    run, checkpoints = Run(), Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    run.save(checkpoints, 1)
    run.save(checkpoints, 2)
    damage(tmp_path / "step-00000001")
    (tmp_path / "step-00000002" / "training.pt").unlink()
    why = (
        r"no checkpoint is complete.*step-00000001: model\.safetensors has \d+ bytes, not \d+; "
        r"step-00000002: training\.pt"
    )
    with pytest.raises(UserError, match=why):
        Checkpoints(tmp_path).latest()
    assert steps(checkpoints) == [1, 2]


def test_a_process_killed_while_saving_leaves_a_complete_checkpoint(tmp_path):
    """The process is killed at its first, second, third, … call to the file system, until one attempt succeeds."""
    run_alone(_save_and_die_at_each_call, tmp_path)


def _save_and_die_at_each_call(folder: Path) -> None:
    run = Run()
    outcomes = []
    for calls in range(1, 300):
        checkpoints = Checkpoints(folder / str(calls), keep_last=1)
        run.save(checkpoints, 1)
        child = os.fork()
        if child == 0:
            _die_at_call(calls)
            run.save(checkpoints, 2)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        latest = latest_checkpoint(checkpoints.directory)
        assert latest is not None
        outcomes.append((status, latest.name))
        Checkpoints(checkpoints.directory)  # the next start
        assert not list(checkpoints.directory.glob(".tmp-*"))
        if status == 0:
            break
    names = [name for _, name in outcomes]
    assert [status for status, _ in outcomes] == [9] * (len(outcomes) - 1) + [0]
    assert names == sorted(names)  # the old one up to some call, the new one from there on
    assert names.count("step-00000001") > 10
    assert names.count("step-00000002") > 3


def _die_at_call(number: int) -> None:
    left = [number]

    def hook(event: str, args: tuple) -> None:
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.listdir", "os.scandir"):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

    sys.addaudithook(hook)


def test_an_error_that_hides_the_operating_system_says_how_much_room_there_is(tmp_path):
    error = RuntimeError("unexpected pos 704 vs 598")
    free = r"unexpected pos 704 vs 598 \([\d,]+ bytes are free on its disk\)"
    assert re.fullmatch(free, reason_not_written(error, tmp_path))
    error.__cause__ = OSError(28, "No space left on device")
    assert reason_not_written(error, tmp_path) == "No space left on device"


@pytest.mark.parametrize("limit", [1_000, 20_000, 60_000])
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, limit):
    run, checkpoints = Run(), Checkpoints(tmp_path, keep_last=1)
    run.advance()
    run.save(checkpoints, 1)
    sizes = [f.stat().st_size for f in (tmp_path / "step-00000001").iterdir()]
    assert max(sizes) > 60_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # files stop growing there, as on a full disk
    try:
        with pytest.raises(UserError) as caught:
            run.save(checkpoints, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = str(caught.value)
    assert "step-00000002: the checkpoint cannot be written: " in message
    assert "File too large" in message
    assert f"the last good checkpoint is {tmp_path / 'step-00000001'}" in message
    assert "\n" not in message
    assert steps(checkpoints) == [1]
    assert verify_manifest(tmp_path / "step-00000001") is None
    assert restore(tmp_path / "step-00000001", run.model, run.optimizer)[0] == 1


def test_a_full_disk_is_named_as_the_system_names_it(tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="No space left on device; there is no checkpoint yet"):
        Run().save(Checkpoints(tmp_path), 1)
    assert not list(tmp_path.iterdir())


def test_find_model_accepts_runs_checkpoints_and_models(tmp_path):
    run = Run()
    with pytest.raises(UserError, match="neither a run nor a checkpoint nor a saved model"):
        find_model(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.directory.mkdir()
    with pytest.raises(UserError, match="a run without a complete checkpoint"):
        find_model(tmp_path)
    run.save(checkpoints, 3)
    inside = tmp_path / "checkpoints" / "step-00000003"
    assert find_model(tmp_path) == inside == find_model(inside)
    run.model.save_pretrained(tmp_path / "bare")
    assert find_model(tmp_path / "bare") == tmp_path / "bare"
