"""The sections of `tfla analyze`, in the order of the report."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple

from tfla.paper.report_types import Claim, Figure, Missing, Options


class Section(NamedTuple):
    """A section: its module with ``Config``, ``figures`` and possibly ``claims``, its heading, one line of help."""

    module: str
    title: str
    help: str

    @property
    def config(self) -> type[Options]:
        """Return the class of its options."""
        found: type[Options] = importlib.import_module(self.module).Config
        return found

    def defaults(self, config: Options) -> Options:
        """Return its options, with those that all sections share taken from the config."""
        return self.config(**{f.name: getattr(config, f.name) for f in fields(Options)})

    def draw(self, config: Options) -> list[Figure | Missing]:
        """Draw and write its figures, in the style of all sections."""
        from matplotlib import rc_context

        from tfla.paper.style import STYLE

        figures: Callable[[Options], list[Figure | Missing]] = importlib.import_module(self.module).figures
        with rc_context(STYLE):
            return figures(config)

    def claims(self, config: Options) -> list[Claim]:
        """Return its claims; none where the paper claims nothing about it."""
        found = getattr(importlib.import_module(self.module), "claims", None)
        return found(config) if found is not None else []


SECTIONS: dict[str, Section] = {
    "counting": Section("tfla.paper.counting", "Counting", "FLOPs and bytes of every algorithm (Figures 15, 16)"),
    "theory": Section("tfla.paper.theory", "Theory of the runtime", "runtime by chunk size, GPU (Figures 17 to 22)"),
    "delta": Section("tfla.paper.delta", "The delta rule", "FLOPs, bytes and times of the delta rule, KDA and GLA"),
    "benchmarks": Section("tfla.paper.benchmarks", "Benchmarks", "stored measurements (Figures 4, 5, 12, 13, 14)"),
    "transfer": Section("tfla.paper.transfer", "Transfer behavior", "gain before and after the norm (Figures 3, 6, 7)"),
    "numerics": Section("tfla.paper.numerics.figures", "Numerics", "stored errors against float64, beside rounding"),
    "training": Section("tfla.paper.training", "Training", "small training runs (Tables 2, 3, 5, 6; Figures 8 to 11)"),
    "evidence": Section("tfla.paper.evidence.figures", "What models can do", "recall, state tracking, length, needles"),
    "scale": Section("tfla.paper.scale.figures", "Many GPUs", "time and memory of a step on 8 to 1,024 GPUs, a model"),
}
