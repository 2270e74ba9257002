"""The values of kernels: numbers, blocks of numbers in registers, and pointers. Layouts are not simulated."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _truncated(a: Any, b: Any) -> Any:
    """Return the quotient of integers, truncated towards 0 as in C."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _rest(a: Any, b: Any) -> Any:
    return a - _truncated(a, b) * b


def _kind(x: Any) -> torch.dtype | None:
    """Return the dtype of a number or a block, or None for Python's numbers, which take that of the other operand."""
    return x.dtype if isinstance(x, Operand) else None


def common(a: Any, b: Any) -> torch.dtype:
    """Return the dtype of the result of an operation on both."""
    kinds = [kind for kind in (_kind(a), _kind(b)) if kind is not None] or [torch.int32]
    kind = torch.promote_types(kinds[0], kinds[-1])
    if any(isinstance(x, float) for x in (a, b)) and not kind.is_floating_point:
        return torch.float32
    return kind


def plain(x: Any) -> Any:
    """Return the data of a number or a block, and anything else as it is."""
    return x.data if isinstance(x, Operand) else x


def tensor(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a number or a block as a tensor."""
    if isinstance(x, Block):
        return x.data if dtype is None else x.data.to(dtype)
    return torch.tensor(plain(x), dtype=dtype if dtype is not None else _kind(x))


def _apply(op: Callable[[Any, Any], Any], a: Any, b: Any, compares: bool = False) -> Any:
    if isinstance(a, Pointer) or isinstance(b, Pointer):
        return NotImplemented
    kind = common(a, b)
    if isinstance(a, Block) or isinstance(b, Block):
        return Block(op(tensor(a, kind), tensor(b, kind)))
    return Number(op(plain(a), plain(b)), torch.bool if compares else kind)


def _binary(op: Callable[[Any, Any], Any], compares: bool = False) -> Any:
    return lambda a, b: _apply(op, a, b, compares)


def _reflected(op: Callable[[Any, Any], Any]) -> Any:
    return lambda a, b: _apply(op, b, a)


class Type:
    """The type of a value, whose layout is not simulated."""

    layout = None


class Operand:
    """A number or a block."""

    dtype: torch.dtype
    data: Any
    type = Type()

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(_truncated), _reflected(_truncated)
    __mod__, __rmod__ = _binary(_rest), _reflected(_rest)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rshift__ = _binary(operator.lshift), _binary(operator.rshift)
    __lt__, __le__ = _binary(operator.lt, True), _binary(operator.le, True)
    __gt__, __ge__ = _binary(operator.gt, True), _binary(operator.ge, True)
    __eq__, __ne__ = _binary(operator.eq, True), _binary(operator.ne, True)
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Any:
        return _apply(operator.sub, 0, self)


class Number(Operand):
    """A scalar of a kernel. Integers do not wrap around: one that does not fit is an error."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: Any, dtype: torch.dtype) -> None:
        if dtype in (torch.int32, torch.int64) and not torch.iinfo(dtype).min <= data <= torch.iinfo(dtype).max:
            raise OverflowError(f"{data} is no {dtype}")
        self.data, self.dtype = data, dtype

    def to(self, dtype: torch.dtype) -> Number:
        return Number(torch.tensor(self.data, dtype=self.dtype).to(dtype).item(), dtype)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return operator.index(self.data)

    def __repr__(self) -> str:
        return f"{self.data}"


class Block(Operand):
    """A block in registers. The result of an asynchronous MMA may be used only after a wait for it."""

    __slots__ = ("_data", "pending")

    def __init__(self, data: Tensor, pending: int | None = None) -> None:
        self._data, self.pending = data, pending

    @property
    def data(self) -> Tensor:
        if self.pending is not None:
            raise RuntimeError("the result of an MMA is used before a wait for it has returned it")
        return self._data

    @property
    def accumulator(self) -> Tensor:
        """The data for a further MMA, which may accumulate onto a pending result."""
        return self._data

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self._data.shape)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype))


class PointerType:
    def __init__(self, element_ty: torch.dtype) -> None:
        self.element_ty = element_ty


class Pointer:
    """A pointer, or a block of them, into the storage of a tensor."""

    def __init__(self, storage: Tensor, offset: Any) -> None:
        self.storage, self.offset = storage, offset
        self.dtype = PointerType(storage.dtype)

    @classmethod
    def to_first(cls, x: Tensor) -> Pointer:
        return cls(flat(x), Number(x.storage_offset(), torch.int64))

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.offset + other)

    __radd__ = __add__

    def elements(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the indices of the elements in the storage, and which of them the mask selects."""
        at, wanted = tensor(self.offset).long(), torch.tensor(True) if mask is None else tensor(mask)
        at, wanted = torch.broadcast_tensors(at, wanted)
        outside = wanted & ((at < 0) | (at >= self.storage.numel()))
        if outside.any():
            raise IndexError(f"element {at[outside][0]} of a tensor that has {self.storage.numel()}")
        return at, wanted


def flat(x: Tensor) -> Tensor:
    """Return all elements of the storage of x as a view; writes to it do not increase PyTorch's version counter."""
    return x.data.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
