"""The recurrent state."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tfla._util.device import check_device
from tfla.ops.transforms import needs_dispatcher

MASK = ": the indices of a mask are mask.nonzero().flatten()"


class State(NamedTuple):
    """The state of gated linear attention, stabilised: the true state is ``exp(m) C`` and ``exp(m) n``.

    C: (B, H, dqk, dhv), n: (B, H, dqk), m: (B, H); float32, or float64 where q is. n and m are None without a
    normaliser. With ``cu_seqlens``, B is the number of sequences. For decoding C and n may be kept in 16 bits.

    m is a number the computation is free to choose and cancels out of every result. Gradients reach the true state
    through C and n; a returned m carries none.
    """

    C: Tensor
    n: Tensor | None = None
    m: Tensor | None = None

    @staticmethod
    def zeros(
        batch: int,
        heads: int,
        dqk: int,
        dhv: int,
        *,
        normalize: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """Return the state before the first step.

        Raises:
            TypeError, ValueError: a size is no int or below 1 (batch: below 0), dtype is no float dtype, or there is no
                such device here.
        """
        sizes = {"batch": batch, "heads": heads, "dqk": dqk, "dhv": dhv}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
                raise TypeError(f"{name}: got {size!r}, expected an int")
            if size < 0 or (name != "batch" and size == 0):
                raise ValueError(f"{name}: got {size}, expected at least {int(name != 'batch')}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype: got {dtype!r}, expected a float dtype")
        if device is not None and not torch.compiler.is_compiling():
            device = check_device(device)
        C = torch.zeros(batch, heads, dqk, dhv, dtype=dtype, device=device)
        return State(C, C.new_zeros(batch, heads, dqk), C.new_zeros(batch, heads)) if normalize else State(C)

    def detach(self) -> State:
        """The same state, cut from the graph."""
        return self._each(Tensor.detach)

    def to(self, device: torch.device | str) -> State:
        """Return the same state on another device.

        Raises:
            TypeError, ValueError: there is no such device here.
        """
        device = check_device(device)
        return self._each(lambda t: t.to(device))

    def clone(self) -> State:
        """A copy, which steps in place leave alone."""
        return self._each(Tensor.clone)

    def gather(self, rows: Tensor | Sequence[int]) -> State:
        """A copy of the states of some sequences of the batch, in the order of their indices, repeats allowed.

        Raises:
            TypeError, ValueError: rows are no one-dimensional list or tensor of integers, or out of range. A mask is
                none: it says with its length what indices say with their values.
        """
        index = self._index(rows)
        return self._each(lambda t: t.index_select(0, index))

    def scatter(self, rows: Tensor | Sequence[int], states: State) -> None:
        """Overwrites the states of some sequences, in place: sequence rows[j] gets the j-th of ``states``.

        Raises:
            TypeError, ValueError: as :meth:`gather`; or rows name a sequence twice; or ``states`` are not as many, or
                not of this kind.
        """
        if not isinstance(states, State):
            raise TypeError(f"states: got {type(states).__name__}, expected tfla.State")
        index = self._index(rows, once=True)
        for name, mine, theirs in zip(self._fields, self, states, strict=True):
            if (mine is None) != (theirs is None):
                got, wanted = ("None", "a tensor") if theirs is None else ("a tensor", "None")
                raise ValueError(f"states.{name}: got {got}, expected {wanted}")
            if mine is None or theirs is None:
                continue
            shape = (index.shape[0], *mine.shape[1:])
            if theirs.shape != shape:
                raise ValueError(f"states.{name}: got shape {tuple(theirs.shape)}, expected {shape}")
            mine.index_copy_(0, index, theirs.to(mine))

    def reset(self, rows: Tensor | Sequence[int]) -> None:
        """Puts some sequences before their first step, in place.

        Raises:
            TypeError, ValueError: as :meth:`gather`.
        """
        index = self._index(rows)
        for t in self:
            if t is not None:
                t.index_fill_(0, index, 0.0)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> State:
        return State(*(None if t is None else fn(t) for t in self))  # type: ignore[arg-type]

    def _index(self, rows: object, once: bool = False) -> Tensor:
        """On a GPU the values of a tensor are not read, so that nothing waits for the device."""
        if not isinstance(rows, Tensor):
            if not isinstance(rows, Sequence) or not all(isinstance(row, numbers.Integral) for row in rows):
                raise TypeError(f"rows: got {rows!r}, expected a tensor or a list of integers")
            if any(isinstance(row, bool) for row in rows):
                raise TypeError(f"rows: got {rows!r}, expected a tensor or a list of integers{MASK}")
            rows = torch.tensor([int(row) for row in rows], dtype=torch.int64)
        if rows.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"rows: got dtype {rows.dtype}, expected int64{MASK * (rows.dtype == torch.bool)}")
        if rows.dim() != 1:
            raise ValueError(f"rows: got shape {tuple(rows.shape)}, expected one dimension")
        if rows.device.type == "cpu" and not needs_dispatcher((rows,)):
            given = rows.tolist()
            wrong = [row for row in given if not 0 <= row < self.C.shape[0]]
            if wrong:
                raise ValueError(f"rows: got {wrong[0]}, expected from 0 to {self.C.shape[0] - 1}")
            if once and len(set(given)) < len(given):
                twice = next(row for row in given if given.count(row) > 1)
                raise ValueError(f"rows: got {twice} more than once, expected each sequence once")
        return rows.to(self.C.device)
