"""A family of kernels: its launch code, which is run once for each call signature and replayed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfla.backends.base import Exchange, FinalRows, Grads, Inputs, Outputs, Replay, Spec, Starts, static
from tfla.backends.gpu import normalizer_rows
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.replay import LaunchRecorder, recorded_launches, recording


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelFamily:
    """The launch code of one family of kernels: straight lists of the launches of a forward and of a backward."""

    name: str
    # What a call depends on beside shapes, strides, dtypes and options.
    signature: Callable[[Inputs, Spec], tuple[Hashable, ...]]
    context: Callable[[LaunchRecorder, Inputs, Spec], LaunchContext]
    forward: Callable[[LaunchContext], Outputs]
    backward: Callable[[LaunchContext, Outputs, Tensor, Tensor | None, Tensor | None], Grads]

    def _call_signature(self, direction: str, x: Inputs, spec: Spec, *more: Tensor | None) -> Hashable:
        """Return all that the launches of a call depend on; `more` are further tensors that are given."""
        return direction, self.name, spec, *self.signature(x, spec), static((*x, *more))

    def _context(self, recorder: LaunchRecorder, spec: Spec) -> LaunchContext:
        """Return the context of a call whose first given tensors are the inputs."""
        return self.context(recorder, Inputs(*recorder.given[:9]), spec)  # type: ignore[arg-type]

    def run_forward(self, x: Inputs, spec: Spec) -> Outputs:
        """Record or replay the launches of the forward."""
        signature = self._call_signature("forward", x, spec)
        recorded = recorded_launches(signature)
        if recorded is not None:
            return Outputs(*recorded(x))
        with recording(signature, x) as recorder:
            out = recorder.results = self.forward(self._context(recorder, spec))
        return out

    def run_forward_by_rows(self, x: Inputs, spec: Spec, rows: Tensor, final_rows: FinalRows | None) -> Tensor:
        """Return h of a forward whose states are rows of a pool, the states of x; record or replay its launches.

        `final_rows` are the pool that gets the final states and its rows, or None where these are the same.
        """
        given: Sequence[Tensor | None] = (*x, rows, *(final_rows or ()))
        signature = self._call_signature("forward by rows", x, spec, *given[9:])
        recorded = recorded_launches(signature)
        if recorded is not None:
            return recorded(given)[0]
        with recording(signature, given) as recorder:
            own, *final = recorder.given[9:]
            other = FinalRows(*final) if final else None  # type: ignore[arg-type]
            ctx = replace(self._context(recorder, spec), rows=own, final_rows=other)
            out = self.forward(ctx)
            normalizer_rows.launch_store(ctx, out)
            recorder.results = [out.h]
        return out.h

    def forward_replay(self, x: Inputs, spec: Spec) -> Replay | None:
        """Return the recorded launches of an earlier `run_forward` with this signature, or None.

        It is None for float32, since the precision of float32 products can change from call to call.
        """
        return None if x.q.dtype == torch.float32 else recorded_launches(self._call_signature("forward", x, spec))

    def run_backward(
        self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec
    ) -> Grads:
        """Record or replay the launches of the backward."""
        given = *x, dh, dC, dn, out.h, out.d, out.chunk_C, out.chunk_n
        signature = self._call_signature("backward", x, spec, *given[9:])
        recorded = recorded_launches(signature)
        if recorded is not None:
            return Grads(*recorded(given))
        with recording(signature, given) as recorder:
            cotangents, saved = recorder.given[9:12], _replace_saved(out, *recorder.given[12:])
            grads = self.backward(self._context(recorder, spec), saved, *cotangents)  # type: ignore[arg-type]
            recorder.results = grads
        return grads

    def run_forward_exchanging(self, x: Inputs, spec: Spec, exchange: Exchange) -> tuple[Outputs, Starts]:
        """Record or replay the launches of a forward that exchanges states with other processes."""
        signature = exchange, self._call_signature("forward", x, spec)
        found: Sequence[Tensor]
        recorded = recorded_launches(signature)
        if recorded is not None:
            found = recorded(x)
        else:
            with recording(signature, x) as recorder:
                ctx = replace(self._context(recorder, spec), exchange=exchange)
                found = recorder.results = *self.forward(ctx), *ctx.exchanged
        count = len(Outputs._fields)
        return Outputs(*found[:count]), Starts(*found[count:])

    def run_backward_exchanging(
        self, x: Inputs, out: Outputs, dh: Tensor, saved: Sequence[Tensor], spec: Spec, exchange: Exchange
    ) -> Grads:
        """Record or replay the launches of a backward that exchanges cotangents with other processes."""
        given = *x, dh, out.h, out.d, out.chunk_C, out.chunk_n, *saved
        signature = exchange, self._call_signature("backward", x, spec, *given[9:])
        recorded = recorded_launches(signature)
        if recorded is not None:
            return Grads(*recorded(given))
        with recording(signature, given) as recorder:
            cotangent, *read = recorder.given[9:14]
            ctx = self._context(recorder, spec)
            ctx = replace(ctx, exchange=exchange, saved=tuple(recorder.given[14:]))  # type: ignore[arg-type]
            grads = self.backward(ctx, _replace_saved(out, *read), cotangent, None, None)  # type: ignore[arg-type]
            recorder.results = grads
        return grads


def _replace_saved(
    out: Outputs, h: Tensor | None, d: Tensor | None, chunk_C: Tensor | None, chunk_n: Tensor | None
) -> Outputs:
    """Return the results of a forward with the tensors that its backward reads replaced by those of the recorder."""
    return out._replace(h=h, d=d, chunk_C=chunk_C, chunk_n=chunk_n)  # type: ignore[arg-type]
