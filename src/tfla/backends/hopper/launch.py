"""Launches of the Hopper kernels. Gates, segments and what joins them: :mod:`tfla.backends.triton.launch`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tfla.backends.base import Inputs, Outputs, Spec
from tfla.backends.hopper.columns import columns
from tfla.backends.hopper.rows import rows
from tfla.backends.triton.compiled import Tape
from tfla.backends.triton.launch import Call, Pair, processors

TILES = gl.NVMMASharedLayout(128, 16, 4)
WIDTH = 128  # of the state that a program has: rows of dq and dk


def described(x: Tensor, L: int, width: int) -> Callable[[Tensor], TensorDescriptor]:
    """Makes descriptors of tensors like x (B, T, H, d), in tiles (L, width), past Triton's long checks."""
    B, T, H, d = x.shape
    b, t, h, _ = x.stride()
    known = vars(TensorDescriptor(x, [B, H, T, d], [b, h, t, 1], [1, 1, L, width], TILES)) | {"base": None}

    def of(base: Tensor) -> TensorDescriptor:
        made = object.__new__(TensorDescriptor)
        vars(made).update(known, base=base)
        return made

    return of


class HopperCall(Call):
    """As `Call`, with walks of its own."""

    def __init__(self, tape: Tape, x: Inputs, spec: Spec) -> None:
        super().__init__(tape, x, spec)
        self.blocks = 2 if self.V % 256 == 0 and self.K <= 128 else 1
        self.finds_delta = 128 * self.blocks == self.V  # one program has all of dh . h

    def descriptor(self, x: Tensor, L: int, width: int) -> TensorDescriptor:
        """Tiles (L, width) of x (B, T, H, d)."""
        return self.do(described(x, L, width), x)

    def grid(self, parts: int) -> tuple[int, int]:
        pieces = self.segments * self.H
        return max(1, min(pieces, processors(self.x.q.device) // parts)), parts

    def outputs(self, h: Tensor, gates: Tensor, state: Pair, final: Pair, d: Tensor | None) -> None:
        x = self.x
        self._columns(x.k, x.v, x.q, h, gates, False, state, final, self.spec.normalize, d)

    def values_gradient(
        self, gates: Tensor, out: Outputs, dh: Tensor, dv: Tensor, end: Tensor | None, delta: bool
    ) -> None:
        x, h = self.x, out.h if delta and self.finds_delta else None
        self._columns(x.q, dh, x.k, dv, gates, True, (end, None), (None, None), False, None, h)

    def _columns(
        self, x: Tensor, y: Tensor, z: Tensor, out: Tensor, gates: Tensor, back: bool, state: Pair, final: Pair,
        normalize: bool, d: Tensor | None, h: Tensor | None = None,
    ) -> None:  # fmt: skip
        """With h also delta, of y and h."""
        C, n, C_out, n_out = (gates if t is None else t for t in (*state, *final))
        L, blocks = self.L, self.blocks
        of_qk, of_v = (lambda t: self.descriptor(t, L, self.K)), (lambda t: self.descriptor(t, L, 64 * blocks))
        self.launch(columns, self.grid(self.V // (128 * blocks)),
            of_qk(x), of_v(y), of_qk(z), of_v(y if h is None else h), of_v(out), gates, C, C_out, n, n_out,
            gates if d is None else d, self.T, self.tiles, self.H, self.group, self.steps, self.segments * self.H,
            DK=self.K, DV=self.V, BLOCKS=blocks,
            L=L, STAGES=3 if h is None else 2, BACK=back, SEGMENTED=self.segmented, STATE=state[0] is not None,
            FINAL=final[0] is not None, NORMALIZE=normalize, SAVE_D=d is not None, DELTA=h is not None, num_warps=4,
        )  # fmt: skip

    def rows(
        self, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, gates: Tensor, delta: bool, back: bool,
        state: Pair, final: Pair,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        L, parts = self.L, self.K // WIDTH
        sums = self.new(parts, self.H, self.tiles, WIDTH // 16, L)
        marks, n_marks = self.new_marks(sums)
        C, n = state
        C_out, n_out = final
        tiles = (
            self.descriptor(t, L, width) for t, width in ((x, WIDTH), (y, self.V), (z, self.V), (w, 64), (out, 64))
        )
        self.launch(rows, self.grid(parts),
            *tiles, gates, sums, gates if C is None else C, gates if C_out is None else C_out,
            gates if n is None else n, gates if n_out is None else n_out, marks, n_marks, self.T, self.tiles, self.H,
            self.group, self.steps, self.segments * self.H, DK=self.K, DV=self.V, L=L, STAGES=2, MARKS=self.marks,
            BACK=back, SEGMENTED=self.segmented, STATE=C is not None, FINAL=C_out is not None,
            NORMALIZE=self.spec.normalize, DELTA=delta, num_warps=4,
        )  # fmt: skip
        return sums, marks, n_marks
