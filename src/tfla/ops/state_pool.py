"""The rows of a pool of states, read and overwritten by index in plain PyTorch, without a synchronization.

The kernels of decoding steps do the same themselves, and so do some of those of whole sequences. Other calls over whole
sequences gather their initial states here and scatter their final ones. An index of -1 stands for no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tfla.backends import DeltaInputs, Inputs
from tfla.backends.base import POOL_DTYPES, FinalRows
from tfla.ops import checks
from tfla.ops.checked_values import checked_indices
from tfla.ops.state import State
from tfla.ops.transforms import is_distributed, needs_dispatcher, transforms_active

AnyInputs = TypeVar("AnyInputs", Inputs, DeltaInputs)
PER_STEP = ("q", "k", "v", "log_i", "log_f", "beta", "read_key")  # the tensors of any inputs that have steps


def checked(indices: Tensor, pool: State) -> Tensor:
    """Return indices whose values are checked: by the caller, or for a traced call on a CPU inside its graph."""
    if indices.device.type == "cpu" and needs_dispatcher((indices,)):
        return checked_indices(indices, pool.C.shape[0])
    return indices


def state_of_plan(pool: State | None, sequences: int) -> State | None:
    """Return a state with which a call whose kernels may read rows of a pool is planned, or None where none can.

    Kernels compute in float32 with rows of any of POOL_DTYPES. The plan of a call depends on the shape and the dtype of
    its state alone, so that the values of the state are not set.
    """
    if pool is None or pool.C.shape[0] == 0 or any(t is not None and t.dtype not in POOL_DTYPES for t in pool):
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in pool):
        return None

    def planned(t: Tensor) -> Tensor:
        return t.new_empty(1, dtype=torch.float32).expand(sequences, *t.shape[1:])

    return State(*(None if t is None else planned(t) for t in pool))  # type: ignore[arg-type]


def as_packed(x: AnyInputs) -> AnyInputs | None:
    """Return the inputs of a call with its B sequences of T steps packed, (1, B T, ...), or None where that is a copy.

    Kernels find the rows of packed sequences alone. Inputs that are packed already are returned as they are.
    """
    if x.cu_seqlens is not None:
        return x
    B, T = x.v.shape[:2]
    steps = {name: t for name in PER_STEP if (t := getattr(x, name, None)) is not None}
    if not x.v.numel() or (min(B, T) > 1 and any(t.stride(0) != T * t.stride(1) for t in steps.values())):
        return None
    offsets = torch.arange(0, B * T + 1, T, device=x.v.device)
    return x._replace(cu_seqlens=offsets, **{name: t.flatten(0, 1)[None] for name, t in steps.items()})


class OtherRows(NamedTuple):
    """The rows of a part of a call, as `state_indices` has them: rows to read from one pool and to write to another.

    Args:
        indices: (B,), the rows of the initial state, a pool.
        pool: the pool that gets the final states.
        final: (B,), its rows.
    """

    indices: Tensor
    pool: State
    final: Tensor

    def final_rows(self, initial: State) -> FinalRows | None:
        """Return the pool that gets the final states and its rows, or None where they are those of the initial ones."""
        if self.pool.C is initial.C and self.final is self.indices:
            return None
        return FinalRows(self.pool.C, self.final.contiguous(), self.pool.n, self.pool.m)


class NotInKernels(Exception):
    """No kernel reads and writes the rows of a part of a call."""


class PoolRows:
    """The rows of a pool that belong to the sequences of a call, for all tensors of the pool.

    Args:
        indices: (B,) int32 or int64, the row of each sequence, each at most once; -1 stands for none.
        size: the number of rows of the pool.
    """

    def __init__(self, indices: Tensor, size: int) -> None:
        self.indices, self.size = indices, size
        self._targets: tuple[Tensor, Tensor, Tensor] | None = None

    def read(self, t: Tensor) -> Tensor:
        """Return the rows (B, ...) of t (size, ...); those of sequences at -1 are zero."""
        if not self.size:  # then no index is a row
            return t.new_zeros(self.indices.shape[0], *t.shape[1:])
        return torch.where(_like(self.indices >= 0, t), t.index_select(0, self.indices.clamp(min=0)), 0)

    def write(self, t: Tensor, rows: Tensor) -> None:
        """Overwrite the rows of t (size, ...) by rows (B, ...); those of sequences at -1 are left out.

        A row at -1 becomes a copy of one that is not, so that both write the same. If all are at -1, the first row of t
        is overwritten by itself.

        Raises:
            ValueError: gradients of the rows are recorded.
        """
        if not self.indices.shape[0] or not self.size:
            return
        if rows.requires_grad:
            raise ValueError("state_indices: got them while gradients are recorded, expected torch.no_grad()")
        source, target, written = self.targets()
        rows = rows.to(t.dtype).index_select(0, source)
        t.index_copy_(0, target, torch.where(written, rows, t.index_select(0, target)))

    def read_state(self, pool: State, dtype: torch.dtype | None = None) -> State:
        """Return the states (B, ...) of a pool, in its dtypes or in the given one."""
        return State(*(None if t is None else self.read(t).to(dtype or t.dtype) for t in pool))  # type: ignore[arg-type]

    def write_state(self, pool: State, states: State) -> None:
        """Overwrite the rows of a pool by states (B, ...)."""
        for own, given in zip(pool, states, strict=True):
            if own is not None and given is not None:
                self.write(own, given)

    def clear(self, pool: State) -> None:
        """Overwrite the rows of a pool by the states before the first step, which are zero."""
        if not self.indices.shape[0] or not self.size:
            return
        _, target, written = self.targets()
        for t in pool:
            if t is not None:
                first = torch.where(written, 0, t.index_select(0, target[:1]))  # if all are at -1, row 0 as it is
                t.index_fill_(0, target, 0).index_copy_(0, target[:1], first)

    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return which sequence (B,) writes and to which row (B,) int64, and whether any does."""
        if self._targets is None:
            self._targets = self._find_targets()
        return self._targets

    def _find_targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return :meth:`targets`."""
        valid = self.indices >= 0
        own = torch.arange(self.indices.shape[0], device=self.indices.device)
        source = torch.where(valid, own, valid.to(torch.int8).argmax())
        return source, self.indices.index_select(0, source).clamp(min=0).to(torch.int64), valid.any()


def rows_that_exist(indices: Tensor, pool: State) -> PoolRows:
    """Return the rows of a pool that are not beyond its end; sequences of others have none."""
    size = pool.C.shape[0]
    return PoolRows(torch.where(indices < size, indices, -1), size)


def without_padding(h: Tensor, indices: Tensor) -> Tensor:
    """Return outputs h (B, ...), zero for sequences at index -1."""
    return torch.where(_like(indices >= 0, h), h, 0.0)


def attend_by_index(
    request: Any,
    indices: Tensor | OtherRows,
    cu_seqlens: Tensor | None,
    run: Callable[[Any], Any],
    further: Sequence[object] = (),
    in_kernels: Callable[[Any, OtherRows], Tensor | None] | None = None,
    in_graph: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Compute a call over whole sequences whose initial states are rows of a pool, and its final states too.

    Args:
        request: the arguments of the call; its state is the pool.
        indices: (sequences,), the rows; or those of a part, which have been checked.
        cu_seqlens: the offsets of packed sequences.
        run: the function that computes a call from its arguments.
        further: arguments of the call that are not in the request.
        in_kernels: the function that computes h from the arguments and the indices with kernels that read and overwrite
            the rows, or returns None where no kernel does.
        in_graph: whether that function takes traced calls, too, as an operator of their graph.

    Returns:
        h; with `request.return_state` also the pool, whose rows are then overwritten.

    Raises:
        ValueError, TypeError: the state or the indices do not fit; the message says what is allowed.
        NotInKernels: no kernel takes the rows of a part.
    """
    if isinstance(indices, OtherRows):
        h = None if in_kernels is None else in_kernels(request, indices)
        if h is None:
            raise NotInKernels
        return h, indices.pool
    q, pool = request.q, request.state
    if not isinstance(q, Tensor) or is_distributed(q):
        raise TypeError(f"state_indices: got them with q of type {type(q).__name__}, expected plain tensors")
    if not isinstance(pool, State):
        raise TypeError(
            f"state_indices: got them with initial_state {type(pool).__name__}, expected tfla.State, the pool"
        )
    checks.check_pool(pool, "initial_state", q, request.v)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    checks.check_state_indices(indices, sequences, pool)
    if request.return_state:
        given = [t for t in (*request, *further, *pool) if isinstance(t, Tensor)]
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        parts = {name: t.dtype for name, t in zip(State._fields, pool, strict=True) if t is not None}
        if pool.m is not None and pool.m.dtype.itemsize == 2:
            parts["m"] = torch.float32  # C and n stand for exp(m) C and exp(m) n: to round m would scale both
        checks.check_in_place(pool, parts, recorded, transforms_active(), "state_indices: got them", "initial_state")
    traced = needs_dispatcher((q, indices, *pool))
    if in_kernels is not None and (not traced or (in_graph and not transforms_active())):
        h = in_kernels(request, OtherRows(indices, pool, indices))
        if h is not None:
            return (h, pool) if request.return_state else h
    indices = checked(indices, pool)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = PoolRows(indices, pool.C.shape[0])
    found = run(request._replace(state=rows.read_state(pool, wide)))
    if not request.return_state:
        gathered: Tensor = found
        return gathered
    rows.write_state(pool, found[1])
    return found[0], pool


def _like(mask: Tensor, t: Tensor) -> Tensor:
    """Return a mask (B,) with as many dimensions as t."""
    return mask.view(-1, *[1] * (t.dim() - 1))
