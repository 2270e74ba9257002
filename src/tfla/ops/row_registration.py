"""Operators over whole sequences whose states are rows of a pool, registered with PyTorch for traced calls.

For an operator `tfla::NAME`, `tfla::NAME_rows_` reads and overwrites the rows, and `tfla::NAME_rows` only reads them.
Both return h and have no gradients. Inside them kernels read and write the rows, as in eager calls, or the rows are
gathered and scattered where no kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla.backends.base import FinalRows
from tfla.ops import flops
from tfla.ops.autocast import without_autocast
from tfla.ops.checks import check_values_of_indices
from tfla.ops.dispatch import Plan
from tfla.ops.gates import clamp
from tfla.ops.registration import DifferentiableOperator
from tfla.ops.schema import Schema
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows

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
        """Register `tfla::NAME` with its shapes for tracing and its FLOPs, and return it."""

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
        flops.add(getattr(torch.ops.tfla, name), schema, count)
        return getattr(torch.ops.tfla, name).default

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

    def _gather(self, x: Any, indices: Tensor, backend: Any, spec: Any) -> Tensor:
        """Return h of a call that gathers its rows, and scatters them if it overwrites them."""
        pool = State(*(getattr(x, part, None) for part in State._fields))  # type: ignore[arg-type]
        rows = PoolRows(indices, pool.C.shape[0])
        own = rows.read_state(pool, x.acc_dtype)
        given = {part: clamp(t) if part == "m" else t for part, t in own._asdict().items() if t is not None}
        with without_autocast(x.q.device.type):
            out = backend.forward(x._replace(**given), spec)
        if spec.final_state:
            rows.write_state(pool, State(*(getattr(out, part, None) for part in State._fields)))  # type: ignore[arg-type]
        h: Tensor = out.h
        return h
