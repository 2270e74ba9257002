"""Vector clocks, and for each place in shared memory its last write and the last read by each agent.

An agent is a source of accesses of shared memory that are ordered among themselves: the warps of a partition, its MMAs,
its TMA copies to global memory, and for each barrier the TMA copies from global memory that complete there. An agent
that waits for another one takes over the other one's vector clock. An access is in order if the agent's clock contains
all earlier accesses that conflict with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTITIONS = 8
KINDS = 3
WARPS, MMAS, COPIES = range(KINDS)  # the agents of a partition
READERS = PARTITIONS * KINDS
AGENTS = READERS + 64  # those of the partitions, and the copies that complete at up to 64 barriers
WRITER, WRITTEN, READ = 0, 1, 2  # the columns of a place: last writer, its time, the times of readers
Ints = NDArray[np.int64]


class RaceError(RuntimeError):
    """An error: two accesses of shared memory, of which at least one writes, are not ordered."""


@dataclass
class VectorClock:
    """A vector clock: for each agent the number of its actions that have happened before."""

    times: Ints = field(default_factory=lambda: np.zeros(AGENTS, np.int64))
    fenced: Ints = field(default_factory=lambda: np.zeros(PARTITIONS, np.int64))  # stores that MMAs and copies can see

    def learn(self, other: VectorClock) -> None:
        np.maximum(self.times, other.times, out=self.times)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def copy(self) -> VectorClock:
        return VectorClock(self.times.copy(), self.fenced.copy())


def new_places(shape: list[int]) -> Ints:
    return np.zeros([*shape, READ + READERS], np.int64)


def agent_of(partition: int, kind: int) -> int:
    return partition * KINDS + kind


def check_read(places: Ints, agent: int, time: int, clock: VectorClock, where: Any) -> None:
    writer, written = places[..., WRITER], places[..., WRITTEN]
    if (written > clock.times[writer]).any():
        raise RaceError(f"{where} reads what {_who(writer[written > clock.times[writer]])} may not have written yet")
    if agent % KINDS != WARPS:
        by_warps = (writer < READERS) & (writer % KINDS == WARPS)
        if (by_warps & (written > clock.fenced[np.minimum(writer // KINDS, PARTITIONS - 1)])).any():
            raise RaceError(f"{where} reads what warps have stored without a fence")
    places[..., READ + agent] = time


def check_write(places: Ints, agent: int, time: int, clock: VectorClock, where: Any) -> None:
    writer, written = places[..., WRITER], places[..., WRITTEN]
    if (written > clock.times[writer]).any():
        raise RaceError(f"{where} writes over what {_who(writer[written > clock.times[writer]])} may not have written")
    late = places[..., READ:] > clock.times[:READERS]
    if late.any():
        raise RaceError(f"{where} writes over what {_who(np.nonzero(late)[-1])} may not have read yet")
    places[..., WRITER] = agent
    places[..., WRITTEN] = time


def _who(agents: Ints) -> str:
    agent = int(agents.flat[0])
    if agent >= READERS:
        return "a copy from memory"
    kind = ("the warps", "an MMA", "a copy to memory")[agent % KINDS]
    return f"{kind} of partition {agent // KINDS}"
