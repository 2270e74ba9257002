"""The exchange between the passes of a backend that makes the states of segments anyway.

With a normalizer the max states before the spans are exchanged first, two numbers for each head, because the backend
stabilizes segments with them. Whether a process cuts its own steps into segments is its own choice: it sends the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends import Inputs
from tfla.ops.context_parallel import exchange, own_states
from tfla.ops.context_parallel.local import Call, Gated, Saved, of_sequences


def give_max_states(x: Inputs, call: Call) -> None:
    """Take part in the exchange of max states of other processes, which cut their steps into segments."""
    gates, given, rows = Gated.of(x, call.spec), of_sequences(x.m, x.q.shape[0]), []
    for span in call.cut.spans:
        f = span.fragments[-1]
        m = given[:, f.sequence] if given is not None and f.begins else None
        rows.append(torch.stack(own_states.own_max(*gates.at(slice(f.start, f.stop)), m, f.begins)))
    exchange.gather(torch.stack(rows).double(), call.group, call.placement.size)


@functools.cache  # for good: a captured graph reads them
def _places(device: torch.device, positions: tuple[int, ...]) -> Tensor:
    """Return the places in time of spans on a device, (S,) int32."""
    return torch.tensor(positions, dtype=torch.int32, device=device)


class SegmentExchange(NamedTuple):
    """The exchange of a dense batch, see :class:`tfla.backends.base.Exchange`; each fragment is a span."""

    positions: tuple[int, ...]
    processes: int
    final: bool
    group: str

    @staticmethod
    def of(call: Call) -> SegmentExchange:
        """Return the exchange of a call."""
        return SegmentExchange(call.placement.positions, call.placement.size, call.spec.final_state, call.group)

    def places(self, like: Tensor) -> Tensor:
        """Return the places in time of this process's spans, (S,) int32; they are copied to a device once."""
        return _places(like.device, self.positions)

    def start(self, rows: Tensor) -> Tensor:
        """Start the collective and return its result, which only :meth:`finish` may read."""
        return exchange.start_gather(rows, self.group, self.processes)

    def finish(self, gathered: Tensor) -> Tensor:
        """Return the rows of all processes, (R, rows, B, H, width)."""
        return exchange.finish_gather(gathered, self.processes)


def read_by_backward(saved: Saved, final_m: Tensor, dC: Tensor | None, dn: Tensor | None) -> tuple[Tensor, ...]:
    """Return what :meth:`tfla.backends.base.Backend.backward_exchanging` reads besides the local tensors."""
    none = final_m.new_empty(0)
    final = (none if t is None else t for t in (dC, dn))
    return saved.last_m, saved.log_decay, final_m, *final
