"""The cotangents that processes exchange in a backward, and those of the states after this process's fragments."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends import Inputs
from tfla.ops.context_parallel import exchange, own_states
from tfla.ops.context_parallel.local import Call, Gated, Saved, Shape
from tfla.ops.context_parallel.spans import (
    LOG_DECAY_PARTS,
    Cotangent,
    carry_back,
    exclusive_sums,
    from_rows,
    to_rows,
)


def own_cotangents(x: Inputs, h: Tensor, saved: Saved, dh: Tensor, call: Call) -> list[Cotangent | None]:
    """Return the cotangents of the states before the spans of this process, from the outputs of these spans alone.

    It is None for a span that begins with a sequence: no process needs it.
    """
    spec, gates = call.spec, None
    found: list[Cotangent | None] = []
    d = Shape.of(call, x.q.shape[0]).back(saved.d) if spec.normalize else None
    for s, span in enumerate(call.cut.spans):
        if span.source is None:
            found.append(None)
            continue
        f = span.fragments[0]
        steps = slice(f.start, f.stop)
        gates = Gated.of(x, spec) if gates is None else gates
        out = own_states.Outputs(h[:, steps], None if d is None else d[:, steps], dh[:, steps])
        m = saved.m[s] if spec.normalize else None
        found.append(
            own_states.own_cotangent(x.q[:, steps], *gates.at(steps), m, out, spec.scale, spec.normalizer_grad)
        )
    return found


def cotangent_rows(
    own: list[Cotangent | None], final_m: Tensor, dC: Tensor | None, dn: Tensor | None, call: Call, like: Tensor
) -> list[Tensor]:
    """Return the rows that this process gives to the others, those of dC and with a normalizer those of dn.

    Backends that have segments exchange one after the other, see :func:`tfla.backends.gpu.exchanging.pass_cotangents`.
    Rows are (S + D, B, H, width), or (S, ...) without final states.

    Args:
        own: the cotangents of the states before its spans; None leaves a row of zeros.
        final_m: (B D, H), the max states of the final states.
        dC, dn: (B D, ...), this process's cotangents of the final states; None is zero.
        call: the call.
        like: (B, H, dqk, dhv), a tensor of the dtype of states.
    """
    (B, H, K, V), normalize = like.shape, call.spec.normalize
    final = len(call.cut.ends) if call.spec.final_state else 0
    m = final_m.unflatten(0, (B, -1)).transpose(0, 1) if normalize and final else None

    def rows_of(columns: int, spans: list[tuple[Tensor, Tensor | None] | None], at_end: Tensor | None) -> Tensor:
        """Return the rows of cotangents (B, H, K, columns)."""
        width = K * columns + LOG_DECAY_PARTS + normalize
        rows = like.new_zeros(len(own) + final, B, H, width)
        zero = rows.new_zeros(B, H, dtype=torch.float64)
        for s, each in enumerate(spans):
            if each is not None:
                rows[s] = to_rows(each[0], None, each[1], zero)
        if final and (dC is not None or dn is not None):
            x = rows.new_zeros(B * final, H, K, columns) if at_end is None else at_end.to(rows.dtype)
            rows[len(own) :] = to_rows(x.unflatten(0, (B, -1)).transpose(0, 1), None, m, zero.expand(final, B, H))
        return rows

    found = [rows_of(V, [each and (each.C, each.m) for each in own], dC)]
    if normalize:
        spans = [None if each is None or each.n is None else (each.n.unsqueeze(-1), each.m) for each in own]
        found.append(rows_of(1, spans, None if dn is None else dn.unsqueeze(-1)))
    return found


def received(gathered: list[Tensor], final_m: Tensor, call: Call, like: Tensor) -> tuple[Cotangent, Cotangent | None]:
    """Return the cotangents of the states before all spans, (spans, B, ...), and of the final states, (D, B, ...).

    Args:
        gathered: the rows of all processes, (R, rows, B, H, width) each.
        final_m, call, like: as in :func:`cotangent_rows`.
    """
    of_ranks = from_rows(gathered[0], *like.shape[-2:])
    if call.spec.normalize:
        of_ranks = of_ranks._replace(n=from_rows(gathered[1], like.shape[-2], 1).C.squeeze(-1))
    of_spans = Cotangent(*exchange.in_order_of_time(of_ranks, call.placement)[1:])
    if not call.spec.final_state:
        return of_spans, None
    C, n = (None if t is None else t[:, len(call.cut.spans) :].sum(0) for t in of_ranks[1:3])
    assert C is not None
    m = final_m.unflatten(0, (like.shape[0], -1)).transpose(0, 1) if n is not None else None
    return of_spans, Cotangent(C, n, m)


def ends_of(
    call: Call,
    log_decay: Tensor,
    end_log_decay: Tensor,
    last_m: Tensor,
    of_spans: Cotangent,
    of_final: Cotangent | None,
    shape: Shape,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the cotangents of the states after the fragments of this process, (B F, ...), or None where all are zero.

    Args:
        call: the call.
        log_decay, end_log_decay, last_m: as in :class:`Saved`.
        of_spans: (all spans, B, ...), the cotangents of the states before spans.
        of_final: (D, B, ...), the cotangents of the final states; None where there are none.
        shape: the form in which the backend gets the fragments.
    """
    normalize = call.spec.normalize
    rows: list[tuple[Tensor, Tensor | None] | None] = []
    for span in call.cut.spans:
        for f in span.fragments:
            # last_m has the backend's order of fragments.
            m = last_m[:, len(rows)] if normalize else None
            end = call.cut.ends[f.sequence]
            parts, decays = [], []
            if not f.ends:
                later = slice(span.position + 1, end.position + 1)
                parts.append(Cotangent(*(None if t is None else t[later] for t in of_spans)))  # type: ignore[arg-type]
                decays.append(exclusive_sums(log_decay[later], after=False))
            if of_final is not None:
                at = slice(f.sequence, f.sequence + 1)
                parts.append(Cotangent(*(None if t is None else t[at] for t in of_final)))  # type: ignore[arg-type]
                decay = torch.zeros_like(log_decay[:1])
                if not f.ends:
                    between = log_decay[span.position + 1 : end.position].sum(0, keepdim=True)
                    decay = between + end_log_decay[at]
                decays.append(decay)
            if not parts:
                rows.append(None)
                continue
            every = Cotangent(*(None if t[0] is None else torch.cat(t) for t in zip(*parts, strict=True)))  # type: ignore[arg-type]
            rows.append(carry_back(every, torch.cat(decays), m))
    return shape.joined([row and row[0] for row in rows]), shape.joined([row and row[1] for row in rows])
