"""`tfla tune`: one shape, or those of a benchmark suite."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch

from tfla.analysis import accelerators
from tfla.backends import BACKENDS, Backend, Inputs, select
from tfla.backends.hopper import takes
from tfla.bench.machine import environment
from tfla.bench.markdown import table
from tfla.bench.problem import Problem
from tfla.bench.suites import SUITES
from tfla.ops.gates import InputGate
from tfla.ops.tuned import Entry, device_name, user_file
from tfla.train.device import pick_device
from tfla.train.messages import UserError
from tfla.tune import store
from tfla.tune.choose import best, shortlist
from tfla.tune.measure import Measured, measured
from tfla.tune.predict import Candidate, Machine, chunk_sizes, predict
from tfla.tune.stored import entries

MOST = 3  # candidates of a kernel that are measured
PROCESSORS = {"V100": 80, "A100": 108, "H100": 132, "H200": 132, "B200": 148}  # multiprocessors, from data sheets


@dataclass(frozen=True)
class TuneConfig:
    """Find the kernel and the chunk size for a shape and keep them for calls with chunk_size=None.

    All candidates are predicted; the few that may win are measured, forward and backward together. A shape that has an
    entry is measured again only with --again.
    """

    batch: int = 8
    """Sequences."""
    length: int = 8192
    """Steps of a sequence, T."""
    heads: int = 16
    """Heads of q, k and v."""
    dqk: int = 128
    """Head dimension of q and k."""
    dhv: int = 256
    """Head dimension of v."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of q, k and v."""
    gate: Literal["exp", "sigmoid", "both"] = "exp"
    """The input gate."""
    suite: tuple[str, ...] = ()
    """Shapes of these suites of `tfla bench gpu` in place of the one above."""
    device: str = "auto"
    """auto is the GPU if there is one."""
    backend: str | None = None
    """None takes what the operator would take."""
    kernel: str | None = None
    """None compares the backend's kernels; one that is named is tuned for calls that name it."""
    memory_limit: float | None = None
    """GiB that forward and backward may take beyond the inputs."""
    predict: bool = False
    """Predict only; nothing is measured or kept."""
    accelerator: str | None = None
    """Predict for one that is not here, such as H100."""
    stored: Path | None = None
    """Keep the winners among results of `tfla bench gpu` in this folder; nothing is measured."""
    again: bool = False
    """Measure although there is an entry."""
    repeats: int = 10
    """Samples of a candidate."""
    file: Path | None = None
    """Keep the winners in this file; None: the user's."""

    @property
    def problems(self) -> list[Problem]:
        """Shapes to tune for."""
        shapes = [Problem(self.batch, self.length, self.heads, self.dqk, self.dhv)]
        if self.suite:
            shapes = [
                replace(suite.problem(e, x, "cuda"), chunk_size=None)
                for suite in map(SUITES.__getitem__, self.suite) for x in suite.xs for e in suite.entries if e.ours
            ]  # fmt: skip
        return list(dict.fromkeys(replace(p, dtype=self.dtype) for p in shapes))

    @property
    def gates(self) -> tuple[InputGate, ...]:
        return ("exp", "sigmoid") if self.gate == "both" else (self.gate,)

    def check(self) -> None:
        """Raise UserError where a value is out of range; the message names it."""
        for name in ("batch", "length", "heads", "dqk", "dhv", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise UserError(f"memory-limit: got {self.memory_limit}, expected a number above 0")
        for name in self.suite:
            if name not in SUITES or name == "decode":
                allowed = ", ".join(s for s in SUITES if s != "decode")
                raise UserError(f"suite: got {name!r}, allowed are {allowed}")


def inputs(p: Problem) -> Inputs:
    """Tensors of that shape: what backends decide by."""
    dtype = getattr(torch, p.dtype)
    q, v = (torch.empty(p.B, p.T, p.H, d, dtype=dtype, device=p.device) for d in (p.dqk, p.dhv))
    gate = torch.empty(p.B, p.T, p.H, device=p.device)
    return Inputs(q, q, v, gate, gate, None, None, None, None)


def this_machine(device: str) -> Machine:
    """Rates as measured, in a second or two."""
    rates = accelerators.measured(device)
    cuda = device.startswith("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else os.cpu_count() or 1
    return Machine(device_name(torch.device(device)), rates.flops, rates.bandwidth, processors)


def known_machine(name: str) -> Machine:
    """An accelerator that need not be here.

    Raises:
        UserError: it is not known.
    """
    if name not in PROCESSORS:
        raise UserError(f"accelerator: got {name!r}, allowed are {', '.join(PROCESSORS)}")
    known = accelerators.ACCELERATORS[name]
    return Machine(name, known.flops, known.bandwidth, PROCESSORS[name])


def chosen_backend(p: Problem, config: TuneConfig) -> Backend:
    """What the operator would take here; for an accelerator that is not here, what its architecture allows.

    Raises:
        UserError: the backend or the kernel that was asked for cannot be used.
    """
    name = config.backend
    if config.accelerator is not None:
        fits = takes(p.dqk, p.dhv) and p.dtype != "float32" and config.kernel in (None, "fused")
        name = name or ("hopper" if config.accelerator in ("H100", "H200") and fits else "triton")
        if name not in BACKENDS:
            raise UserError(f"backend: got {name!r}, allowed are {', '.join(map(repr, BACKENDS))}")
        chosen = BACKENDS[name]
    else:
        try:
            chosen = select(name, inputs(p))
        except ValueError as error:
            raise UserError(str(error)) from error
    if chosen.name == "reference":
        raise UserError("backend: 'reference' stores no states, there is nothing to tune")
    if config.kernel is not None and config.kernel not in chosen.kernels:
        allowed = ", ".join(map(repr, chosen.kernels))
        raise UserError(f"kernel: got {config.kernel!r}, backend {chosen.name!r} has {allowed}")
    return chosen


@dataclass(frozen=True)
class Tuned:
    """What was found for one shape."""

    problem: Problem
    gate: InputGate
    candidates: list[Candidate]
    measured: list[Measured]
    default: tuple[str, int]
    winner: Candidate | Measured | None

    @property
    def chosen(self) -> Candidate | None:
        return self.winner.candidate if isinstance(self.winner, Measured) else self.winner

    def text(self, machine: Machine, limit: int | None) -> str:
        """A table of all candidates, and a line on the winner."""
        p, found = self.problem, {(m.candidate.kernel, m.candidate.chunk_size): m for m in self.measured}
        rows = []
        for c in self.candidates:
            m = found.get((c.kernel, c.chunk_size))
            mark = "best" if c == self.chosen else "default" if (c.kernel, c.chunk_size) == self.default else ""
            rows.append([
                c.way, f"{c.chunk_size:,}", f"{c.seconds * 1e3:.3f}", gib(c.peak_bytes),
                "-" if m is None else m.error or f"{m.seconds * 1e3:.3f}",
                "-" if m is None or m.peak_bytes is None else gib(m.peak_bytes), mark,
            ])  # fmt: skip
        header = ["way", "chunk size", "predicted ms", "predicted GiB", "measured ms", "measured GiB", ""]
        lines = [
            f"mLSTM{self.gate[:3]} on {machine.name}, {p.dtype}: B {p.B}, T {p.T:,}, {p.H} heads, dqk {p.dqk}, "
            f"dhv {p.dhv}; forward and backward, memory beyond the inputs",
            "", table(header, rows), "",
        ]  # fmt: skip
        if self.winner is None:
            return "\n".join([*lines, f"nothing is within {gib(limit or 0)} GiB"])
        best = self.chosen
        assert best is not None
        said = f"best: {best.way}, chunk size {best.chunk_size:,}"
        base = found.get(self.default)
        if isinstance(self.winner, Measured) and base is not None and base.error is None:
            said += f", {base.seconds / self.winner.seconds:.2f} times as fast as the default, {self.default[1]:,}"
        return "\n".join([*lines, said if self.measured else said + ", by prediction alone"])

    def row(self, machine: Machine, config: TuneConfig, limit: int | None) -> dict[str, Any]:
        """What is kept of it."""
        assert isinstance(self.winner, Measured)
        p, best = self.problem, self.winner.candidate
        found = {(m.candidate.kernel, m.candidate.chunk_size): m for m in self.measured}
        base = found.get(self.default)
        return Entry(
            machine.name, best.backend, p.dtype, self.gate == "exp", p.B, p.T, p.H, p.dqk, p.dhv, best.kernel,
            best.chunk_size, config.kernel is not None,
        )._asdict() | {
            "seconds": self.winner.seconds, "peak_bytes": self.winner.peak_bytes, "memory_limit": limit,
            "default": list(self.default), "default_seconds": None if base is None or base.error else base.seconds,
        }  # fmt: skip


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def tune(p: Problem, gate: InputGate, config: TuneConfig, machine: Machine) -> Tuned:
    """Predicts every candidate and, unless told otherwise, measures those that may win."""
    backend = chosen_backend(p, config)
    sizes = inputs(replace(p, device="meta"))
    named = backend.kernels if config.kernel is None else (config.kernel,)
    kernels = [kernel for kernel in named if backend.kernel_unsupported(sizes, kernel) is None]
    if not kernels:
        why = backend.kernel_unsupported(sizes, named[0])
        raise UserError(f"kernel: {named[0]!r} of backend {backend.name!r} cannot run these inputs: {why}")
    limit = None if config.memory_limit is None else int(config.memory_limit * 2**30)
    candidates = [
        predict(p, gate == "exp", backend.name, kernel, L, machine) for kernel in kernels for L in chunk_sizes(p.T)
    ]
    first = config.kernel or (kernels[0] if config.accelerator else backend.default_kernel(inputs(p), None))
    # What `chunk_size=None` is without an entry; a backend for a GPU decides by the processors it has.
    default = p.T if config.accelerator else min(backend.default_chunk_size(inputs(p), first), p.T)
    if (first, default) not in {(c.kernel, c.chunk_size) for c in candidates}:
        candidates.append(predict(p, gate == "exp", backend.name, first, default, machine))
    if config.predict or config.accelerator:
        return Tuned(p, gate, candidates, [], (first, default), best(candidates, limit))
    few = shortlist(candidates, (first, default), limit, MOST)
    found = [measured(p, gate, c, config.repeats) for c in few]
    return Tuned(p, gate, candidates, found, (first, default), best(found, limit))


def run(config: TuneConfig) -> None:
    """Prints what it finds and keeps the winners.

    Raises:
        UserError: an option does not fit, or the file cannot be written.
    """
    config.check()
    file = config.file or user_file()
    if config.stored is not None:
        found_there = entries(config.stored)
        if not found_there:
            raise UserError(
                f"stored: {config.stored} has no results in which several kernels or chunk sizes were timed"
            )
        store.add(file, found_there)
        print(f"{len(found_there)} shapes of {config.stored} kept in {file}")
        return
    device = "cuda" if config.accelerator else str(pick_device(config.device))
    machine = known_machine(config.accelerator) if config.accelerator else this_machine(device)
    rows, why = store.read(file)
    if why is not None:
        print(f"{file} cannot be used and is written anew: {why}")
    kept = {store.entry(row).key: row for row in rows}
    limit = None if config.memory_limit is None else int(config.memory_limit * 2**30)
    only_predict = config.predict or config.accelerator is not None
    for p in (replace(p, device=device) for p in config.problems):
        for gate in config.gates:
            if not only_predict and not config.again:
                old = kept.get(_key(machine, p, gate, config))
                if old is not None:
                    print(f"{_shape(p, gate)}: {old['kernel']}, chunk size {old['chunk_size']:,}, measured on "
                          f"{old['date']} ({file}); --again measures again")  # fmt: skip
                    continue
            found = tune(p, gate, config, machine)
            print(found.text(machine, limit), end="\n\n", flush=True)
            if isinstance(found.winner, Measured):
                store.add(
                    file,
                    [
                        found.row(machine, config, limit)
                        | {"date": date.today().isoformat(), "versions": environment(device)["versions"]}
                    ],
                )
                print(f"kept in {file}\n", flush=True)


def _shape(p: Problem, gate: InputGate) -> str:
    return f"mLSTM{gate[:3]}, {p.dtype}: B {p.B}, T {p.T:,}, {p.H} heads, dqk {p.dqk}, dhv {p.dhv}"


def _key(machine: Machine, p: Problem, gate: InputGate, config: TuneConfig) -> tuple[Any, ...]:
    backend = chosen_backend(p, config).name
    asked = config.kernel is not None
    return Entry(
        machine.name, backend, p.dtype, gate == "exp", p.B, p.T, p.H, p.dqk, p.dhv, config.kernel or "", 1, asked
    ).key  # fmt: skip
