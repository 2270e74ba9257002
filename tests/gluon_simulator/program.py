"""A program and its partitions, which are threads: one of them runs at a time, and the next one is chosen at random."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gluon_simulator.clocks import COPIES, MMAS, WARPS, VectorClock, agent_of


class Partition:
    """The warps of a partition, their vector clocks, and the numbers of MMAs and copies that they have started.

    `clock` has what some warp of the partition has waited for. After a barrier of the partition all of them have, which
    `shared` is about.
    """

    def __init__(self, name: str, index: int, warps: int) -> None:
        self.name, self.index, self.warps = name, index, warps
        self.clock = VectorClock()
        self.shared = VectorClock()
        self.mmas = 0
        self.copies = 0

    def access(self) -> tuple[int, int]:
        """Count an access by the warps, and return their agent and its time."""
        agent = agent_of(self.index, WARPS)
        self.clock.times[agent] += 1
        return agent, int(self.clock.times[agent])

    def start_mma(self) -> tuple[int, int]:
        self.mmas += 1
        return agent_of(self.index, MMAS), self.mmas

    def start_copy(self) -> tuple[int, int]:
        self.copies += 1
        return agent_of(self.index, COPIES), self.copies

    def wait_for(self, kind: int, time: int) -> None:
        """Wait for the MMAs or copies up to the one at this time."""
        agent = agent_of(self.index, kind)
        self.clock.times[agent] = max(int(self.clock.times[agent]), time)
        if kind == COPIES:  # one thread has started them and waits, and the same one arrives at barriers
            self.shared.times[agent] = self.clock.times[agent]

    def fence(self) -> None:
        self.clock.fenced[self.index] = self.clock.times[agent_of(self.index, WARPS)]

    def barrier(self) -> None:
        self.shared = self.clock.copy()

    def waits_for_nothing(self) -> bool:
        times = self.clock.times
        return bool(
            times[agent_of(self.index, MMAS)] == self.mmas and times[agent_of(self.index, COPIES)] == self.copies
        )


class _StoppedError(BaseException):
    """The signal to a partition that another one has failed."""


class Program:
    """One program of a grid."""

    def __init__(self, ids: tuple[int, ...], grid: tuple[int, ...], warps: int, seed: int) -> None:
        self.ids, self.grid = ids, grid
        self.random = random.Random(f"{seed} {ids}")
        self.here = threading.local()
        self.here.partition = Partition("before the partitions", 0, warps)
        self.ready: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.turns: list[threading.Semaphore] = []
        self.error: BaseException | None = None
        self.barriers: list[Any] = []
        self.time = self.last_allocation = 0

    def tick(self) -> int:
        """Return the number of an action among those on barriers and allocations."""
        self.time += 1
        return self.time

    @property
    def partition(self) -> Partition:
        partition: Partition = self.here.partition
        return partition

    def specialize(self, work: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Sequence[int]) -> None:
        """Run partitions concurrently: the first on the warps of the program, the others on `warps` further ones."""
        done = threading.Semaphore(0)
        begin, sizes = self.partition.clock, [self.partition.warps, *warps]
        self.turns = [threading.Semaphore(0) for _ in work]
        self.ready = {i: ("its turn", lambda: True) for i in range(len(work))}

        def run(i: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
            partition = Partition(f"partition {i}, {fn.__name__}", i, sizes[i])
            partition.clock.learn(begin)
            partition.barrier()
            self.here.partition = partition
            self.turns[i].acquire()
            try:
                if self.error is None:
                    with torch.no_grad():
                        fn(*args)
                    if not partition.waits_for_nothing():
                        raise RuntimeError("it ends before its MMAs and copies")
            except _StoppedError:
                pass
            except BaseException as error:
                self.error = self.error or _of(partition.name, error)
            del self.ready[i]
            self._hand_over()
            done.release()

        threads = [threading.Thread(target=run, args=(i, *w), daemon=True) for i, w in enumerate(work)]
        for thread in threads:
            thread.start()
        self._hand_over()
        for _ in threads:
            done.acquire()
        if self.error is not None:
            raise self.error
        for bar in self.barriers:  # what partitions are given has its memory until they end
            bar.last_use = self.tick()
        if any(not bar.empty for bar in self.barriers):
            raise RuntimeError("copies from memory are on their way when the program ends")

    def _hand_over(self) -> None:
        if self.error is None and self.ready:
            able = [i for i, (_, ready) in self.ready.items() if ready()]
            if able:
                self.turns[self.random.choice(able)].release()
                return
            waiting = ", ".join(f"{i} for {what}" for i, (what, _) in self.ready.items())
            self.error = RuntimeError(f"no partition can go on: {waiting}")
        for i in list(self.ready):
            self.turns[i].release()

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Let other partitions run until `ready()` is true; `what` names the condition in messages."""
        me = self.partition.index
        if not self.turns:
            assert ready(), what
            return
        self.ready[me] = (what, ready)
        self._hand_over()
        self.turns[me].acquire()
        if self.error is not None:
            raise _StoppedError


def _of(name: str, error: BaseException) -> BaseException:
    error.args = (f"{name}: {error}",)
    return error


_RUNNING: list[Program] = []


def current() -> Program:
    return _RUNNING[-1]


def run(kernel: Callable[[], Any], grid: Sequence[int], warps: int, seed: int) -> None:
    """Run a kernel, one program after another."""
    sizes = (*grid, 1, 1)[:3]
    for x in range(sizes[0]):
        for y in range(sizes[1]):
            _RUNNING.append(Program((x, y, 0), sizes, warps, seed))
            try:
                kernel()
                for bar in _RUNNING[-1].barriers:
                    bar.check_lifetime()
            finally:
                _RUNNING.pop()
