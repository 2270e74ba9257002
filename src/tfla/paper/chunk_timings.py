"""The stored times of the forward of mLSTMsig by chunk size, in the setup of Figures 5, 17, 19, 20 and 21."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfla.bench.results import check_gpu_result, read
from tfla.measure.accelerators import Accelerator, of_result
from tfla.paper.report_types import Missing, Options

SUITE = "fig5"
SHAPE = {"T": 8192, "dqk": 256, "dhv": 512}  # the paper's 7B model
BATCH, H = 8, 8
TILE = 64  # a chunk of one tile is the paper's limit_chunk


@dataclass
class ChunkTimings:
    """The seconds of each measured implementation by chunk size."""

    where: str = ""
    accelerator: Accelerator | None = None
    """The GPU with the rates that were measured in the same run."""
    curves: dict[str, dict[int, float]] = field(default_factory=dict)

    @property
    def quadratic(self) -> dict[str, dict[int, float]]:
        """Return the curves of the kernels that are quadratic inside a chunk, as the paper's are."""
        return {name: curve for name, curve in self.curves.items() if name.endswith(" tfla") or "xl_chunk" in name}


def sig_forward(config: Options) -> ChunkTimings:
    """Return the stored times; no curves where there is no stored result."""
    path = config.results / f"{SUITE}.json"
    if not path.exists():
        return ChunkTimings()
    result = read(path)
    check_gpu_result(path, result, complete=True)
    env = result["environment"]
    found = ChunkTimings(f"{env['device']}, {env['date']}", of_result(result))
    for row in result["rows"]:
        if row.get("direction") == "forward" and "mLSTMsig" in row["name"] and "seconds" in row:
            name = (
                row["name"]
                if "," in row["name"] or "implementation" not in row
                else f"{row['name']}, {row['implementation']}"
            )
            found.curves.setdefault(name, {})[row["x"]] = row["seconds"]
    return found


def missing_figure(config: Options, name: str, title: str) -> Missing:
    """Return the entry of a figure that needs these times where they are missing."""
    path = config.results / f"{SUITE}.json"
    return Missing(name, title, f"no measurement in {path}: `tfla bench gpu {SUITE} --out {path}`")
