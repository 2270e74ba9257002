"""The launches of the backward of the delta rule on Hopper.

dv and what writing adds to dk are by `delta_dv_dk_kernel`, dq and the rest of dk by `delta_dq_dk_kernel`.

Given the prediction errors E and dv, the rest is the backward of linear attention that writes beta E and has two
readers of the state (docs/delta-rule.md): queries with the cotangent dh, and the keys with the cotangent -dv. Where dhv
is above 128, dv comes from `delta_dv_kernel`, and dq and dk from `dq_dk_kernel`, which has one reader.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from tfla.backends.delta import DeltaGrads
from tfla.backends.gpu import gate_gradients, gate_kernels, reductions, results, sequences
from tfla.backends.gpu.checkpoints import checkpoint_shape
from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.hopper import delta_dq_dk, delta_dv, delta_dv_dk, delta_solve, dq_dk, dq_dk_launch, host, scheduler
from tfla.backends.hopper.gate_warp import LOADED, GateVectors
from tfla.backends.triton import delta
from tfla.backends.triton.delta import DeltaContext
from tfla.backends.triton.delta_kernels import NO_CHECKPOINTS


def backward(ctx: DeltaContext, E: Tensor, X: Tensor, dh: Tensor, dC: Tensor | None) -> DeltaGrads:
    """Launch the backward.

    Args:
        ctx: The context of the call.
        E: The prediction errors, (B, T, H, dhv).
        X: The corrections, (B, T, H, L), or (0,) where the forward has not stored them: they are solved for again,
            and given back before the last scan, which needs the most memory.
        dh: The cotangent of h, (B, T, H, dhv).
        dC: The cotangent of the final states, (N, H, dqk, dhv), or None.

    Returns:
        The gradients of the inputs; one that is not computed has shape (0,).
    """
    x, base = ctx.x, ctx.base
    dh = results.dense_rows(base, dh)
    dv = base.new(*x.v.shape, dtype=x.v.dtype)
    dC0 = base.new(x.sequences, base.H, base.K, base.V) if x.C is not None else None
    ctx = replace(ctx, base=scheduler.launch(sequences.bound(base, dv)))
    base, gates = ctx.base, ctx.gates()
    X = delta.stored_or_solved(ctx, gates, X, delta_solve.launch)
    C, dC = results.dense(base, x.C), results.dense(base, dC)
    # dv, (D10) to (D13), dq and dk, (D14) to (D16), and what dlog_f, (D17), is made of.
    scan = by_each_reader if base.V > host.STATE_ROWS else by_both_readers
    dq, dk, dbeta, pairs = scan(ctx, gates, X, E, dh, dv, C, dC, dC0)
    df = None if pairs is None else delta.gate_gradient(ctx, gates, *pairs, dC)
    none = base.placeholder(0)
    found = (dq, dk, dv, dbeta if x.beta is not None else None, df, None, None, None, dC0)
    return DeltaGrads(*(none if t is None else t for t in found))


class PairSums(NamedTuple):
    """The sums that the gradient of gates is made of, see `delta.gate_gradient`."""

    reads: Tensor
    pair_sums: Tensor
    dots: Tensor
    starts: Tensor | None


def by_both_readers(
    ctx: DeltaContext, gates: Tensor, X: Tensor, E: Tensor, dh: Tensor, dv: Tensor, C: Tensor | None,
    dC: Tensor | None, dC0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, PairSums | None]:  # fmt: skip
    """Launch a scan against time and one with it, each for both readers, where dhv is at most 128.

    Args:
        ctx: The context of the call, with the schedule of packed sequences.
        gates: The gate vectors, or any tensor where there are no gates.
        X, E, dh: See `backward`.
        dv: Output, (B, T, H, dhv).
        C: The initial states, (N, H, dqk, dhv), or None for zeros.
        dC: The cotangents of the final states, or None.
        dC0: Output for the cotangents of the initial states, or None.

    Returns:
        dq and dk, (B, T, Hq, dqk), dbeta, (B, T, H), and with gates what their gradient is made of.
    """
    base, rows = ctx.base, host.STATE_ROWS
    shape, dtype = (base.B, base.T, base.H), ctx.x.q.dtype
    dk_w = base.new(*shape, rows, dtype=dtype)
    checkpoints = base.new(*(checkpoint_shape(replace(base, K=rows, V=rows)) if ctx.gated else (0,)), dtype=dtype)
    sums = delta_dq_dk.Sums(
        reads=base.new(1, base.H, base.tiles, 1, base.L),
        pairs=base.new(1, base.H, base.tiles, gate_gradients.PAIR_SUMS.value, base.L),
        checkpoints=checkpoints,
        dots=base.new(checkpoints.shape[0] * base.H, host.CONSUMER_WARPS),
    )
    dbeta, do_e = delta_dv_dk.launch(
        ctx, gates, X, E, dh, dv, dk_w, sums.pairs, checkpoints, final=dC, initial=dC0
    )  # fmt: skip
    dq = base.new(*shape, base.K, dtype=dtype)
    # A tile of dk overwrites that of dk_w, which it contains, where a launch may read and write a tensor by two of its
    # parameters.
    apart = ctx.x.q.shape[3] < rows or base.recorder.one_pointer_each
    dk = base.new(*shape, base.K, dtype=dtype) if apart else dk_w
    sequences.clear(base, dq, dk)
    delta_dq_dk.launch(ctx, gates, E, dh, dv, do_e, dq, dk, dk_w, sums, initial=C)
    pairs = None
    if ctx.x.log_f is not None:
        pairs = PairSums(sums.reads, sums.pairs, sums.dots, delta.start_dots(base, gates, C, dC0, ()))
    return reductions.launch(base, dq, base.group), reductions.launch(base, dk, base.group), dbeta, pairs


def by_each_reader(
    ctx: DeltaContext, gates: Tensor, X: Tensor, E: Tensor, dh: Tensor, dv: Tensor, C: Tensor | None,
    dC: Tensor | None, dC0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, PairSums | None]:  # fmt: skip
    """Launch five scans, like `by_both_readers`, for wider heads: for dv, and of each reader one in each direction.

    dk is the sum of dr and of what both readers contribute, added up in float32, over dr.
    """
    x, base = ctx.x, ctx.base
    dbeta, do_e = delta_dv.launch(ctx, gates, X, E, dh, dv, dC, dC0)
    shape = base.B, base.T, base.H, base.K
    dq, by_queries, by_keys = (base.new(*shape, dtype=x.q.dtype) for _ in range(3))
    scans = new_scans(ctx, gates, do_e, C, dC)
    sequences.clear(base, dq, by_queries, by_keys)
    scans.launch(dq_dk.QUERIES, x.k, E, dh, x.q, dq)
    scans.launch(dq_dk.QUERIES, x.q, dh, E, x.k, by_queries, reverse=True)
    scans.launch(dq_dk.READ_KEYS, x.k, dv, E, x.k, by_keys, reverse=True)
    # dr is the last: the checkpoints, which the scans against time read, have been given back by then.
    dr = base.new(*shape, dtype=x.q.dtype)
    sequences.clear(base, dr)
    scans.launch(dq_dk.READ_KEYS, x.k, E, dv, x.k, dr)
    pairs = None
    if x.log_f is not None:
        starts = delta.start_dots(scans.base, gates, scans.C, dC0, ())
        pairs = PairSums(*scans.sums, scans.dots, starts)
    dk = reductions.launch_three_parts(base, (dr, by_queries, by_keys), base.group)
    return reductions.launch(base, dq, base.group), dk, dbeta, pairs


@dataclass(frozen=True, kw_only=True)
class Scans:
    """The operands and results that the four launches of `dq_dk_kernel` in a backward share: two readers, both ways."""

    base: LaunchContext  # of linear attention, with beta and do . E for the gates, and the head dims of the kernel
    gates: GateVectors
    scale: float  # the factor of queries
    C: Tensor | None  # initial states, (N, H, K, V), or None for zeros
    dC: Tensor | None  # cotangents of the final states, or None
    gated: bool  # whether dlog_f is needed, and for it the tensors below
    sums: tuple[Tensor, Tensor]  # see `gate_gradients.pair_sums`; readers are parts
    checkpoints: Tensor  # of C, (checkpoints, H, K, V)
    dots: Tensor  # parts of <C, dC> at the checkpoints, (checkpoints * H, parts)

    def launch(
        self, reader: Any, x: Tensor, y: Tensor, z: Tensor, w: Tensor, out: Tensor, reverse: bool = False
    ) -> None:
        """Compute dq or dr, or with `reverse` what the reader contributes to dk.

        Args:
            reader: QUERIES or READ_KEYS of :mod:`.dq_dk`.
            x, y, z, w: The operands, in the table of that module.
            out: Output, (B, T, H, dqk).
            reverse: Whether the scan goes against time.
        """
        by_keys = reader is dq_dk.READ_KEYS
        # The scan of queries with time stores C, the scans against time read it, one for each part of dC.
        at_checkpoints = self.gated and (reverse or not by_keys)
        base = replace(
            self.base,
            spec=self.base.spec._replace(scale=-1.0 if by_keys else self.scale),
            checkpoint_steps=self.base.checkpoint_steps if at_checkpoints else NO_CHECKPOINTS,
        )
        reads, pairs = (base.recorder.rows(t, int(by_keys), by_keys + 1) for t in self.sums)
        initial = (self.dC if by_keys else None) if reverse else self.C
        checkpoints = self.checkpoints if at_checkpoints else w  # any tensor of their dtype, which is not accessed
        dq_dk_launch.launch(
            base, self.gates, x, y, z, w, out, reads, (checkpoints, self.gates.vectors, self.dots),
            reverse=reverse, initial=(initial, None), final=(None, pairs), reader=reader, save_sums=self.gated,
        )  # fmt: skip


def new_scans(ctx: DeltaContext, gates: Tensor, do_e: Tensor, C: Tensor | None, dC: Tensor | None) -> Scans:
    """Return what the scans for dq and dk share.

    Args:
        ctx: The context of the call.
        gates: The gate vectors, or any tensor where there are no gates.
        do_e: do . E, (B, T, H).
        C: The initial states, (N, H, dqk, dhv), or None for zeros.
        dC: The cotangents of the final states, or None.
    """
    base, x, columns = ctx.base, ctx.x, host.STATE_ROWS
    if not ctx.gated:
        gates = gate_kernels.launch(replace(base, x=base.x._replace(log_f=base.zeros(*x.v.shape[:3]))))
    vectors = GateVectors(gates, {"GATES": LOADED.value, **dict.fromkeys(base.gate_forms, False)})
    wide = replace(
        base, x=base.x._replace(log_i=ctx.beta, log_f=do_e), K=host.STATE_ROWS, V=ceil_div(base.V, columns) * columns
    )
    checkpoints = base.new(*(checkpoint_shape(wide) if ctx.gated else (0,)), dtype=x.q.dtype)
    return Scans(
        base=wide,
        gates=vectors,
        scale=ctx.spec.scale,
        C=results.pad_state(wide, C, None)[0],
        dC=results.pad_state(wide, dC, None)[0],
        gated=ctx.gated,
        sums=(
            base.new(2, base.H, base.tiles, 1, base.L),
            base.new(2, base.H, base.tiles, gate_gradients.PAIR_SUMS.value, base.L),
        ),
        checkpoints=checkpoints,
        dots=base.new(checkpoints.shape[0] * base.H, 2 * host.CONSUMER_WARPS),
    )
