"""The command `tfla experiment`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfla.experiments.plans import EXPERIMENTS


def usage() -> str:
    """What `tfla experiment --help` prints."""
    names = {name: e.title for name, e in EXPERIMENTS.items()} | {"all": "all of them"}
    lines = [f"  {name:<8}{text}" for name, text in names.items()]
    return "\n".join(
        ["usage: tfla experiment NAME [options]", "", *lines, "", "tfla experiment NAME --help lists the options."]
    )


def experiment(args: Sequence[str]) -> int:
    """``tfla experiment NAME``; returns the exit code."""
    name, rest = (args[0], list(args[1:])) if args else ("", [])
    if name != "all" and name not in EXPERIMENTS:
        print(usage(), file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    import tyro

    from tfla.experiments.run import ExperimentConfig, run

    config = tyro.cli(ExperimentConfig, args=rest, prog=f"tfla experiment {name}")
    target = run(name, config)
    print(f"wrote {target}; tfla analyze training --training {target} draws it")
    return 0
