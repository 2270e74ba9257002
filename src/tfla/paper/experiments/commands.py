"""The command `tfla experiment`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfla._util.errors import wrong_word
from tfla._util.parsing import parse
from tfla.paper.evidence import plans as evidence
from tfla.paper.experiments.plans import EXPERIMENTS


def usage() -> str:
    """Return the text of `tfla experiment --help`."""
    names = {name: e.title for name, e in EXPERIMENTS.items()} | {"all": "all of the paper's above"}
    names |= {name: e.title for name, e in evidence.EXPERIMENTS.items()}
    lines = [f"  {name:<10}{text}" for name, text in names.items()]
    return "\n".join(
        ["usage: tfla experiment NAME [options]", "", *lines, "", "tfla experiment NAME --help lists the options."]
    )


def experiment(args: Sequence[str]) -> int:
    """Run `tfla experiment NAME`; return the exit code."""
    name, rest = (args[0], list(args[1:])) if args else ("", [])
    if name in ("-h", "--help", ""):
        print(usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    if name not in ("all", *EXPERIMENTS, *evidence.EXPERIMENTS):
        return wrong_word("tfla experiment", name, "experiment", usage())
    if name in evidence.EXPERIMENTS:
        from tfla.paper.evidence.run import EvidenceConfig
        from tfla.paper.evidence.run import run as run_evidence

        target, failed = run_evidence(name, parse(EvidenceConfig, rest, f"tfla experiment {name}"))
        print(f"wrote {target}; tfla analyze evidence --{name} {target} draws it")
        return 1 if failed else 0
    from tfla.paper.experiments.run import ExperimentConfig, run

    config = parse(ExperimentConfig, rest, f"tfla experiment {name}")
    target = run(name, config)
    print(f"wrote {target}; tfla analyze training --training {target} draws it")
    return 0
