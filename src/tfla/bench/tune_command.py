"""The command `tfla tune`: tuning for a shape, for the shapes of benchmark suites, or from stored results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tfla._util import outputs
from tfla._util.errors import UserError
from tfla._util.parsing import parse
from tfla.bench.suites import SUITES
from tfla.bench.tuned_entries import entries
from tfla.measure.problem import Problem
from tfla.ops.tuned import user_file
from tfla.tune import run as tuning
from tfla.tune import store
from tfla.tune.config import TuneConfig


@dataclass(frozen=True)
class TuneOptions(TuneConfig):
    """Find the kernel and the chunk size for a shape and keep them for calls with chunk_size=None.

    All candidates are predicted; the few that may win are measured, forward and backward together. A shape that has an
    entry is measured again only with --again.
    """

    suite: tuple[str, ...] = ()
    """Suites of `tfla bench gpu` whose shapes are tuned, in place of the shape above."""
    stored: Path | None = None
    """Folder of results of `tfla bench gpu` whose winners are stored; nothing is measured."""

    @property
    def shapes(self) -> list[Problem]:
        """The shapes of the suites, or the shape of the options where no suite is named."""
        if not self.suite:
            return super().shapes
        return [
            replace(suite.problem(entry, x, "cuda"), chunk_size=None)
            for suite in map(SUITES.__getitem__, self.suite) for x in suite.xs for entry in suite.entries if entry.ours
        ]  # fmt: skip

    def check(self) -> None:
        """Raise UserError where a value is out of range; the message names it."""
        super().check()
        for name in self.suite:
            if name not in SUITES or name == "decode":
                allowed = ", ".join(s for s in SUITES if s != "decode")
                raise UserError(f"suite: got {name!r}, allowed are {allowed}")


def run(config: TuneOptions) -> int:
    """Run :func:`tfla.tune.run.run`, or store the winners of stored results; return the exit code.

    Raises:
        UserError: an option does not fit, or the file cannot be written.
    """
    if config.stored is None:
        return tuning.run(config)
    config.check()
    file = config.file or user_file()
    outputs.check_file("file", file)
    return _keep_stored(config.stored, file)


def _keep_stored(folder: Path, file: Path) -> int:
    """Store the winners of stored results and return the exit code."""
    if not folder.is_dir():
        raise UserError(f"stored: got {str(folder)!r}, expected a folder of results of `tfla bench gpu`")
    found = entries(folder)
    if not found:
        raise UserError(f"stored: {folder} has no results in which several kernels or chunk sizes were timed")
    store.add(file, found)
    print(f"{len(found)} shapes of {folder} kept in {file}")
    return 0


def tune(args: Sequence[str]) -> int:
    """Run `tfla tune` with these arguments; return the exit code."""
    return run(parse(TuneOptions, args, "tfla tune"))
