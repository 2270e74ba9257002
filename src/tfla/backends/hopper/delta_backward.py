"""The launches of the backward of the delta rule on Hopper.

Given the prediction errors E and dv, the rest is the backward of linear attention that writes beta E and has two
readers of the state (docs/delta-rule.md): queries with the cotangent dh, and the keys with the cotangent -dv. dv
and what writing adds to dk come from `delta_dv_dk_kernel`, dq and the rest of dk from `delta_dq_dk_kernel`, which has
both readers. Where dhv is above 128 the first has a launch for each 128 columns, and `dq_dk_kernel`, which has one
reader, takes the place of the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from tfla.backends.delta import DeltaGrads
from tfla.backends.gpu import gate_gradients, gate_kernels, reductions, results, sequences
from tfla.backends.gpu.checkpoints import checkpoint_shape
from tfla.backends.gpu.config import ceil_div
from tfla.backends.gpu.context import LaunchContext
from tfla.backends.hopper import delta_dq_dk, delta_dv_dk, dq_dk, dq_dk_launch, host, scheduler
from tfla.backends.hopper.gate_warp import LOADED, GateVectors
from tfla.backends.triton import delta
from tfla.backends.triton.delta import DeltaContext
from tfla.backends.triton.delta_kernels import NO_CHECKPOINTS

# Steps between checkpoints of dC where dhv is at most 128. With half of them a call would take more than 1.5 times the
# memory of its output and gradients; dlog_f, which sums rounding from one to the next, differs little.
CHECKPOINT_STEPS = 512

# READ_ERROR of `rounded_sums` where dhv is above 128: the operands of which the scans with time make the state are
# rounded once there, and all steps that read it have these errors in common.
WIDE_READ_ERROR = 16.0


def backward(ctx: DeltaContext, E: Tensor, X: Tensor, dh: Tensor, dC: Tensor | None) -> DeltaGrads:
    """Launch the backward.

    Args:
        ctx: The context of the call.
        E: The prediction errors, (B, T, H, dhv).
        X: The corrections, (B, T, H, L).
        dh: The cotangent of h, (B, T, H, dhv).
        dC: The cotangent of the final states, (N, H, dqk, dhv), or None.

    Returns:
        The gradients of the inputs; one that is not computed has shape (0,).
    """
    x, base = ctx.x, ctx.base
    dh = results.dense_rows(base, dh)
    dv = base.new(*x.v.shape, dtype=x.v.dtype)
    dC0 = base.new(x.sequences, base.H, base.K, base.V) if x.C is not None else None
    base = scheduler.launch(sequences.bound(base, dv))
    if base.V <= host.STATE_ROWS:
        base = replace(base, checkpoint_steps=CHECKPOINT_STEPS)
    ctx = replace(ctx, base=base)
    base, gates = ctx.base, ctx.gates()
    C, dC = results.dense(base, x.C), results.dense(base, dC)
    # dv, (D10) to (D13), dq and dk, (D14) to (D16), and what dlog_f, (D17), is made of.
    dq, dk, dbeta, pairs = launch_scans(ctx, gates, X, E, dh, dv, C, dC, dC0)
    read_error = 0.0 if base.V <= host.STATE_ROWS else WIDE_READ_ERROR
    df = None if pairs is None else delta.gate_gradient(ctx, gates, *pairs, dC, read_error)
    none = base.placeholder(0)
    found = (dq, dk, dv, dbeta if x.beta is not None else None, df, None, None, None, dC0)
    return DeltaGrads(*(none if t is None else t for t in found))


def initial_cotangent(ctx: DeltaContext, E: Tensor, X: Tensor, dh: Tensor) -> Tensor:
    """Launch the scan against time for the cotangents of the initial states, (N, H, dqk, dhv), from dh alone.

    The arguments are those of :func:`backward`. What else the scan computes is not read.
    """
    x, base, rows = ctx.x, ctx.base, host.STATE_ROWS
    dh = results.dense_rows(base, dh)
    dv, dk_w = (base.new(*x.v.shape[:3], n, dtype=t.dtype) for n, t in ((base.V, x.v), (rows, x.q)))
    dC0 = base.new(x.sequences, base.H, base.K, base.V)
    pairs = base.new(ceil_div(base.V, rows), base.H, base.tiles, gate_gradients.PAIR_SUMS.value, base.L)
    base = replace(scheduler.launch(sequences.bound(base)), checkpoint_steps=NO_CHECKPOINTS)
    ctx = replace(ctx, base=base)
    checkpoints = E  # any of their dtype, which is not accessed
    delta_dv_dk.launch(ctx, ctx.gates(), X, E, dh, dv, dk_w, pairs, checkpoints, final=None, initial=dC0)
    return dC0


class PairSums(NamedTuple):
    """The sums that the gradient of gates is made of, see `delta.gate_gradient`."""

    reads: Tensor
    pair_sums: Tensor
    dots: Tensor
    starts: Tensor | None


def launch_scans(
    ctx: DeltaContext, gates: Tensor, X: Tensor, E: Tensor, dh: Tensor, dv: Tensor, C: Tensor | None,
    dC: Tensor | None, dC0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, PairSums | None]:  # fmt: skip
    """Launch the scans: against time one for each 128 columns of dhv, and with time one, or one for each reader.

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
    parts = ceil_div(base.V, rows)  # of the sums: blocks of columns against time, with time readers
    padded = replace(base, K=rows, V=parts * rows)
    dk_w = base.new(*shape, rows, dtype=dtype)
    checkpoints = base.new(*(checkpoint_shape(padded) if ctx.gated else (0,)), dtype=dtype)
    sums = delta_dq_dk.Sums(
        reads=base.new(parts, base.H, base.tiles, 1, base.L),
        pairs=base.new(parts, base.H, base.tiles, gate_gradients.PAIR_SUMS.value, base.L),
        checkpoints=checkpoints,
        dots=base.new(checkpoints.shape[0] * base.H, host.CONSUMER_WARPS),
    )
    dbeta, do_e = delta_dv_dk.launch(
        ctx, gates, X, E, dh, dv, dk_w, sums.pairs, checkpoints, final=dC, initial=dC0
    )  # fmt: skip
    # A tile of dk overwrites that of dk_w, which it contains.
    dk = base.new(*shape, base.K, dtype=dtype) if ctx.x.q.shape[3] < rows else dk_w
    sequences.clear(base, dk)
    if parts == 1:
        dq = base.new(*shape, base.K, dtype=dtype)
        sequences.clear(base, dq)
        delta_dq_dk.launch(ctx, gates, E, dh, dv, do_e, dq, dk, dk_w, sums, dbeta, initial=C)
    else:
        scan = ScanOfReader(ctx, padded, gates, E, do_e, dbeta, sums, results.pad_state(padded, C, None)[0])
        scan.launch(dq_dk.READ_KEYS, dv, dk_w, dk)
        # dq is the last: the checkpoints, which the scan for dk reads, have been given back by then.
        dq = base.new(*shape, base.K, dtype=dtype)
        sequences.clear(base, dq)
        scan.launch(dq_dk.QUERIES, dh, ctx.x.q, dq)
    pairs = None
    if ctx.x.log_f is not None:
        pairs = PairSums(sums.reads, sums.pairs, sums.dots, delta.start_dots(base, gates, C, dC0, ()))
    return reductions.launch(base, dq, base.group), reductions.launch(base, dk, base.group), dbeta, pairs


