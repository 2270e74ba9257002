"""The folder of a run: its lock, its configuration and the names of its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tfla._util.errors import UserError, notice, reason
from tfla._util.files import remove_temporary, write_atomically
from tfla.train.config import OF_FSDP, RESUMABLE_FIELDS, TrainConfig, differences, from_json, to_json

CONFIG_FILE = "config.json"
TOKENS_FOLDER = "tokens"
CHECKPOINTS_FOLDER = "checkpoints"
CURVES_FILE = "curves.png"
LOCK_FILE = "lock"
PATIENCE = 0.2  # seconds to wait for the lock: a run that fails removes the file, and the next one tries again


@contextmanager
def open_run(config: TrainConfig) -> Iterator[Path]:
    """Create the folder ``config.run`` if needed, lock it for this process, and yield it.

    A run that fails before its configuration is written leaves the folder as it was.

    Raises:
        UserError: another process trains there, or the folder cannot be written.
    """
    directory = config.run
    try:
        created = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / LOCK_FILE):
            remove_temporary(directory)
            try:
                yield directory
            except BaseException:
                if not (directory / CONFIG_FILE).exists():
                    (directory / LOCK_FILE).unlink(missing_ok=True)
                    with suppress(OSError):  # files of others stay
                        for path in created:
                            path.rmdir()
                raise
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {reason(error)}") from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock of the operating system, which is released however the process ends."""
    lock = FileLock(path, timeout=PATIENCE)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"{path.parent}: another process is training there") from error
    try:
        yield
    finally:
        lock.release()


def read_run_config(directory: Path) -> TrainConfig | None:
    """Return the configuration that a run was started with; None if the folder holds no run.

    Raises:
        UserError: the configuration cannot be read.
    """
    path = directory / CONFIG_FILE
    try:
        return from_json(TrainConfig, path.read_text()) if path.exists() else None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error


def check_changes(old: TrainConfig | None, new: TrainConfig, step: int | None, *, sharing: bool = True) -> None:
    """Compare the configuration of a run with the one that it was started with.

    Args:
        old: the configuration that it was started with; None if the run is new.
        new: the configuration of this start.
        step: the step of its newest checkpoint. Without a checkpoint every option may change.
        sharing: processes share the sequences or their steps. Options of their gathers mean nothing without.

    Raises:
        UserError: the new configuration could not have led to the checkpoint; the message names the options.
    """
    if old is None or step is None:
        return
    fixed = [
        f"{n} is {a}, not {b}"
        for n, (a, b) in differences(old, new).items()
        if n not in RESUMABLE_FIELDS and n != "steps" and (sharing or n.removeprefix("parallel.") not in OF_FSDP)
    ]
    if fixed:
        raise UserError(f"{new.run}: this run's {'; '.join(fixed)}. Take another --run, or the run's own values")
    if new.steps < step:
        raise UserError(f"steps: got {new.steps}, expected at least {step}, which this run has done already")


def write_run_config(old: TrainConfig | None, new: TrainConfig) -> None:
    """Write the configuration of a run into its folder, and print a notice for each option that has changed."""
    for name, (a, b) in ({} if old is None else differences(old, new)).items():
        if name != "run":
            notice(f"{name}: {b} from here on, {a} before")
    write_atomically(new.run / CONFIG_FILE, lambda path: path.write_text(to_json(new)))
