"""Launches of the Hopper kernels. Gates, segments and what joins them: :mod:`tfla.backends.triton.launch`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tfla.backends.base import Inputs, Outputs, Spec
from tfla.backends.hopper import frame
from tfla.backends.hopper.dk_dv import both
from tfla.backends.hopper.dq_dk import rows
from tfla.backends.hopper.gate_warp import ALL, NONE, SOME
from tfla.backends.hopper.o_dv import columns
from tfla.backends.hopper.scheduler import CUT, FIELDS, order
from tfla.backends.hopper.segment_states import states
from tfla.backends.hopper.small_head import whole
from tfla.backends.hopper.split_reduce import PAIR
from tfla.backends.triton.compiled import Tape
from tfla.backends.triton.launch import Call, Pair, Plan, ceil_div, plan_of, processors, products
from tfla.backends.triton.tensor_maps import Encoded, Remembered

ROWS = 128  # of a state that a program of `rows` has, by up to MOST columns
MOST = 256
OF_COLUMNS, WITH_H, OF_ROWS, OF_STATES = 3, 2, 2, 4  # stages: 192 KiB of the widest tiles each, beside the rest
FREE = 0x7FFF0000  # of a tensor descriptor: a dim that no coordinate reaches the end of
WARPS = 8  # of a program that leave a part each of a product of states
TURNS = 4  # programs for each multiprocessor, at most, with packed pieces: one that is done early takes more of them


def pieces(columns: int) -> int:
    """How many programs of `rows` share those of a state."""
    return columns // (MOST if columns % MOST == 0 else ROWS)


def parts(columns: int) -> int:
    """How many they leave of an output, to be summed."""
    return ceil_div(pieces(columns), PAIR.value)


def even(count: int, most: int) -> int:
    """The fewest programs that take so many pieces of work in as few turns as `most` do.

    Where memory is the bound it would have less to do while some of them have one piece more than the others.
    """
    return ceil_div(count, max(1, ceil_div(count, most)))


def like(descriptor: TensorDescriptor) -> Callable[[Tensor], TensorDescriptor | Encoded]:
    """Makes such descriptors of other tensors, past Triton's long checks, or has what one has been encoded to."""
    remembered: Remembered = {}
    known = vars(descriptor) | {"base": None, "remembered": remembered}

    def of(base: Tensor) -> TensorDescriptor | Encoded:
        encoded = remembered.get(base.data_ptr())
        if encoded is not None:
            return encoded
        made = object.__new__(TensorDescriptor)
        vars(made).update(known, base=base)
        return made

    return of


