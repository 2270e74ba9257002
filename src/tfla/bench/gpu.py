"""The command `tfla bench gpu SUITE`, which times the paper's setups on this GPU in one run.

Every implementation runs in a process of its own. `python -m tfla.bench.gpu SUITE` does the same and needs torch alone.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from typing import Any

import torch

from tfla._util.device import check_device
from tfla._util.errors import UserError
from tfla._util.files import write_json
from tfla._util.outputs import check_file
from tfla.bench.entries import DELTA_FORMS, Entry
from tfla.bench.options import GpuBench, parse
from tfla.bench.suites import SUITES, Suite
from tfla.bench.worker_group import ask_together, dismiss_together, start_together
from tfla.bench.worker_pool import WorkerDied, WorkerPool
from tfla.measure.problem import FORWARD, STEP, Problem
from tfla.measure.roofline import (
    backward_bytes,
    backward_flops,
    delta_roofline_seconds,
    forward_bytes,
    forward_flops,
    roofline_seconds,
    step_bytes,
)
from tfla.measure.timing import Sampling

SAMPLING_SHARE = 0.6  # share of a configuration's time for samples; the rest is for warm-up and sustained run
COMPILING_SHARE = 0.4  # the largest share of the budget for compilation
AT_ONCE = max(8, (os.cpu_count() or 8) // 2)  # processes that compile at the same time; their tensors share the GPU
NOT_RUN = "not run: the budget was spent"
MAX_CRASHES = 2  # crashes in a row after which an implementation is not run any more
Row = dict[str, Any]


def installed(module: str) -> bool:
    """Return whether a module can be found; only its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def rooflines(problem: Problem, form: str, direction: str, rates: dict[str, dict[str, float]]) -> Row:
    """Return the roofline of a form at the rates of a rested and of a busy device."""
    H, dqk, dhv = problem.H, problem.dqk, problem.dhv
    normalizer = form.endswith("exp")
    if form in DELTA_FORMS:
        bounds = [
            delta_roofline_seconds(
                DELTA_FORMS[form], problem.B * problem.T, H, dqk, dhv, rates["gemm"][how], rates["copy"][how],
                backward=direction != FORWARD, itemsize=problem.itemsize,
            )
            for how in ("rested", "sustained")
        ]  # fmt: skip
        return {"floor_seconds": bounds[0], "sustained_floor_seconds": bounds[1]}
    if form.startswith("step"):
        flops, moved = 4 * H * dqk * dhv, step_bytes(H, dqk, dhv, normalizer)
    else:
        flops = forward_flops(problem.T, H, dqk, dhv)
        moved = forward_bytes(problem.T, H, dqk, dhv, problem.itemsize)
        if direction != FORWARD:
            flops += backward_flops(problem.T, H, dqk, dhv)
            moved += backward_bytes(problem.T, H, dqk, dhv, problem.itemsize, normalizer)
    rested, busy = (
        roofline_seconds(problem.B * flops, problem.B * moved, rates["gemm"][how], rates["copy"][how])
        for how in ("rested", "sustained")
    )
    return {"floor_seconds": rested, "sustained_floor_seconds": busy}


def named(entry: Entry) -> Row:
    """Return the fields of a row that name the implementation."""
    return {"name": entry.name} | ({"group": entry.group} if entry.group else {})


def row_text(row: Row) -> str:
    """Return a row as a line of text."""
    name = f"{row['name']}, {row['group']}" if "group" in row else row["name"]
    head = f"{row['x']:>7,}  {name:<44} {row['direction']:<20}" if "x" in row else f"{'':>9}{name:<44}"
    if "error" in row:
        return head + row["error"]
    parts = [f"{row['seconds'] * 1e3:>9.3f} ms"]
    parts.append(f"{row['ratio']:>8.2f} x roofline" if "ratio" in row else " " * 19)
    parts.append(f"{row['sustained_seconds'] * 1e3:>9.3f} ms sustained" if "sustained_seconds" in row else " " * 22)
    parts.append(f"{row['peak_bytes'] / 2**30:>6.2f} GiB" if "peak_bytes" in row else "")
    parts.append(f"{row['allocated_bytes'] / 2**30:>7.2f} GiB in all" if "allocated_bytes" in row else "")
    parts.append(f"{row['tokens_per_second']:>10,.0f} tokens/s" if "tokens_per_second" in row else "")
    return head + "".join(parts).rstrip()


