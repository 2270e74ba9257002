"""The commands `tfla bench cpu`, `tfla bench gpu`, `tfla bench invariance` and `tfla bench report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfla._util.errors import wrong_word
from tfla._util.parsing import parse

USAGE = """usage: tfla bench {cpu,gpu,invariance,report} [options]

  cpu         time the operator on this CPU beside its roofline, attention and mlstm_kernels
  gpu         time the paper's setups on this GPU beside their rooflines and other libraries' kernels
  invariance  time a model whose outputs depend on no other sequence of the batch
  report      render benchmarks/results into docs/performance.md and its figures"""


def bench(args: Sequence[str]) -> int:
    """Run the benchmark that the arguments name and return the exit code."""
    name, rest = (args[0], list(args[1:])) if args else ("", [])
    if name == "cpu":
        from tfla.bench import cpu

        cpu.run(parse(cpu.CpuBench, rest, "tfla bench cpu", description="The operator on this CPU."))
    elif name == "gpu":
        from tfla.bench import gpu

        return gpu.main(rest, "tfla bench gpu")
    elif name == "invariance":
        from tfla.bench import batch_invariance

        text = "What batch_invariant costs."
        options = parse(batch_invariance.InvarianceBench, rest, "tfla bench invariance", description=text)
        batch_invariance.run(options)
    elif name == "report":
        from tfla.bench import report

        report.run(parse(report.Report, rest, "tfla bench report", description="Tables for the docs."))
    elif name in ("-h", "--help", ""):
        print(USAGE, file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    else:
        return wrong_word("tfla bench", name, "benchmark", USAGE)
    return 0
