"""The launches of the Hopper kernels.

`HopperLaunch` and, for small heads, `SmallHeadLaunch` replace the scans of :mod:`tfla.backends.triton.launch`. The
kernels for gates, segments and their boundary states are launched from there for both backends.
"""

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
from tfla.backends.gpu.descriptors import DescriptorCache, EncodedDescriptor
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
# Stages of the ring of each kernel: the widest tiles then take 192 KiB of shared memory.
O_DV_STAGES = 3
O_DV_STAGES_WITH_H = 2
DQ_DK_STAGES = 2
SEGMENT_STATES_STAGES = 4
UNBOUNDED = 0x7FFF0000  # extent of a dimension of a TMA descriptor that no coordinate reaches
CONSUMER_WARPS = 8  # consumer warps of a program, each of which stores a part of <C, dC>
MAX_PROGRAMS_PER_SM = 4  # with packed sequences, so that a multiprocessor that finishes early takes another program


def num_splits(columns: int) -> int:
    """Return how many programs of `dq_dk_kernel` share the columns of a state."""
    return columns // (MAX_STATE_COLUMNS if columns % MAX_STATE_COLUMNS == 0 else STATE_ROWS)


def num_partials(columns: int) -> int:
    """Return how many partial sums of an output these programs leave in memory: one for each pair."""
    return ceil_div(num_splits(columns), PAIR.value)


def balanced_programs(count: int, most: int) -> int:
    """Return the fewest programs that take `count` work tiles in as few rounds as `most` programs do.

    With more programs only some of them would have a work tile in the last round, and memory bandwidth would be idle.

    Args:
        count: Number of work tiles.
        most: How many programs run at the same time.
    """
    return ceil_div(count, max(1, ceil_div(count, most)))


def descriptor_factory(descriptor: TensorDescriptor) -> Callable[[Tensor], TensorDescriptor | EncodedDescriptor]:
    """Return a function that makes the TMA descriptors of other tensors of the same shape and strides.

    It skips Triton's checks, which are slow, and returns the encoded descriptor where a launch has encoded one for the
    same address.
    """
    remembered: DescriptorCache = {}
    known = vars(descriptor) | {"base": None, "remembered": remembered}

    def of(base: Tensor) -> TensorDescriptor | EncodedDescriptor:
        encoded = remembered.get(base.data_ptr())
        if encoded is not None:
            return encoded
        made = object.__new__(TensorDescriptor)
        vars(made).update(known, base=base)
        return made

    return of