class Run:
    """The run of one suite on one device."""

    def __init__(self, config: GpuBench, suite: Suite, say: Callable[[str], None]) -> None:
        self.config, self.suite, self.say = config, suite, say
        self.xs = config.lengths or suite.xs
        self.end = time.monotonic() + config.budget
        self.pool = WorkerPool()
        self.rates: dict[str, dict[str, float]] = {}
        self.waiting = 0  # configurations that remain to be timed
        self.defaults: dict[str, set[str]] = {}  # entry of backend=None -> backends and kernels that were chosen

    def sizes(self, entry: Entry) -> tuple[int, ...]:
        """Return the values on the axis at which an implementation is timed."""
        return tuple(x for x in self.xs if entry.xs is None or x in entry.xs)

    def left(self) -> float:
        """Return the seconds that are left of the budget."""
        return self.end - time.monotonic()

    def allowance(self) -> float:
        """Return the seconds that one configuration may take."""
        return max(1.0, min(self.config.limit, self.left()))

    def sampling(self) -> Sampling:
        """Return the sampling of the options, shorter where the budget would not suffice for all configurations."""
        share = self.left() / max(1, self.waiting) / len(self.suite.directions)
        return replace(
            self.config.sampling, patience=min(self.config.patience, max(0.1, SAMPLING_SHARE * share)),
            in_a_row=self.suite.in_a_row,
        )  # fmt: skip

    def sampling_together(self) -> Sampling:
        """Return a sampling with a fixed number of calls, since the processes wait for each other in every call."""
        return replace(
            self.config.sampling, repeats=min(self.config.repeats, self.suite.samples_together),
            warmup=min(self.config.warmup, 2), patience=math.inf, sustained=0.0, in_a_row=self.suite.in_a_row,
        )  # fmt: skip

    def ask(self, entry: Entry, x: int) -> Iterator[Row]:
        """Time a configuration in one process, or in as many as the entry needs, and yield its rows."""
        job = self.job(entry, x)
        if entry.processes == 1:
            return self.pool.of(entry.key).ask(job, self.allowance())
        job["sampling"] = asdict(self.sampling_together())
        return ask_together(self.pool, entry.key, entry.processes, job, self.allowance())

    def start(self, entry: Entry) -> None:
        """Start the processes of an entry, so that they import their modules while others are timed."""
        if entry.processes == 1:
            self.pool.of(entry.key)
        else:
            start_together(self.pool, entry.key, entry.processes)

    def dismiss(self, entry: Entry) -> None:
        """Stop the processes of an entry."""
        if entry.processes == 1:
            self.pool.dismiss(entry.key)
        else:
            dismiss_together(self.pool, entry.key, entry.processes)

    def job(self, entry: Entry, x: int, only_compile: bool = False) -> Row:
        """Return the job of one configuration, which is sent to a worker."""
        everywhere = self.config.sustained_everywhere or self.suite.sustained_at is None
        return {
            "kind": "time", "make": entry.make, "options": entry.options,
            "problem": asdict(self.suite.problem(entry, x, self.config.device)), "directions": self.suite.directions,
            "sampling": asdict(self.sampling()), "only_compile": only_compile, "host": self.suite.host,
            "sustained": everywhere or x in (self.suite.sustained_at or ()),
        }  # fmt: skip

    def machine(self, entries: list[Entry]) -> Row:
        """Measure the environment and the rates of the machine, in the worker of the first implementation.

        Where processes run an implementation together, the link between their devices is measured as well.
        """
        job = {"kind": "machine", "device": self.config.device, "sampling": asdict(self.config.sampling)}
        together = max(entry.processes for entry in entries)
        if together > 1:
            start_together(self.pool, "link", together)
        self.say("device copy and matrix product")
        (found,) = self.pool.of(entries[0].key).ask(job, self.config.limit)
        self.rates = found["rates"]
        if together > 1:
            self.say("link")
            job = {"kind": "link", "device": self.config.device}
            (link,) = ask_together(self.pool, "link", together, job, self.config.limit)
            dismiss_together(self.pool, "link", together)
            if "error" in link:
                raise RuntimeError(f"{self.config.device}: {link['error']}")
            self.rates["link"] = link["link"]
            found["environment"]["devices"] = together
        return found

    def compile(self, entries: list[Entry]) -> None:
        """Compile every kernel before the timing, many at a time.

        There is one process for each implementation, or for each of its configurations where those have kernels of
        their own. An error here occurs again in the timing, which reports it. The processes of other libraries are
        restarted for the timing, because autotuning beside other processes may choose a wrong configuration.
        """
        end = time.monotonic() + COMPILING_SHARE * self.config.budget

        def one(entry: Entry, xs: tuple[int, ...]) -> None:
            """Compile one implementation for some configurations, while there is time."""
            name = entry.key if entry.ours else f"{entry.key} {xs}"
            try:
                for x in xs:
                    if (left := end - time.monotonic()) > 0:
                        list(self.pool.of(name).ask(self.job(entry, x, only_compile=True), left))
            except WorkerDied:
                self.pool.dismiss(name)
            if not entry.ours:
                self.pool.dismiss(name)

        jobs = [(e, xs) for e in entries for xs in ([(x,) for x in self.sizes(e)] if e.each else [self.sizes(e)])]
        self.say("compiling")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(one, *job) for job in jobs]:
                done.result()

    def timed_rows(self, entry: Entry) -> Iterator[Row]:
        """Yield the rows of one implementation; a crash is a row too, after which a new process continues."""
        crashes: list[int] = []
        for x in self.sizes(entry):
            missing = [named(entry) | {"x": x, "direction": d} for d in self.suite.directions]
            if len(crashes) >= MAX_CRASHES:
                why = f"not run: its process ended at {' and '.join(f'{c:,}' for c in crashes)}"
                yield from (row | {"error": why} for row in missing)
                self.waiting -= 1
                continue
            if self.left() <= 0:
                yield from (row | {"error": NOT_RUN} for row in missing)
                self.waiting -= 1
                continue
            try:
                for found in self.ask(entry, x):
                    yield self.finish(entry, x, missing.pop(0) | found)
                    self.say(f"{entry.key}, {self.suite.axis} {x:,}")
                crashes.clear()
            except WorkerDied as died:
                self.dismiss(entry)
                if missing:
                    crashes.append(x)
                    yield missing.pop(0) | {"error": str(died)}
                yield from (row | {"error": "not run: its process had ended"} for row in missing)
            self.waiting -= 1
        self.dismiss(entry)

    def finish(self, entry: Entry, x: int, row: Row) -> Row:
        """Return the row with its sizes, its roofline and the ratio of its time to the roofline."""
        problem = self.suite.problem(entry, x, self.config.device)
        row |= {key: getattr(problem, key) for key in ("B", "T", "H", "dqk", "dhv")}
        if "error" not in row and entry.form is not None and not self.suite.host:
            floors = rooflines(problem, entry.form, row["direction"], self.rates)
            row |= {key: seconds / entry.processes for key, seconds in floors.items()}
            row["ratio"] = row["seconds"] / row["floor_seconds"]
        if "moved_bytes" in row:  # counted by the implementation itself
            for key, how in (("floor_seconds", "rested"), ("sustained_floor_seconds", "sustained")):
                row[key] = row["moved_bytes"] / self.rates["copy"][how]
            row["ratio"] = row["seconds"] / row["floor_seconds"]
        if "error" not in row and row["direction"] == STEP:
            row["tokens_per_second"] = problem.B * problem.T / row["seconds"]
        if "operator_seconds" in row:
            row["operator_share"] = row["operator_seconds"] / row["seconds"]
        if "implementation" in row:
            self.defaults.setdefault(entry.key, set()).add(row["implementation"])
        return row

    def repeats(self, entry: Entry) -> bool:
        """Return whether an entry has been timed already: `backend=None` chose its kernel at every size."""
        name, _, implementation = entry.name.rpartition(", ")
        return entry.ours and self.defaults.get(replace(entry, name=name).key) == {implementation}

    def rows(self, entries: list[Entry]) -> Iterator[Row]:
        """Yield all rows; while one implementation is timed, the process of the next one already imports."""
        there = [e for e in entries if e.needs is None or installed(e.needs)]
        self.waiting = sum(len(self.sizes(e)) for e in there)
        ahead = self.config.device != "cpu"
        if ahead and not self.suite.alone and len(there) > 1:
            self.compile(there)
        for entry in entries:
            if entry not in there:
                yield named(entry) | {"error": f"not installed ({entry.needs})"}
                continue
            if self.repeats(entry):
                self.pool.dismiss(entry.key)
                self.waiting -= len(self.sizes(entry))
                continue
            following = there[there.index(entry) + 1 :]
            if ahead and following and self.left() > 0:
                self.start(following[0])
            yield from self.timed_rows(entry)


