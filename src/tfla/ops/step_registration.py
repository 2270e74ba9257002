"""Operators of decoding steps, registered with PyTorch.

An operator `NAME` is registered as `tfla::NAME`, and as `tfla::NAME_`, which overwrites the state C in place. Where the
state has further parts, `tfla::NAME_pool_` overwrites rows of all of them by index. They have neither gradients nor
rules for transforms; the functions in plain PyTorch have both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tfla.ops import flops
from tfla.ops.checks import check_values_of_indices, check_values_of_lengths
from tfla.ops.schema import Schema

X = TypeVar("X", bound=tuple[Any, ...])  # a NamedTuple of tensors, with C, `lengths` and `indices`
S = TypeVar("S", bound=tuple[Any, ...])  # a NamedTuple of options, with `final_state`


class StepOperator(Generic[X, S]):
    """One operator of decoding steps with its registrations.

    Its results are h, the new C and the other parts of the new state; without the option `final_state` all but h are
    empty tensors.

    Args:
        name: the name of the operator.
        inputs: the named tuple of the inputs.
        spec: the named tuple of the options.
        backends: the backends by name.
        state: the names of the inputs that are parts of the state.
        shapes: the function that returns empty tensors like the results, for a call with `final_state`.
        count: the formula of the FLOPs, see :func:`tfla.ops.flops.add`.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: type[X],
        spec: type[S],
        backends: Mapping[str, Any],
        state: Sequence[str],
        shapes: Callable[[X], tuple[Tensor, ...]],
        count: Callable[[Any, str, Any], int],
    ) -> None:
        options: tuple[str, ...] = spec._fields  # type: ignore[attr-defined]
        after = options[options.index("final_state") + 1]
        self.backends, self.shapes = backends, shapes
        self.state = tuple(state)
        self.schema = Schema(inputs, spec, backend_before="final_state", results=1 + len(state))
        fixed = {"final_state": True}
        self.schema_in_place = Schema(
            inputs, spec, backend_before=after, results=len(state), fixed=fixed, overwritten=("C",)
        )
        self.schema_pool = Schema(inputs, spec, backend_before=after, results=1, fixed=fixed, overwritten=state)
        self._register(name, self.schema, self._new, self._new_shapes, count)
        self._register(f"{name}_", self.schema_in_place, self._in_place, self._in_place_shapes, count)
        self.new = getattr(torch.ops.tfla, name).default
        self.in_place = self.pool = getattr(torch.ops.tfla, f"{name}_").default
        if len(state) > 1:
            self._register(f"{name}_pool_", self.schema_pool, self._pool, self._pool_shapes, count)
            self.pool = getattr(torch.ops.tfla, f"{name}_pool_").default

    @staticmethod
    def _register(
        name: str,
        schema: Schema[X, S],
        run: Callable[..., Any],
        shapes: Callable[..., Any],
        count: Callable[[Any, str, Any], int],
    ) -> None:
        """Register `tfla::NAME` with its shapes for tracing and its FLOPs."""

        @torch._disable_dynamo
        def untraced(*args: Any) -> Any:
            return run(*args)

        torch.library.define(f"tfla::{name}", schema.text)
        torch.library.impl(f"tfla::{name}", "default")(untraced)
        torch.library.register_fake(f"tfla::{name}")(shapes)
        flops.add(getattr(torch.ops.tfla, name), schema, count)

    def __call__(self, x: X, backend: str, spec: S, in_place: bool) -> Sequence[Tensor]:
        """Compute the steps with a backend.

        With `in_place` the new C overwrites the old one and is returned; with indices all parts of the state are.
        """
        if not in_place:
            found: Sequence[Tensor] = self.new(*self.schema.pack(x, (), backend, spec))
            return found
        if x.indices is not None:  # type: ignore[attr-defined]
            h = self.pool(*self.schema_pool.pack(x, (), backend, spec))
            parts = (getattr(x, name) for name in self.state)
            return h, *(h.new_empty(0) if t is None else t for t in parts)
        rest = self.in_place(*self.schema_in_place.pack(x, (), backend, spec))
        h, *others = (rest,) if isinstance(rest, Tensor) else rest
        return h, x.C, *others  # type: ignore[attr-defined]

    def _run(self, schema: Schema[X, S], args: Sequence[Any], in_place: bool) -> tuple[Tensor, ...]:
        """Run the steps on the backend that the arguments name, and return distinct tensors."""
        x, _, backend, spec = schema.unpack(args)
        lengths, C, v = x.lengths, x.C, x.v  # type: ignore[attr-defined]
        if lengths is not None and lengths.device.type == "cpu":  # a call that is traced cannot read them
            check_values_of_lengths(lengths, v.shape[1])
        if x.indices is not None and x.indices.device.type == "cpu":  # type: ignore[attr-defined]
            check_values_of_indices(x.indices, C.shape[0])  # type: ignore[attr-defined]
        h, *state = self.backends[backend].steps(x, spec, C if in_place else None)
        return h, *(t if t.numel() else torch.empty_like(t) for t in state)

    def _new(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the results of a call."""
        return self._run(self.schema, args, in_place=False)

    def _in_place(self, *args: Any) -> Any:
        """Return the results of a call but for C, which it overwrites."""
        h, _, *others = self._run(self.schema_in_place, args, in_place=True)
        return (h, *others) if others else h

    def _pool(self, *args: Any) -> Tensor:
        """Return h of a call that overwrites rows of all parts of the state."""
        return self._run(self.schema_pool, args, in_place=True)[0]

    def _new_shapes(self, *args: Any) -> tuple[Tensor, ...]:
        """Return empty tensors like the results of a call."""
        x, _, _, spec = self.schema.unpack(args)
        h, *state = self.shapes(x)
        if not spec.final_state:  # type: ignore[attr-defined]
            state = [h.new_empty(0) for _ in state]
        return h, *state

    def _in_place_shapes(self, *args: Any) -> Any:
        """Return empty tensors like the results of a call but for C."""
        h, _, *others = self.shapes(self.schema_in_place.unpack(args).x)
        return (h, *others) if others else h

    def _pool_shapes(self, *args: Any) -> Tensor:
        """Return an empty tensor like h of a call that overwrites rows of the state."""
        return self.shapes(self.schema_pool.unpack(args).x)[0]
