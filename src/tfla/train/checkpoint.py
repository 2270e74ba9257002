"""Checkpoints: everything a run needs to go on, in a folder that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch

from tfla.nn import LanguageModel
from tfla.train.messages import UserError, notice, reason
from tfla.train.storage import clear_temporary, remove_directory, whole_directory
from tfla.train.tokenizer import Tokenizer

MANIFEST, STATE = "manifest.json", "training.pt"


class Checkpoints:
    """The checkpoints of one run, ``step-00000100`` and so on.

    Args:
        directory: where they are; made if needed.
        keep_last: how many of the newest stay.
        keep_every: those of multiples of this step stay for good.
    """

    def __init__(self, directory: Path, keep_last: int = 2, keep_every: int | None = None) -> None:
        self.directory, self.keep_last, self.keep_every = directory, keep_last, keep_every
        directory.mkdir(parents=True, exist_ok=True)
        clear_temporary(directory)

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
                _write_manifest(folder, step)
        except Exception as error:  # each of the libraries has its own kind for a full disk
            raise UserError(
                f"{target}: the checkpoint cannot be written: {reason(error)}; {self.last_good()}"
            ) from error
        self._prune()
        return target

    def last_good(self) -> str:
        """Half a sentence on where the run would go on."""
        latest = latest_checkpoint(self.directory)
        if latest is None:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {latest}; start again to continue from it"

    def _prune(self) -> None:
        found = _steps(self.directory)
        for step, path in found[: -self.keep_last]:
            if self.keep_every is None or step % self.keep_every:
                remove_directory(path)


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint in a folder that is whole; broken ones are passed over with a notice."""
    for _, path in reversed(_steps(directory)):
        broken = what_is_broken(path)
        if broken is None:
            return path
        notice(f"{path}: passed over: {broken}")
    return None


def what_is_broken(path: Path) -> str | None:
    """None for a checkpoint that is just as it was written, else what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if _sha256(path / name) != entry["sha256"]:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} or a file that it lists cannot be read: {reason(error)}"
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
        raise UserError(f"{path}: neither a run nor a checkpoint nor a saved model")
    of_a_run = (path / MANIFEST).exists() or (path / STATE).exists()
    if of_a_run and (broken := what_is_broken(path)) is not None:
        raise UserError(f"{path}: {broken}")
    return path


def _steps(directory: Path) -> list[tuple[int, Path]]:
    found = [(path.name.removeprefix("step-"), path) for path in directory.glob("step-*")]
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def _write_manifest(folder: Path, step: int) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir()) if p.is_file()}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