def chosen(config: GpuBench, suite: Suite) -> list[Entry]:
    """Return the implementations of the suite that the options select.

    Raises:
        ValueError: none is selected; the message lists their names.
    """
    entries = [e for e in suite.entries if config.baselines or e.ours or e.make.endswith(":copy_state")]
    names = [e.key for e in entries]
    if config.only:
        entries = [e for e in entries if any(part.lower() in e.key.lower() for part in config.only)]
    if not entries:
        raise ValueError(f"only: got {', '.join(config.only)}; this suite has {'; '.join(names)}")
    return entries


def _status(text: str) -> None:
    """Show a line of status in place of the last one, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def run(config: GpuBench, suite: Suite | None = None) -> Row:
    """Run a suite: print each row when it is measured, write all rows to the file, and return them.

    Raises:
        ValueError: no suite or implementation has that name.
        RuntimeError: the device cannot be used.
    """
    if suite is None:
        if config.suite not in SUITES:
            raise ValueError(f"suite: got {config.suite!r}, allowed are {', '.join(SUITES)}")
        suite = SUITES[config.suite]
    entries, going = chosen(config, suite), Run(config, suite, _status)
    result: Row = {"suite": config.suite, "title": suite.title, "axis": suite.axis, "panels": suite.panels}
    result |= {"note": suite.note} if suite.note else {}
    with going.pool:
        try:
            result |= going.machine(entries)
        except WorkerDied as died:
            raise RuntimeError(f"{config.device}: {died}") from None
        result["config"] = {f.name: getattr(config, f.name) for f in fields(config)} | {"out": None}
        result["rows"] = []
        copy, gemm = (going.rates[name]["rested"] for name in ("copy", "gemm"))
        print(f"{suite.title}\n{result['environment']['device']}: copy {copy / 1e9:,.0f} GB/s, "
              f"matrix product {gemm / 1e12:,.1f} TFLOP/s", flush=True)  # fmt: skip
        for row in going.rows(entries):
            _status("")
            print(row_text(row), flush=True)
            result["rows"].append(row)
            if config.out is not None:
                write_json(config.out, result)
    return result


def main(args: Sequence[str] | None = None, prog: str = "python -m tfla.bench.gpu") -> int:
    """Run the command and return its exit code, 2 where an option is invalid or the device cannot be used."""
    config = parse(sys.argv[1:] if args is None else args, prog)
    try:
        if config.out is not None:
            check_file("out", config.out)
        chosen(config, SUITES[config.suite])
        if not (config.device.startswith("cuda:") or config.device == "cuda") or not torch.cuda.is_available():
            check_device(config.device)  # not for GPUs, whose memory is left to the processes that are timed
        run(config)
    except (UserError, ValueError, RuntimeError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
