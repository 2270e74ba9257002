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
from tfla.ops.context_parallel.cotangents import cotangent_rows, ends_of, received
from tfla.ops.context_parallel.local import Call, Gated, Saved, Shape, of_sequences
from tfla.ops.context_parallel.spans import Cotangent, compose, exclusive_sums, from_rows, to_rows

CLOSED = -1e30  # the log-decay of a span whose decay is 0 in float32


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
    """The exchange of a dense batch, see :class:`tfla.backends.base.Exchange`.

    Each fragment is a span, so that the rows of the backend are (B S, ...).
    """

    call: Call
    batch: int
    dqk: int
    dhv: int

    def _spans(self, x: Tensor) -> Tensor:
        """Return (B S, ...) as (S, B, ...)."""
        return x.unflatten(0, (self.batch, -1)).transpose(0, 1)

    def _gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes."""
        size = self.call.placement.size
        return exchange.finish_gather(exchange.start_gather(rows, self.call.group, size), size)

    def states(self, C: Tensor, n: Tensor | None, m: Tensor | None, m0: Tensor | None, decay: Tensor) -> Tensor:
        """Return the rows of all processes, (R, S, B, H, width)."""
        log_decay = decay.double().log().clamp(min=CLOSED)
        if m is not None and m0 is not None:
            log_decay = log_decay + m - m0
        of_C, of_n, of_m = (None if t is None else self._spans(t) for t in (C, n, m))
        assert of_C is not None
        return self._gather(to_rows(of_C, of_n, of_m, self._spans(log_decay)))

    def starts(self, gathered: Tensor, m0: Tensor | None, C: Tensor | None, n: Tensor | None) -> Tensor:
        """Return the states before the spans of this process, (B S, H, dqk dhv + dqk)."""
        of_spans = exchange.in_order_of_time(from_rows(gathered, self.dqk, self.dhv), self.call.placement)
        m, given_C, given_n = (None if t is None else self._spans(t) for t in (m0, C, n))
        rows = []
        for s, span in enumerate(self.call.cut.spans):
            if span.source is not None:
                found = compose(of_spans.at(slice(span.source, span.position)), None if m is None else m[s])
                rows.append(_joined(found.C, found.n))
            elif given_C is not None:
                rows.append(_joined(given_C[s], None if given_n is None else given_n[s]))
            else:
                rows.append(torch.zeros_like(_joined(of_spans.C[0], None if of_spans.n is None else of_spans.n[0])))
        return torch.stack(rows, 1).flatten(0, 1)

    def cotangents(self, dC: Tensor, dn: Tensor | None, *saved: Tensor) -> Tensor:
        """Return the cotangents of the states after the spans of this process, (B S, H, dqk dhv + dqk).

        ``saved`` is what :func:`read_by_cotangents` returned.
        """
        m, last_m, log_decay, end_log_decay, final_m, final_dC, final_dn = saved
        call, of_C, of_n = self.call, self._spans(dC), None if dn is None else self._spans(dn)
        own: list[Cotangent | None] = []
        for s, span in enumerate(call.cut.spans):
            n, at = (None, None) if of_n is None else (of_n[s], m[s])
            own.append(None if span.source is None else Cotangent(of_C[s], n, at))
        end_C, end_n = (t if t.numel() else None for t in (final_dC, final_dn))
        gathered = self._gather(cotangent_rows(own, final_m, end_C, end_n, call, of_C[0]))
        of_spans, of_final = received(gathered, final_m, call, of_C[0])
        shape = Shape(self.batch, None, len(own))
        C, n = ends_of(call, log_decay, end_log_decay, last_m, of_spans, of_final, shape)
        if C is None:
            C, n = torch.zeros_like(dC), None if dn is None else torch.zeros_like(dn)
        return _joined(C, n)


def read_by_cotangents(saved: Saved, final_m: Tensor, dC: Tensor | None, dn: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensors that :meth:`SegmentExchange.cotangents` reads; those that are missing have shape (0,)."""
    none = final_m.new_empty(0)
    return (
        saved.m, saved.last_m, saved.log_decay, saved.end_log_decay, final_m, none if dC is None else dC,
        none if dn is None else dn,
    )  # fmt: skip


def _joined(C: Tensor, n: Tensor | None) -> Tensor:
    """Return C and n of each head in one row."""
    return C.flatten(-2) if n is None else torch.cat([C.flatten(-2), n], -1)