class ScanOfReader:
    """A launch of `dq_dk_kernel` for one of the readers: the operands that both have.

    Args:
        ctx: The context of the call.
        padded: Its sizes, with the head dims of the kernel.
        gates: The gate vectors, or any tensor where there are no gates.
        E: The prediction errors.
        do_e: do . E, (B, T, H).
        dbeta: The gradient of beta, (B, T, H).
        sums: What the scans leave for the gradient of gates; readers are parts.
        C: The initial states, (N, H, K, V), or None for zeros.
    """

    def __init__(
        self, ctx: DeltaContext, padded: LaunchContext, gates: Tensor, E: Tensor, do_e: Tensor, dbeta: Tensor,
        sums: delta_dq_dk.Sums, C: Tensor | None,
    ) -> None:  # fmt: skip
        self.E, self.sums, self.C, self.k, self.gated = E, sums, C, ctx.x.k, ctx.gated
        self.norms, self.dbeta = ctx.norms_apart, dbeta
        if not ctx.gated:  # the kernel always loads gate vectors
            gates = gate_kernels.launch(replace(padded, x=padded.x._replace(log_f=padded.zeros(*E.shape[:3]))))
        self.gates = GateVectors(gates, {"GATES": LOADED.value, **dict.fromkeys(padded.gate_forms, False)})
        # beta and do . E take the place of the gates, and the factor of queries that of the scale.
        self.base = replace(
            padded, x=padded.x._replace(log_i=ctx.beta, log_f=do_e), spec=padded.spec._replace(scale=ctx.spec.scale)
        )

    def launch(self, reader: Any, z: Tensor, w: Tensor, out: Tensor) -> None:
        """Compute dq, or dk from dk_w.

        Args:
            reader: QUERIES or READ_KEYS of :mod:`.dq_dk`.
            z, w: The operands, in the table of that module.
            out: Output, (B, T, H, dqk).
        """
        by_keys, base = reader is dq_dk.READ_KEYS, self.base
        if by_keys:
            base = replace(base, spec=base.spec._replace(scale=-1.0))
        at_checkpoints = by_keys and self.gated
        if not at_checkpoints:
            base = replace(base, checkpoint_steps=NO_CHECKPOINTS)
        reads, pairs = (base.recorder.rows(t, int(by_keys), by_keys + 1) for t in self.sums[:2])
        checkpoints = self.sums.checkpoints if at_checkpoints else self.E  # any of their dtype, which is not accessed
        norms = None
        if self.norms is not None:
            of_keys, of_queries = self.norms
            norms = of_keys, of_keys if by_keys else of_queries, self.dbeta
        dq_dk_launch.launch(
            base, self.gates, self.k, self.E, z, w, out, reads, (checkpoints, self.gates.vectors, self.sums.dots),
            reverse=False, initial=(self.C, None), final=(None, pairs), reader=reader,
            save_sums=self.gated or norms is not None, norms=norms,
        )  # fmt: skip
