"""Launches of the walks of narrow heads, :mod:`.whole`; the rest is as in :mod:`.launch`."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tfla.backends.base import Inputs, Spec
from tfla.backends.hopper.launch import HopperCall, like
from tfla.backends.hopper.whole import whole
from tfla.backends.triton.compiled import Tape
from tfla.backends.triton.launch import Pair, Plan, plan_of, products

SHARED_MEMORY = 232_448  # bytes that a program can have
GATES = 1_536  # bytes of the gate vectors of a head in a stage


@functools.cache
def narrow_plan(K: int, V: int, itemsize: int, multiplied: str, heads: int) -> Plan:
    return dataclasses.replace(plan_of(K, V, itemsize, multiplied, 90), together=heads)


def stages_of(K: int, V: int, reads: int, writes: int, heads: int, shared: bool, states: int) -> int:
    """How many fit of stages with so many tiles of q or k and of v or do, beside so many states a head."""
    L = 64
    stage = 2 * L * (reads * K * (1 if shared else heads) + writes * V * heads) + heads * GATES
    kept = 2 * heads * K * V * states + 2 * L * K * shared + 4 * heads * K + 256
    return min(4, (SHARED_MEMORY - kept) // stage)


def described_states(states: Tensor) -> TensorDescriptor:
    """Of states (…, dqk, dhv), one at a time."""
    K, V = states.shape[-2:]
    return TensorDescriptor(states, [states.numel() // V, V], [V, 1], [K, V], gl.NVMMASharedLayout(128, 16, 2))


class NarrowCall(HopperCall):
    """As `HopperCall`, with one kernel for all walks, that for dk doing dv as well."""

    def __init__(self, tape: Tape, x: Inputs, spec: Spec) -> None:
        super().__init__(tape, x, spec)
        self.finds_delta, self.joint, self.pieces = True, True, 1
        fits = stages_of(self.K, self.V, 2, 2, 2, True, 2) >= 2  # that of the walk for dk, which has most
        self.together = 2 if self.group % 2 == 0 and fits else 1

    @classmethod
    def plan_for(cls, x: Inputs) -> Plan:
        heads = 2 - int(x.v.shape[2]) % 2
        return narrow_plan(*cls.frame(x), x.q.element_size(), products(x), heads)

    @classmethod
    def programs(cls, x: Inputs) -> int:
        return 1

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        x = self.x
        self._walk(x.k, x.v, x.q, None, gates, False, state, final, values=h, d=d)

    def add_up(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, states_out: Tensor, decays: Tensor, skip: bool,
        n: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._walk(
            x, y, None, None, gates, back, (None, None), (states_out, n), decays=decays, skip=skip,
            normalize=n is not None,
        )  # fmt: skip

    def queries_gradient(
        self, gates: Tensor, dh: Tensor, dq: Tensor, start: Pair, delta: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, q_dq = self.x, self.new(1, self.H, self.tiles, 1, self.L)
        marks = self.new_marks(q_dq)
        self._walk(x.k, x.v, x.q, dh, gates, False, start, (None, None), keys=dq, sums=q_dq, marks=marks, delta=delta)
        return q_dq, marks

    def keys_gradient(
        self, gates: Tensor, dh: Tensor, dk: Tensor, dv: Tensor, marks: tuple[Tensor, Tensor], end: Pair, first: Pair,
        delta: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, k_dk = self.x, self.new(1, self.H, self.tiles, 1, self.L)
        dots = self.new(marks[0].shape[0] * self.H, 1, dtype=torch.float64)
        self._walk(
            x.q, dh, x.k, x.v, gates, True, end, first, values=dv, keys=dk, sums=k_dk, marks=marks, dots=dots,
            delta=delta,
        )  # fmt: skip
        return k_dk, dots

    def _walk(
        self, x: Tensor, y: Tensor, zk: Tensor | None, zv: Tensor | None, gates: Tensor, back: bool, state: Pair,
        final: Pair, *, values: Tensor | None = None, keys: Tensor | None = None, sums: Tensor | None = None,
        marks: Pair = (None, None), dots: Tensor | None = None, d: Tensor | None = None, decays: Tensor | None = None,
        delta: bool = False, skip: bool = False, normalize: bool | None = None,
    ) -> None:  # fmt: skip
        """Fills values and keys, or without them what is added to states."""
        L, K, V, H = self.L, self.K, self.V, self.H
        reads, writes = (1 if zk is None else 2), (1 if zv is None else 2)
        if marks[0] is None or marks[0].shape[0] == 0:  # no piece is that long
            marks, dots = (None, None), None
        states, n_marks = marks
        of_states = None if states is None else self.do(like(described_states(states)), states)
        kept = 2 if states is not None and back else 1
        shared = self.together == 2
        heads = 2 if H % 2 == 0 and stages_of(K, V, reads, writes, 2, shared, kept) >= 2 else 1
        shared = shared and heads == 2
        of_k, of_v = (lambda t: self.descriptor(t, K)), (lambda t: self.descriptor(t, V))
        X, Y = of_k(x), of_v(y)
        rest = (sums, d, dots, state[0], final[0], state[1], final[1], n_marks, decays)
        count = self.segments * H // heads
        self.launch(whole, (self.programs_for(count, 1),),
            X, Y, X if zk is None else of_k(zk), Y if zv is None else of_v(zv), Y if values is None else of_v(values),
            X if keys is None else of_k(keys), X if of_states is None else of_states, gates, *self.given_gates,
            *(gates if t is None else t for t in rest), self.order, self.T, self.tiles, H // heads, self.group,
            self.steps, count, *self.numbers, HEADS=heads, SHARED=shared, DK=K, DV=V, L=L,
            STAGES=stages_of(K, V, reads, writes, heads, shared, kept), MARKS=self.marks, BACK=back,
            SEGMENTED=self.segmented, STATE=state[0] is not None, FINAL=final[0] is not None, SKIP=skip,
            VALUES=values is not None, KEYS=keys is not None,
            NORMALIZE=self.spec.normalize if normalize is None else normalize, SAVE_D=d is not None, DELTA=delta,
            MARKED=states is not None, PACKED=self.packed, **self.made, num_warps=4,
        )  # fmt: skip
