"""The subjects of `tfla analyze`, in the order of the report."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from tfla.analysis.frame import Figure, Missing, Options


class Subject(NamedTuple):
    """A module with ``Config`` and ``figures``, its heading in the report, one line of help."""

    module: str
    title: str
    help: str

    @property
    def config(self) -> type[Options]:
        found: type[Options] = importlib.import_module(self.module).Config
        return found

    def draw(self, config: Options) -> list[Figure | Missing]:
        """Draws and writes its figures, in the style of all."""
        from matplotlib import rc_context

        from tfla.analysis.style import STYLE

        figures: Callable[[Options], list[Figure | Missing]] = importlib.import_module(self.module).figures
        with rc_context(STYLE):
            return figures(config)


SUBJECTS: dict[str, Subject] = {
    "counting": Subject("tfla.analysis.counting", "Counting", "FLOPs and bytes of every form (Figures 15, 16)"),
    "theory": Subject("tfla.analysis.theory", "Theory of the runtime", "runtime by chunk size, GPU (Figures 17 to 22)"),
    "benchmarks": Subject("tfla.analysis.benchmarks", "Benchmarks", "stored measurements (Figures 4, 5, 12, 13, 14)"),
}
