"""The options of `tfla bench gpu`, parsed with the standard library alone, since GPU machines may lack packages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tfla._util.parsing import check_paths, path_option
from tfla.bench.suites import SUITES
from tfla.measure.timing import Sampling

N = TypeVar("N", int, float)


@dataclass
class GpuBench:
    """The options of `tfla bench gpu`; :func:`parse` has the help of each."""

    suite: str
    only: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    baselines: bool = True
    repeats: int = 30
    warmup: int = 10
    pause: float = 0.02
    patience: float = 3.0
    sustained: float = 1.0
    sustained_everywhere: bool = False
    limit: float = 120.0
    budget: float = 540.0
    device: str = "cuda"
    out: Path | None = None

    @property
    def sampling(self) -> Sampling:
        """The sampling of one call."""
        return Sampling(self.repeats, self.warmup, self.pause, self.patience, self.sustained)


LARGEST = 2**31 - 1


def count(text: str) -> int:
    """Parse a number of at least 1."""
    return _within(int(text), 1)


def count_or_none(text: str) -> int:
    """Parse a number of at least 0."""
    return _within(int(text), 0)


def seconds(text: str) -> float:
    """Parse a time in seconds, at least 0."""
    return _within(float(text), 0.0)


def _within(value: N, low: N) -> N:
    """Return a number that is in range; argparse reports the error otherwise."""
    if not low <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"got {value}, expected from {low} to {LARGEST}")
    return value


def parse(args: Sequence[str], prog: str) -> GpuBench:
    """Parse the arguments and return the options."""
    parser = argparse.ArgumentParser(prog, description="The paper's setups on this GPU.")

    def add(name: str, text: str, kind: Callable[[str], Any] = str, **more: Any) -> None:
        """Add an option with the default of its field."""
        default = getattr(GpuBench, name.replace("-", "_"))
        text += f" (default: {default})" if default not in ((), None) else ""
        parser.add_argument(f"--{name}", type=kind, default=default, help=text, **more)

    parser.add_argument("suite", choices=list(SUITES), help="; ".join(f"{k}: {s.title}" for k, s in SUITES.items()))
    add("only", "implementations whose name contains one of these", nargs="+", metavar="NAME")
    add("lengths", "values of the suite's axis: T, chunk size, head dim or batch", count, nargs="+", metavar="N")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false", help="time this library alone")
    # The name of the option before.
    parser.add_argument("--no-peers", dest="baselines", action="store_false", help=argparse.SUPPRESS)
    add("repeats", "samples of a call", count)
    add("warmup", "calls before the samples", count_or_none)
    add("pause", "seconds of rest before a sample", seconds)
    add("patience", "seconds of samples after which five are enough", seconds)
    add("sustained", "seconds of the sustained run; 0 for none", seconds)
    parser.add_argument(
        "--sustained-everywhere", action="store_true", help="also where the suite leaves the sustained run out"
    )
    add("limit", "seconds after which one configuration is given up", seconds)
    add("budget", "seconds after which the run ends with what it has", seconds)
    add("device", "where to run")
    add("out", "write the rows as JSON here", path_option)
    values: dict[str, Any] = vars(parser.parse_args(args))
    values |= {name: tuple(values[name]) for name in ("only", "lengths")}
    config = GpuBench(**values)
    check_paths(config)
    return config
