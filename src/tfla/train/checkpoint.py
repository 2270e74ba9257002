"""Checkpoints: all that a run needs to continue, each in a folder that is either complete or absent."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tfla._util.errors import UserError, notice, reason, reason_not_written
from tfla._util.files import (
    MANIFEST,
    TEMPORARY,
    atomic_directory,
    publish_directory,
    remove_directory,
    remove_temporary,
    verify_manifest,
    write_manifest,
)
from tfla.nn import LanguageModel
from tfla.nn.pretrained import CONFIG, WEIGHTS, find_weights
from tfla.train.ranks import ONE_PROCESS, Ranks
from tfla.train.tokenizer import Tokenizer

STATE_FILE = "training.pt"


class Checkpoints:
    """The checkpoints of one run, in folders ``step-00000100`` and so on.

    Args:
        directory: the folder of the checkpoints, created with the first one.
        keep_last: the number of the newest complete checkpoints to keep; broken ones do not count.
        keep_every: checkpoints at multiples of this many steps are never deleted.
        ranks: the processes of the run. Several of them write a checkpoint together, in the background of the training;
            a checkpoint is complete when the first of them has renamed its folder.
    """

    def __init__(
        self, directory: Path, keep_last: int = 2, keep_every: int | None = None, ranks: Ranks = ONE_PROCESS
    ) -> None:
        self.directory, self.keep_last, self.keep_every, self.ranks = directory, keep_last, keep_every, ranks
        if ranks.first:
            remove_temporary(directory)
        self._saving: tuple[Path, Future[Any]] | None = None
        self._group: Any = None  # of the processes, for the thread that writes
        self._thread = ThreadPoolExecutor(1)  # of the first process, which completes checkpoints; started when used
        self._broken: dict[Path, str | None] = {}  # why each examined checkpoint is broken; None if it is not

    def save(
        self,
        step: int,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        progress: dict[str, Any],
    ) -> Path:
        """Write a checkpoint, then delete those that need not be kept. Several processes only start to write it.

        Args:
            step: the number of updates done.
            model: the model.
            optimizer: its optimizer.
            tokenizer: the tokenizer of the run.
            progress: plain values that :func:`restore` returns.

        Returns:
            the folder of the checkpoint.

        Raises:
            UserError: the checkpoint cannot be written; all earlier ones are as they were.
        """
        target = self.directory / f"step-{step:08d}"
        if self.ranks.size > 1:
            self._start_saving(target, step, model, optimizer, tokenizer, progress)
            return target
        state = {"optimizer": optimizer.state_dict(), "random": _random_state(), "progress": progress}
        try:
            with atomic_directory(target) as folder:
                model.save_pretrained(folder)
                tokenizer.save(folder)
                with open(folder / STATE_FILE, "wb") as file:  # given a path, torch hides the error of the disk
                    torch.save(state, file)
                write_manifest(folder, step=step)
        except Exception as error:  # each library has its own error for a full disk
            raise self._not_written(target, error) from error
        self._broken[target] = None
        self._prune()
        return target

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            UserError: it cannot be written; all earlier ones are as they were.
        """
        if self._saving is None:
            return
        (target, future), self._saving = self._saving, None
        try:
            future.result()
        except BaseException as error:  # the errors of torch.distributed.checkpoint are no Exceptions
            from tfla.train.distributed_checkpoint import cause

            if isinstance(error, KeyboardInterrupt):
                raise
            raise self._not_written(target, cause(error)) from cause(error)

    def raise_failure(self) -> None:
        """Raise the error of a checkpoint that was being written, as :meth:`finish` does, without waiting for it."""
        if self._saving is not None and self._saving[1].done():
            self.finish()

    def _start_saving(
        self,
        target: Path,
        step: int,
        model: LanguageModel,
        optimizer: torch.optim.Optimizer,
        tokenizer: Tokenizer,
        progress: dict[str, Any],
    ) -> None:
        """Start to write a checkpoint together with the other processes, after the one before it is complete."""
        from tfla.train.distributed_checkpoint import start_saving

        self.finish()
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        temporary = target.with_name(f"{TEMPORARY}{target.name}")

        def create() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

        try:
            self.ranks.ask_first(create)
            written = start_saving(temporary, model, optimizer, self._group)
        except OSError as error:
            raise self._not_written(target, error) from error
        state = {"random": _random_state(), "progress": dict(progress)}

        def complete() -> None:
            written.result()
            config = json.dumps(model.config.to_dict(), indent=2) + "\n"
            (temporary / CONFIG).write_text(config, encoding="utf-8")
            tokenizer.save(temporary)
            with open(temporary / STATE_FILE, "wb") as file:
                torch.save(state, file)
            write_manifest(temporary, step=step)
            publish_directory(temporary, target)
            self._broken[target] = None
            self._prune()

        self._saving = target, self._thread.submit(complete) if self.ranks.first else written

    def _not_written(self, target: Path, error: BaseException) -> UserError:
        """Return the error for a checkpoint that cannot be written."""
        why = reason_not_written(error, self.directory)
        return UserError(f"{target}: the checkpoint cannot be written: {why}; {self.last_good()}")

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint; None if there is no checkpoint. A notice names each newer broken one.

        Raises:
            UserError: all checkpoints are broken; the message names them and says why.
        """
        steps = _steps(self.directory)
        for _, path in reversed(steps):
            if self._is_complete(path):
                return path
        if not steps:
            return None
        found = "; ".join(f"{path.name}: {self._broken[path]}" for _, path in steps)
        raise UserError(
            f"{self.directory}: no checkpoint is complete, so the run cannot continue ({found}); "
            "take another run, or move this folder away to start from the beginning"
        )

    def last_good(self, contents: bool = True) -> str:
        """Return a phrase for error messages on the checkpoint from which the run would continue.

        Args:
            contents: as in :func:`latest_checkpoint`.
        """
        latest = latest_checkpoint(self.directory, contents)
        if latest is None:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {latest}; start again to continue from it"

    def _is_complete(self, path: Path) -> bool:
        """Return whether a checkpoint is complete; print a notice if not.

        The first comparison with its manifest is by digests, later ones are by sizes.
        """
        if self._broken.get(path) is None:
            self._broken[path] = verify_manifest(path, contents=path not in self._broken)
            if self._broken[path] is not None:
                notice(f"{path}: skipped: {self._broken[path]}")
        return self._broken[path] is None

    def _prune(self) -> None:
        """Delete the checkpoints that need not be kept."""
        kept = 0
        for step, path in reversed(_steps(self.directory)):
            if kept < self.keep_last:
                kept += self._is_complete(path)
            elif self.keep_every is None or step % self.keep_every:
                remove_directory(path)


def restore(
    path: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, ranks: Ranks = ONE_PROCESS
) -> tuple[int, dict[str, Any]]:
    """Load a checkpoint into a model, its optimizer and the global random generators.

    The checkpoint may be of one process or of several, and so may this run be.

    Returns:
        the step and the progress that were saved.

    Raises:
        UserError: a file cannot be read or does not fit the model.
    """
    from safetensors.torch import load_file

    try:
        state = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
        if "optimizer" not in state or ranks.size > 1:
            from tfla.train import distributed_checkpoint

            if "optimizer" not in state:
                distributed_checkpoint.load(path, model, optimizer)
            else:
                distributed_checkpoint.distribute(model, optimizer, load_file(path / WEIGHTS), state["optimizer"])
        else:
            # Weights are copied into the existing tensors: with their alignment every rounding is that of an unbroken
            # run.
            model.load_state_dict(load_file(path / WEIGHTS))
            optimizer.load_state_dict(state["optimizer"])
        _set_random_state(state["random"])
        return json.loads((path / MANIFEST).read_text())["step"], state["progress"]
    except BaseException as error:  # each library has its own errors, and some are no Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{path}: the checkpoint cannot be read: {reason(error)}") from error


def latest_checkpoint(directory: Path, contents: bool = True) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None; a notice names each newer broken one.

    Args:
        directory: the folder.
        contents: compare digests, which reads every file; False compares only sizes.
    """
    for _, path in reversed(_steps(directory)):
        broken = verify_manifest(path, contents)
        if broken is None:
            return path
        notice(f"{path}: skipped: {broken}")
    return None


def find_model(path: Path) -> Path:
    """Return the folder with the weights: of a run its newest checkpoint, else the checkpoint or saved model itself.

    Raises:
        UserError: the path is neither a run nor a checkpoint nor a saved model, or it is broken.
    """
    if (path / "checkpoints").is_dir():
        latest = latest_checkpoint(path / "checkpoints")
        if latest is None:
            raise UserError(f"{path}: a run without a complete checkpoint")
        return latest
    if not find_weights(path).is_file():
        if (path / "model.safetensors.index.json").is_file():
            return path  # the layout of another library, which the error on loading names
        raise UserError(f"{path}: neither a run nor a checkpoint nor a saved model")
    of_a_run = (path / MANIFEST).exists() or (path / STATE_FILE).exists()
    if of_a_run and (broken := verify_manifest(path)) is not None:
        raise UserError(f"{path}: {broken}")
    return path


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of all checkpoints in a folder, in order."""
    found = [(path.name.removeprefix("step-"), path) for path in directory.glob("step-*")]
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def _random_state() -> dict[str, Any]:
    """Return the states of the global random generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    """Set the global random generators to the states that :func:`_random_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
