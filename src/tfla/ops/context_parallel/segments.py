"""The exchange between the passes of a backend that makes the states of segments anyway.

With a normalizer the max states before the spans are exchanged first, two numbers for each head, because the backend
stabilizes segments with them. Whether a process cuts its own steps into segments is its own choice: it sends the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tfla.backends import Inputs
from tfla.ops.context_parallel import exchange, own_states
from tfla.ops.context_parallel.local import Call, Gated, Saved, of_sequences
from tfla.ops.context_parallel.spans import exclusive_sums


def max_states(x: Inputs, call: Call) -> Tensor:
    """Return the max states before the spans of this process, (S, B, H), which all processes compute together."""
    gates, given, rows = Gated.of(x, call.spec), of_sequences(x.m, x.q.shape[0]), []
    for span in call.cut.spans:
        f = span.fragments[-1]
        m = given[:, f.sequence] if given is not None and f.begins else None
        rows.append(torch.stack(own_states.own_max(*gates.at(slice(f.start, f.stop)), m, f.begins)))
    size = call.placement.size
    of_ranks = exchange.finish_gather(exchange.start_gather(torch.stack(rows), call.group, size), size)
    log_decay, own = (exchange.ordered(of_ranks[:, :, part], call.placement) for part in (0, 1))
    found = []
    for span in call.cut.spans:
        if span.source is None:
            first = given[:, span.fragments[0].sequence] if given is not None else torch.zeros_like(own[0])
            found.append(first.to(x.acc_dtype))
        else:
            before = slice(span.source, span.position)
            found.append((exclusive_sums(log_decay[before], after=True) + own[before]).amax(0).to(x.acc_dtype))
    return torch.stack(found)


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
    return saved.m, saved.last_m, saved.log_decay, final_m, *final
