"""The recurrent state of the operators."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from tfla._util.device import check_device
from tfla.ops.transforms import needs_dispatcher

MASK = ": the indices of a mask are mask.nonzero().flatten()"


class State(NamedTuple):
    """The stabilized state of gated linear attention; the true state is ``exp(m) C`` and ``exp(m) n``.

    With ``cu_seqlens``, B is the number of sequences. All tensors are float32, or float64 if q is float64. For
    decoding, C and n may also be bfloat16 or float16. The value of m is a choice of the computation and cancels out of
    every result. Gradients reach the true state through C and n; a returned m carries none. `torch.save` writes a state
    and `torch.load` reads it, with its default ``weights_only=True``.

    Attributes:
        C: (B, H, dqk, dhv).
        n: (B, H, dqk), the normalizer; None without one.
        m: (B, H), the max state; None without a normalizer.
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
        """Return the state before the first step, which is zero.

        Args:
            batch: the number of sequences.
            heads: the number of heads of v.
            dqk, dhv: the sizes of a head of q and k, and of v.
            normalize: whether the state has a normalizer n and a max state m.
            dtype: a float dtype, that of C and n. m is at least float32, since its error scales the whole state.
            device: the device; None is PyTorch's default.

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
        if not normalize:
            return State(C)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return State(C, C.new_zeros(batch, heads, dqk), C.new_zeros(batch, heads, dtype=wide))

    def detach(self) -> State:
        """Return the same state, detached from the graph of autograd."""
        return self._each(Tensor.detach)

    def to(self, device: torch.device | str) -> State:
        """Return the same state on the given device.

        Raises:
            TypeError, ValueError: there is no such device here.
        """
        device = check_device(device)
        return self._each(lambda t: t.to(device))

    def clone(self) -> State:
        """Return a copy, which does not change when steps overwrite this state in place."""
        return self._each(Tensor.clone)

    def gather(self, rows: Tensor | Sequence[int]) -> State:
        """Return a copy of the states of some sequences of the batch.

        Args:
            rows: (R,) integers, the indices of the sequences, in any order; an index may occur more than once.

        Raises:
            TypeError, ValueError: rows are no one-dimensional list or tensor of integers, or out of range. A boolean
                mask is not accepted.
        """
        index = self._index(rows)
        return self._each(lambda t: t.index_select(0, index))

    def scatter(self, rows: Tensor | Sequence[int], states: State) -> None:
        """Overwrite the states of some sequences in place.

        Args:
            rows: (R,) integers, the indices of the sequences, each at most once.
            states: the new states, with batch R; sequence rows[j] gets the j-th one.

        Raises:
            TypeError, ValueError: as :meth:`gather`; or rows contain an index twice; or ``states`` is no State, or has
                other shapes apart from the batch R, or n and m where this state has none, or the reverse.
        """
        if not isinstance(states, State):
            raise TypeError(f"states: got {type(states).__name__}, expected tfla.State")
        index = self._index(rows, once=True)
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, own, given in zip(self._fields, self, states, strict=True):
            if (own is None) != (given is None):
                got, wanted = ("None", "a tensor") if given is None else ("a tensor", "None")
                raise ValueError(f"states.{name}: got {got}, expected {wanted}")
            if own is None or given is None:
                continue
            check_rows_of(f"states.{name}", given, own, index)
            pairs.append((own, given))
        for own, given in pairs:
            overwrite_rows(own, index, given)

    def reset(self, rows: Tensor | Sequence[int]) -> None:
        """Reset some sequences in place to the state before the first step.

        Args:
            rows: (R,) integers, the indices of the sequences.

        Raises:
            TypeError, ValueError: as :meth:`gather`.
        """
        index = self._index(rows)
        for t in self:
            if t is not None:
                t.index_fill_(0, index, 0.0)

    def _each(self, fn: Callable[[Tensor], Tensor]) -> State:
        """Return the state of fn of each tensor."""
        return State(*(None if t is None else fn(t) for t in self))  # type: ignore[arg-type]

    def _index(self, rows: object, once: bool = False) -> Tensor:
        """Check rows and return them as a tensor on the device of the state.

        The values of a tensor on a GPU are not checked, because the host would wait for the device.
        """
        if not isinstance(rows, Tensor):
            if not isinstance(rows, Sequence) or not all(isinstance(row, numbers.Integral) for row in rows):
                raise TypeError(f"rows: got {rows!r}, expected a tensor or a list of integers")
            if any(isinstance(row, bool) for row in rows):
                raise TypeError(f"rows: got {rows!r}, expected a tensor or a list of integers{MASK}")
            rows = torch.tensor([int(row) for row in rows], dtype=torch.int64, device="cpu")
        if rows.dtype not in (torch.int32, torch.int64):
            mask = MASK * (rows.dtype == torch.bool)
            raise TypeError(f"rows: got dtype {rows.dtype}, expected int32 or int64{mask}")
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
        return rows.to(self.C.device, torch.int64)


def register_state(kind: type, name: str) -> None:
    """Let torch.load read states of a type by default, and torch.export.save write programs with them."""
    torch.serialization.add_safe_globals([kind])
    _register_namedtuple(kind, serialized_type_name=name)


register_state(State, "tfla.State")


def check_rows_of(name: str, given: object, own: Tensor, index: Tensor) -> None:
    """Raise unless ``given`` is a tensor that has a row of ``own`` for each index.

    Raises:
        TypeError, ValueError: the message starts with ``name``.
    """
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: got {type(given).__name__}, expected a tensor")
    shape = (index.shape[0], *own.shape[1:])
    if given.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected {shape}")


def overwrite_rows(own: Tensor, index: Tensor, given: Tensor) -> None:
    """Overwrite rows of ``own`` in place by ``given``, which may be a view of ``own``."""
    given = given.to(own)
    # A compiler cannot compare memory, and makes no copy that nothing needs.
    if torch.compiler.is_compiling() or given.untyped_storage()._cdata == own.untyped_storage()._cdata:
        given = given.clone()
    own.index_copy_(0, index, given)
