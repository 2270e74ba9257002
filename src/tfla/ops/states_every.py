"""The states after every n steps of a call over whole sequences, for caches of prefixes.

The steps are computed in parts that end where a state is wanted, each by a call that starts from the state after the
one before. So every step is computed once, by the kernels of all backends, and a state has the bits of the same call,
with the same n, that stops there. Where kernels read and overwrite rows of a pool, see :mod:`.states_every_rows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import packed_bounds
from tfla.ops import checks
from tfla.ops.state import State
from tfla.ops.state_pool import NotInKernels, OtherRows, attend_by_index
from tfla.ops.states_every_rows import PartsInRows, Steps
from tfla.ops.transforms import is_distributed

Found = tuple[Tensor, State, State]  # h, the final states, and the states after every n steps
Tensors = Mapping[str, Tensor | None]  # the tensors of an operator by name


class _PooledCall(NamedTuple):
    """A call whose initial states are rows of a pool, as :func:`tfla.ops.state_pool.attend_by_index` takes it."""

    q: Tensor
    v: Tensor | None
    state: State | None
    return_state: bool = True


def with_states_every(
    operator: Callable[..., Any],
    tensors: Tensors,
    every: int,
    *,
    initial_state: State | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
    context_parallel: object,
    state_indices: Tensor | None,
    **options: Any,
) -> Found:
    """Compute h, the final states, and the states after every n steps.

    Args:
        operator: the operator over whole sequences.
        tensors: its tensors (B, T, ...) by name, those that are None too.
        every: n.
        initial_state, return_state, cu_seqlens, context_parallel, state_indices: the operator's own.
        options: its other options.

    Returns:
        h, the final states, and states with two dimensions of the batch, (B, T // n, H, ...). Of packed sequences the
        one after step (j + 1) n of sequence s is in [0, cu_seqlens[s] // n + j], and rows of none are zero.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    check_states_every(every, return_state, context_parallel, tensors)
    q = tensors["q"]
    assert q is not None
    checks.check_shape("q", q, ("B", "T", "H", "dqk"))
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name}: got shape {tuple(x.shape)}, expected {tuple(q.shape[:2])} as its first dimensions"
            )
    if cu_seqlens is not None:
        checks.check_cu_seqlens(cu_seqlens, q)
    run = _Run(operator, tensors, q.shape[1], options)
    if state_indices is None:
        return run(every, initial_state, cu_seqlens)
    between: list[State] = []

    def from_rows(call: _PooledCall) -> tuple[Tensor, State]:
        """Compute the call from the rows of the pool; the states between go around the pool."""
        h, last, states = run(every, call.state, cu_seqlens)
        between.append(states)
        return h, last

    def in_kernels(call: _PooledCall, rows: OtherRows) -> Tensor | None:
        """Compute the call with kernels that read and overwrite the rows, or return None where none do."""
        try:
            h, states = PartsInRows(run.part, rows.pool, rows.indices, cu_seqlens, q.shape[1], every).run()
        except NotInKernels:
            return None
        between.append(states)
        return h

    # Without such kernels all parts go from state to state outside of the pool, whose dtype may be a narrower one.
    further = *tensors.values(), *options.values()
    h, pool = attend_by_index(
        _PooledCall(q, tensors["v"], initial_state), state_indices, cu_seqlens, from_rows, further, in_kernels
    )
    return h, pool, between[0]


def check_options(every: object, return_state: object, context_parallel: object) -> None:
    """Raise a TypeError or a ValueError if a call with these options cannot return states in between."""
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"states_every: got {type(every).__name__}, expected None or an int")
    if every < 1:
        raise ValueError(f"states_every: got {every}, expected at least 1")
    if return_state is not True:
        raise ValueError(f"states_every: got {every} with return_state {return_state!r}, expected return_state=True")
    if context_parallel is not None:
        raise ValueError("states_every: got it with context_parallel, expected at most one of them")


def check_states_every(every: object, return_state: object, context_parallel: object, tensors: Tensors) -> None:
    """Raise a TypeError or a ValueError if a call with these options and tensors cannot return states in between."""
    check_options(every, return_state, context_parallel)
    for name in ("q", "v"):
        x = tensors[name]
        if is_distributed(x):
            raise TypeError(f"states_every: got it with {name} of type {type(x).__name__}, expected plain tensors")
        checks.check_float(name, x)


