"""The launches of the Triton kernels of one forward or backward, which the Hopper backend extends.

B, T and H are the sizes of v, (B, T, H, dhv); K and V are dqk and dhv of the states, padded where the kernels need it.
For packed sequences B is 1. Gradients and results are named as in :mod:`tfla.backends.base`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from tfla.backends.base import Grads, Inputs, Outputs, Replay, Spec, static, stored_dtype
from tfla.backends.gpu import gate_gradients as gradient_kernels
from tfla.backends.gpu import gate_kernels, reductions, segmentation
from tfla.backends.gpu import sequences as sequence_kernels
from tfla.backends.gpu import state_passing as sum_kernels
from tfla.backends.gpu.checkpoints import checkpoint_interval
from tfla.backends.gpu.config import (
    SHORTEST_SEGMENT,
    KernelConfig,
    ceil_div,
    kernel_config,
    power_of_two,
    processors,
    products,
)
from tfla.backends.gpu.replay import LaunchRecorder, record_or_replay, recorded_launches
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE
from tfla.backends.triton import LARGEST_FUSED_DQK, fused_kernels

CHUNK, HEADS, WARPS = 128, 4, 4  # steps, heads and warps of a program of the gate kernels
OFFSETS, MOST_CLEARED = 512, 5  # offsets that a program loads at once; most tensors that one launch clears


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, time and head of x, (B, T, H, ...).

    The batch stride is 0 for B = 1: it could otherwise exceed 32 bits and require another kernel.
    """
    b, t, h, *_ = x.stride()
    return b if x.shape[0] > 1 else 0, t, h


