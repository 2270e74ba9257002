"""The command `tfla tune` for one shape or several."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tfla._util import outputs
from tfla._util.device import pick_device
from tfla._util.errors import UserError
from tfla.measure import accelerators
from tfla.measure.machine import environment
from tfla.measure.problem import Problem
from tfla.ops.gates import InputGate
from tfla.ops.tuned import Entry, device_name, user_file
from tfla.tune import store
from tfla.tune.choose import best
from tfla.tune.config import TuneConfig
from tfla.tune.default import PROCESSORS, inputs, untuned
from tfla.tune.found import Tuned
from tfla.tune.measure import LEAST, Measured, measured
from tfla.tune.plan import TuningPlan, check_memory, duration, memory_of, ordered, too_large
from tfla.tune.predict import Candidate, Machine, chunk_sizes, predict


def this_machine(device: str) -> Machine:
    """Measure the rates of this machine, which takes a second or two."""
    rates = accelerators.measured(device)
    cuda = device.startswith("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else os.cpu_count() or 1
    return Machine(device_name(torch.device(device)), rates.flops, rates.bandwidth, processors)


def known_machine(name: str) -> Machine:
    """Return an accelerator of the table, which this machine need not have.

    Raises:
        UserError: the table has no accelerator of that name.
    """
    if name not in PROCESSORS:
        raise UserError(f"accelerator: got {name!r}, allowed are {', '.join(PROCESSORS)}")
    accelerator = accelerators.ACCELERATORS[name]
    return Machine(name, accelerator.flops, accelerator.bandwidth, PROCESSORS[name])


def plan(p: Problem, gate: InputGate, config: TuneConfig, machine: Machine) -> TuningPlan:
    """Predict every candidate of a shape and choose those to measure.

    Raises:
        UserError: the backend or the kernel that is named cannot be used.
    """
    backend, first, default = untuned(p, gate == "exp", config.backend, config.kernel, config.accelerator)
    if backend.name == "reference":
        raise UserError("backend: 'reference' stores no states, there is nothing to tune")
    sizes = inputs(replace(p, device="meta"))
    named = backend.kernels if config.kernel is None else (config.kernel,)
    kernels = [kernel for kernel in named if backend.kernel_unsupported(sizes, kernel) is None]
    if not kernels:
        why = backend.kernel_unsupported(sizes, named[0])
        raise UserError(f"kernel: {named[0]!r} of backend {backend.name!r} cannot run these inputs: {why}")
    candidates = [
        predict(p, gate == "exp", backend.name, kernel, L, machine) for kernel in kernels for L in chunk_sizes(p.T)
    ]
    if (first, default) not in {(c.kernel, c.chunk_size) for c in candidates}:
        candidates.append(predict(p, gate == "exp", backend.name, first, default, machine))
    return TuningPlan(p, gate, candidates, (first, default), ordered(candidates, (first, default), config.limit))


class Budget:
    """The time that measuring may take, and the error of the predictions."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds
        self.factor = 1.0  # measured over predicted seconds of the last candidate

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def allows(self, candidate: Candidate) -> bool:
        """Return whether there is time to measure the candidate."""
        return LEAST * self.factor * candidate.seconds < self.left()

    def learn(self, found: Measured) -> None:
        """Update the ratio of measured to predicted time."""
        if found.error is None:
            self.factor = found.seconds / max(found.candidate.seconds, 1e-9)


def tune(found: TuningPlan, config: TuneConfig, budget: Budget, step: Callable[[Candidate], None]) -> Tuned:
    """Measure the candidates of a plan, in their order, while there is time; ``step`` is called before each."""
    done, left_out = list[Measured](), list[Candidate]()
    memory = memory_of(found.problem.device)
    for candidate in found.few:
        step(candidate)
        if (why := too_large(found.problem, candidate, memory)) is not None:
            done.append(Measured(candidate, math.inf, None, why))
        elif budget.allows(candidate):
            done.append(measured(found.problem, found.gate, candidate, config.repeats, budget.left()))
            budget.learn(done[-1])
        else:
            left_out.append(candidate)
    winner = best(done, config.limit)
    return Tuned(found.problem, found.gate, found.candidates, done, found.default, winner, left_out)


