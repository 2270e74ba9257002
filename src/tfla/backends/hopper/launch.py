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
from tfla.backends.gpu.config import KernelConfig, ceil_div, choose_kernel_config, processors, products
from tfla.backends.gpu.descriptors import Encoded, Remembered
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.hopper import padded_dims_of
from tfla.backends.hopper.dk_dv import dk_dv_kernel
from tfla.backends.hopper.dq_dk import dq_dk_kernel
from tfla.backends.hopper.gate_warp import LOADED, PARTIAL, RECOMPUTED
from tfla.backends.hopper.o_dv import o_dv_kernel
from tfla.backends.hopper.scheduler import FIELDS, VIRTUAL_ROWS, schedule_packed
from tfla.backends.hopper.segment_states import segment_states_kernel
from tfla.backends.hopper.small_head import small_head_kernel
from tfla.backends.hopper.split_reduce import PAIR
from tfla.backends.triton.launch import Call, Pair

# A program of `dq_dk_kernel` has STATE_ROWS rows of a state by up to MAX_STATE_COLUMNS columns.
STATE_ROWS = 128
MAX_STATE_COLUMNS = 256
# Pipeline stages: the widest tiles of each kernel take 192 KiB, beside what else is in shared memory.
O_DV_STAGES = 3
O_DV_STAGES_WITH_H = 2
DQ_DK_STAGES = 2
SEGMENT_STATES_STAGES = 4
UNBOUNDED = 0x7FFF0000  # of a tensor descriptor: a dim that no coordinate reaches the end of
CONSUMER_WARPS = 8  # of a program that leave a part each of a product of states
MAX_PROGRAMS_PER_SM = 4  # with packed sequences: a multiprocessor that is done early takes more of them


def num_splits(columns: int) -> int:
    """How many programs of `dq_dk_kernel` share those of a state."""
    return columns // (MAX_STATE_COLUMNS if columns % MAX_STATE_COLUMNS == 0 else STATE_ROWS)


def num_partials(columns: int) -> int:
    """How many they leave of an output, to be summed."""
    return ceil_div(num_splits(columns), PAIR.value)


def balanced_programs(count: int, most: int) -> int:
    """The fewest programs that take so many pieces of work in as few turns as `most` do.

    Where memory is the bound it would have less to do while some of them have one piece more than the others.
    """
    return ceil_div(count, max(1, ceil_div(count, most)))


def descriptor_factory(descriptor: TensorDescriptor) -> Callable[[Tensor], TensorDescriptor | Encoded]:
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


