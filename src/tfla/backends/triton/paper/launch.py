"""The launches of the paper's kernels: states at the starts of chunks, then all results of each chunk in parallel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from tfla.backends.base import Inputs, Outputs, Spec
from tfla.backends.gpu.config import architecture, ceil_div, power_of_two, products
from tfla.backends.gpu.replay import LaunchRecorder
from tfla.backends.triton.launch import Call, Pair, _strides
from tfla.backends.triton.paper import gate_gradients, recurrent
from tfla.backends.triton.paper import parallel as tfla_parallel

STEPS = 1024  # steps that a program of the gate gradients loads at once


@dataclass(frozen=True)
class Tiling:
    """The block sizes: B_Lhq and B_Lkv of the paper are L for a program's own tile, `inner` for those of its loop."""

    L: int  # steps of a tile, also of the gate vectors
    inner: int
    contracted: int  # largest contracted dim that is one block; larger ones have blocks of 64
    output: int  # largest block of the head dim that is divided among programs
    key_block: int  # rows of the state of one program
    value_block: int  # columns of the state of one program
    warps: int
    stages: int

    def contracted_block(self, width: int) -> int:
        """Return the block size of a contracted dim of this width."""
        block = padded(width)
        return block if block <= self.contracted else min(64, self.contracted)


def padded(width: int) -> int:
    """Return the padded head dim, at least 32.

    With operands of 16 columns the MMAs that Triton generates for Hopper read beyond shared memory.
    """
    return max(32, power_of_two(width))


def tiling(x: Inputs, chunk_size: int) -> Tiling:
    """Return the block sizes that fit the registers; tiles have 64 steps in chunks of 64 (`limit_chunk`), else 128."""
    if x.q.element_size() == 4:  # no MMAs
        return Tiling(32, 32, 32, 64, 32, 64, 4, 1)
    if x.q.shape[3] % 16 or x.v.shape[3] % 16:  # unaligned rows are loaded through registers
        return Tiling(64, 32, 64, 64, 64, 64, 8, 2)
    large = chunk_size > 64
    if architecture(x.q.device) in (90, 100):  # MMAs of four warps
        return Tiling(128, 64, 128, 128, 64, 128, 8, 3) if large else Tiling(64, 64, 64, 128, 64, 128, 4, 2)
    return Tiling(128 if large else 64, 32, 64, 128, 64, 128, 8, 2)


def chunk_steps(x: Inputs, chunk_size: int) -> int:
    """Return chunk_size rounded up to whole tiles."""
    L = tiling(x, chunk_size).L
    return ceil_div(chunk_size, L) * L


def details(x: Inputs, chunk_size: int) -> dict[str, object]:
    """Return what :func:`tfla.explain` shows: the block sizes for h under the paper's names."""
    sizes = tiling(x, chunk_size)
    return {
        "chunk": chunk_steps(x, chunk_size),
        "B_Lhq": sizes.L,
        "B_Lkv": sizes.inner,
        "B_dqk": sizes.contracted_block(x.q.shape[3]),
        "B_dhv": min(sizes.output, padded(x.v.shape[3])),
    }


