"""The runs in the file that `tfla experiment` writes, and their tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfla._util.errors import UserError, reason
from tfla.bench import schema
from tfla.paper.experiments.plans import EXPERIMENTS, LONGER, MIXERS, MLSTMS, SEEDS, Mixer, Variant
from tfla.paper.report_types import Options, Table

Row = dict[str, Any]
MEASURE = "tfla experiment all --size small --out benchmarks/results/training.json"
SETTLED, SPIKE = 20, 5  # steps at the start that have large norms anyway; times the running median
NAMES: dict[Mixer, str] = {"mlstm_exp": "mLSTMexp", "mlstm_sig": "mLSTMsig", "attention": "Llama (attention)"}


@dataclass
class Config(Options):
    """The options of `tfla analyze training`."""

    training: Path | None = None
    """The file that `tfla experiment` wrote; None is training.json among the stored measurements."""


class TrainingRuns:
    """The training runs of one file by variant."""

    def __init__(self, result: Row) -> None:
        self.result = result
        fields = Variant.__dataclass_fields__
        self.runs = {Variant(**{name: row[name] for name in fields}): row for row in result["runs"]}

    def trained(self, variant: Variant) -> Row | None:
        """Return the run of a variant that was trained to its end; None for others."""
        row = self.runs.get(variant)
        done = row is not None and "failed" not in row and bool(row.get("evals"))
        return row if row is not None and done and row["evals"][-1]["step"] == self.steps else None

    @property
    def steps(self) -> int:
        """Return the steps of a whole run."""
        return int(self.result["size"]["steps"])

    def at(self, variant: Variant, name: str, step: int) -> float | None:
        """Return bits_per_byte, perplexity or loss on the held-out part at that step; None where there is none."""
        row = self.runs.get(variant, {})
        return next((e[name] for e in row.get("evals", ()) if e["step"] == step and "failed" not in row), None)

    def last(self, variant: Variant, name: str) -> float | None:
        """Return the value of the last evaluation of a run that was trained to its end; None for others."""
        return self.at(variant, name, self.steps)

    def all_of(self, variants: Iterable[Variant], name: str = "bits_per_byte", step: int | None = None) -> list[float]:
        """Return the values of the variants that have one at that step; None is the last step."""
        return [x for v in variants if (x := self.at(v, name, self.steps if step is None else step)) is not None]

    def reached(self, variants: Iterable[Variant]) -> int:
        """Return the step at which variants are compared.

        It is the last step where a run got there, else the last evaluation that all evaluated runs have, else 0.
        """
        steps = [{e["step"] for e in self.runs.get(v, {}).get("evals", ()) if e["step"]} for v in variants]
        evaluated = [found for found in steps if found]
        if any(self.steps in found for found in evaluated):
            return self.steps
        return max(set.intersection(*evaluated), default=0) if evaluated else 0

    @property
    def where(self) -> str:
        """Return the setting of the runs as text: model, data, device and date."""
        size, env = self.result["size"], self.result["environment"]
        tokens = size["steps"] * size["batch_size"] * size["context"]
        amount = f"{tokens / 1e6:.1f} million" if tokens >= 1e6 else f"{tokens:,}"
        blocks = f"{size['num_blocks']} block{'s' * (size['num_blocks'] > 1)}"
        return (
            f"{blocks} of width {size['d_model']}, {amount} bytes of Python's standard library, {env['device']}, "
            f"{env['date']}"
        )


def load(config: Config) -> TrainingRuns | None:
    """Return the training runs of the options' file; None where there is no file.

    Raises:
        UserError: the file does not hold training runs, or the options name a file that does not exist.
    """
    path = config.training or config.results / "training.json"
    if not path.exists() and config.training is None:
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or result.get("kind") != "training":
            raise ValueError("not what tfla experiment writes")
        _check(result)
        return TrainingRuns(result)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"training: {path} cannot be read: {reason(error)}") from error
    except KeyError as error:
        raise UserError(f"training: {path} cannot be read: there is no {error.args[0]!r}") from error


def _check(result: Row) -> None:
    """Raise ValueError where a field that figures and claims need is missing or has a wrong type."""
    objects = dict.fromkeys(("size", "environment", "config"), schema.OBJECT)
    schema.check_fields(result, "", objects | {"runs": schema.list_of(schema.OBJECT)})
    schema.check_fields(result["size"], "size.", schema.SIZE)
    schema.check_fields(result["environment"], "environment.", schema.ENVIRONMENT)
    schema.check_fields(result["config"], "config.", {"optim": schema.OBJECT})
    schema.check_fields(result["config"]["optim"], "config.optim.", {"clip": schema.RATE})
    for n, row in enumerate(result["runs"]):
        needed = {name: kind for name, kind in schema.RUN.items() if name != "failed"} if "evals" in row else {}
        schema.check_fields(row, f"runs[{n}].", needed, schema.RUN)
        for m, evaluation in enumerate(row.get("evals", ())):
            schema.check_fields(evaluation, f"runs[{n}].evals[{m}].", schema.EVALUATION)


def mean_text(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean as text, with the standard deviation where there are several values."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def running_median(values: list[float], width: int = 21) -> list[float]:
    """Return the median of the values around each value."""
    half = width // 2
    return [statistics.median(values[max(0, n - half) : n + half + 1]) for n in range(len(values))]


def spikes(norms: list[float], above: float = SPIKE) -> list[float]:
    """Return the gradient norms after the first SETTLED steps that are above that multiple of their running median."""
    usual = running_median(norms)
    return [x for n, x in enumerate(norms) if n >= SETTLED and x > above * usual[n]]


def seeds(variant: Variant) -> tuple[Variant, ...]:
    """Return the variant with each of the seeds."""
    return tuple(replace(variant, seed=seed) for seed in SEEDS)


def spread(found: TrainingRuns) -> float:
    """Return the standard deviation over the seeds of the default mLSTMexp; nan with fewer than two."""
    values = found.all_of(seeds(Variant("mlstm_exp")))
    return statistics.stdev(values) if len(values) > 1 else float("nan")


@dataclass(frozen=True)
class Line:
    """A row of a table: its label, the mixer that sets its color, and its runs."""

    label: str
    mixer: Mixer
    variants: tuple[Variant, ...]


def reached(found: TrainingRuns, lines: Iterable[Line]) -> int:
    """Return the step at which the runs of a table are compared."""
    return found.reached(v for line in lines for v in line.variants)


def title_of(name: str, found: TrainingRuns, step: int) -> str:
    """Return the title, with the step where that is not the last."""
    return name if step == found.steps else f"{name}; after {step} of {found.steps} steps"


TABLES: dict[str, list[Line]] = {
    "Table 2: by heads": [
        Line(f"{NAMES[mixer]}, {heads} heads", mixer, seeds(Variant(mixer, heads=heads)))
        for heads in (2, 4) for mixer in MIXERS
    ],
    f"Table 5: {LONGER} times the context": [
        Line(NAMES[mixer], mixer, seeds(Variant(mixer, longer=LONGER))) for mixer in MIXERS
    ],
    "Table 6: input gate": [
        Line(f"{NAMES[mixer]}, {'learnable' if trainable else 'fixed'}", mixer, (Variant(mixer, trainable=trainable),))
        for mixer in MLSTMS for trainable in (True, False)
    ],
    "Table 3: backends, 1 head": [
        Line(f"{NAMES[v.mixer]}, {v.backend}", v.mixer, (v,)) for v in EXPERIMENTS["table3"].variants
    ],
}  # fmt: skip


def table_of(found: TrainingRuns) -> Table:
    """Return the rows of all tables: bits per byte and perplexity, with their standard deviations over seeds."""
    rows = []
    for name, lines in TABLES.items():
        step = reached(found, lines)
        for line in lines:
            bits, perplexity = (found.all_of(line.variants, x, step) for x in ("bits_per_byte", "perplexity"))
            if bits and step:
                label = title_of(name, found, step).partition(": ")
                parameters = next(found.runs[v]["parameters"] for v in line.variants if found.at(v, "perplexity", step))
                rows.append([
                    f"{label[0]}, {label[2]}", line.label, f"{parameters / 1e6:.2f} million", str(len(bits)),
                    mean_text(bits), mean_text(perplexity),
                ])  # fmt: skip
    return Table(["", "model", "parameters", "seeds", "bits per byte", "perplexity"], rows)
