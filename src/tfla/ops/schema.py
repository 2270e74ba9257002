"""The schemas of registered operators, generated from the fields of named tuples.

A registered operator takes a flat list of arguments: the tensors of its inputs, further tensors, and the options of its
spec, among them the name of the backend. :class:`Schema` writes that list down as PyTorch's schema string, and converts
between the list and the named tuples.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

X = TypeVar("X", bound=tuple[Any, ...])  # a NamedTuple of tensors
S = TypeVar("S", bound=tuple[Any, ...])  # a NamedTuple of options

SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    bool: "bool",
    int: "SymInt",
    str: "str",
    torch.dtype | None: "ScalarType?",
}


def argument(name: str, annotation: Any, default: Mapping[str, Any]) -> str:
    """Return the declaration of one argument in a schema, as in ``'str gates="log"'``."""
    kind = "str" if typing.get_origin(annotation) is Literal else SCHEMA_TYPES[annotation]
    if name not in default:
        return f"{kind} {name}"
    value = default[name]
    return f'{kind} {name}="{value}"' if isinstance(value, str) else f"{kind} {name}={value}"


class Arguments(NamedTuple, Generic[X, S]):
    """The arguments of one call of a registered operator."""

    x: X  # the tensors of the inputs
    further: tuple[Tensor | None, ...]  # the tensors after them
    backend: str  # the name of the backend
    spec: S  # the options


class Schema(Generic[X, S]):
    """The list of arguments of a registered operator.

    Args:
        inputs: the named tuple of the inputs.
        spec: the named tuple of the options.
        backend_before: the option before which the name of the backend stands.
        further: the tensors after the inputs, by name: whether each may be None.
        fixed: the options that are no arguments of the operator, by name: the values that they have.
        results: the number of tensors that the operator returns.
        overwritten: the inputs that the operator overwrites in place.
    """

    def __init__(
        self,
        inputs: type[X],
        spec: type[S],
        *,
        backend_before: str,
        results: int,
        further: Mapping[str, bool] | None = None,
        fixed: Mapping[str, Any] | None = None,
        overwritten: Sequence[str] = (),
    ) -> None:
        self.inputs, self.spec = inputs, spec
        self.further, self.fixed = dict(further or {}), dict(fixed or {})
        names: list[str] = []
        for name in spec._fields:  # type: ignore[attr-defined]
            names += ["backend"] * (name == backend_before)
            names += [name] * (name not in self.fixed)
        self.options = tuple(names)
        self.num_inputs = len(inputs._fields)  # type: ignore[attr-defined]
        self.num_tensors = self.num_inputs + len(self.further)
        every = (*spec._fields, "backend")  # type: ignore[attr-defined]
        self._positions = tuple(every.index(name) for name in names)
        self.text = self._text(results, overwritten)

    def _text(self, results: int, overwritten: Sequence[str]) -> str:
        """Return the schema string."""
        of_inputs, of_spec = typing.get_type_hints(self.inputs), {**typing.get_type_hints(self.spec), "backend": str}
        defaults = self.spec._field_defaults  # type: ignore[attr-defined]
        declared = [argument(name, kind, {}) for name, kind in of_inputs.items()]
        for letter, name in zip("abc", overwritten, strict=False):
            optional = "?" * (f"Tensor? {name}" in declared)
            declared[declared.index(f"Tensor{optional} {name}")] = f"Tensor({letter}!){optional} {name}"
        declared += [
            argument(name, Tensor | None if optional else Tensor, {}) for name, optional in self.further.items()
        ]
        declared += [argument(name, of_spec[name], defaults) for name in self.options]
        return f"({', '.join(declared)}) -> ({', '.join(['Tensor'] * results)})"

    def pack(self, x: X, further: Sequence[Tensor | None], backend: str, spec: S) -> tuple[Any, ...]:
        """Return the list of arguments of a call."""
        options = (*spec, backend)
        return (*x, *further, *[options[j] for j in self._positions])

    def unpack(self, args: Sequence[Any]) -> Arguments[X, S]:
        """Return the named tuples of a list of arguments; the dispatcher leaves out trailing ones that are defaults."""
        options = dict(zip(self.options, args[self.num_tensors :], strict=False))
        backend = options.pop("backend")
        return Arguments(
            self.inputs(*args[: self.num_inputs]), tuple(args[self.num_inputs : self.num_tensors]), backend,
            self.spec(**options, **self.fixed),
        )  # fmt: skip

    def replace(self, args: tuple[Any, ...], option: str, value: Any) -> tuple[Any, ...]:
        """Return the list of arguments with another value of an option that has no default."""
        at = self.num_tensors + self.options.index(option)
        return (*args[:at], value, *args[at + 1 :])
