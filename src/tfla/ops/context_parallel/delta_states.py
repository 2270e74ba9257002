"""The actions that processes exchange in a forward of the delta rule, and the states that follow from all of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.backends import DELTA_BACKENDS, DeltaBackend, DeltaInputs
from tfla.backends.delta import DeltaSpec
from tfla.ops.context_parallel.cuts import Cut, End, Fragment, Placement
from tfla.ops.context_parallel.local import DeltaCall, of_sequences
from tfla.ops.context_parallel.transitions import Action, apply, row_width, to_row, transition_shape

BLOCK = 8192  # steps whose outputs, which are not read, are in memory at once
PER_STEP = 6  # fields of the inputs that have steps, the first ones


def _at(x: DeltaInputs, steps: slice) -> DeltaInputs:
    """Return the inputs of some steps, without a state."""
    of_steps = (None if t is None else t[:, steps] for t in x[:PER_STEP])
    return DeltaInputs(*of_steps, x.A_log, x.dt_bias, None, None)  # type: ignore[arg-type,call-arg]


def _final_state(x: DeltaInputs, spec: DeltaSpec, backend: DeltaBackend, dhv: int) -> Tensor:
    """Return the state after all steps; where a backend takes no heads as wide as v, it gets their columns in parts."""
    assert x.C is not None
    columns = [slice(None)] if backend.unsupported(x) is None else [slice(dhv), slice(dhv, None)]
    states = [backend.forward(x._replace(v=x.v[..., at], C=x.C[..., at]), spec).C for at in columns]
    return states[0] if len(states) == 1 else torch.cat(states, -1)


def own_action(x: DeltaInputs, call: DeltaCall, f: Fragment) -> Action:
    """Return the action of a fragment.

    If the sequence begins with it, the state contains the initial one, and the transition, which is not read, is zero.
    Else a matrix A is what the steps make of the identity, where they write no values: A and S are the final state of
    values [v | 0] from the state [0 | I].
    """
    (B, _, H, V), K, correct = x.v.shape, x.q.shape[3], call.spec.correct
    C = x.q.new_zeros(B, H, K, V, dtype=x.acc_dtype)
    if f.begins and x.C is not None:
        given = of_sequences(x.C, B)
        assert given is not None
        C = given[:, f.sequence].to(C.dtype)
    with_matrix = correct and not f.begins
    spec, backend = call.spec._replace(save=False, final_state=True), DELTA_BACKENDS[call.backend]
    if with_matrix:
        found = backend.action(_at(x, slice(f.start, f.stop)), spec)
        if found is not None:
            return Action(*found)
        C = torch.cat([C, torch.eye(K, dtype=C.dtype, device=C.device).expand(B, H, K, K)], -1)
    for start in range(f.start, f.stop, BLOCK):
        part = _at(x, slice(start, min(start + BLOCK, f.stop)))
        v = F.pad(part.v, (0, K)) if with_matrix else part.v
        C = _final_state(part._replace(v=v, C=C), spec, backend, V)
    if with_matrix:
        return Action(C[..., V:], C[..., :V])
    A = C.new_zeros(B, H, *transition_shape(K, correct))
    if not f.begins and x.log_f is not None:
        A = x.log_f[:, f.start : f.stop].sum(1, dtype=torch.float64).exp().to(C.dtype)
    return Action(A, C)


def action_rows(x: DeltaInputs, call: DeltaCall) -> Tensor:
    """Return the rows that this process gives to the others, (S + additional rows, B, H, width).

    They are those of the last fragments of its spans. With `final_state` those of the other fragments that end follow.
    """
    B, H, K, V = x.q.shape[0], x.v.shape[2], x.q.shape[3], x.v.shape[3]
    spec, cut = call.spec, call.cut
    width = row_width(K, V, spec.correct)
    rows = x.q.new_zeros(cut.rows(spec.final_state), B, H, width, dtype=x.acc_dtype)
    for row, f in cut.sent(spec.final_state).items():
        rows[row] = to_row(own_action(x, call, f), spec.correct)
    return rows


def carried_state(of_spans: Action, source: int, position: int, correct: bool) -> Tensor:
    """Return the state before a span of a sequence that begins in an earlier one, ``source``."""
    C = of_spans.C[source]
    for p in range(source + 1, position):
        C = apply(of_spans.A[p], C, correct) + of_spans.C[p]
    return C


def _end_action(end: End, placement: Placement, of_spans: Action, of_ranks: Action) -> Action:
    """Return the action of the fragment with which a sequence ends."""
    if end.row is None:
        return Action(of_spans.A[end.position], of_spans.C[end.position])
    rank, row = placement.owner(end.position)[0], placement.spans_here + end.row
    return Action(of_ranks.A[rank, row], of_ranks.C[rank, row])


def final_states(cut: Cut, placement: Placement, of_spans: Action, of_ranks: Action, correct: bool) -> Action:
    """Return the final states of all sequences, (D, B, H, ...), and the transitions of the fragments that end."""
    found = []
    for end in cut.ends:
        A, C = _end_action(end, placement, of_spans, of_ranks)
        if end.source < end.position:
            C = C + apply(A, carried_state(of_spans, end.source, end.position, correct), correct)
        found.append((A, C))
    A, C = (torch.stack(each) for each in zip(*found, strict=True))
    return Action(A, C)
