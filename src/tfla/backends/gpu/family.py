"""A family of kernels: its launch code, which is run once for each call signature and replayed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfla.backends.base import Exchange, Grads, Inputs, Outputs, Replay, Spec, static
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.gpu.replay import LaunchRecorder, record_or_replay, recorded_launches


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
        return direction, self.name, spec, *self.signature(x, spec), static(*x, *more)

    def run_forward(self, x: Inputs, spec: Spec) -> Outputs:
        """Record or replay the launches of the forward."""

        def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Outputs:
            return self.forward(self.context(recorder, Inputs(*given), spec))  # type: ignore[arg-type]

        return Outputs(*record_or_replay(self._call_signature("forward", x, spec), x, first))

    def forward_replay(self, x: Inputs, spec: Spec) -> Replay | None:
        """Return the recorded launches of an earlier `run_forward` with this signature, or None.

        It is None for float32, since the precision of float32 products can change from call to call.
        """
        return None if x.q.dtype == torch.float32 else recorded_launches(self._call_signature("forward", x, spec))

    def run_backward(
        self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec
    ) -> Grads:
        """Record or replay the launches of the backward."""

        def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Grads:
            ctx = self.context(recorder, Inputs(*given[:9]), spec)  # type: ignore[arg-type]
            cotangents, (h, d, chunk_C, chunk_n) = given[9:12], given[12:]
            saved = out._replace(h=h, d=d, chunk_C=chunk_C, chunk_n=chunk_n)  # type: ignore[arg-type]
            return self.backward(ctx, saved, *cotangents)  # type: ignore[arg-type]

        given = *x, dh, dC, dn, out.h, out.d, out.chunk_C, out.chunk_n
        return Grads(*record_or_replay(self._call_signature("backward", x, spec, *given[9:]), given, first))

    def run_forward_exchanging(self, x: Inputs, spec: Spec, exchange: Exchange) -> tuple[Outputs, Tensor, Tensor]:
        """Record or replay the launches of a forward that exchanges states with other processes."""

        def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
            ctx = replace(self.context(recorder, Inputs(*given), spec), exchange=exchange)  # type: ignore[arg-type]
            out = self.forward(ctx)
            return *out, *ctx.exchanged

        signature = exchange, self._call_signature("forward", x, spec)
        *out, gathered, starts = record_or_replay(signature, x, first)
        return Outputs(*out), gathered, starts

    def run_backward_exchanging(
        self, x: Inputs, out: Outputs, dh: Tensor, saved: Sequence[Tensor], spec: Spec, exchange: Exchange
    ) -> Grads:
        """Record or replay the launches of a backward that exchanges cotangents with other processes."""

        def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Grads:
            ctx = self.context(recorder, Inputs(*given[:9]), spec)  # type: ignore[arg-type]
            ctx = replace(ctx, exchange=exchange, saved=tuple(given[14:]))  # type: ignore[arg-type]
            dh, h, d, chunk_C, chunk_n = given[9:14]
            read = out._replace(h=h, d=d, chunk_C=chunk_C, chunk_n=chunk_n)  # type: ignore[arg-type]
            return self.backward(ctx, read, dh, None, None)  # type: ignore[arg-type]

        given = *x, dh, out.h, out.d, out.chunk_C, out.chunk_n, *saved
        signature = exchange, self._call_signature("backward", x, spec, *given[9:])
        return Grads(*record_or_replay(signature, given, first))
