"""Checkpoints: everything a run needs to go on, in a folder that is whole or not there."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from tfla._util.errors import UserError, notice, reason
from tfla._util.files import (
    MANIFEST,
    clear_temporary,
    remove_directory,
    what_is_broken,
    whole_directory,
    write_atomically,
    write_manifest,
)
from tfla.nn import LanguageModel
from tfla.train.config import FREE, TrainConfig, differences, from_json, to_json
from tfla.train.tokenizer import Tokenizer

STATE = "training.pt"


class Checkpoints:
    """The checkpoints of one run, ``step-00000100`` and so on.

    Args:
        directory: where they are; made when the first one is saved.
        keep_last: how many of the newest whole ones stay; broken ones do not count.
        keep_every: those of multiples of this step stay for good.
    """

    def __init__(self, directory: Path, keep_last: int = 2, keep_every: int | None = None) -> None:
        self.directory, self.keep_last, self.keep_every = directory, keep_last, keep_every
        clear_temporary(directory)
        self._broken: dict[Path, str | None] = {}  # what is wrong with each checkpoint, once it has been examined

    def save(
        self,
        step: int,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        progress: dict[str, Any],
    ) -> Path:
        """Write the checkpoint of a step, then remove those that need not stay.

        Args:
            step: updates done.
            progress: plain values that :func:`restore` gives back.

        Raises:
            UserError: it cannot be written; all earlier checkpoints are as they were.
        """
        target = self.directory / f"step-{step:08d}"
        state = {"optimizer": optimizer.state_dict(), "random": _random_state(), "progress": progress}
        try:
            with whole_directory(target) as folder:
                model.save_pretrained(folder)
                tokenizer.save(folder)
                with open(folder / STATE, "wb") as file:  # given a path, torch does not say what the disk said
                    torch.save(state, file)
                write_manifest(folder, step=step)
        except Exception as error:  # each of the libraries has its own kind for a full disk
            raise UserError(
                f"{target}: the checkpoint cannot be written: {reason(error)}; {self.last_good()}"
            ) from error
        self._broken[target] = None
        self._prune()
        return target

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint; None if nothing has been saved. A notice names each newer broken one.

        Raises:
            UserError: there are checkpoints, and each of them is broken; the message names them and says why.
        """
        steps = _steps(self.directory)
        for _, path in reversed(steps):
            if self._whole(path):
                return path
        if not steps:
            return None
        found = "; ".join(f"{path.name}: {self._broken[path]}" for _, path in steps)
        raise UserError(
            f"{self.directory}: no checkpoint is whole, so the run cannot continue ({found}); "
            "take another run, or move this folder away to start from the beginning"
        )

    def last_good(self) -> str:
        """Half a sentence on where the run would go on."""
        latest = latest_checkpoint(self.directory)
        if latest is None:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {latest}; start again to continue from it"

    def _whole(self, path: Path) -> bool:
        """Compare a checkpoint with its manifest, in full the first time, by sizes from then on; say what is broken."""
        if self._broken.get(path) is None:
            self._broken[path] = what_is_broken(path, contents=path not in self._broken)
            if self._broken[path] is not None:
                notice(f"{path}: passed over: {self._broken[path]}")
        return self._broken[path] is None

    def _prune(self) -> None:
        kept = 0
        for step, path in reversed(_steps(self.directory)):
            if kept < self.keep_last:
                kept += self._whole(path)
            elif self.keep_every is None or step % self.keep_every:
                remove_directory(path)


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint in a folder that is whole; broken ones are passed over with a notice."""
    for _, path in reversed(_steps(directory)):
        broken = what_is_broken(path)
        if broken is None:
            return path
        notice(f"{path}: passed over: {broken}")
    return None


def restore(path: Path, model: LanguageModel, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
    """Put a checkpoint's weights, optimizer and random state back. Returns its step and progress.

    Raises:
        UserError: a file cannot be read or does not fit the model.
    """
    from safetensors.torch import load_file

    try:
        # Copied into the tensors that are there: their alignment, and with it every rounding, is that of a new run.
        model.load_state_dict(load_file(path / "model.safetensors"))
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        _set_random_state(state["random"])
        return json.loads((path / MANIFEST).read_text())["step"], state["progress"]
    except Exception as error:  # likewise
        raise UserError(f"{path}: the checkpoint cannot be read: {reason(error)}") from error


def find_model(path: Path) -> Path:
    """The folder with the weights that a path means: a run, its newest checkpoint; a checkpoint or a model, itself.

    Raises:
        UserError: it is none of these.
    """
    if (path / "checkpoints").is_dir():
        latest = latest_checkpoint(path / "checkpoints")
        if latest is None:
            raise UserError(f"{path}: a run without a whole checkpoint")
        return latest
    if not (path / "model.safetensors").is_file():
        if (path / "model.safetensors.index.json").is_file():
            return path  # of another library, which loading it names
        raise UserError(f"{path}: neither a run nor a checkpoint nor a saved model")
    of_a_run = (path / MANIFEST).exists() or (path / STATE).exists()
    if of_a_run and (broken := what_is_broken(path)) is not None:
        raise UserError(f"{path}: {broken}")
    return path


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def _steps(directory: Path) -> list[tuple[int, Path]]:
    found = [(path.name.removeprefix("step-"), path) for path in directory.glob("step-*")]
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


CONFIG, TOKENS, CHECKPOINTS, CURVES, LOCK = "config.json", "tokens", "checkpoints", "curves.png", "lock"


def read_config(directory: Path) -> TrainConfig | None:
    """The configuration that a run was started with; None if the folder is no run yet.

    Raises:
        UserError: it is there but cannot be read.
    """
    path = directory / CONFIG
    try:
        return from_json(TrainConfig, path.read_text()) if path.exists() else None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error


@contextmanager
def open_run(config: TrainConfig) -> Iterator[Path]:
    """Claim the folder config.run for this process alone; made if needed.

    A run that fails before its configuration is written leaves nothing: the folder is as it was.

    Raises:
        UserError: another process trains there, or the folder cannot be written.
    """
    directory = config.run
    try:
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / LOCK):
            clear_temporary(directory)
            try:
                yield directory
            except BaseException:
                if not (directory / CONFIG).exists():
                    (directory / LOCK).unlink(missing_ok=True)
                    with suppress(OSError):  # what others have put there stays
                        for path in made:
                            path.rmdir()
                raise
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {reason(error)}") from error


def check_changes(old: TrainConfig | None, new: TrainConfig, step: int | None) -> None:
    """Compare the configuration of a run with the one that it was started with.

    Args:
        old: what it was started with; None if it is new.
        new: what is asked for.
        step: of its newest checkpoint. Without one nothing has been learned, and everything may change.

    Raises:
        UserError: what the run has learned would not be the result of the new configuration; the message says why.
    """
    if old is None or step is None:
        return
    fixed = [f"{n} is {a}, not {b}" for n, (a, b) in differences(old, new).items() if n not in FREE and n != "steps"]
    if fixed:
        raise UserError(f"{new.run}: this run's {'; '.join(fixed)}. Take another --run, or the run's own values")
    if new.steps < step:
        raise UserError(f"steps: got {new.steps}, expected at least {step}, which this run has done already")


def write_config(old: TrainConfig | None, new: TrainConfig) -> None:
    """Write a run's configuration into its folder; a notice for each option that has changed."""
    for name, (a, b) in ({} if old is None else differences(old, new)).items():
        if name != "run":
            notice(f"{name}: {b} from here on, {a} before")
    write_atomically(new.run / CONFIG, lambda path: path.write_text(to_json(new)))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by the operating system, which lets go of it however the process ends."""
    file = _locked(path)
    while os.name == "posix" and os.fstat(file.fileno()).st_nlink == 0:  # a run that failed has just removed it
        file.close()
        file = _locked(path)
    with file:
        yield


def _locked(path: Path) -> TextIO:
    file = open(path, "a")  # noqa: SIM115 - closed by the caller
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise UserError(f"{path.parent}: another process is training there") from error
    return file