def run(config: TuneConfig) -> int:
    """Tune, print the results and store the winners; return the exit code, 1 where a shape has no winner.

    Raises:
        UserError: an option does not fit, or the file cannot be written.
    """
    config.check()
    file = config.file or user_file()
    only_predict = config.predict or config.accelerator is not None
    if not only_predict:
        outputs.check_file("file", file)
    device = "cuda" if config.accelerator is not None else str(pick_device(config.device))
    problems = [replace(p, device=device) for p in config.problems]
    for p in problems:
        check_memory(p, None if only_predict else memory_of(device))
    machine = known_machine(config.accelerator) if config.accelerator is not None else this_machine(device)
    if only_predict:
        found = [
            Tuned(p.problem, p.gate, p.candidates, [], p.default, best(p.candidates, config.limit))
            for p in (plan(p, gate, config, machine) for p in problems for gate in config.gates)
        ]
        for tuned in found:
            print(tuned.text(machine, config), end="\n\n", flush=True)
        return 0 if all(tuned.winner is not None for tuned in found) else 1
    return _measure(config, file, machine, problems)


def _measure(config: TuneConfig, file: Path, machine: Machine, problems: list[Problem]) -> int:
    """Measure the shapes that are not in the file yet; return the exit code."""
    rows, why = store.read(file)
    if why is not None:
        print(f"{file} cannot be used and is replaced: {why}")
    kept = {store.entry(row).key: row for row in rows}
    plans = []
    for p in problems:
        for gate in config.gates:
            found = plan(p, gate, config, machine)
            old = None if config.again else kept.get(_key(machine, found, config))
            if old is None:
                plans.append(found)
            else:
                print(f"{_shape(p, gate)}: {old['kernel']}, chunk size {old['chunk_size']:,}, measured on "
                      f"{old['date']} ({file}); --again measures again")  # fmt: skip
    if not plans:
        return 0
    total = sum(found.seconds(config.repeats) for found in plans)
    count = sum(len(found.few) for found in plans)
    shapes = f"{len(plans)} shape{'s' * (len(plans) > 1)}"
    print(
        f"measuring {count} candidates of {shapes} takes about {duration(total)} by prediction, at most "
        f"{duration(config.budget)} (--budget)",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    budget, failed = Budget(config.budget), False
    with tqdm(total=count, unit="candidate", file=sys.stderr, disable=None, leave=False) as bar:

        def step(candidate: Candidate) -> None:
            bar.set_postfix_str(f"{candidate.implementation}, chunk size {candidate.chunk_size:,}")
            bar.update()

        for found in plans:
            tuned = tune(found, config, budget, step)
            bar.clear()
            print(tuned.text(machine, config), end="\n\n", flush=True)
            if not tuned.compared or not isinstance(tuned.winner, Measured):
                failed = True
                continue
            versions = {"date": date.today().isoformat(), "versions": environment(found.problem.device)["versions"]}
            store.add(file, [tuned.row(machine, config) | versions])
            print(f"kept in {file}\n", flush=True)
    return 1 if failed else 0


def _shape(p: Problem, gate: InputGate) -> str:
    """Return a shape as text."""
    return f"mLSTM{gate[:3]}, {p.dtype}: B {p.B}, T {p.T:,}, {p.H} heads, dqk {p.dqk}, dhv {p.dhv}"


def _key(machine: Machine, found: TuningPlan, config: TuneConfig) -> tuple[Any, ...]:
    """Return the key of the entry that a plan leads to."""
    p, backend = found.problem, found.candidates[0].backend
    asked = config.kernel is not None
    return Entry(
        machine.name, backend, p.dtype, found.gate == "exp", p.B, p.T, p.H, p.dqk, p.dhv, config.kernel or "", 1, asked
    ).key  # fmt: skip
