"""The folder of a run: one process at a time, one configuration for good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfla.nn.files import write_atomically
from tfla.train.config import FREE, TrainConfig, differences, from_json, to_json
from tfla.train.messages import UserError, notice, reason
from tfla.train.storage import clear_temporary

CONFIG, TOKENS, CHECKPOINTS, CURVES = "config.json", "tokens", "checkpoints", "curves.png"


def read_config(directory: Path) -> TrainConfig | None:
    """The configuration that a run was started with; None if the folder is no run yet.

    Raises:
        UserError: it is there but cannot be read.
    """
    path = directory / CONFIG
    if not path.exists():
        return None
    try:
        return from_json(TrainConfig, path.read_text())
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error


@contextmanager
def open_run(config: TrainConfig) -> Iterator[Path]:
    """The folder config.run, made if needed, for this process alone.

    Raises:
        UserError: another process trains there, the folder cannot be written, or the run was started with another
            configuration; the message says what differs.
    """
    directory = config.run
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / "lock"):
            clear_temporary(directory)
            _settle_config(config, directory)
            yield directory
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {reason(error)}") from error


def _settle_config(config: TrainConfig, directory: Path) -> None:
    old = read_config(directory)
    if old is not None:
        changed = differences(old, config)
        fixed = [f"{name} is {a}, not {b}" for name, (a, b) in changed.items() if name not in FREE]
        if fixed:
            raise UserError(f"{directory}: this run's {'; '.join(fixed)}. Take another --run, or the run's own values")
        for name, (a, b) in changed.items():
            if name != "run":
                notice(f"{name}: {b} from here on, {a} before")
    write_atomically(directory / CONFIG, lambda path: path.write_text(to_json(config)))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by the operating system, which lets go of it however the process ends."""
    with open(path, "a") as file:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{path.parent}: another process is training there") from error
        yield
