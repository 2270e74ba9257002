"""The launches of the delta rule and of linear attention with a gate for each key channel: one forward, one backward.

Kernels over all tiles make the operands of the scans (:mod:`.channel_tiles`) and the gradients of queries, keys and
gates (:mod:`.channel_gradients`); the scans between them (:mod:`.channel_scans`) have neither gates nor beta. The
backward keeps C and dC of every tile, in the dtype of q, until its last kernel has read them. It computes large batches
in slices of batch rows, and a slice in parts of its steps: then it keeps the dC of a part of a slice.

The launches also serve gates by step where a step reads the state before its decay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla.backends.delta import DeltaGrads, DeltaInputs, DeltaOutputs, DeltaSpec
from tfla.backends.gpu import reductions, results, sequences
from tfla.backends.gpu.batch_slices import BatchSlice, CallPart, batch_slices
from tfla.backends.gpu.config import TileConfig, architecture, ceil_div, power_of_two, processors
from tfla.backends.gpu.context import LaunchContext, time_strides
from tfla.backends.gpu.time_parts import TimePart, time_parts
from tfla.backends.triton import channel_gradients, channel_scans, channel_tiles
from tfla.backends.triton.channel_decays import TILE_FLAGS
from tfla.backends.triton.channel_tiles import Operands

# The largest exponent, in base 2, of the factors of a tile that needs no levels. With it float32 products keep their
# digits, and products of 16-bit inputs, which are computed in bfloat16 or tf32, their range.
BOUND = {torch.float32: 24.0, torch.float16: 100.0, torch.bfloat16: 100.0}


@dataclass(frozen=True, eq=False)
class ChannelConfig:
    """The configuration of the kernels of one call; compared by identity."""

    solve: TileConfig  # of decay_operands with X: `block` key channels at a time
    tiles: TileConfig  # of decay_operands without X
    h: TileConfig  # of channel_h_scan: a program has `split` columns of dhv
    states: TileConfig  # of channel_h_scan without outputs
    dv: TileConfig  # of channel_dv_scan
    gradients: TileConfig  # of channel_gradients: `split` key channels of a program, `block` columns of dhv at a time
    descriptors: bool  # whether the scans use TMA descriptors, where strides allow them


@functools.cache
def channel_config(dqk: int, dhv: int, correct: bool, arch: int) -> ChannelConfig:
    """Return the configuration for these head dims on a GPU of this compute capability, 90 for 9.0.

    With `correct` scans have more operands.
    """
    K, V = power_of_two(dqk), power_of_two(dhv)
    wide = K > 128  # then a state has many rows

    def tile(split: int, block: int, num_warps: int, stages: int) -> TileConfig:
        return TileConfig(split=split, block=block, blocks=1, num_warps=num_warps, stages=stages)

    if arch == 90:
        columns = min(V, 64)
        stages = 1 if wide and correct else 2  # what shared memory holds
        return ChannelConfig(
            solve=tile(K, min(K, 16), 4, 2),
            tiles=tile(K, min(K, 32), 4, 2),
            h=tile(columns, columns, 8 if wide else 4, stages),
            states=tile(columns, columns, 4, 2),
            dv=tile(columns, columns, 8 if wide else 4, stages),
            gradients=tile(min(K, 32), min(V, 64), 4, 2),
            descriptors=dqk % 8 == 0 and dhv % 8 == 0,
        )
    columns = min(V, 16 if wide else 32)
    return ChannelConfig(
        solve=tile(K, min(K, 32), 4, 1),
        tiles=tile(K, min(K, 32), 4, 1),
        h=tile(columns, columns, 8, 1),
        states=tile(columns, columns, 4, 1),
        dv=tile(columns, columns, 8, 1),
        gradients=tile(min(K, 32), min(V, 32), 4, 1),
        descriptors=False,
    )


@dataclass(frozen=True, kw_only=True)
class ChannelContext:
    """The sizes, options and tensors that all launches of one forward or backward share."""

    base: LaunchContext  # sizes and recorder
    x: DeltaInputs
    spec: DeltaSpec
    config: ChannelConfig
    beta: Tensor  # (B, T, H); ones where the call has none
    log_f: Tensor  # (B, T, H, dqk); gates by step with a stride of 0
    first_row: int | None = None  # of a slice whose tensors of tokens are whole, see `BatchSlice`
    first_step: int = 0  # of a part of the steps of such tensors, see `TimePart`

    @property
    def read_key(self) -> Tensor:
        """The read keys, (B, T, Hq, dqk)."""
        return self.x.k if self.x.read_key is None else self.x.read_key

    @property
    def input_strides(self) -> tuple[int, ...]:
        """The strides of q, k, the read key, log_f and beta."""
        x = self.x
        strides = (*time_strides(x.q), *time_strides(x.k), *time_strides(self.read_key), *time_strides(self.log_f))
        return *strides, self.log_f.stride(3), *time_strides(self.beta)

    @property
    def activation(self) -> tuple[Tensor, Tensor]:
        """A_log and dt_bias of the gates' activation, and what stands for one that there is not."""
        x = self.x
        return self.beta if x.A_log is None else x.A_log, self.beta if x.dt_bias is None else x.dt_bias

    @property
    def activation_numbers(self) -> tuple[float, ...]:
        """The factor of the gates' activation, and the strides of A_log and of dt_bias by head and channel."""
        A_log, bias = self.x.A_log, self.x.dt_bias
        rate_stride = 0 if A_log is None else A_log.stride(0)
        bias_strides = (0, 0) if bias is None else (*bias.stride(), 0)[:2]
        return float(self.spec.lower_bound), rate_stride, *bias_strides

    @property
    def split_keys(self) -> bool:
        """True if scans read write keys as two 16-bit numbers; shared memory has no room for those of wide heads."""
        return self.spec.correct and self.x.q.dtype != torch.float32 and self.base.K <= 128

    @property
    def beta_by_errors(self) -> bool:
        """True if dbeta is dv . E / beta; float16 has no digits of dv where beta is small."""
        return self.spec.correct and self.x.q.dtype == torch.bfloat16

    @property
    def flags_of_program(self) -> int:
        """The number of flags of tiles that a program with LEVELED reads; a multiprocessor has 8 such programs."""
        tiles = self.base.tiles * self.base.H
        return max(1, min(TILE_FLAGS.value, ceil_div(tiles, 8 * processors(self.x.q.device))))

    @property
    def tile_constants(self) -> dict[str, Any]:
        """The constants that the kernels over tiles share."""
        dtype = self.x.q.dtype
        exact, short = dtype == torch.float32, dtype == torch.bfloat16
        return {
            "DK": self.base.K, "L": self.base.L, "CORRECT": self.spec.correct,
            "READ_KEY": self.x.read_key is not None, "READ_BEFORE": self.spec.read_before_decay,
            "IS_VARLEN": self.base.packed, "PRECISION": self.base.precision,
            "SUMS": "bf16x2" if short else "ieee" if exact else "tf32x3",
            "SLICED": self.first_row is not None, "BOUND": BOUND[dtype], "LEVELS": self.base.L.bit_length() - 1,
        }  # fmt: skip

    @property
    def activation_constants(self) -> dict[str, Any]:
        """The constants by which the kernels over tiles normalize q and k, and apply the gates' activation."""
        return {
            "NORMALIZED": self.spec.normalize_qk, "ACTIVATION": self.spec.gate_activation,
            "HAS_RATE": self.x.A_log is not None, "HAS_BIAS": self.x.dt_bias is not None,
        }  # fmt: skip

    @property
    def scan_constants(self) -> dict[str, Any]:
        """The constants that the scans share."""
        return {
            "DK": self.base.K, "DV": self.base.V, "BK": power_of_two(self.base.K), "L": self.base.L,
            "IS_VARLEN": self.base.packed, "PRECISION": self.base.precision, "SPLIT": self.split_keys,
        }  # fmt: skip

    def first_row_in(self, x: Tensor | None) -> int:
        """Return at which row of x, (B, T, ...), those of this slice start: x may have these rows alone."""
        return self.first_row or 0 if x is not None and x.shape[0] == self.x.v.shape[0] else 0

    def new_tile_states(self) -> Tensor:
        """Allocate a state for every tile, transposed, (H, tiles, dhv, dqk)."""
        base = self.base
        return base.new(base.H, base.tiles, base.V, base.K, dtype=self.x.q.dtype)

    @property
    def bytes_of_states(self) -> int:
        """The bytes of the states before all tiles and the cotangents after them."""
        base = self.base
        return 2 * base.H * base.tiles * base.K * base.V * self.x.q.element_size()

    @property
    def whole_alone(self) -> bool:
        """True if a backward computes all batch rows and steps at once: a plan, whose gates by step it cannot cut."""
        return self.base.recorder.one_pointer_each and not self.x.channel_gates

    def slices(self, kernels: ChannelKernels) -> list[tuple[int, int]]:
        """Return the batch rows that a backward by these kernels computes one after the other."""
        programs = kernels.programs
        if programs is None or self.whole_alone:
            return [(0, self.base.B)]
        return batch_slices(self.base, programs, self.bytes_of_states)

    def steps(self, kernels: ChannelKernels) -> list[tuple[int, int]]:
        """Return the parts of the steps that a backward by these kernels computes one after the other."""
        if kernels.programs is None or self.whole_alone:
            return [(0, self.base.T)]
        return time_parts(self.base, self.bytes_of_states)

    def zeros_of_plan(self, kernels: ChannelKernels, dC: Tensor | None) -> Tensor | None:
        """Return the zeros that the scans of the first or of the last steps start from, or None where none reads them.

        A plan has one kernel to compile for all parts of the steps if each scan starts from a given state.
        """
        base = self.base
        given = self.x.C is not None and dC is not None
        if given or not base.recorder.one_pointer_each or len(self.steps(kernels)) == 1:
            return None
        return base.zeros(base.B, base.H, base.K, base.V)

    def of_steps(self, part: TimePart) -> ChannelContext:
        """Return the context of some steps."""
        if part.first_step is None:
            return self.of_part(part)
        return replace(
            self, base=part.context(self.base), first_row=self.first_row or 0, first_step=part.first_step
        )  # fmt: skip

    def of_part(self, part: CallPart) -> ChannelContext:
        """Return the context of some steps, or of some batch rows, in tensors of their own."""
        return replace(
            self, base=part.context(self.base), x=part.fields(self.x), beta=part(self.beta), log_f=part(self.log_f)
        )

    def of_rows(self, part: BatchSlice) -> ChannelContext:
        """Return the context of some batch rows."""
        if part.first_row is None:
            return self.of_part(part)
        x = self.x._replace(C=part(self.x.C))
        return replace(
            self, base=part.context(self.base), x=x, beta=part(self.beta), log_f=part.tokens(self.log_f),
            first_row=part.first_row,
        )  # fmt: skip

    def new_sums(self) -> Tensor | None:
        """Allocate what tiles add to the gradients of A_log and dt_bias, (2, H, tiles, dqk) float32, or return None."""
        base, x = self.base, self.x
        if self.spec.gate_activation == "none" or (x.A_log is None and x.dt_bias is None):
            return None
        return base.zeros(2, base.H, base.tiles, base.K)

    def new_row_sums(self) -> tuple[Tensor | None, Tensor | None]:
        """Allocate zeros (B, H, dqk) for what rows add to the gradients of A_log and dt_bias, or None if not given."""
        base, x = self.base, self.x
        activated = self.spec.gate_activation != "none"
        of_rate, of_bias = (
            base.zeros(base.B, base.H, base.K) if activated and t is not None else None for t in (x.A_log, x.dt_bias)
        )
        return of_rate, of_bias

    def new_dots(self, programs: int) -> Tensor | None:
        """Allocate dv . E for this many parts of dhv, (programs, B, T, H) float32; None where dbeta needs none."""
        base = self.base
        return base.new(programs, base.B, base.T, base.H) if self.beta_by_errors else None


