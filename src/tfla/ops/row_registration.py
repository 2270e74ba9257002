"""Operators over whole sequences whose states are rows of a pool, registered with PyTorch for traced calls.

For an operator `tfla::NAME`, `tfla::NAME_rows_` reads and overwrites the rows, and `tfla::NAME_rows` only reads them.
Both return h. Inside them kernels read and write the rows, as in eager calls, or the rows are gathered and scattered
where no kernel does. A graph that was traced without gradients may be called with tensors that have them:
`tfla::NAME_rows` then gathers the rows and calls `tfla::NAME`, and `tfla::NAME_rows_` is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.backends.base import FinalRows
from tfla.ops import flops
from tfla.ops.autocast import without_autocast
from tfla.ops.checked_values import checked_indices
from tfla.ops.checks import check_in_place, check_values_of_indices
from tfla.ops.dispatch import Plan
from tfla.ops.gates import clamp
from tfla.ops.registration import LIBRARY, DifferentiableOperator
from tfla.ops.schema import Schema
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows
from tfla.ops.transforms import forward_mode

# The function that returns the inputs and the options of a call as the kernels of a backend take them that read rows of
# a pool, or None where none does.
Prepare = Callable[[Any, Any, Any], tuple[Any, Any] | None]


class RowsOperator:
    """An operator whose states are rows of a pool, the fields C, n and m of its inputs.

    Args:
        operator: the operator of states of their own.
        name: the name of its forward.
        prepare: see above.
        count: the formula of the FLOPs, see :func:`tfla.ops.flops.add`.
    """

    def __init__(
        self, operator: DifferentiableOperator[Any, Any, Any, Any], name: str, prepare: Prepare,
        count: Callable[[Any, str, Any], int],
    ) -> None:  # fmt: skip
        self.operator, self.prepare = operator, prepare
        of = operator.forward_schema
        self.parts = [part for part in State._fields if part in of.inputs._fields]
        self._registered = {}
        for overwrites in (False, True):
            schema: Schema[Any, Any] = Schema(
                of.inputs, of.spec, backend_before="kernel", results=1, further={"indices": False},
                fixed={"save": False, "final_state": overwrites}, overwritten=self.parts if overwrites else (),
            )  # fmt: skip
            own = f"{name}_rows" + "_" * overwrites
            self._registered[overwrites] = schema, self._register(own, schema, count)

    def _register(self, name: str, schema: Schema[Any, Any], count: Callable[[Any, str, Any], int]) -> Any:
        """Register `tfla::NAME` with its shapes for tracing, its gradients and its FLOPs, and return it."""

        @torch._disable_dynamo
        def untraced(*args: Any) -> Tensor:
            x, (indices,), backend, spec = schema.unpack(args)
            assert indices is not None
            return self._run(x, indices, self.operator.backends[backend], spec)

        def shapes(*args: Any) -> Tensor:
            v = schema.unpack(args).x.v
            return v.new_empty(v.shape)

        torch.library.define(f"tfla::{name}", schema.text, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(f"tfla::{name}", "default")(untraced)
        torch.library.register_fake(f"tfla::{name}")(shapes)
        registered = getattr(torch.ops.tfla, name).default

        @torch._disable_dynamo
        def under_autograd(keys: Any, *args: Any) -> Tensor:
            tensors = args[: schema.num_tensors]
            recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
            if recorded or forward_mode(tensors):
                return self._with_gradients(schema, args, recorded)
            with torch._C._AutoDispatchBelowAutograd():
                h: Tensor = registered.redispatch(keys & torch._C._after_autograd_keyset, *args)
            return h

        LIBRARY.impl(name, under_autograd, "Autograd", with_keyset=True)
        flops.add(getattr(torch.ops.tfla, name), schema, count)
        return registered

    def __call__(self, x: Any, indices: Tensor, plan: Plan, final_rows: FinalRows | None) -> Tensor | None:
        """Return h of a planned call, which overwrites the rows where its options ask for final states.

        Without kernels that take the rows of an eager call, it returns None before anything is written. So does a
        traced call with `final_rows`, for which the operators have no arguments.
        """
        if not plan.use_dispatcher:
            return self.in_kernels(x, indices, plan.backend, plan.spec, final_rows)
        if final_rows is not None:
            return None
        flops.register()
        schema, registered = self._registered[plan.spec.final_state]
        h: Tensor = registered(*schema.pack(x, (indices,), plan.backend.name, plan.spec))
        return h

    def in_kernels(
        self, x: Any, indices: Tensor, backend: Any, spec: Any, final_rows: FinalRows | None
    ) -> Tensor | None:
        """Return h of a call whose kernels read and overwrite rows of a pool, or None where none does."""
        prepared = self.prepare(x, backend, spec)
        if prepared is None:
            return None
        with without_autocast(x.q.device.type):
            h: Tensor | None = backend.forward_by_rows(prepared[0], indices, prepared[1], final_rows)
        return None if h is None else h.view(x.v.shape)

    def _run(self, x: Any, indices: Tensor, backend: Any, spec: Any) -> Tensor:
        """Return h of a call on tensors with values."""
        self.operator.check(x)
        if indices.device.type == "cpu":  # a call that is traced cannot read them
            check_values_of_indices(indices, x.C.shape[0])
        h = self.in_kernels(x, indices, backend, spec, None)
        return self._gather(x, indices, backend, spec) if h is None else h

    def _with_gradients(self, schema: Schema[Any, Any], args: Sequence[Any], recorded: bool) -> Tensor:
        """Return h of a call some of whose tensors have gradients or, unless `recorded`, tangents.

        Raises:
            ValueError: the call overwrites its rows.
        """
        x, (indices,), backend, spec = schema.unpack(args)
        assert indices is not None
        if spec.final_state:
            check_in_place(self._pool_of(x), {}, recorded, not recorded, "state_indices: got them")
        if indices.device.type == "cpu":
            indices = checked_indices(indices, x.C.shape[0])
        own = self._with_own_states(x, PoolRows(indices, x.C.shape[0]))
        h: Tensor = self.operator.forward(*self.operator.forward_schema.pack(own, (), backend, spec))[0]
        return h

    def _gather(self, x: Any, indices: Tensor, backend: Any, spec: Any) -> Tensor:
        """Return h of a call that gathers its rows, and scatters them if it overwrites them."""
        rows = PoolRows(indices, x.C.shape[0])
        with without_autocast(x.q.device.type):
            out = backend.forward(self._with_own_states(x, rows), spec)
        if spec.final_state:
            rows.write_state(self._pool_of(x), self._pool_of(out))
        h: Tensor = out.h
        return h

    @staticmethod
    def _pool_of(x: Any) -> State:
        """Return the fields of inputs or results that are parts of a state."""
        return State(*(getattr(x, part, None) for part in State._fields))  # type: ignore[arg-type]

    def _with_own_states(self, x: Any, rows: PoolRows) -> Any:
        """Return inputs whose states are those of the rows, in place of the pool."""
        own = rows.read_state(self._pool_of(x), x.acc_dtype)
        given = {part: clamp(t) if part == "m" else t for part, t in own._asdict().items() if t is not None}
        return x._replace(**given)
