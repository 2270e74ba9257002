"""`tfla bench cpu` and `tfla bench report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro

from tfla.bench import cpu, report

USAGE = """usage: tfla bench {cpu,report} [options]

  cpu     time the operator on this CPU beside its floor, attention and mlstm_kernels
  report  render benchmarks/results into docs/performance.md"""


def bench(args: Sequence[str]) -> int:
    """Run a benchmark; returns the exit code."""
    name, rest = (args[0], list(args[1:])) if args else ("", [])
    if name == "cpu":
        cpu.run(tyro.cli(cpu.CpuBench, args=rest, prog="tfla bench cpu", description="The operator on this CPU."))
    elif name == "report":
        report.run(tyro.cli(report.Report, args=rest, prog="tfla bench report", description="Tables for the docs."))
    else:
        print(USAGE, file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    return 0