def described(x: Tensor, L: int, width: int, packed: bool) -> TensorDescriptor:
    """Tiles (L, width) of x (B, T, H, d).

    That of packed sequences ends where the sequence of a tile does. The copy engine cuts off at coordinates that a
    descriptor has as constants, so rows count from CUT less what is left of the sequence, the one that it ends with is
    another coordinate, and as addresses wrap around at 2^64 bytes, CUT of a third takes CUT rows off again.
    """
    B, T, H, d = x.shape
    b, t, h, _ = x.stride()
    cut: int = CUT.value
    if packed:
        shape, strides = [FREE, FREE, H, cut, d], [2**64 // cut - t, t, h, t, 1]
    else:
        shape, strides = [B, H, T, d], [b, h, t, 1]
    block = [*[1] * (len(shape) - 2), L, width]
    layout = gl.NVMMASharedLayout(128, 16, len(shape))
    return TensorDescriptor(x, shape, strides, block, layout)


class HopperCall(Call):
    """As `Call`, with walks of its own."""

    close_marks = False
    values_last = False

    def __init__(self, tape: Tape, x: Inputs, spec: Spec) -> None:
        super().__init__(tape, x, spec)
        self.narrow = self.K <= ROWS  # a program of `columns` has a whole row of the state
        self.blocks = 2 if self.V % 256 == 0 else 1
        self.finds_delta = self.narrow and 128 * self.blocks == self.V  # one program has all of dh . h
        self.joint = self.narrow and self.V == ROWS and not spec.normalize  # one walk back makes dk and dv
        self.pieces = parts(self.V)
        self.order = self._order() if self.packed else self.cu
        self.added: Tensor | None = None  # what segments add to the cotangent of n, where the walk for dq finds it
        self.numbers = *self.gate_strides, *self.scales
        # Gate vectors, by the walks; of wider heads several programs would make the same. A kernel that makes not all
        # serves all forms of gates.
        made = ALL if self.narrow and not spec.normalize else NONE
        self.made = {"MADE": made.value, **{name: made is ALL and form for name, form in self.gate_forms.items()}}

    def _order(self) -> Tensor:
        """Of packed pieces, as :mod:`.order` has it."""
        out, block = self.new(self.segments, FIELDS.value, dtype=torch.int32), 16
        self.launch(order, (ceil_div(self.segments, block),),
            self.cu, out, self.x.sequences, self.steps if self.segmented else self.T + 1, self.segments, L=self.L,
            BLOCK=block, WIDE=64, num_warps=4,
        )  # fmt: skip
        return out

    def gates(self, m_final: Tensor | None, d: Tensor | None = None) -> Tensor:
        """Where the walks make them, anything stands for those in memory."""
        if self.made["MADE"] == ALL.value:
            return self.given_gates[1]
        # Walks back are no faster for it: those for dq and dk have no time for more exponentials. COLUMN has the scale.
        self.few_vectors = self.narrow and d is None and self.spec.scale != 0
        if self.few_vectors:
            self.made["MADE"] = SOME.value
        return super().gates(m_final, d)

    def descriptor(self, x: Tensor, width: int) -> TensorDescriptor | Encoded:
        """Tiles (L, width) of x (B, T, H, d)."""
        return self.do(like(described(x, self.L, width, self.packed)), x)

    @classmethod
    def frame(cls, x: Inputs) -> tuple[int, int]:
        return frame(x)

    @classmethod
    def details(cls, x: Inputs, chunk_size: int) -> dict[str, object]:
        K, V = cls.frame(x)
        filled = (x.q.shape[3], x.v.shape[3]) != (K, V)
        return super().details(x, chunk_size) | ({"filled up to": f"{K} x {V}"} if filled else {})

    @classmethod
    def plan_for(cls, x: Inputs) -> Plan:
        """Of the Triton kernels beside the walks: tiles of 64 steps whatever the head dims."""
        return plan_of(ROWS, ROWS, x.q.element_size(), products(x), 90)

    @classmethod
    def programs(cls, x: Inputs) -> int:
        K, V = cls.frame(x)
        of_rows = K // ROWS * pieces(V)
        return of_rows if K <= ROWS else max(of_rows, V // ROWS * pieces(K))

    def grid(self, parts: int) -> tuple[int, int]:
        return self.programs_for(self.segments * self.H, parts), parts

    def programs_for(self, count: int, parts: int) -> int:
        """How many take so many pieces of work, each in so many parts."""
        most = max(1, processors(self.x.q.device) // parts)
        return max(1, min(count, TURNS * most) if self.packed else even(count, most))

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        x = self.x
        if self.narrow:
            self._columns(x.k, x.v, x.q, h, gates, False, state, final, self.spec.normalize, d)
            return
        divides = self.spec.normalize and pieces(self.K) == 1  # programs have all of n
        if self.spec.normalize and not divides:
            self.denominators(x.k, x.q, gates, state[1], final[1], d)
        self._transposed(x.v, x.k, x.q, h, gates, False, state, final, divides, d)

    def values_gradient(
        self, gates: Tensor, out: Outputs, dh: Tensor, dv: Tensor, end: Tensor | None, delta: bool
    ) -> None:
        x, h = self.x, out.h if delta and self.finds_delta else None
        if self.joint:
            return
        if self.narrow:
            self._columns(x.q, dh, x.k, dv, gates, True, (end, None), (None, None), False, None, h)
        else:
            self._transposed(dh, x.q, x.k, dv, gates, True, (end, None), (None, None))

    def _columns(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor, gates: Tensor, back: bool, state: Pair, final: Pair,
        normalize: bool, d: Tensor | None, h: Tensor | None = None,
    ) -> None:  # fmt: skip
        """With h also delta, of y and h."""
        C, n, C_out, n_out = (gates if t is None else t for t in (*state, *final))
        L, blocks = self.L, self.blocks
        of_qk, of_v = (lambda t: self.descriptor(t, self.K)), (lambda t: self.descriptor(t, 64 * blocks))
        self.launch(columns, self.grid(self.V // (128 * blocks)),
            of_qk(x), of_v(y), of_qk(z), gates if h is None else of_v(h), of_v(out), gates, *self.given_gates,
            C, C_out, n, n_out, gates if d is None else d, self.order, self.T, self.tiles, self.H, self.group,
            self.steps, self.segments * self.H, *self.numbers, DK=self.K, DV=self.V, BLOCKS=blocks, L=L,
            STAGES=OF_COLUMNS if h is None else WITH_H, BACK=back, SEGMENTED=self.segmented,
            STATE=state[0] is not None, FINAL=final[0] is not None, NORMALIZE=normalize, SAVE_D=d is not None,
            DELTA=h is not None, PACKED=self.packed, **self.made, num_warps=4,
        )  # fmt: skip

    def _transposed(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor, gates: Tensor, back: bool, state: Pair, final: Pair,
        divides: bool = False, d: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`rows` of C^T: o, or walking back dv."""
        shares = parts(self.K)
        to = out if shares == 1 else self.new(self.B, self.T, self.H * shares, out.shape[3], dtype=out.dtype)
        sums = d if divides and d is not None else gates
        marks = (gates,) * 3
        self._rows(x, y, z, out, to, gates, sums, marks, False, back, state, final, True, divides)
        if shares > 1:
            self.sum_of_groups(to, shares, out)

    def boundary_states(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, given: Pair, final: Pair, delta: bool = False
    ) -> Pair:
        if back or not self.spec.normalize:
            return super().boundary_states(x, y, gates, back, given, final, delta)
        C, n, decays = self.new_states(), self.new(self.segments, self.H, self.K), self.new(self.segments, self.H)
        self.add_up(x, y, gates, back, C, decays, final[0] is None, n)
        self.join(C, decays, back, given[0], final[0])
        self.join(n, decays, back, given[1], final[1])
        return C, n

    def add_up(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, states_out: Tensor, decays: Tensor, skip: bool,
        n: Tensor | None = None,
    ) -> None:  # fmt: skip
        """With n also what they add to n."""
        shared, grid = self._shares(skip)
        self.launch(states, grid,
            self.descriptor(x, ROWS), self.descriptor(y, self.V // shared), gates, *self.given_gates, states_out,
            decays if n is None else n, decays, self.order, self.T, self.tiles, self.H, self.group, self.steps,
            self.segments * self.H, *self.numbers, DX=self.K, DY=self.V, PIECES=shared, L=self.L, STAGES=OF_STATES,
            BACK=back, SEGMENTED=self.segmented, NORMALIZE=n is not None, SKIP=skip, PACKED=self.packed, **self.made,
            num_warps=4,
        )  # fmt: skip

    def _shares(self, skip: bool) -> tuple[int, tuple[int, int]]:
        """Programs of the walk for states that share the columns of one, and its grid: twice as many where they would
        leave half of the multiprocessors idle, at least. With `skip` those of last segments have no work."""
        segments, of_rows = self.segments - (self.x.sequences if skip else 0), self.K // ROWS
        shared = pieces(self.V)
        halves = self.V // shared == MOST and not self.packed
        if halves and 2 * segments * self.H * of_rows * shared <= processors(self.x.q.device):
            return 2 * shared, (self.segments * self.H, of_rows * 2 * shared)
        return shared, self.grid(of_rows * shared)

    def _parts(self) -> int:
        """Programs of a walk for dq or dk, each of which leaves a sum of its own for the gates."""
        return self.K // ROWS * pieces(self.V)

    def queries_gradient(
        self, gates: Tensor, dh: Tensor, dq: Tensor, start: Pair, delta: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, q_dq = self.x, self.new(self._parts(), self.H, self.tiles, 1, self.L)
        marks = self.new_marks(q_dq)
        if self.segmented and delta:
            self.added = self.new(self.segments, self.H, self.K)
        self._rows(x.k, x.v, dh, x.q, dq, gates, q_dq, (*marks, gates), delta, False, start, (None, self.added))
        return q_dq, marks

    def boundary_n(
        self, x: Tensor, gates: Tensor, back: bool, given: Tensor | None, final: Tensor | None, decays: Tensor,
        delta: bool,
    ) -> Tensor:  # fmt: skip
        if self.added is None:
            return super().boundary_n(x, gates, back, given, final, decays, delta)
        self.join(self.added, decays, back, given, final)
        return self.added

    def keys_gradient(
        self, gates: Tensor, dh: Tensor, dk: Tensor, dv: Tensor, marks: tuple[Tensor, Tensor], end: Pair, first: Pair,
        delta: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The walk leaves products of its states with those at marks."""
        x, k_dk = self.x, self.new(self._parts(), self.H, self.tiles, 1, self.L)
        dots = self.new(marks[0].shape[0] * self.H, WARPS * self._parts())
        if self.joint:
            self._both(dh, dk, dv, gates, k_dk, marks[0], dots, end[0], first[0])
        else:
            self._rows(x.q, dh, x.v, x.k, dk, gates, k_dk, (*marks, dots), delta, True, end, first)
        return k_dk, dots

    def _both(
        self, dh: Tensor, dk: Tensor, dv: Tensor, gates: Tensor, sums: Tensor, states: Tensor, dots: Tensor,
        state: Tensor | None, final: Tensor | None,
    ) -> None:  # fmt: skip
        x, whole, half = self.x, (lambda t: self.descriptor(t, ROWS)), (lambda t: self.descriptor(t, ROWS // 2))
        self.launch(both, self.grid(1),
            whole(x.q), half(x.k), whole(x.v), half(dh), half(dk), half(dv), gates, *self.given_gates, sums,
            gates if state is None else state, gates if final is None else final, states, dots, self.order,
            self.T, self.tiles, self.H, self.group, self.steps, self.segments * self.H, *self.numbers, L=self.L,
            MARKS=self.marks, BACK=True, SEGMENTED=self.segmented, STATE=state is not None, FINAL=final is not None,
            PACKED=self.packed, **self.made, num_warps=4,
        )  # fmt: skip

    def _rows(
        self, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, gates: Tensor, sums: Tensor,
        marks: tuple[Tensor, Tensor, Tensor], delta: bool, back: bool, state: Pair, final: Pair,
        transposed: bool = False, divides: bool = False,
    ) -> None:  # fmt: skip
        """marks: states, those of n, and walking back their products with cotangents. Where it divides sums get d."""
        C, n, C_out, n_out = (gates if t is None else t for t in (*state, *final))
        L, (DX, DY) = self.L, (self.V, self.K) if transposed else (self.K, self.V)
        shared = pieces(DY)
        grid = self.grid(DX // ROWS * shared)
        cleared = gates
        if shared > 1:
            cleared = self.do(Tensor.zero_, self.new(grid[0] * grid[1] // PAIR.value, dtype=torch.int32))
        self.launch(rows, grid,
            self.descriptor(x, ROWS), self.descriptor(y, DY // shared), self.descriptor(z, DY // shared),
            self.descriptor(w, 64), self.descriptor(out, 64), gates, *self.given_gates, sums, C, C_out, n,
            n_out, *marks, cleared, self.order, self.T, self.tiles, self.H, self.group, self.steps,
            self.segments * self.H, *self.numbers, DX=DX, DY=DY, PIECES=shared, L=L, STAGES=OF_ROWS, MARKS=self.marks,
            BACK=back, SEGMENTED=self.segmented, STATE=state[0] is not None, FINAL=final[0] is not None,
            NORMALIZE=self.spec.normalize and not transposed, DELTA=delta, TRANSPOSED=transposed, DIVIDES=divides,
            SAVE_D=divides and sums is not gates, PACKED=self.packed, **self.made, num_warps=4,
        )  # fmt: skip


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