def make_descriptor(x: Tensor, L: int, width: int, packed: bool) -> TensorDescriptor:
    """Return the TMA descriptor of `x`, (B, T, H, d), in tiles (L, width).

    TMA clips only at the fixed extents of a descriptor, but a tile of a packed sequence must be clipped at the end of
    its own sequence. Step t of a sequence that ends at step `end` is therefore at row VIRTUAL_ROWS - (end - t) of a
    dimension with VIRTUAL_ROWS rows, which ends exactly at t = end. A second dimension adds `end` rows to the address.
    A third one takes VIRTUAL_ROWS rows off it: addresses wrap around at 2^64 bytes, and so a step of 2^64 /
    VIRTUAL_ROWS bytes less a row, taken VIRTUAL_ROWS times, is VIRTUAL_ROWS rows back.

    Args:
        x: The tensor, (B, T, H, d); packed sequences have B = 1.
        L: Steps of a tile.
        width: Columns of a tile.
        packed: Whether `x` has packed sequences.
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
    """The launches of one forward or backward whose scans are Hopper kernels."""

    close_marks = False
    values_last = False

    def __init__(self, recorder: LaunchRecorder, x: Inputs, spec: Spec) -> None:
        super().__init__(recorder, x, spec)
        self.whole_rows = self.K <= STATE_ROWS  # `o_dv_kernel` computes o and dv
        self.blocks = 2 if self.V % 256 == 0 else 1
        self.finds_delta = self.whole_rows and 128 * self.blocks == self.V  # one program has all columns of dh and h
        self.fused_dk_dv = self.whole_rows and self.V == STATE_ROWS and not spec.normalize  # one kernel
        self.pieces = num_partials(self.V)
        self.schedule = self.cu
        self.segment_dn: Tensor | None = None  # what segments add to dn, from the scan for dq
        self.gate_scalars = *self.gate_strides, *self.scales
        # The gate warps compute all gate vectors where no two programs would compute the same ones. Otherwise a kernel
        # does not depend on the form of the gates, so that one compiled kernel serves all forms.
        made = RECOMPUTED if self.whole_rows and not spec.normalize else LOADED
        forms = {name: made is RECOMPUTED and form for name, form in self.gate_forms.items()}
        self.gate_constants = {"GATES": made.value, **forms}

    def begin(self, *results: Tensor) -> None:
        """Begin as `Call`, and compute the schedule of packed sequences."""
        super().begin(*results)
        if self.packed:
            self.schedule = self._make_schedule()

    def _make_schedule(self) -> Tensor:
        """Return the schedule of packed sequences, (segments, FIELDS), see :func:`schedule_packed`."""
        out, block = self.new(self.segments, FIELDS.value, dtype=torch.int32), 16
        self.launch(schedule_packed, (ceil_div(self.segments, block),),
            self.cu, out, self.x.sequences, self.steps if self.segmented else self.T + 1, self.segments, L=self.L,
            SEGMENT_BLOCK=block, SEQUENCE_BLOCK=64, num_warps=4,
        )  # fmt: skip
        return out

    def gates(self, m_final: Tensor | None, d: Tensor | None = None) -> Tensor:
        """Return the gate vectors, or a placeholder where the gate warps compute all of them.

        Args:
            m_final: Output for the final max state, (sequences, H).
            d: The denominators of the forward; with them the gate vectors of the backward are computed.
        """
        if self.gate_constants["GATES"] == RECOMPUTED.value:
            return self.given_gates[1]
        # PARTIAL only in the forward: the scans for dq and dk have no time for more exponentials. COLUMN contains the
        # scale, so that weights cannot be computed from it where the scale is 0.
        self.few_vectors = self.whole_rows and d is None and self.spec.scale != 0
        if self.few_vectors:
            self.gate_constants["GATES"] = PARTIAL.value
        return super().gates(m_final, d)

    def descriptor(self, x: Tensor, width: int) -> TensorDescriptor | EncodedDescriptor:
        """Return the TMA descriptor of `x`, (B, T, H, d), in tiles (L, width)."""
        return self.do(descriptor_factory(make_descriptor(x, self.L, width, self.packed)), x)

    @classmethod
    def frame(cls, x: Inputs) -> tuple[int, int]:
        """Return dqk and dhv of the kernels, to which the heads of the inputs are padded."""
        return padded_dims_of(x)

    @classmethod
    def details(cls, x: Inputs, chunk_size: int) -> dict[str, object]:
        """Return what :func:`tfla.explain` shows."""
        K, V = cls.frame(x)
        filled = (x.q.shape[3], x.v.shape[3]) != (K, V)
        return super().details(x, chunk_size) | ({"filled up to": f"{K} x {V}"} if filled else {})

    @classmethod
    def kernel_config_for(cls, x: Inputs) -> KernelConfig:
        """Return the configuration of the Triton kernels beside the scans: tiles of 64 steps for all head dims."""
        return choose_kernel_config(STATE_ROWS, STATE_ROWS, x.q.element_size(), products(x), 90)

    @classmethod
    def programs(cls, x: Inputs) -> int:
        """Return how many programs share a segment of one head."""
        K, V = cls.frame(x)
        of_rows = K // STATE_ROWS * num_splits(V)
        return of_rows if K <= STATE_ROWS else max(of_rows, V // STATE_ROWS * num_splits(K))

    def grid(self, parts: int) -> tuple[int, int]:
        """Return the grid of a kernel whose work tiles are each shared by `parts` programs."""
        return self.programs_for(self.segments * self.H, parts), parts

    def programs_for(self, count: int, parts: int) -> int:
        """Return how many programs take `count` work tiles, each of which is shared by `parts` programs."""
        most = max(1, processors(self.x.q.device) // parts)
        return max(1, min(count, MAX_PROGRAMS_PER_SM * most) if self.packed else balanced_programs(count, most))

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        """Compute h, with a normalizer also d, and the final states."""
        x = self.x
        if self.whole_rows:
            self._launch_o_dv(x.k, x.v, x.q, h, gates, False, state, final, self.spec.normalize, d)
            return
        fuse_normalizer = self.spec.normalize and num_splits(self.K) == 1  # each program has all of n
        if self.spec.normalize and not fuse_normalizer:
            self.denominators(x.k, x.q, gates, state[1], final[1], d)
        self._launch_transposed(x.v, x.k, x.q, h, gates, False, state, final, fuse_normalizer, d)

    def values_gradient(
        self, gates: Tensor, out: Outputs, dh: Tensor, dv: Tensor, end: Tensor | None, delta: bool
    ) -> None:
        """Compute dv, and with a normalizer delta where `finds_delta` is set; nothing where `dk_dv_kernel` does."""
        x, h = self.x, out.h if delta and self.finds_delta else None
        if self.fused_dk_dv:
            return
        if self.whole_rows:
            self._launch_o_dv(x.q, dh, x.k, dv, gates, True, (end, None), (None, None), False, None, h)
        else:
            self._launch_transposed(dh, x.q, x.k, dv, gates, True, (end, None), (None, None))

    def _launch_o_dv(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor, gates: Tensor, reverse: bool, state: Pair, final: Pair,
        normalize: bool, d: Tensor | None, h: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch `o_dv_kernel` for o, or with `reverse` for dv.

        Args:
            x: k, or q for dv.
            y: v, or do for dv.
            z: q, or k for dv.
            out: Output like y.
            gates: Gate vectors.
            reverse: Whether the scan goes against time.
            state: Initial states of work tiles, C and n, or None for zeros.
            final: Outputs for the states after work tiles, or None.
            normalize: Whether to divide by the denominators.
            d: Output for the denominators, or None.
            h: The output of the forward, with which delta is computed, or None.
        """
        C, n, C_out, n_out = (gates if t is None else t for t in (*state, *final))
        L, blocks = self.L, self.blocks
        of_qk, of_v = (lambda t: self.descriptor(t, self.K)), (lambda t: self.descriptor(t, 64 * blocks))
        self.launch(o_dv_kernel, self.grid(self.V // (128 * blocks)),
            of_qk(x), of_v(y), of_qk(z), gates if h is None else of_v(h), of_v(out), gates, *self.given_gates,
            C, C_out, n, n_out, gates if d is None else d, self.schedule, self.T, self.tiles, self.H, self.group,
            self.steps, self.segments * self.H, *self.gate_scalars, DK=self.K, DV=self.V, BLOCKS=blocks, L=L,
            STAGES=O_DV_STAGES if h is None else O_DV_STAGES_WITH_H, REVERSE=reverse, IS_SEGMENTED=self.segmented,
            USE_INITIAL_STATE=state[0] is not None, STORE_FINAL_STATE=final[0] is not None, NORMALIZE=normalize,
            SAVE_D=d is not None, COMPUTE_DP_OFFSET=h is not None, IS_VARLEN=self.packed, **self.gate_constants,
            num_warps=4,
        )  # fmt: skip

    def _launch_transposed(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor, gates: Tensor, reverse: bool, state: Pair, final: Pair,
        fuse_normalizer: bool = False, d: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch `dq_dk_kernel` for C^T, which computes o, or with `reverse` dv.

        Args:
            x: v, or do for dv.
            y: k, or q for dv.
            z: q, or k for dv.
            out: Output like x.
            gates: Gate vectors.
            reverse: Whether the scan goes against time.
            state: Initial states of work tiles, C and n, or None for zeros.
            final: Outputs for the states after work tiles, or None.
            fuse_normalizer: Whether the kernel divides by the denominators.
            d: Output for the denominators, or None.
        """
        partials = num_partials(self.K)
        to = out if partials == 1 else self.new(self.B, self.T, self.H * partials, out.shape[3], dtype=out.dtype)
        sums = d if fuse_normalizer and d is not None else gates
        checkpoints = (gates,) * 3
        self._launch_dq_dk(
            x, y, z, out, to, gates, sums, checkpoints, False, reverse, state, final, True, fuse_normalizer
        )
        if partials > 1:
            self.clear(to)
            self.sum_of_groups(to, partials, out)

    def boundary_states(
        self, x: Tensor, y: Tensor, gates: Tensor, reverse: bool, given: Pair, final: Pair, delta: bool = False
    ) -> Pair:
        """Return the states at which segments start, or against time the cotangents at which they end.

        C and n come from one launch of `segment_states_kernel` in the forward direction.
        """
        if reverse or not self.spec.normalize:
            return super().boundary_states(x, y, gates, reverse, given, final, delta)
        C, n, decays = self.new_states(), self.new(self.segments, self.H, self.K), self.new(self.segments, self.H)
        self.add_up(x, y, gates, reverse, C, decays, final[0] is None, n)
        self.join(C, decays, reverse, given[0], final[0])
        self.join(n, decays, reverse, given[1], final[1])
        return C, n

    def add_up(
        self, x: Tensor, y: Tensor, gates: Tensor, reverse: bool, states_out: Tensor, decays: Tensor, skip: bool,
        n: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch `segment_states_kernel`: what segments add to C, and with `n` to n, and the decays over them."""
        splits, grid = self._segment_states_grid(skip)
        self.launch(segment_states_kernel, grid,
            self.descriptor(x, STATE_ROWS), self.descriptor(y, self.V // splits), gates, *self.given_gates, states_out,
            decays if n is None else n, decays, self.schedule, self.T, self.tiles, self.H, self.group, self.steps,
            self.segments * self.H, *self.gate_scalars, DX=self.K, DY=self.V, NUM_SPLITS=splits, L=self.L,
            STAGES=SEGMENT_STATES_STAGES, REVERSE=reverse, IS_SEGMENTED=self.segmented, NORMALIZE=n is not None,
            SKIP_LAST=skip, IS_VARLEN=self.packed, **self.gate_constants, num_warps=4,
        )  # fmt: skip

    def _segment_states_grid(self, skip: bool) -> tuple[int, tuple[int, int]]:
        """Return how many programs of `segment_states_kernel` share the columns of a state, and its grid.

        Twice as many share them where at least half of the multiprocessors would be idle otherwise. With `skip` the
        last segments of sequences have no work and do not count.
        """
        segments, of_rows = self.segments - (self.x.sequences if skip else 0), self.K // STATE_ROWS
        splits = num_splits(self.V)
        halves = self.V // splits == MAX_STATE_COLUMNS and not self.packed
        if halves and 2 * segments * self.H * of_rows * splits <= processors(self.x.q.device):
            return 2 * splits, (self.segments * self.H, of_rows * 2 * splits)
        return splits, self.grid(of_rows * splits)

    def _num_programs(self) -> int:
        """Return how many programs of `dq_dk_kernel` share a state: each leaves partial sums for the gate gradients."""
        return self.K // STATE_ROWS * num_splits(self.V)

    def queries_gradient(
        self, gates: Tensor, dh: Tensor, dq: Tensor, start: Pair, delta: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute dq.

        Returns:
            The sums q . dq, (programs of a head, H, tiles, 1, L), and the checkpoints of C and n.
        """
        x, q_dq = self.x, self.new(self._num_programs(), self.H, self.tiles, 1, self.L)
        checkpoints = self.new_marks(q_dq)
        if self.segmented and delta:
            self.segment_dn = self.new(self.segments, self.H, self.K)
        self._launch_dq_dk(
            x.k, x.v, dh, x.q, dq, gates, q_dq, (*checkpoints, gates), delta, False, start, (None, self.segment_dn)
        )
        return q_dq, checkpoints

    def boundary_n(
        self, x: Tensor, gates: Tensor, reverse: bool, given: Tensor | None, final: Tensor | None, decays: Tensor,
        delta: bool,
    ) -> Tensor:  # fmt: skip
        """Return n where segments start, or against time its cotangents where they end, (segments, H, dqk)."""
        if self.segment_dn is None:
            return super().boundary_n(x, gates, reverse, given, final, decays, delta)
        self.join(self.segment_dn, decays, reverse, given, final)
        return self.segment_dn

    def keys_gradient(
        self, gates: Tensor, dh: Tensor, dk: Tensor, dv: Tensor, checkpoints: tuple[Tensor, Tensor], end: Pair,
        first: Pair, delta: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute dk, and dv where one kernel computes both.

        Returns:
            The sums k . dk, (programs of a head, H, tiles, 1, L), and the parts of <C, dC> at checkpoints,
            (checkpoints H, parts).
        """
        x, k_dk = self.x, self.new(self._num_programs(), self.H, self.tiles, 1, self.L)
        dots = self.new(checkpoints[0].shape[0] * self.H, CONSUMER_WARPS * self._num_programs())
        if self.fused_dk_dv:
            self._launch_dk_dv(dh, dk, dv, gates, k_dk, checkpoints[0], dots, end[0], first[0])
        else:
            self._launch_dq_dk(x.q, dh, x.v, x.k, dk, gates, k_dk, (*checkpoints, dots), delta, True, end, first)
        return k_dk, dots

    def _launch_dk_dv(
        self, dh: Tensor, dk: Tensor, dv: Tensor, gates: Tensor, sums: Tensor, states: Tensor, dots: Tensor,
        state: Tensor | None, final: Tensor | None,
    ) -> None:  # fmt: skip
        """Launch `dk_dv_kernel`.

        Args:
            dh: Cotangent of h.
            dk: Output.
            dv: Output.
            gates: Gate vectors.
            sums: Output for k . dk.
            states: States at checkpoints.
            dots: Output for the parts of <C, dC>.
            state: dC after the last steps of work tiles, or None for zeros.
            final: Output for dC before their first steps, or None.
        """
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
        checkpoints: tuple[Tensor, Tensor, Tensor], delta: bool, reverse: bool, state: Pair, final: Pair,
        transposed: bool = False, fuse_normalizer: bool = False,
    ) -> None:  # fmt: skip
        """Launch `dq_dk_kernel`.

        Args:
            x, y, z, w: The operands, in the table of :mod:`.dq_dk`.
            out: Output like x.
            gates: Gate vectors.
            sums: Output for w . out; with `transposed` for d, or `gates` for neither.
            checkpoints: C and n at checkpoints, and the output for the parts of <C, dC>.
            delta: Whether to add delta.
            reverse: Whether the scan goes against time.
            state: Initial states of work tiles, C and n, or None for zeros.
            final: Outputs for the states after work tiles, or None.
            transposed: Whether to compute o or dv.
            fuse_normalizer: Whether the kernel divides by the denominators.
        """
        C, n, C_out, n_out = (gates if t is None else t for t in (*state, *final))
        L, (DX, DY) = self.L, (self.V, self.K) if transposed else (self.K, self.V)
        splits = num_splits(DY)
        grid = self.grid(DX // STATE_ROWS * splits)
        zero_counts = gates
        if splits > 1:
            zero_counts = self.do(Tensor.zero_, self.new(grid[0] * grid[1] // PAIR.value, dtype=torch.int32))
        self.launch(dq_dk_kernel, grid,
            self.descriptor(x, STATE_ROWS), self.descriptor(y, DY // splits), self.descriptor(z, DY // splits),
            self.descriptor(w, 64), self.descriptor(out, 64), gates, *self.given_gates, sums, C, C_out, n,
            n_out, *checkpoints, zero_counts, self.schedule, self.T, self.tiles, self.H, self.group, self.steps,
            self.segments * self.H, *self.gate_scalars, DX=DX, DY=DY, NUM_SPLITS=splits, L=L, STAGES=DQ_DK_STAGES,
            CHECKPOINT_STEPS=self.marks, REVERSE=reverse, IS_SEGMENTED=self.segmented,
            USE_INITIAL_STATE=state[0] is not None, STORE_FINAL_STATE=final[0] is not None,
            NORMALIZE=self.spec.normalize and not transposed, USE_DP_OFFSET=delta, TRANSPOSED=transposed,
            FUSE_NORMALIZER=fuse_normalizer, SAVE_D=fuse_normalizer and sums is not gates, IS_VARLEN=self.packed,
            **self.gate_constants, num_warps=4,
        )  # fmt: skip


SHARED_MEMORY_BYTES = 232_448  # bytes of shared memory that a program can have
GATE_VECTOR_BYTES = 1_536  # bytes of the gate vectors of a head in a stage


@functools.cache
def small_head_config(K: int, V: int, itemsize: int, multiplied: str, heads: int) -> KernelConfig:
    """Return the configuration of small heads: for the cost model a program of `heads` heads is that many programs."""
    return dataclasses.replace(choose_kernel_config(K, V, itemsize, multiplied, 90), programs_per_sm=heads)


def max_stages(K: int, V: int, qk_tiles: int, v_tiles: int, heads: int, shared: bool, states: int) -> int:
    """Return how many stages of the ring fit in shared memory, at most 4.

    Args:
        K: dqk.
        V: dhv.
        qk_tiles: Tiles of q or k that a head has in a stage.
        v_tiles: Tiles of v or do that a head has in a stage.
        heads: Heads of a program.
        shared: Whether these share q and k.
        states: States of each head in shared memory.
    """
    L = 64
    stage = 2 * L * (qk_tiles * K * (1 if shared else heads) + v_tiles * V * heads) + heads * GATE_VECTOR_BYTES
    kept = 2 * heads * K * V * states + 2 * L * K * shared + 4 * heads * K + 256
    return min(4, (SHARED_MEMORY_BYTES - kept) // stage)


def make_state_descriptor(states: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of `states`, (..., dqk, dhv), in tiles of one state."""
    K, V = states.shape[-2:]
    return TensorDescriptor(states, [states.numel() // V, V], [V, 1], [K, V], gl.NVMMASharedLayout(128, 16, 2))


class SmallHeadLaunch(HopperLaunch):
    """The launches of one forward or backward of small heads: `small_head_kernel` computes all scans."""

    def __init__(self, recorder: LaunchRecorder, x: Inputs, spec: Spec) -> None:
        super().__init__(recorder, x, spec)
        self.finds_delta, self.fused_dk_dv, self.pieces = True, True, 1
        fits = max_stages(self.K, self.V, 2, 2, 2, True, 2) >= 2  # in the scan for dk, which needs most
        self.together = 2 if self.group % 2 == 0 and fits else 1

    @classmethod
    def kernel_config_for(cls, x: Inputs) -> KernelConfig:
        """Return the configuration of small heads; a program has two of them where their number is even."""
        heads = 2 - int(x.v.shape[2]) % 2
        return small_head_config(*cls.frame(x), x.q.element_size(), products(x), heads)

    @classmethod
    def programs(cls, x: Inputs) -> int:
        """Return 1: a program has whole states."""
        return 1

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        """Compute h, with a normalizer also d, and the final states."""
        x = self.x
        self._launch_small_head(x.k, x.v, x.q, None, gates, False, state, final, values=h, d=d)

    def add_up(
        self, x: Tensor, y: Tensor, gates: Tensor, reverse: bool, states_out: Tensor, decays: Tensor, skip: bool,
        n: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute what segments add to C, and with `n` to n, and the decays over them."""
        self._launch_small_head(
            x, y, None, None, gates, reverse, (None, None), (states_out, n), decays=decays, skip=skip,
            normalize=n is not None,
        )  # fmt: skip

    def queries_gradient(
        self, gates: Tensor, dh: Tensor, dq: Tensor, start: Pair, delta: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute dq, and with a normalizer delta; return the sums q . dq and the checkpoints of C and n."""
        x, q_dq = self.x, self.new(1, self.H, self.tiles, 1, self.L)
        checkpoints = self.new_marks(q_dq)
        self._launch_small_head(
            x.k, x.v, x.q, dh, gates, False, start, (None, None), keys=dq, sums=q_dq, checkpoints=checkpoints,
            delta=delta,
        )  # fmt: skip
        return q_dq, checkpoints

    def keys_gradient(
        self, gates: Tensor, dh: Tensor, dk: Tensor, dv: Tensor, checkpoints: tuple[Tensor, Tensor], end: Pair,
        first: Pair, delta: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute dk and dv; return the sums k . dk and <C, dC> at checkpoints."""
        x, k_dk = self.x, self.new(1, self.H, self.tiles, 1, self.L)
        dots = self.new(checkpoints[0].shape[0] * self.H, 1, dtype=torch.float64)
        self._launch_small_head(
            x.q, dh, x.k, x.v, gates, True, end, first, values=dv, keys=dk, sums=k_dk, checkpoints=checkpoints,
            dots=dots, delta=delta,
        )  # fmt: skip
        return k_dk, dots

    def _launch_small_head(
        self, x: Tensor, y: Tensor, zk: Tensor | None, zv: Tensor | None, gates: Tensor, reverse: bool, state: Pair,
        final: Pair, *, values: Tensor | None = None, keys: Tensor | None = None, sums: Tensor | None = None,
        checkpoints: Pair = (None, None), dots: Tensor | None = None, d: Tensor | None = None,
        decays: Tensor | None = None, delta: bool = False, skip: bool = False, normalize: bool | None = None,
    ) -> None:  # fmt: skip
        """Launch `small_head_kernel`, which fills `values` and `keys`, or without them only `final` and `decays`.

        Args:
            x, y, zk, zv: The operands, in the table of :mod:`.small_head`.
            gates: Gate vectors.
            reverse: Whether the scan goes against time.
            state: Initial states of work tiles, C and n, or None for zeros.
            final: Outputs for the states after work tiles, or None.
            values: Output o or dv, or None.
            keys: Output dq or dk, or None.
            sums: Output for q . dq or k . dk.
            checkpoints: C and n at checkpoints.
            dots: Output for <C, dC>.
            d: Output for the denominators, or None.
            decays: Output for the decays over segments.
            delta: Whether to add delta.
            skip: Whether the last segments of sequences have no work.
            normalize: Whether the state has n; by default as the operator.
        """
        L, K, V, H = self.L, self.K, self.V, self.H
        qk_tiles, v_tiles = (1 if zk is None else 2), (1 if zv is None else 2)
        if checkpoints[0] is None or checkpoints[0].shape[0] == 0:  # no segment is that long
            checkpoints, dots = (None, None), None
        states, n_checkpoints = checkpoints
        of_states = None if states is None else self.do(descriptor_factory(make_state_descriptor(states)), states)
        num_states = 2 if states is not None and reverse else 1
        shared = self.together == 2
        heads = 2 if H % 2 == 0 and max_stages(K, V, qk_tiles, v_tiles, 2, shared, num_states) >= 2 else 1
        shared = shared and heads == 2
        of_k, of_v = (lambda t: self.descriptor(t, K)), (lambda t: self.descriptor(t, V))
        X, Y = of_k(x), of_v(y)
        rest = (sums, d, dots, state[0], final[0], state[1], final[1], n_checkpoints, decays)
        count = self.segments * H // heads
        self.launch(small_head_kernel, (self.programs_for(count, 1),),
            X, Y, X if zk is None else of_k(zk), Y if zv is None else of_v(zv), Y if values is None else of_v(values),
            X if keys is None else of_k(keys), X if of_states is None else of_states, gates, *self.given_gates,
            *(gates if t is None else t for t in rest), self.schedule, self.T, self.tiles, H // heads, self.group,
            self.steps, count, *self.gate_scalars, HEADS=heads, SHARED_QK=shared, DK=K, DV=V, L=L,
            STAGES=max_stages(K, V, qk_tiles, v_tiles, heads, shared, num_states), CHECKPOINT_STEPS=self.marks,
            REVERSE=reverse, IS_SEGMENTED=self.segmented, USE_INITIAL_STATE=state[0] is not None,
            STORE_FINAL_STATE=final[0] is not None, SKIP_LAST=skip, OUTPUT_V=values is not None,
            OUTPUT_K=keys is not None, NORMALIZE=self.spec.normalize if normalize is None else normalize,
            SAVE_D=d is not None, USE_DP_OFFSET=delta, HAS_CHECKPOINTS=states is not None, IS_VARLEN=self.packed,
            **self.gate_constants, num_warps=4,
        )  # fmt: skip
