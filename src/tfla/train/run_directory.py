"""The folder of a run: one process at a time, one configuration for good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tfla.nn.files import write_atomically
from tfla.train.config import FREE, TrainConfig, differences, from_json, to_json
from tfla.train.messages import UserError, notice, reason
from tfla.train.storage import clear_temporary

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