class Chunks(Call):
    """The launches of the paper's kernels, which compute the steps between two stored states in parallel."""

    def __init__(self, recorder: LaunchRecorder, x: Inputs, spec: Spec) -> None:
        super().__init__(recorder, x, spec)
        self.tiling = tiling(x, spec.chunk_size)
        self.L = self.tiling.L
        self.tiles = self.slots(self.L)
        self.steps, self.segmented = chunk_steps(x, spec.chunk_size), True
        self.segments = self.slots(self.steps)

    @staticmethod
    def tuning(x: Inputs, spec: Spec) -> tuple[Hashable, ...]:
        """Return the settings that a recording depends on beside its inputs: block sizes and precision."""
        return tiling(x, spec.chunk_size), products(x)

    def boundary_states(
        self, x: Tensor, y: Tensor, gates: Tensor, back: bool, given: Pair, final: Pair, delta: bool = False
    ) -> Pair:
        """Compute the states before every chunk, or with `back` the cotangents of the states after it."""
        C = self.new_states()
        n = self.new(self.segments, self.H, self.K) if self.spec.normalize else None
        sizes = self.tiling
        BK, BV = min(sizes.key_block, padded(self.K)), min(sizes.value_block, padded(self.V))
        pieces = ceil_div(self.K, BK) * ceil_div(self.V, BV) * self.x.sequences * self.H
        self.launch(recurrent.states, (pieces,),
            x, y, gates, self.cu, *(gates if t is None else t for t in (*given, C, n, *final)), self.x.sequences,
            self.T, self.tiles, self.H, self.group, self.steps, *_strides(x), *_strides(y),
            DK=self.K, DV=self.V, BK=BK, BV=BV, L=self.L, REVERSE=back, NORMALIZE=self.spec.normalize, DELTA=delta,
            IS_VARLEN=self.packed, USE_INITIAL_STATE=given[0] is not None, STORE_FINAL_STATE=final[0] is not None,
            PRECISION=self.precision, STAGES=sizes.stages, num_warps=sizes.warps, tunable=True,
        )  # fmt: skip
        return C, n

    def parallel(
        self, a: Tensor, b: Tensor, y: Tensor, out: Tensor, gates: Tensor, back: bool, states: Pair,
        w: Tensor | None = None, delta: bool = False, d: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute `out`; with w (q for dq, k for dk) return the sums w . out over blocks of the head dim."""
        sizes, contracted, width = self.tiling, a.shape[3], out.shape[3]
        BO = min(sizes.output, padded(width))
        parts, tiles = ceil_div(width, BO), ceil_div(min(self.steps, self.T), self.L)
        sums = gates if w is None else self.new(parts, self.H, self.tiles, self.L)
        group_a, group_y = (self.group, 1) if w is None else (1, self.group)  # heads that share a and b, and y and w
        used = y if w is None else w
        self.launch(tfla_parallel.parallel, (parts * tiles * self.segments * self.H,),
            a, b, y, used, out, gates, self.cu, *(gates if t is None else t for t in (*states, d)), sums,
            self.x.sequences, self.T, self.tiles, self.H, group_a, group_y, self.steps, tiles, *_strides(a),
            *_strides(b), *_strides(y), *_strides(used), *_strides(out),
            DA=contracted, DO=width, BA=sizes.contracted_block(contracted), BO=BO, L=self.L, LI=sizes.inner,
            REVERSE=back, OF_QK=w is not None, NORMALIZE=self.spec.normalize, DELTA=delta, SAVE_D=d is not None,
            IS_VARLEN=self.packed, EXACT=self.exact, NEGATIVE=self.spec.scale < 0, PRECISION=self.precision,
            STAGES=sizes.stages, num_warps=sizes.warps, tunable=True,
        )  # fmt: skip
        return sums

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        """Launch the kernel of h, and of d where it is given."""
        self.parallel(self.x.q, self.x.k, self.x.v, h, gates, False, state, d=d)

    def gradients(
        self, gates: Tensor, out: Outputs, dh: Tensor, results: tuple[Tensor, Tensor, Tensor], of_gates: Pair,
        start: Pair, end: Pair, first: Pair, delta: bool,
    ) -> None:  # fmt: skip
        """Launch the kernels of the gradients: dC of every chunk, dv, dq, dk, and those of the gates."""
        x, (dq, dk, dv), (di, df) = self.x, results, of_gates
        end_is_read = end[0] is not None
        end = self.boundary_states(x.q, dh, gates, True, end, first, delta)
        self.parallel(x.k, x.q, dh, dv, gates, True, end)
        q_dq = self.parallel(dh, x.v, x.k, dq, gates, False, start, x.q, delta)
        k_dk = self.parallel(x.v, dh, x.q, dk, gates, True, end, x.k, delta)
        pointers = (gates if t is None else t for t in (*start, *end, *first, self.cu, *self.given_gates, di, df))
        self.launch(gate_gradients.chunk_gate_gradients, (self.segments * self.H,),
            x.q, q_dq, k_dk, *pointers, x.sequences, self.T, self.tiles, self.H, self.steps, self.K * self.V, self.K,
            *self.gate_strides,
            PARTS=q_dq.shape[0], L=self.L, STEPS=min(STEPS, power_of_two(self.steps)), BLOCK=2048,
            BLOCK_N=power_of_two(self.K), IS_VARLEN=self.packed, NORMALIZE=self.spec.normalize,
            USE_INITIAL_STATE=x.C is not None, USE_FINAL_STATE=end_is_read, **self.gate_forms, num_warps=4,
        )  # fmt: skip