# Launchers of scans, which take and return what those of :mod:`.channel_scans` do.
LaunchH = Callable[
    [ChannelContext, Operands, Tensor, "Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None",
     "Tensor | None"], None
]  # fmt: skip
LaunchDv = Callable[
    [ChannelContext, Operands, Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"],
    tuple[Tensor, "Tensor | None"],
]


class ChannelKernels(NamedTuple):
    """The launchers that a backend chooses for a call."""

    operands: channel_tiles.Bounded | None = None  # of tiles that need no levels; with None those of Triton
    gradients: channel_gradients.Bounded | None = None  # likewise
    h: LaunchH = channel_scans.launch_h
    dv: LaunchDv = channel_scans.launch_dv
    programs: int | None = None  # of the scans that share a head of a sequence; None: all batch rows at once


TRITON = ChannelKernels()


def context(base: LaunchContext, x: DeltaInputs, spec: DeltaSpec, beta: Tensor) -> ChannelContext:
    """Return the context of a call."""
    config = channel_config(base.K, base.V, spec.correct, architecture(x.q.device))
    log_f = x.log_f
    if log_f is None:
        zero = base.zeros(1, dtype=beta.dtype)
        log_f = base.do(lambda t, q, v: t.expand(*v.shape[:3], q.shape[3]), zero, x.q, x.v)
    elif not x.channel_gates:
        log_f = base.do(lambda t, q: t.unsqueeze(3).expand(*t.shape, q.shape[3]), log_f, x.q)
    return ChannelContext(base=base, x=x, spec=spec, config=config, beta=beta, log_f=log_f)


def forward(ctx: ChannelContext, kernels: ChannelKernels = TRITON) -> DeltaOutputs:
    """Launch the forward by `kernels`."""
    x, spec, base = ctx.x, ctx.spec, ctx.base
    h = base.new(*x.v.shape, dtype=x.v.dtype)
    E = base.new(*x.v.shape, dtype=x.v.dtype) if spec.save and spec.correct else None
    base = sequences.bound(base, h, *(() if E is None else (E,)))
    ctx = replace(ctx, base=base)
    initial, final = results.ends_of_states(base)
    operands = channel_tiles.launch(ctx, None, kernels.operands)
    kernels.h(ctx, operands, x.v, h, E, None, initial, final)
    none = base.placeholder(0)
    X = operands.X if spec.save else None
    chunk_C = base.placeholder(0, base.H, base.K, base.V) if spec.save else none
    C, E, X = (none if t is None else t for t in (final, E, X))
    return DeltaOutputs(h, C, E, X, chunk_C)


def backward(
    ctx: ChannelContext, E: Tensor, X: Tensor | None, dh: Tensor, dC: Tensor | None,
    kernels: ChannelKernels = TRITON,
) -> DeltaGrads:  # fmt: skip
    """Launch the backward.

    Args:
        ctx: The context of the call.
        E, X: What the forward stored; not read without correction.
        dh: The cotangent of h, (B, T, H, dhv).
        dC: The cotangent of the final states, (N, H, dqk, dhv), or None.
        kernels: The launchers.
    """
    x, base, correct = ctx.x, ctx.base, ctx.spec.correct
    dh = results.dense_rows(base, dh)
    grads = channel_gradients.allocate(ctx)
    dv = base.new(*x.v.shape, dtype=x.v.dtype)
    dC0 = base.new(x.sequences, base.H, base.K, base.V) if x.C is not None else None
    base = sequences.bound(base, grads.q, grads.k, dv, *(() if grads.read_key is None else (grads.read_key,)))
    ctx = replace(ctx, base=base)
    errors, X, dC = E if correct else x.v, X if correct else None, results.dense(base, dC)
    slices = [BatchSlice(base, *rows) for rows in ctx.slices(kernels)]
    zeros = ctx.of_rows(slices[0]).zeros_of_plan(kernels, dC)  # no slice has more rows
    sums = ctx.new_row_sums()
    for part in slices:
        of_rows = grads._replace(
            q=part.tokens(grads.q), k=part.tokens(grads.k), read_key=part.tokens(grads.read_key),
            log_f=part.tokens(grads.log_f), beta=part(grads.beta),
        )  # fmt: skip
        with base.recorder.temporary():
            _backward_of_rows(
                ctx.of_rows(part), part.tokens(errors), part.tokens(X), part.tokens(dh), part(dC), part.tokens(dv),
                part(dC0), of_rows, sums, (part.start, part.stop), zeros, kernels,
            )  # fmt: skip
    dq, dk = (reductions.launch(base, t, base.group) for t in (grads.q, grads.k))
    read_key = None if grads.read_key is None else reductions.launch(base, grads.read_key, base.group)
    dbeta = grads.beta if x.beta is not None else None
    dlog_f = grads.log_f if x.log_f is not None else None
    sequences.clear(base, *(t for t in (dbeta, dlog_f) if t is not None))
    of_rate, of_bias = _activation_gradients(ctx, *sums)
    none = base.placeholder(0)
    found = (dq, dk, dv, dbeta, dlog_f, read_key, of_rate, of_bias, dC0)
    return DeltaGrads(*(none if t is None else t for t in found))


def _backward_of_rows(
    ctx: ChannelContext, errors: Tensor, X: Tensor | None, dh: Tensor, dC: Tensor | None, dv: Tensor,
    dC0: Tensor | None, grads: channel_gradients.Gradients, sums: tuple[Tensor | None, ...], rows: tuple[int, int],
    zeros: Tensor | None, kernels: ChannelKernels,
) -> None:  # fmt: skip
    """Launch the backward of some batch rows.

    Args:
        ctx: The context of these rows.
        errors: The prediction errors, or without correction the values, (B, T, H, dhv).
        X: What the forward stored, or None without correction.
        dh, dC: The cotangents of h, with dense rows, and of the final states, dense.
        dv, dC0, grads: The outputs. Operands of scans lie in those that a kernel computes after it has read them.
        sums: What each row of the call adds to the gradients of A_log and of dt_bias for each channel, (rows of the
            call, H, dqk) or None: outputs, to which parts of the steps add.
        rows: The first of these rows in the call, and the one after the last.
        zeros: The result of :meth:`ChannelContext.zeros_of_plan`.
        kernels: The launchers.
    """
    base = ctx.base
    memory: tuple[Tensor, ...] = grads.q, grads.k, grads.log_f
    if kernels.programs == 1:
        # A program that has all columns of dv has read the operands of a tile before it stores the dv of the tile.
        memory = dv, *memory
    operands = channel_tiles.launch(ctx, X, kernels.operands, memory)
    halves = [TimePart(base, *ends) for ends in ctx.steps(kernels)]
    parts = [(part, ctx.of_steps(part), operands.of_part(part)) for part in halves]
    of_states = base.B, base.H, base.K, base.V
    ends = [base.new(*of_states) for _ in parts[1:]]  # states between two parts, and cotangents
    states = [of_part.new_tile_states() for _, of_part, _ in parts]
    initial, unread = results.dense(base, ctx.x.C), None
    if ends and base.recorder.one_pointer_each:
        # Each scan stores the state that it ends with, too, see `zeros_of_plan`.
        unread = base.new(*of_states)
        initial, dC = (zeros if x is None else x for x in (initial, dC))
        dC0 = unread if dC0 is None else dC0
    for (part, of_part, read), found, first, last in zip(
        parts, states, [initial, *ends], [*ends, unread], strict=True
    ):  # fmt: skip
        kernels.h(of_part, read, part(errors), None, None, found, first, last)
    for (part, of_part, read), before, final, first in zip(
        reversed(parts), reversed(states), [dC, *reversed(ends)], [*reversed(ends), dC0], strict=True
    ):
        E, do, of_v, by_tile = part(errors), part(dh), part(dv), of_part.new_sums()
        with base.recorder.temporary():
            cotangents, dots = kernels.dv(of_part, read, do, E, of_v, final, first)
            channel_gradients.launch(
                of_part, read, do, of_v, E, before, cotangents, dots, part.fields(grads), kernels.gradients, by_tile
            )  # fmt: skip
        for index, total in enumerate(sums):
            if total is not None and by_tile is not None:
                base.recorder.add_tiles(total, *rows, by_tile, index)


def _activation_gradients(
    ctx: ChannelContext, of_rate: Tensor | None, of_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of A_log and dt_bias from sums of each batch row and channel, (B, H, dqk) each, or None.

    Hosts of plans get these sums, since they may have divided the rows over devices.
    """
    if ctx.base.recorder.one_pointer_each:
        return of_rate, of_bias
    do, bias = ctx.base.do, ctx.x.dt_bias
    dims = (0, 2) if bias is not None and bias.dim() == 1 else 0
    return (
        None if of_rate is None else do(lambda t: t.sum((0, 2)), of_rate),
        None if of_bias is None else do(lambda t: t.sum(dims), of_bias),
    )