def _describable(*tensors: Tensor) -> bool:
    """Return whether TMA descriptors can address these tensors: addresses and strides are multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0
        and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        and t.shape[-1] * t.element_size() >= 16
        for t in tensors
    )


Pair = tuple[Tensor | None, Tensor | None]  # C and n, or their cotangents dC and dn


class Call:
    """The sizes, options and launches of one forward or backward.

    Subclasses replace single launches, and set the class attributes that say what their kernels do.
    """

    close_marks = True  # whether checkpoints are closer without a normalizer
    values_last = True  # whether dv is computed after dq and dk; its memory then holds checkpoints until then
    finds_delta = False  # whether a scan computes delta before other launches read it
    pieces = 1  # number of partial dq and dk of a head, which are summed afterwards
    together = 1  # heads that share one partial dq and dk
    few_vectors = False  # whether the gate vectors INTER, UPDATE and DECAY are left out (TOTAL_ONLY)

    def __init__(self, recorder: LaunchRecorder, x: Inputs, spec: Spec) -> None:
        self.x, self.spec = x, spec
        self.new, self.placeholder, self.do, self.launch = (
            recorder.new,
            recorder.placeholder,
            recorder.do,
            recorder.launch,
        )
        self.B, self.T, self.H = x.v.shape[:3]
        self.K, self.V = self.frame(x)
        self.filled = (x.q.shape[3], x.v.shape[3]) != (self.K, self.V)
        self.packed = x.cu_seqlens is not None
        self.cu = x.cu_seqlens if x.cu_seqlens is not None else x.log_f
        self.config = self.kernel_config_for(x)
        self.L = self.config.tile_steps
        self.marks = self.marks_of(x, spec)
        self.exact = x.q.dtype == torch.float32
        self.precision = products(x)
        self.group = self.H // x.q.shape[2]
        self.tiles = self.slots(self.L)
        chosen = spec.chunk_size < DEFERRED_CHUNK_SIZE
        self.keeps_states = chosen and not self.filled
        chunk_size = (
            spec.chunk_size if chosen else segmentation.best_chunk_size(x, self.kernel_config_for(x), self.programs(x))
        )
        self.steps = self.segment_steps(x, chunk_size)
        self.segmented = self.steps < self.T
        self.segments = self.slots(self.steps) if self.segmented else x.sequences
        self.given_gates = x.log_f if x.log_i is None else x.log_i, x.log_f
        self.gate_strides = (*_strides(self.given_gates[0]), *_strides(x.log_f))
        self.gate_forms = {
            "INPUT_GATE": x.log_i is not None, "SIGMOID_I": spec.gates == "sigmoid", "SIGMOID_F": spec.gates != "log"
        }  # fmt: skip
        self.scales = spec.scale, math.log2(abs(spec.scale)) if spec.scale else -1e9
        self.longest = min(self.steps, self.T)  # steps of a segment
        self.spare: Tensor | None = None  # unused memory in the inputs' dtype: dv before it is computed
        self.lent = 0  # number of its elements that hold checkpoints

    @classmethod
    def frame(cls, x: Inputs) -> tuple[int, int]:
        """Return dqk and dhv of the states, padded to what the kernels of a subclass support."""
        return x.q.shape[3], x.v.shape[3]

    @classmethod
    def kernel_config_for(cls, x: Inputs) -> KernelConfig:
        """Return the kernel configuration for these inputs."""
        return kernel_config(x)

    @classmethod
    def programs(cls, x: Inputs) -> int:
        """Return how many programs share the scan of one segment of one head."""
        return ceil_div(x.v.shape[3], cls.kernel_config_for(x).o_dv.split)

    @classmethod
    def segment_steps(cls, x: Inputs, chunk_size: int) -> int:
        """Return chunk_size rounded up to whole tiles: the number of steps of a segment."""
        L = cls.kernel_config_for(x).tile_steps
        return ceil_div(chunk_size, L) * L

    @classmethod
    def details(cls, x: Inputs, chunk_size: int) -> dict[str, object]:
        """Return the sizes that :func:`tfla.explain` shows."""
        return {
            "tile": cls.kernel_config_for(x).tile_steps,
            "segment": min(cls.segment_steps(x, chunk_size), x.v.shape[1]),
        }

    @classmethod
    def tuning(cls, x: Inputs, spec: Spec) -> tuple[Hashable, ...]:
        """Return the choices that are part of the call signature because the inputs' shapes do not determine them."""
        return kernel_config(x), cls.marks_of(x, spec), products(x)

    @classmethod
    def marks_of(cls, x: Inputs, spec: Spec) -> int:
        """Return the number of steps between checkpoints."""
        closer = cls.close_marks and not spec.normalize
        dims = int(x.q.shape[3]), int(x.v.shape[3])
        return checkpoint_interval(*dims, x.q.element_size(), math.prod(cls.frame(x)), closer)

    def begin(self, *results: Tensor) -> None:
        """Bound the offsets of packed sequences, and clear steps of no sequence in `results` (1, T, ...), dense."""
        if self.packed:
            bounds = self.new(*self.cu.shape, dtype=self.cu.dtype)
            self._bound(bounds, results)
            self.cu = bounds

    def clear(self, *results: Tensor) -> None:
        """Clear steps of no sequence in `results` (1, T, ...), dense, after `begin`."""
        if self.packed:
            self._bound(None, results)

    def _bound(self, bounds: Tensor | None, results: tuple[Tensor, ...]) -> None:
        entries, none = self.x.sequences + 1, MOST_CLEARED - len(results)
        widths = [math.prod(t.shape[2:]) for t in results]
        programs = max(1, min(processors(self.cu.device), self.T // CHUNK))
        self.launch(sequence_kernels.bound_sequences, (programs,),
            self.cu, self.cu if bounds is None else bounds, *results, *[self.cu] * none, entries, self.T, *widths,
            *[0] * none, TENSORS=len(results), BOUND=bounds is not None, ENTRIES=OFFSETS, BLOCK=1024,
            num_warps=4,
        )  # fmt: skip

    def slots(self, steps: int) -> int:
        """Return the number of pieces of `steps` steps of all sequences, empty pieces of packed sequences included."""
        return self.T // steps + self.x.sequences if self.packed else self.B * ceil_div(self.T, steps)

    def dense(self, t: Tensor | None) -> Tensor | None:
        """Return t as a contiguous float32 tensor."""
        if t is None or (t.dtype == torch.float32 and t.is_contiguous()):
            return t
        found: Tensor = self.do(lambda t: t.float().contiguous(), t)
        return found

    def filled_up(self, C: Tensor | None, n: Tensor | None) -> Pair:
        """Return initial states C, (sequences, H, dqk, dhv), and n padded to K and V, in float32."""
        C, n = self.dense(C), self.dense(n)
        if not self.filled:
            return C, n
        k, v = self.K - self.x.q.shape[3], self.V - self.x.v.shape[3]
        return (
            None if C is None else self.do(lambda t: pad(t, (0, v, 0, k)), C),
            None if n is None else self.do(lambda t: pad(t, (0, k)), n),
        )

    def cut_off(self, C: Tensor | None, n: Tensor | None) -> Pair:
        """Return states C, (sequences, H, K, V), and n cut to the head dims of the inputs."""
        if not self.filled:
            return C, n
        k, v = self.x.q.shape[3], self.x.v.shape[3]
        return (
            None if C is None else self.do(lambda t: t[..., :k, :v].contiguous(), C),
            None if n is None else self.do(lambda t: t[..., :k].contiguous(), n),
        )

    def zeros(self, *shape: int) -> Tensor:
        """Return a float32 tensor of zeros."""
        return self.do(Tensor.zero_, self.new(*shape))

    def new_states(self) -> Tensor:
        """Allocate the states of all segments, (segments, H, K, V)."""
        return self.new(self.segments, self.H, self.K, self.V, dtype=stored_dtype(self.x, self.spec))

    def heads_of(self, most: int) -> int:
        """Return how many heads a program of the gate kernels computes, at most `most`."""
        return min(most, triton.next_power_of_2(self.H))

    def gates(self, m_final: Tensor | None, d: Tensor | None = None) -> Tensor:
        """Compute the gate vectors, (H, tiles, VECTORS, L) float32.

        Args:
            m_final: the max states after the sequences, (sequences, H), to be written, or None.
            d: the denominators of the forward, (B, T, H), for the gate vectors of the backward.
        """
        x, spec, m = self.x, self.spec, self.dense(self.x.m)
        slots, heads, size = self.slots(CHUNK), self.heads_of(HEADS), gate_kernels.VECTORS.value * self.L
        summaries = 4 * self.H * slots if spec.normalize else 0  # one allocation: each takes the host a while
        out = self.new(self.H * self.tiles * size + summaries)
        grid = (slots, ceil_div(self.H, heads))
        shared: dict[str, Any] = {
            "CHUNK": CHUNK,
            "HEADS": heads,
            "L": self.L,
            "IS_VARLEN": self.packed,
            **self.gate_forms,
        }
        shared["num_warps"] = WARPS
        if spec.normalize and (self.packed or CHUNK < self.T):
            self.launch(gate_kernels.chunk_summary, grid,
                *self.given_gates, self.cu, out, x.sequences, self.T, self.tiles, self.H, *self.gate_strides, slots,
                **shared,
            )  # fmt: skip
        self.launch(gate_kernels.chunk_gates, grid,
            *self.given_gates, out if m is None else m, self.cu, out if d is None else d, out,
            out if m_final is None else m_final, x.sequences, self.T, self.tiles, self.H, *self.gate_strides,
            *_strides(x.log_f if d is None else d), *self.scales, slots,
            NORMALIZE=spec.normalize, USE_INITIAL_STATE=x.m is not None, STORE_FINAL_STATE=m_final is not None,
            FOLD_DENOMINATOR=d is not None, EXACT=self.exact, TOTAL_ONLY=self.few_vectors, **shared,
        )  # fmt: skip
        return out

    def compute_delta(self, gates: Tensor, h: Tensor, dh: Tensor) -> None:
        """Compute delta, (T7), into the gate vectors."""
        V = h.shape[3]
        block = 128 if V % 16 == 0 else 32  # rows that are not aligned take more registers
        self.launch(gate_kernels.compute_delta, (self.slots(self.L), self.H),
            gates, h, dh, self.cu, self.x.sequences, self.T, self.tiles, self.H, V, *_strides(h), *_strides(dh),
            L=self.L, BLOCK_V=min(block, power_of_two(V)), IS_VARLEN=self.packed, num_warps=8,
        )  # fmt: skip

    def end_cotangents(self, dC: Tensor | None, dn: Tensor | None) -> Pair:
        """Return the padded cotangents of the final states; if only one of dC and dn is given, the other is zeros."""
        C, n = self.filled_up(dC, dn)
        if not self.spec.normalize or (C is None) == (n is None):
            return C, n
        shape = self.x.sequences, self.H, self.K
        return self.zeros(*shape, self.V) if C is None else C, self.zeros(*shape) if n is None else n

    def columns(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor | None, gates: Tensor, back: bool, state: Tensor | None,
        final: Tensor | None, decays: Tensor | None = None, skip: bool = False,
    ) -> None:  # fmt: skip
        """Compute o or dv into `out`; with None only the final states of segments and their decays.

        Args:
            x, y, z: the operands, see the table in :mod:`.fused_kernels`.
            out: the output, (B, T, H, dhv).
            gates: the gate vectors.
            back: whether the scan runs against time.
            state: the states that scans start from, (segments, H, K, V).
            final: the states that scans end with, to be written.
            decays: the decays over segments, (segments, H), to be written.
            skip: whether the segments that end a scan are left out.
        """
        tiles = self.config.o_dv
        written = y if out is None else out
        self.launch(fused_kernels.o_dv_scan, (ceil_div(self.V, tiles.split), self.segments * self.H),
            x, y, z, written, gates, self.cu, gates if state is None else state, gates if final is None else final,
            gates if decays is None else decays, self.x.sequences, self.T, self.tiles, self.H, self.group, self.steps,
            *_strides(x), *_strides(y), *_strides(z), *_strides(written),
            DK=self.K, DV=self.V, BK=power_of_two(self.K), BV=tiles.block, BLOCKS=tiles.blocks, L=self.L, REVERSE=back,
            OUTPUT=out is not None, IS_VARLEN=self.packed, IS_SEGMENTED=self.segmented,
            USE_INITIAL_STATE=state is not None, STORE_FINAL_STATE=final is not None, EXACT=self.exact,
            NEGATIVE=self.spec.scale < 0, PRECISION=self.precision, TMA=self.config.descriptors and _describable(x, y,
            z, written), STAGES=tiles.stages, SKIP_LAST=skip, num_warps=tiles.num_warps, tunable=True,
        )  # fmt: skip

    def denominators(
        self, x: Tensor, z: Tensor, gates: Tensor, n: Tensor | None, final: Tensor | None, d: Tensor | None
    ) -> None:
        """Compute the denominators and fold them into the gate vectors.

        Where whole sequences leave most multiprocessors idle, this scan alone is cut into segments.
        """
        programs, available = self.B * self.H * self.parts_of_n(), processors(z.device)
        if self.segmented or (self.packed and 2 * programs > available):
            self.normalizer_scan(x, z, gates, False, n, final, d)
            return
        steps = ceil_div(max(ceil_div(self.T * programs, available), SHORTEST_SEGMENT), self.L) * self.L
        if 2 * steps > self.T and not self.packed:  # one segment, with the kernel for segments
            starts = self.zeros(self.B, self.H, self.K) if n is None else n
            self.normalizer_scan(x, z, gates, False, starts, final, d, steps=ceil_div(self.T, self.L) * self.L)
            return
        segments = self.slots(steps)
        starts, decays = self.new(segments, self.H, self.K), self.new(segments, self.H)
        self.normalizer_scan(x, x, gates, False, None, starts, None, False, final is None, steps, decays)
        self.join(starts, decays, False, n, final, steps)
        ends = None if final is None else self.new(segments, self.H, self.K)  # written but not read
        self.normalizer_scan(x, z, gates, False, starts, ends, d, steps=steps)

    def parts_of_n(self) -> int:
        """Return how many programs share the keys of one n; float32 takes twice the shared memory."""
        return ceil_div(self.K, LARGEST_FUSED_DQK // 2 if self.exact else LARGEST_FUSED_DQK)

    def normalizer_scan(
        self, x: Tensor, z: Tensor, gates: Tensor, back: bool, n: Tensor | None, final: Tensor | None,
        d: Tensor | None = None, output: bool = True, skip: bool = False, steps: int = 0, decays: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Scan n: fold the denominators into the gate vectors, or without `output` compute only final n or dn.

        Args:
            x, z: k and q, or for dn q twice.
            gates: the gate vectors.
            back: whether the scan runs against time, for dn.
            n: the normalizer states that scans start from, (segments, H, K).
            final: the states that scans end with, to be written.
            d: the denominators, (B, T, H), to be written.
            output: whether denominators are computed.
            skip: whether the segments that end a scan are left out.
            steps: the number of steps of a segment, if it differs from that of the other scans.
            decays: the decays over segments, (segments, H), to be written.
        """
        segmented, segments = (True, self.slots(steps)) if steps else (self.segmented, self.segments)
        stages = 1 if self.exact else 2  # limited by registers and shared memory
        if self.config.descriptors:
            stages = 3 if self.K <= 256 else 1
        most = 128 if output and not self.config.descriptors else 256  # keys for which four warps have registers
        pieces = self.parts_of_n()
        parts = self.new(pieces, self.H, self.tiles, self.L) if output and pieces > 1 else gates
        self.launch(fused_kernels.normalizer_scan, (segments * self.H, pieces),
            x, z, gates, self.cu, parts if decays is None else decays, gates if d is None else d,
            gates if n is None else n, gates if final is None else final, self.x.sequences, self.T, self.tiles, self.H,
            self.group, steps or self.steps, *_strides(x), *_strides(z),
            DK=x.shape[3], DN=self.K, BK=power_of_two(self.K) // pieces, L=self.L, REVERSE=back, OUTPUT=output,
            DELTA=back, IS_VARLEN=self.packed, IS_SEGMENTED=segmented, USE_INITIAL_STATE=n is not None,
            STORE_FINAL_STATE=final is not None, SAVE_D=d is not None, EXACT=self.exact, NEGATIVE=self.spec.scale < 0,
            PRECISION=self.precision, TMA=self.config.descriptors and _describable(x, z), STAGES=stages,
            SKIP_LAST=skip, DECAYS=decays is not None, num_warps=8 if self.exact or most < self.K else 4,
        )  # fmt: skip
        if output and pieces > 1:
            self.launch(fused_kernels.sum_denominators, (self.slots(self.L), self.H),
                parts, gates, gates if d is None else d, self.cu, self.x.sequences, self.T, self.tiles, self.H,
                PARTS=pieces, L=self.L, IS_VARLEN=self.packed, SAVE_D=d is not None, EXACT=self.exact, num_warps=2,
            )  # fmt: skip

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        """Compute h, and with a normalizer d."""
        x = self.x
        if self.spec.normalize:
            self.denominators(x.k, x.q, gates, state[1], final[1], d)
        self.columns(x.k, x.v, x.q, h, gates, False, state[0], final[0])

    def rows(
        self, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, gates: Tensor, delta: bool, back: bool,
        state: Pair, final: Pair,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Compute dq or dk into `out`, (B, T, H, dqk).

        Returns:
            The sums w . out, (parts, H, tiles, pieces, L), and the checkpoints of the state and of n.
        """
        tiles = self.config.dq_dk if self.spec.normalize else self.config.dq_dk_unnormalized or self.config.dq_dk
        parts = ceil_div(self.K, tiles.split)
        each = (
            tiles.split // 16 if self.config.wgmma_dq_dk else 1
        )  # sums over the 16 dims of one warp need no exchange between warps
        sums = self.new(parts, self.H, self.tiles, each, self.L)
        C, n = state
        C_out, n_out = final
        marks, n_marks = self.new_marks(sums)
        self.launch(fused_kernels.dq_dk_scan, (parts, self.segments * self.H),
            x, y, z, w, out, gates, self.cu, sums, gates if C is None else C,
            gates if C_out is None else C_out, gates if n is None else n, gates if n_out is None else n_out,
            marks, n_marks, self.x.sequences, self.T, self.tiles, self.H, self.group, self.steps,
            *_strides(x), *_strides(y), *_strides(z), *_strides(w), *_strides(out),
            DK=self.K, DV=self.V, BK=tiles.split, BV=tiles.block, BLOCKS=tiles.blocks, L=self.L, NP=each, REVERSE=back,
            NORMALIZE=self.spec.normalize, DELTA=delta, IS_VARLEN=self.packed, IS_SEGMENTED=self.segmented,
            USE_INITIAL_STATE=C is not None, STORE_FINAL_STATE=C_out is not None, EXACT=self.exact,
            NEGATIVE=self.spec.scale < 0, PRECISION=self.precision, TMA=self.config.wgmma_dq_dk and _describable(x, y,
            z, w, out), STAGES=tiles.stages, WGMMA=self.config.wgmma_dq_dk, CHECKPOINT_STEPS=self.marks,
            num_warps=tiles.num_warps, tunable=True,
        )  # fmt: skip
        return sums, marks, n_marks

    def sum_of_groups(self, x: Tensor, group: int, out: Tensor | None = None) -> Tensor:
        """Sum x, (B, T, groups * group, D) dense, over the heads of each group; return (B, T, groups, D)."""
        B, T, heads, D = x.shape
        out = self.new(B, T, heads // group, D, dtype=x.dtype) if out is None else out
        rows, width = B * T * heads // group, power_of_two(D)
        block = max(1, 4096 // width)
        self.launch(reductions.sum_head_groups, (ceil_div(rows, block),),
            x, out, rows, GROUP=group, D=D, BLOCK=block, BLOCK_D=width, num_warps=4,
        )  # fmt: skip
        return out

    def new_marks(self, unused: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate checkpoints of the state and of n; without a normalizer `unused` stands for the latter."""
        places = self.B * self.T // self.marks if self.longest > self.marks else 0
        shape = places, self.H, self.K, self.V
        begin, size = ceil_div(self.lent, CHUNK) * CHUNK, math.prod(shape)
        if self.spare is not None and 0 < size <= self.spare.numel() - begin:
            marks = self.do(lambda t: t.view(-1)[begin : begin + size].view(shape), self.spare)
            self.lent = begin + size
        else:
            marks = self.new(*shape, dtype=self.x.q.dtype)
        return marks, self.new(places, self.H, self.K) if self.spec.normalize else unused

    def gradients(
        self, gates: Tensor, out: Outputs, dh: Tensor, results: tuple[Tensor, Tensor, Tensor], of_gates: Pair,
        start: Pair, end: Pair, first: Pair, delta: bool,
    ) -> None:  # fmt: skip
        """Compute all gradients.

        Args:
            gates: the gate vectors of the backward.
            out: the results of the forward.
            dh: the cotangent of h, (B, T, H, dhv).
            results: dq, dk and dv, to be written.
            of_gates: the gradients of the input gate, or None, and of the forget gate, to be written.
            start: the states that scans start from.
            end: the cotangents of the final states of the sequences.
            first: the cotangents of the initial states of the sequences, to be written.
            delta: whether the normalizer has a gradient.
        """
        x, (dq, dk, dv), (di, df) = self.x, results, of_gates
        (dC, dn), decays, last = end, gates, first
        if self.segmented:
            dC, decays = self.boundary_C(x.q, dh, gates, True, end[0], first[0])
            last = None, None
        if self.values_last:
            self.spare = dv
        else:
            self.values_gradient(gates, out, dh, dv, dC, delta)
        q_dq, marks = self.queries_gradient(gates, dh, dq, start, delta)
        if self.segmented and self.spec.normalize:
            dn = self.boundary_n(x.q, gates, True, end[1], first[1], decays, delta)
        k_dk, dots = self.keys_gradient(gates, dh, dk, dv, marks, (dC, dn), last, delta)
        if self.values_last:
            self.values_gradient(gates, out, dh, dv, dC, delta)
        bounds = (gates if t is None else t for t in (*start, dC, dn, *first))
        places = self.segments, ceil_div(self.longest, self.marks)
        if self.packed and not self.segmented:
            places = self.slots(self.marks), 1
        heads = self.heads_of(min(8, 4096 // self.marks))
        warps = max(4, heads * self.marks // 256)
        self.launch(gradient_kernels.gate_gradients, (*places, ceil_div(self.H, heads)),
            q_dq, k_dk, dots, *bounds, self.cu, *self.given_gates, gates if di is None else di, df,
            x.sequences, self.T, self.tiles, self.H, self.steps, self.K * self.V, self.K, *self.gate_strides,
            PARTS=q_dq.shape[0], NP=q_dq.shape[3], CHECKPOINT_STEPS=self.marks, BLOCK=256 * warps // heads,
            BLOCK_N=power_of_two(self.K), L=self.L, HEADS=heads, DOTS=dots.shape[1],
            IS_SEGMENTED=self.segmented, IS_VARLEN=self.packed, NORMALIZE=self.spec.normalize,
            USE_INITIAL_STATE=x.C is not None, USE_FINAL_STATE=end[0] is not None, **self.gate_forms, num_warps=warps,
        )  # fmt: skip

    def queries_gradient(
        self, gates: Tensor, dh: Tensor, dq: Tensor, start: Pair, delta: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute dq; return the sums q . dq, (parts, H, tiles, pieces, L), and the checkpoints of the states."""
        x = self.x
        q_dq, states, n_states = self.rows(x.k, x.v, dh, x.q, dq, gates, delta, False, start, (None, None))
        return q_dq, (states, n_states)

    def keys_gradient(
        self, gates: Tensor, dh: Tensor, dk: Tensor, dv: Tensor, marks: tuple[Tensor, Tensor], end: Pair, first: Pair,
        delta: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute dk; return the sums k . dk in the shape of q . dq, and <C, dC> at the checkpoints.

        Where one scan computes both dk and dv, it also writes dv, and `values_gradient` launches nothing.
        """
        x = self.x
        k_dk, *cotangents = self.rows(x.q, dh, x.v, x.k, dk, gates, delta, True, end, first)
        return k_dk, self.checkpoint_dots(*marks, *cotangents)

    def checkpoint_dots(self, C: Tensor, n: Tensor, dC: Tensor, dn: Tensor) -> Tensor:
        """Return <C, dC> + <n, dn> at each checkpoint of each head, (checkpoints * H, parts) float64."""
        marks = C.shape[0] * C.shape[1]
        dots = self.new(marks, 1, dtype=torch.float64)
        if marks:
            self.launch(gradient_kernels.checkpoint_dots, (marks,),
                C, n, dC, dn, dots, self.K * self.V, self.K, BLOCK=4096, BLOCK_N=power_of_two(self.K),
                NORMALIZE=self.spec.normalize, num_warps=8,
            )  # fmt: skip
        return dots

    def values_gradient(
        self, gates: Tensor, out: Outputs, dh: Tensor, dv: Tensor, end: Tensor | None, delta: bool
    ) -> None:  # fmt: skip
        """Compute dv, and delta where `finds_delta`."""
        self.columns(self.x.q, dh, self.x.k, dv, gates, True, end, None)

    def boundary_states(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, given: Pair, final: Pair, delta: bool = False
    ) -> Pair:
        """Compute the states at segment starts, or with `back` the cotangents of the states at segment ends."""
        C, decays = self.boundary_C(x, y, gates, back, given[0], final[0])
        if not self.spec.normalize:
            return C, None
        return C, self.boundary_n(x, gates, back, given[1], final[1], decays, delta)

    def boundary_C(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, given: Tensor | None, final: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute C of `boundary_states`; return it with the decays over segments, (segments, H)."""
        C, decays = self.new_states(), self.new(self.segments, self.H)
        self.add_up(
            x, y, gates, back, C, decays, final is None
        )  # without `final` the states after last segments are not read
        self.join(C, decays, back, given, final)
        return C, decays

    def boundary_n(
        self, x: Tensor, gates: Tensor, back: bool, given: Tensor | None, final: Tensor | None, decays: Tensor,
        delta: bool,
    ) -> Tensor:  # fmt: skip
        """Compute n of `boundary_states`, (segments, H, K)."""
        n = self.new(self.segments, self.H, self.K)
        if back and not delta:
            self.do(Tensor.zero_, n)
        else:
            self.normalizer_scan(x, x, gates, back, None, n, output=False, skip=final is None)
        self.join(n, decays, back, given, final)
        return n

    def add_up(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, states: Tensor, decays: Tensor, skip: bool
    ) -> None:  # fmt: skip
        """Compute what each segment adds to the state, and its decay; with `skip` the last segments are left out."""
        self.columns(x, y, x, None, gates, back, None, states, decays, skip)

    def join(
        self, states: Tensor, decays: Tensor, back: bool, given: Tensor | None, final: Tensor | None, steps: int = 0
    ) -> None:  # fmt: skip
        """Replace, in place, what each segment adds to the state by the state at its start (state passing).

        `steps` is the number of steps of a segment, if it differs from that of the other scans.
        """
        size = states[0, 0].numel()
        block = min(1024, power_of_two(size))
        self.launch(sum_kernels.pass_states, (ceil_div(size, block), self.x.sequences, self.H),
            states, decays, states if given is None else given, states if final is None else final, self.cu, self.T,
            self.H, steps or self.steps, size, BLOCK=block, REVERSE=back, IS_VARLEN=self.packed,
            USE_INITIAL_STATE=given is not None, STORE_FINAL_STATE=final is not None, num_warps=4,
        )  # fmt: skip


def call_of(direction: str, kind: type[Call], spec: Spec, x: Inputs, *more: Tensor | None) -> Hashable:
    """Return the signature of a call: all that its launches depend on. `more` are further tensors that are given."""
    return direction, kind.__name__, spec, *kind.tuning(x, spec), static(*x, *more)


def forward(x: Inputs, spec: Spec, kind: type[Call] = Call) -> Outputs:
    """Compute the forward, by recording or replaying the launches of `kind`."""

    def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Outputs:
        return _forward(kind(recorder, Inputs(*given), spec))  # type: ignore[arg-type]

    return Outputs(*record_or_replay(call_of("forward", kind, spec, x), x, first))


def forward_replay(x: Inputs, spec: Spec, kind: type[Call]) -> Replay | None:
    """Return the recorded launches of an earlier `forward` with this signature, or None.

    It is None for float32, since the precision of float32 products can change from call to call.
    """
    return None if x.q.dtype == torch.float32 else recorded_launches(call_of("forward", kind, spec, x))


def _forward(call: Call) -> Outputs:
    """Launch the forward."""
    x, spec = call.x, call.spec
    N, H, K, V = x.sequences, call.H, call.K, call.V  # of states
    h = call.new(*x.v.shape, dtype=x.v.dtype)
    call.begin(h)
    C = n = m = None
    if spec.final_state:
        C = call.new(N, H, K, V)
        if spec.normalize:
            # An empty sequence has no last step: its max state keeps the initial value.
            m = call.zeros(N, H) if x.m is None else call.do(Tensor.copy_, call.new(N, H), x.m)
            n = call.new(N, H, K)
    d = call.new(*x.log_f.shape) if spec.normalize and spec.save else None
    chunk_C = chunk_n = None
    gates = call.gates(m)
    initial, final = call.filled_up(x.C, x.n), (C, n)
    if call.segmented:
        chunk_C, chunk_n = initial = call.boundary_states(x.k, x.v, gates, False, initial, final)
        final = None, None
    call.outputs(h, gates, initial, final, d)
    if not (spec.save and call.keeps_states):
        chunk_C = chunk_n = None
    if spec.save and chunk_C is None:
        chunk_C = call.placeholder(0, H, x.q.shape[3], x.v.shape[3], dtype=stored_dtype(x, spec))
        chunk_n = call.placeholder(0, H, x.q.shape[3]) if spec.normalize else None
    C, n = call.cut_off(C, n)
    parts = C, n, m, d, chunk_C, chunk_n
    none = call.placeholder(0)
    return Outputs(h, *(none if t is None else t for t in parts))


def backward(
    x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec, kind: type[Call] = Call
) -> Grads:
    """Compute the backward, by recording or replaying the launches of `kind`."""

    def first(recorder: LaunchRecorder, given: Sequence[Tensor | None]) -> Grads:
        x, cotangents, (h, d, chunk_C, chunk_n) = Inputs(*given[:9]), given[9:12], given[12:]  # type: ignore[arg-type]
        return _backward(kind(recorder, x, spec), out._replace(h=h, d=d, chunk_C=chunk_C, chunk_n=chunk_n), *cotangents)  # type: ignore[arg-type]

    given = *x, dh, dC, dn, out.h, out.d, out.chunk_C, out.chunk_n
    return Grads(*record_or_replay(call_of("backward", kind, spec, x, *given[9:]), given, first))


def _backward(call: Call, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None) -> Grads:
    """Launch the backward."""
    x, spec = call.x, call.spec
    N, H, K, V = x.sequences, call.H, call.K, call.V  # of states
    dh = dh if dh.stride(-1) == 1 else call.do(Tensor.contiguous, dh)
    # Partial gradients are rounded before they are summed. In float32 they would take twice the bytes of all others.
    shares = call.group * call.pieces // call.together
    dq, dk = (call.new(call.B, call.T, x.q.shape[2] * shares, x.q.shape[3], dtype=x.q.dtype) for _ in range(2))
    dv = call.new(*x.v.shape, dtype=x.v.dtype)
    dC0 = call.new(N, H, K, V) if x.C is not None else None
    dn0 = call.new(N, H, K) if x.n is not None else None
    di, df = (None if t is None else call.new(*t.shape, dtype=t.dtype) for t in (x.log_i, x.log_f))
    call.begin(dq, dk, dv, *(t for t in (di, df) if t is not None))
    gates = call.gates(None, out.d if spec.normalize else None)
    delta = spec.normalize and spec.normalizer_grad
    if delta and not call.finds_delta:
        call.compute_delta(gates, out.h, dh)
    start = call.filled_up(x.C, x.n)
    end = call.end_cotangents(dC, dn)
    first: Pair = (dC0, dn0)
    if call.segmented and call.keeps_states:
        start = out.chunk_C, out.chunk_n if spec.normalize else None
    elif call.segmented:
        start = call.boundary_states(x.k, x.v, gates, False, start, (None, None))
    call.gradients(gates, out, dh, (dq, dk, dv), (di, df), start, end, first, delta)
    if call.lent:
        call.clear(dv)
    if shares > 1:
        dq, dk = (call.sum_of_groups(t, shares) for t in (dq, dk))
    dC0, dn0 = call.cut_off(dC0, dn0)
    parts = di, df, dC0, dn0
    none = call.placeholder(0)
    return Grads(dq, dk, dv, *(none if t is None else t for t in parts))