def make_descriptor(x: Tensor, L: int, width: int, packed: bool) -> TensorDescriptor:
    """Tiles (L, width) of x (B, T, H, d).

    That of packed sequences ends where the sequence of a tile does. The copy engine cuts off at coordinates that a
    descriptor has as constants, so rows count from CUT less what is left of the sequence, the one that it ends with is
    another coordinate, and as addresses wrap around at 2^64 bytes, CUT of a third takes CUT rows off again.
    """
    B, T, H, d = x.shape
    b, t, h, _ = x.stride()
    rows: int = VIRTUAL_ROWS.value
    if packed:
        shape, strides = [UNBOUNDED, UNBOUNDED, H, rows, d], [2**64 // rows - t, t, h, t, 1]
    else:
        shape, strides = [B, H, T, d], [b, h, t, 1]
    block = [*[1] * (len(shape) - 2), L, width]
    layout = gl.NVMMASharedLayout(128, 16, len(shape))
    return TensorDescriptor(x, shape, strides, block, layout)


class HopperLaunch(Call):
    """As `Call`, with walks of its own."""

    close_marks = False
    values_last = False

    def __init__(self, recorder: LaunchRecorder, x: Inputs, spec: Spec) -> None:
        super().__init__(recorder, x, spec)
        self.whole_rows = self.K <= STATE_ROWS  # a program of `o_dv_kernel` has a whole row of the state
        self.blocks = 2 if self.V % 256 == 0 else 1
        self.finds_delta = self.whole_rows and 128 * self.blocks == self.V  # one program has all of dh . h
        self.fused_dk_dv = self.whole_rows and self.V == STATE_ROWS and not spec.normalize  # one kernel makes both
        self.pieces = num_partials(self.V)
        self.schedule = self.cu
        self.segment_dn: Tensor | None = None  # what segments add to the cotangent of n, where the walk for dq finds it
        self.gate_scalars = *self.gate_strides, *self.scales
        # Gate vectors, by the walks; of wider heads several programs would make the same. A kernel that makes not all
        # serves all forms of gates.
        made = RECOMPUTED if self.whole_rows and not spec.normalize else LOADED
        forms = {name: made is RECOMPUTED and form for name, form in self.gate_forms.items()}
        self.gate_constants = {"GATES": made.value, **forms}

    def begin(self, *results: Tensor) -> None:
        super().begin(*results)
        if self.packed:
            self.schedule = self._make_schedule()

    def _make_schedule(self) -> Tensor:
        """Of packed pieces, as :func:`schedule_packed` has it."""
        out, block = self.new(self.segments, FIELDS.value, dtype=torch.int32), 16
        self.launch(schedule_packed, (ceil_div(self.segments, block),),
            self.cu, out, self.x.sequences, self.steps if self.segmented else self.T + 1, self.segments, L=self.L,
            SEGMENT_BLOCK=block, SEQUENCE_BLOCK=64, num_warps=4,
        )  # fmt: skip
        return out

    def gates(self, m_final: Tensor | None, d: Tensor | None = None) -> Tensor:
        """Where the walks make them, anything stands for those in memory."""
        if self.gate_constants["GATES"] == RECOMPUTED.value:
            return self.given_gates[1]
        # Walks back are no faster for it: those for dq and dk have no time for more exponentials. COLUMN has the scale.
        self.few_vectors = self.whole_rows and d is None and self.spec.scale != 0
        if self.few_vectors:
            self.gate_constants["GATES"] = PARTIAL.value
        return super().gates(m_final, d)

    def descriptor(self, x: Tensor, width: int) -> TensorDescriptor | Encoded:
        """Tiles (L, width) of x (B, T, H, d)."""
        return self.do(descriptor_factory(make_descriptor(x, self.L, width, self.packed)), x)

    @classmethod
    def frame(cls, x: Inputs) -> tuple[int, int]:
        return padded_dims_of(x)

    @classmethod
    def details(cls, x: Inputs, chunk_size: int) -> dict[str, object]:
        K, V = cls.frame(x)
        filled = (x.q.shape[3], x.v.shape[3]) != (K, V)
        return super().details(x, chunk_size) | ({"filled up to": f"{K} x {V}"} if filled else {})

    @classmethod
    def kernel_config_for(cls, x: Inputs) -> KernelConfig:
        """Of the Triton kernels beside the walks: tiles of 64 steps whatever the head dims."""
        return choose_kernel_config(STATE_ROWS, STATE_ROWS, x.q.element_size(), products(x), 90)

    @classmethod
    def programs(cls, x: Inputs) -> int:
        K, V = cls.frame(x)
        of_rows = K // STATE_ROWS * num_splits(V)
        return of_rows if K <= STATE_ROWS else max(of_rows, V // STATE_ROWS * num_splits(K))

    def grid(self, parts: int) -> tuple[int, int]:
        return self.programs_for(self.segments * self.H, parts), parts

    def programs_for(self, count: int, parts: int) -> int:
        """How many take so many pieces of work, each in so many parts."""
        most = max(1, processors(self.x.q.device) // parts)
        return max(1, min(count, MAX_PROGRAMS_PER_SM * most) if self.packed else balanced_programs(count, most))

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        x = self.x
        if self.whole_rows:
            self._launch_o_dv(x.k, x.v, x.q, h, gates, False, state, final, self.spec.normalize, d)
            return
        divides = self.spec.normalize and num_splits(self.K) == 1  # programs have all of n
        if self.spec.normalize and not divides:
            self.denominators(x.k, x.q, gates, state[1], final[1], d)
        self._launch_transposed(x.v, x.k, x.q, h, gates, False, state, final, divides, d)

    def values_gradient(
        self, gates: Tensor, out: Outputs, dh: Tensor, dv: Tensor, end: Tensor | None, delta: bool
    ) -> None:
        x, h = self.x, out.h if delta and self.finds_delta else None
        if self.fused_dk_dv:
            return
        if self.whole_rows:
            self._launch_o_dv(x.q, dh, x.k, dv, gates, True, (end, None), (None, None), False, None, h)
        else:
            self._launch_transposed(dh, x.q, x.k, dv, gates, True, (end, None), (None, None))

    def _launch_o_dv(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor, gates: Tensor, back: bool, state: Pair, final: Pair,
        normalize: bool, d: Tensor | None, h: Tensor | None = None,
    ) -> None:  # fmt: skip
        """With h also delta, of y and h."""
        C, n, C_out, n_out = (gates if t is None else t for t in (*state, *final))
        L, blocks = self.L, self.blocks
        of_qk, of_v = (lambda t: self.descriptor(t, self.K)), (lambda t: self.descriptor(t, 64 * blocks))
        self.launch(o_dv_kernel, self.grid(self.V // (128 * blocks)),
            of_qk(x), of_v(y), of_qk(z), gates if h is None else of_v(h), of_v(out), gates, *self.given_gates,
            C, C_out, n, n_out, gates if d is None else d, self.schedule, self.T, self.tiles, self.H, self.group,
            self.steps, self.segments * self.H, *self.gate_scalars, DK=self.K, DV=self.V, BLOCKS=blocks, L=L,
            STAGES=O_DV_STAGES if h is None else O_DV_STAGES_WITH_H, REVERSE=back, IS_SEGMENTED=self.segmented,
            USE_INITIAL_STATE=state[0] is not None, STORE_FINAL_STATE=final[0] is not None, NORMALIZE=normalize,
            SAVE_D=d is not None, COMPUTE_DP_OFFSET=h is not None, IS_VARLEN=self.packed, **self.gate_constants,
            num_warps=4,
        )  # fmt: skip

    def _launch_transposed(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor, gates: Tensor, back: bool, state: Pair, final: Pair,
        divides: bool = False, d: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`dq_dk_kernel` of C^T: o, or walking back dv."""
        shares = num_partials(self.K)
        to = out if shares == 1 else self.new(self.B, self.T, self.H * shares, out.shape[3], dtype=out.dtype)
        sums = d if divides and d is not None else gates
        marks = (gates,) * 3
        self._launch_dq_dk(x, y, z, out, to, gates, sums, marks, False, back, state, final, True, divides)
        if shares > 1:
            self.clear(to)
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
        shared, grid = self._segment_states_grid(skip)
        self.launch(segment_states_kernel, grid,
            self.descriptor(x, STATE_ROWS), self.descriptor(y, self.V // shared), gates, *self.given_gates, states_out,
            decays if n is None else n, decays, self.schedule, self.T, self.tiles, self.H, self.group, self.steps,
            self.segments * self.H, *self.gate_scalars, DX=self.K, DY=self.V, NUM_SPLITS=shared, L=self.L,
            STAGES=SEGMENT_STATES_STAGES, REVERSE=back, IS_SEGMENTED=self.segmented, NORMALIZE=n is not None,
            SKIP_LAST=skip, IS_VARLEN=self.packed, **self.gate_constants, num_warps=4,
        )  # fmt: skip

    def _segment_states_grid(self, skip: bool) -> tuple[int, tuple[int, int]]:
        """Programs of the walk for states that share the columns of one, and its grid: twice as many where they would
        leave half of the multiprocessors idle, at least. With `skip` those of last segments have no work."""
        segments, of_rows = self.segments - (self.x.sequences if skip else 0), self.K // STATE_ROWS
        shared = num_splits(self.V)
        halves = self.V // shared == MAX_STATE_COLUMNS and not self.packed
        if halves and 2 * segments * self.H * of_rows * shared <= processors(self.x.q.device):
            return 2 * shared, (self.segments * self.H, of_rows * 2 * shared)
        return shared, self.grid(of_rows * shared)

    def _num_programs(self) -> int:
        """Programs of a walk for dq or dk, each of which leaves a sum of its own for the gates."""
        return self.K // STATE_ROWS * num_splits(self.V)

    def queries_gradient(
        self, gates: Tensor, dh: Tensor, dq: Tensor, start: Pair, delta: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, q_dq = self.x, self.new(self._num_programs(), self.H, self.tiles, 1, self.L)
        marks = self.new_marks(q_dq)
        if self.segmented and delta:
            self.segment_dn = self.new(self.segments, self.H, self.K)
        self._launch_dq_dk(
            x.k, x.v, dh, x.q, dq, gates, q_dq, (*marks, gates), delta, False, start, (None, self.segment_dn)
        )
        return q_dq, marks

    def boundary_n(
        self, x: Tensor, gates: Tensor, back: bool, given: Tensor | None, final: Tensor | None, decays: Tensor,
        delta: bool,
    ) -> Tensor:  # fmt: skip
        if self.segment_dn is None:
            return super().boundary_n(x, gates, back, given, final, decays, delta)
        self.join(self.segment_dn, decays, back, given, final)
        return self.segment_dn

    def keys_gradient(
        self, gates: Tensor, dh: Tensor, dk: Tensor, dv: Tensor, marks: tuple[Tensor, Tensor], end: Pair, first: Pair,
        delta: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The walk leaves products of its states with those at marks."""
        x, k_dk = self.x, self.new(self._num_programs(), self.H, self.tiles, 1, self.L)
        dots = self.new(marks[0].shape[0] * self.H, CONSUMER_WARPS * self._num_programs())
        if self.fused_dk_dv:
            self._launch_dk_dv(dh, dk, dv, gates, k_dk, marks[0], dots, end[0], first[0])
        else:
            self._launch_dq_dk(x.q, dh, x.v, x.k, dk, gates, k_dk, (*marks, dots), delta, True, end, first)
        return k_dk, dots

    def _launch_dk_dv(
        self, dh: Tensor, dk: Tensor, dv: Tensor, gates: Tensor, sums: Tensor, states: Tensor, dots: Tensor,
        state: Tensor | None, final: Tensor | None,
    ) -> None:  # fmt: skip
        x = self.x
        whole, half = (lambda t: self.descriptor(t, STATE_ROWS)), (lambda t: self.descriptor(t, STATE_ROWS // 2))
        self.launch(dk_dv_kernel, self.grid(1),
            whole(x.q), half(x.k), whole(x.v), half(dh), half(dk), half(dv), gates, *self.given_gates, sums,
            gates if state is None else state, gates if final is None else final, states, dots, self.schedule,
            self.T, self.tiles, self.H, self.group, self.steps, self.segments * self.H, *self.gate_scalars, L=self.L,
            CHECKPOINT_STEPS=self.marks, REVERSE=True, IS_SEGMENTED=self.segmented, USE_INITIAL_STATE=state is not None,
            STORE_FINAL_STATE=final is not None, IS_VARLEN=self.packed, **self.gate_constants, num_warps=4,
        )  # fmt: skip

    def _launch_dq_dk(
        self, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, gates: Tensor, sums: Tensor,
        marks: tuple[Tensor, Tensor, Tensor], delta: bool, back: bool, state: Pair, final: Pair,
        transposed: bool = False, divides: bool = False,
    ) -> None:  # fmt: skip
        """marks: states, those of n, and walking back their products with cotangents. Where it divides sums get d."""
        C, n, C_out, n_out = (gates if t is None else t for t in (*state, *final))
        L, (DX, DY) = self.L, (self.V, self.K) if transposed else (self.K, self.V)
        shared = num_splits(DY)
        grid = self.grid(DX // STATE_ROWS * shared)
        cleared = gates
        if shared > 1:
            cleared = self.do(Tensor.zero_, self.new(grid[0] * grid[1] // PAIR.value, dtype=torch.int32))
        self.launch(dq_dk_kernel, grid,
            self.descriptor(x, STATE_ROWS), self.descriptor(y, DY // shared), self.descriptor(z, DY // shared),
            self.descriptor(w, 64), self.descriptor(out, 64), gates, *self.given_gates, sums, C, C_out, n,
            n_out, *marks, cleared, self.schedule, self.T, self.tiles, self.H, self.group, self.steps,
            self.segments * self.H, *self.gate_scalars, DX=DX, DY=DY, NUM_SPLITS=shared, L=L, STAGES=DQ_DK_STAGES,
            CHECKPOINT_STEPS=self.marks, REVERSE=back, IS_SEGMENTED=self.segmented,
            USE_INITIAL_STATE=state[0] is not None, STORE_FINAL_STATE=final[0] is not None,
            NORMALIZE=self.spec.normalize and not transposed, USE_DP_OFFSET=delta, TRANSPOSED=transposed,
            FUSE_NORMALIZER=divides, SAVE_D=divides and sums is not gates, IS_VARLEN=self.packed, **self.gate_constants,
            num_warps=4,
        )  # fmt: skip


SHARED_MEMORY_BYTES = 232_448  # bytes that a program can have
GATE_VECTOR_BYTES = 1_536  # bytes of the gate vectors of a head in a stage


@functools.cache
def small_head_config(K: int, V: int, itemsize: int, multiplied: str, heads: int) -> KernelConfig:
    return dataclasses.replace(choose_kernel_config(K, V, itemsize, multiplied, 90), programs_per_sm=heads)


def max_stages(K: int, V: int, reads: int, writes: int, heads: int, shared: bool, states: int) -> int:
    """How many fit of stages with so many tiles of q or k and of v or do, beside so many states a head."""
    L = 64
    stage = 2 * L * (reads * K * (1 if shared else heads) + writes * V * heads) + heads * GATE_VECTOR_BYTES
    kept = 2 * heads * K * V * states + 2 * L * K * shared + 4 * heads * K + 256
    return min(4, (SHARED_MEMORY_BYTES - kept) // stage)


def make_state_descriptor(states: Tensor) -> TensorDescriptor:
    """Of states (…, dqk, dhv), one at a time."""
    K, V = states.shape[-2:]
    return TensorDescriptor(states, [states.numel() // V, V], [V, 1], [K, V], gl.NVMMASharedLayout(128, 16, 2))


class SmallHeadLaunch(HopperLaunch):
    """As `HopperLaunch`, with one kernel for all walks, that for dk doing dv as well."""

    def __init__(self, recorder: LaunchRecorder, x: Inputs, spec: Spec) -> None:
        super().__init__(recorder, x, spec)
        self.finds_delta, self.fused_dk_dv, self.pieces = True, True, 1
        fits = max_stages(self.K, self.V, 2, 2, 2, True, 2) >= 2  # that of the walk for dk, which has most
        self.together = 2 if self.group % 2 == 0 and fits else 1

    @classmethod
    def kernel_config_for(cls, x: Inputs) -> KernelConfig:
        heads = 2 - int(x.v.shape[2]) % 2
        return small_head_config(*cls.frame(x), x.q.element_size(), products(x), heads)

    @classmethod
    def programs(cls, x: Inputs) -> int:
        return 1

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        x = self.x
        self._launch_small_head(x.k, x.v, x.q, None, gates, False, state, final, values=h, d=d)

    def add_up(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, states_out: Tensor, decays: Tensor, skip: bool,
        n: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._launch_small_head(
            x, y, None, None, gates, back, (None, None), (states_out, n), decays=decays, skip=skip,
            normalize=n is not None,
        )  # fmt: skip

    def queries_gradient(
        self, gates: Tensor, dh: Tensor, dq: Tensor, start: Pair, delta: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, q_dq = self.x, self.new(1, self.H, self.tiles, 1, self.L)
        marks = self.new_marks(q_dq)
        self._launch_small_head(
            x.k, x.v, x.q, dh, gates, False, start, (None, None), keys=dq, sums=q_dq, marks=marks, delta=delta
        )
        return q_dq, marks

    def keys_gradient(
        self, gates: Tensor, dh: Tensor, dk: Tensor, dv: Tensor, marks: tuple[Tensor, Tensor], end: Pair, first: Pair,
        delta: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, k_dk = self.x, self.new(1, self.H, self.tiles, 1, self.L)
        dots = self.new(marks[0].shape[0] * self.H, 1, dtype=torch.float64)
        self._launch_small_head(
            x.q, dh, x.k, x.v, gates, True, end, first, values=dv, keys=dk, sums=k_dk, marks=marks, dots=dots,
            delta=delta,
        )  # fmt: skip
        return k_dk, dots

    def _launch_small_head(
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
        of_states = None if states is None else self.do(descriptor_factory(make_state_descriptor(states)), states)
        kept = 2 if states is not None and back else 1
        shared = self.together == 2
        heads = 2 if H % 2 == 0 and max_stages(K, V, reads, writes, 2, shared, kept) >= 2 else 1
        shared = shared and heads == 2
        of_k, of_v = (lambda t: self.descriptor(t, K)), (lambda t: self.descriptor(t, V))
        X, Y = of_k(x), of_v(y)
        rest = (sums, d, dots, state[0], final[0], state[1], final[1], n_marks, decays)
        count = self.segments * H // heads
        self.launch(small_head_kernel, (self.programs_for(count, 1),),
            X, Y, X if zk is None else of_k(zk), Y if zv is None else of_v(zv), Y if values is None else of_v(values),
            X if keys is None else of_k(keys), X if of_states is None else of_states, gates, *self.given_gates,
            *(gates if t is None else t for t in rest), self.schedule, self.T, self.tiles, H // heads, self.group,
            self.steps, count, *self.gate_scalars, HEADS=heads, SHARED_QK=shared, DK=K, DV=V, L=L,
            STAGES=max_stages(K, V, reads, writes, heads, shared, kept), CHECKPOINT_STEPS=self.marks, REVERSE=back,
            IS_SEGMENTED=self.segmented, USE_INITIAL_STATE=state[0] is not None, STORE_FINAL_STATE=final[0] is not None,
            SKIP_LAST=skip, OUTPUT_V=values is not None, OUTPUT_K=keys is not None,
            NORMALIZE=self.spec.normalize if normalize is None else normalize, SAVE_D=d is not None,
            USE_DP_OFFSET=delta, HAS_CHECKPOINTS=states is not None, IS_VARLEN=self.packed, **self.gate_constants,
            num_warps=4,
        )  # fmt: skip