def unstacked(states: State) -> list[State]:
    """Return states (B, S, ...) of a dense batch as S copies (B, ...)."""

    def one(j: int) -> State:
        return State(*(None if t is None else t[:, j].clone() for t in states))  # type: ignore[arg-type]

    return [one(j) for j in range(states.C.shape[1])]


class _Run:
    """A call in parts: an object that is called with n, the initial states and the offsets of packed sequences.

    Args:
        operator, tensors, options: as :func:`with_states_every` has them.
        T: the number of steps.
    """

    def __init__(self, operator: Callable[..., Any], tensors: Tensors, T: int, options: Mapping[str, Any]) -> None:
        self.operator, self.tensors, self.T, self.options = operator, tensors, T, options

    def __call__(self, every: int, state: State | None, cu_seqlens: Tensor | None) -> Found:
        """Compute the sequences from their initial states."""
        return self.dense(every, state) if cu_seqlens is None else self.packed(every, state, cu_seqlens)

    def part(
        self, steps: Steps, state: State | None, cu_seqlens: Tensor | None, rows: OtherRows | None = None
    ) -> tuple[Tensor, State]:
        """Compute some steps from the states before them; these are rows of pools where `rows` are given."""
        tensors = {name: t[:, steps] if isinstance(t, Tensor) else t for name, t in self.tensors.items()}
        found: tuple[Tensor, State] = self.operator(
            **tensors, initial_state=state, return_state=True, cu_seqlens=cu_seqlens, state_indices=rows, **self.options
        )
        return found

    def dense(self, every: int, state: State | None) -> Found:
        """Compute the sequences of a dense batch."""
        hs, states = [], []
        for start in range(0, max(self.T, 1), every):
            h, state = self.part(slice(start, start + every), state, None)
            hs.append(h)
            if start + every <= self.T:
                states.append(state)
        assert state is not None
        like = state

        def stacked(field: int) -> Tensor | None:
            """Return C, n or m of all states, (B, T // n, H, ...)."""
            one = like[field]
            if one is None:
                return None
            return torch.stack([s[field] for s in states], 1) if states else one.new_empty(len(one), 0, *one.shape[1:])  # type: ignore[misc]

        return torch.cat(hs, 1), state, State(*map(stacked, range(3)))  # type: ignore[arg-type]

    def packed(self, every: int, state: State | None, cu_seqlens: Tensor) -> Found:
        """Compute packed sequences, of which each part has the next n steps; the offsets are read on the host."""
        bounds = list(itertools.pairwise(packed_bounds(cu_seqlens, self.T)))
        device = cu_seqlens.device
        hs: list[Tensor] = []
        taken: list[int] = []  # the steps in the order in which parts compute them
        rows: list[int] = []  # the rows of the result that the states in `found` are for
        found: list[State] = []
        for start in range(0, max([b - a for a, b in bounds], default=0) or 1, every):
            spans = [(min(a + start, b), min(a + start + every, b)) for a, b in bounds]
            steps = [t for a, b in spans for t in range(a, b)]
            offsets = torch.tensor([0, *itertools.accumulate(b - a for a, b in spans)], device=device)
            index = torch.tensor(steps, dtype=torch.int64, device=self._device())
            h, state = self.part(index, state, offsets.to(cu_seqlens.dtype))
            hs.append(h)
            taken += steps
            ended = [s for s, (a, b) in enumerate(spans) if b - a == every]
            rows += [bounds[s][0] // every + start // every for s in ended]
            found.append(_rows(state, ended))
        assert state is not None
        back = torch.tensor(taken, dtype=torch.int64, device=self._device()).argsort()
        target = torch.tensor(rows, dtype=torch.int64, device=self._device())

        def placed(field: int) -> Tensor | None:
            """Return C, n or m of all states in their rows, (1, T // n, H, ...), zeros where there is none."""
            if found[0][field] is None:
                return None
            each = torch.cat([s[field] for s in found])  # type: ignore[misc]
            return each.new_zeros(self.T // every, *each.shape[1:]).index_copy(0, target, each)[None]

        return torch.cat(hs, 1)[:, back], state, State(*map(placed, range(3)))  # type: ignore[arg-type]

    def _device(self) -> torch.device:
        """Return the device of the tensors."""
        q = self.tensors["q"]
        assert q is not None
        return q.device


def _rows(state: State, rows: list[int]) -> State:
    """Return the states of some sequences."""
    return State(*(None if t is None else t[rows] for t in state))  # type: ignore[arg-type]
