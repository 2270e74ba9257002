"""The result of tuning for one shape, as text and as an entry of the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfla._util.markdown import table
from tfla.measure.problem import Problem
from tfla.ops.gates import InputGate
from tfla.ops.tuned import Entry
from tfla.tune.config import TuneConfig
from tfla.tune.measure import Measured
from tfla.tune.plan import duration, gib
from tfla.tune.predict import Candidate, Machine


@dataclass(frozen=True)
class Tuned:
    """The result of tuning for one shape."""

    problem: Problem
    gate: InputGate
    candidates: list[Candidate]
    measured: list[Measured]
    default: tuple[str, int]
    winner: Candidate | Measured | None
    left_out: list[Candidate] = field(default_factory=list)
    """The candidates for which the budget left no time."""

    @property
    def compared(self) -> bool:
        """True where more than one candidate was measured, or there is only one."""
        return len(self.measured) > 1 or not self.left_out

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that won."""
        return self.winner.candidate if isinstance(self.winner, Measured) else self.winner

    def text(self, machine: Machine, config: TuneConfig) -> str:
        """Return a table of all candidates, and lines on the winner and on candidates that were not measured."""
        p, found = self.problem, {(m.candidate.kernel, m.candidate.chunk_size): m for m in self.measured}
        rows = []
        for c in self.candidates:
            m = found.get((c.kernel, c.chunk_size))
            labels = {"default": (c.kernel, c.chunk_size) == self.default, "best": c == self.chosen}
            label = ", ".join(name for name, there in labels.items() if there)
            rows.append([
                c.implementation, f"{c.chunk_size:,}", f"{c.seconds * 1e3:.3f}", gib(c.peak_bytes),
                "-" if m is None else m.error or f"{m.seconds * 1e3:.3f}",
                "-" if m is None or m.peak_bytes is None else gib(m.peak_bytes), label,
            ])  # fmt: skip
        header = ["implementation", "chunk size", "predicted ms", "predicted GiB", "measured ms", "measured GiB", ""]
        lines = [
            f"mLSTM{self.gate[:3]} on {machine.name}, {p.dtype}: B {p.B}, T {p.T:,}, {p.H} heads, dqk {p.dqk}, "
            f"dhv {p.dhv}; forward and backward, memory beyond the inputs",
            "", table(header, rows), "",
        ]  # fmt: skip
        if self.left_out:
            names = "; ".join(f"{c.implementation}, chunk size {c.chunk_size:,}" for c in self.left_out)
            lines += [f"not measured within the budget of {duration(config.budget)} (--budget): {names}", ""]
        if self.winner is None:
            return "\n".join([*lines, self.why_not(config)])
        if self.left_out and not self.compared:
            return "\n".join([*lines, "nothing is kept: only one candidate was measured"])
        best = self.chosen
        assert best is not None
        said = f"best: {best.implementation}, chunk size {best.chunk_size:,}"
        base = found.get(self.default)
        if isinstance(self.winner, Measured) and base is not None and base.error is None:
            said += f", {base.seconds / self.winner.seconds:.2f} times as fast as the default, {self.default[1]:,}"
        return "\n".join([*lines, said if self.measured else said + ", by prediction alone"])

    def why_not(self, config: TuneConfig) -> str:
        """Return why there is no winner."""
        if self.left_out and not self.measured:
            return "nothing is kept: nothing was measured"
        if self.measured and all(m.error is not None for m in self.measured):
            return f"nothing is kept: no candidate could be measured: {self.measured[0].error}"
        return f"nothing is within {gib(config.limit or 0)} GiB"

    def row(self, machine: Machine, config: TuneConfig) -> dict[str, Any]:
        """Return the winner as a row of the file: its entry, and how it was measured."""
        assert isinstance(self.winner, Measured)
        p, best = self.problem, self.winner.candidate
        found = {(m.candidate.kernel, m.candidate.chunk_size): m for m in self.measured}
        base = found.get(self.default)
        return Entry(
            machine.name, best.backend, p.dtype, self.gate == "exp", p.B, p.T, p.H, p.dqk, p.dhv, best.kernel,
            best.chunk_size, config.kernel is not None,
        )._asdict() | {
            "seconds": self.winner.seconds, "peak_bytes": self.winner.peak_bytes, "memory_limit": config.limit,
            "default": list(self.default), "default_seconds": None if base is None or base.error else base.seconds,
        }  # fmt: skip
