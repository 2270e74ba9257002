"""The gradients of queries, keys, beta and gates of one tile, from the states around it.

With the notation of :mod:`.channel_tiles`, the state C before the tile and the cotangent dC after it,

    dq = scale ((do C^T) a + <do E^T> B k),    dr = -((dv C^T) a_r + <dv E^T> B k)
    W  = (E dC^T) w + scale <do E^T>^T q - <dv E^T>^T r,    dk = B W
    dbeta_t = k_t . W_t = dv_t . E_t / beta_t, the latter from the scan for dv

where <S> x has the rows sum over j of S_ij D_ij x_j, for S masked like P or M, and <S>^T x its columns.

The gradient of the gates of step t is the sum over all pairs of a write before t and a read from t on, for each channel
(docs/delta-rule.md). Both lie in the tile, or the write before it and the read after it, or one of them:

    dg_t = g sum over dhv of C * dC + sum over i >= t of reads_i + sum over j < t of writes_j + pairs around t

Where keys are alike, the terms of k_t . W_t cancel: in bfloat16 dbeta is the other product, unless beta is near 0.

The sums of pairs inside the tile are differences of sums of the same rounded products, so that only float32 rounding
is left of what cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu import reductions
from tfla.backends.gpu.config import ampere_mmas, ceil_div, power_of_two
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_activations import activated_gate, gate_derivatives, load_activation
from tfla.backends.gpu.gate_gradients import gate_gradient_of
from tfla.backends.gpu.gate_kernels import first_tile, locate_chunk
from tfla.backends.gpu.state_passing import rounded_product
from tfla.backends.triton.channel_decays import (
    add_sums_after,
    add_sums_to,
    block_exponents,
    decay_after,
    decay_to,
    exponents,
    half_decays,
    head_and_chunk,
    in_odd_block,
    level_factors,
    level_pairs,
    load_exponents,
    sums_from_middle,
    takes_tile,
    tiles_of_program,
)
from tfla.backends.triton.precise_products import as_operand
from tfla.backends.triton.scan_tiles import key_addresses, locate_tile, rows_from, without_unknown_options

# The ptxas of Triton 3.4 gives a thread 32 registers, and spills 15 KB, where 4 warps have a tile with levels and gates
# by step. With 8 warps it spills 1.6 KB.
BEFORE_TRITON_3_5 = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 5)

if TYPE_CHECKING:
    from tfla.backends.triton.channel_rule import ChannelContext
    from tfla.backends.triton.channel_tiles import Operands


@without_unknown_options
@triton.jit
def rows_of_results(
    row, t0, of_tile, T, H, pitch, first_row, first_step, PITCHED: tl.constexpr, SLICED: tl.constexpr
):  # fmt: skip
    """Return the batch row and the token at which a tile starts in the tensors of the call, and its row of results.

    Args:
        row, t0: the batch row and the token at which it starts in the slice.
        of_tile: the row of results where those of batch rows follow each other.
        T, H, pitch, first_row, first_step, PITCHED, SLICED: as for `channel_gradients`.
    """
    if PITCHED:
        of_tile += row * (pitch - T) * H
    if SLICED:
        t0 += first_step
        row, of_tile = rows_from(first_row, row, of_tile + first_step * H, (pitch if PITCHED else T) * H)
    return row, t0, of_tile


@triton.jit(
    do_not_specialize=[
        "sequences",
        "T",
        "tiles_of_head",
        "H",
        "GROUP",
        "per_program",
        "pitch",
        "first_row",
        "first_step",
        "norm_b",
        "norm_t",
        "gate_factor",
        "sum_h",
    ]
)
def channel_gradients(
    Q, K, R, F, beta, cu, needs_levels, dO, dV, E, states, cotangents, dots, dQ, dK, dR, dF, dbeta, q_norms, k_norms,
    A_log, Bias, sums, scale,
    sequences, T, tiles_of_head, H, GROUP, per_program, qb, qt, qh, kb, kt, kh, rb, rt, rh, fb, ft, fh, fd, bb, bt, bh,
    gb, gt, gh, eb, et, eh, pitch, first_row, first_step, norm_b, norm_t, gate_factor, rate_stride, bias_h, bias_c,
    sum_h,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, CORRECT: tl.constexpr,
    READ_KEY: tl.constexpr, READ_BEFORE: tl.constexpr, STEP_GATES: tl.constexpr, IS_VARLEN: tl.constexpr,
    SLICED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, BOUND: tl.constexpr, LEVELS: tl.constexpr,
    LEVELED: tl.constexpr, DOTS: tl.constexpr, PITCHED: tl.constexpr, STAGES: tl.constexpr, NORMALIZED: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_RATE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of tiles for BK key channels. The grid is (tiles * H * DK / BK).

    With LEVELED it is (tiles * H / per_program * DK / BK). The programs of one tile follow each other, so that the L2
    cache holds what all of them read.

    Args:
        Q, K, R, F, beta, cu, scale: as for `decay_operands`.
        needs_levels: (H, tiles) int8, 1 for tiles that need levels; they are computed with LEVELED, others without.
        dO, dV: the cotangents of h and of the values, (B, T, H, DV).
        E: the prediction errors, or without CORRECT the values, (B, T, H, DV).
        states, cotangents: C before each tile and dC after it, (H, tiles, DV, DK).
        dots: dv . E over each of DOTS parts of dhv, (DOTS, B, T, H) float32.
        per_program: with LEVELED how many tiles a program looks at, at most TILE_FLAGS; it computes those with a flag.
        dQ, dK, dR: the gradients, (B, T, H, DK); dR is written with READ_KEY, else it is added to dK.
        dF: the gradient of the log-gates, (B, T, H, DK), or with STEP_GATES its sums over the channels of each program,
            (B, T, H, DK / BK) float32.
        dbeta: the sums over the channels of each program of the gradient of beta, (B, T, H, DK / BK) float32.
        q_norms, k_norms: with NORMALIZED 1 / |q| and 1 / |k|, (B, T, H) float32, with the strides norm_b, norm_t and 1.
            dQ and dK are then the gradients of the normalized q and k, which `project_gradients` reads.
        A_log, Bias, ACTIVATION: as for `decay_operands`. With an activation dF is the gradient of its argument.
        sums: then with A_log or dt_bias an output for what tiles add to their gradients, (2, H, tiles, DK) float32,
            with sum_h from one head to the next.
        pitch: with PITCHED the tokens from one batch row of dV, dQ, dK, dR and dF to the next, which are views of a
            part of the steps, or with SLICED have all steps; without it, and for sums, batch rows follow each other.
        first_row: with SLICED the row at which those of the slice start in all tensors (B, T, ...) but beta, the norms,
            dots and dbeta, which have the rows of the slice.
        first_step: with SLICED the step at which those of the part start in all of them but dots and dbeta, which have
            the steps of the part.
    """
    PARTS: tl.constexpr = (DK + BK - 1) // BK  # cdiv of constants is a tensor in Triton 3.6
    part = tl.program_id(0) % PARTS
    n0, count = tiles_of_program(needs_levels, per_program, tiles_of_head * H, LEVELED, PARTS)
    for i in tl.range(0, count, num_stages=1, disable_licm=True):
        h, chunk = head_and_chunk(n0 + i, tiles_of_head, H, LEVELED)
        s, first, length, start, _ = locate_chunk(cu, sequences, T, chunk, L, IS_VARLEN)
        tile = h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L
        exists = start < length
        if exists & ((tl.load(needs_levels + tile, exists, 0) != 0) == LEVELED):
            hx = h // GROUP
            row, t0, steps = locate_tile(s, first, length, start, IS_VARLEN)
            r = tl.arange(0, L)
            e = r - 1 if READ_BEFORE else r  # a step reads the state after step e
            of_tile = (first + start) * H + h  # of sums, which are dense: offsets inside a tile fit 32 bits
            row_of_slice = row
            row, t0, of_rows = rows_of_results(
                row, t0, of_tile, T, H, pitch, first_row, first_step, PITCHED, SLICED
            )  # fmt: skip
            at = (t0 + r).to(tl.int64)[:, None]
            c = part * BK + tl.arange(0, BK)
            do_at = dO + row * gb + h * gh + at * gt
            e_at = E + row * eb + h * eh + at * et
            dv_at = dV + of_rows * DV + (r * H * DV)[:, None]
            # (1) What steps read of writes inside the tile, [reading step, writing step], and the products with the
            # state before the tile and the cotangent after it, (L, BK)
            weights_q = tl.zeros([L, L], tl.float32)
            weights_r = tl.zeros([L, L], tl.float32)
            dq = tl.zeros([L, BK], tl.float32)
            dr = tl.zeros([L, BK], tl.float32)
            W = tl.zeros([L, BK], tl.float32)
            across = tl.zeros([BK], tl.float32)
            for v0 in tl.range(0, DV, BV, num_stages=STAGES, disable_licm=True):
                v = v0 + tl.arange(0, BV)
                held = (r < steps)[:, None] & (v < DV)[None, :]
                there = (v < DV)[:, None] & (c < DK)[None, :]
                state_at = (tile * DV + v[:, None]) * DK + c[None, :]
                do = tl.load(do_at + v[None, :], held, 0.0)  # (L, BV)
                error = tl.load(e_at + v[None, :], held, 0.0)  # (L, BV)
                C = tl.load(states + state_at, there, 0.0)  # (BV, BK)
                dC = tl.load(cotangents + state_at, there, 0.0)  # (BV, BK)
                weights_q = tl.dot(do, tl.trans(error), weights_q, input_precision=PRECISION)
                dq = tl.dot(do, C, dq, input_precision=PRECISION)
                W = tl.dot(error, dC, W, input_precision=PRECISION)
                if CORRECT:
                    dv = tl.load(dv_at + v[None, :], held, 0.0)  # (L, BV)
                    weights_r = tl.dot(dv, tl.trans(error), weights_r, input_precision=PRECISION)
                    dr = tl.dot(dv, C, dr, input_precision=PRECISION)
                across += tl.sum(rounded_product(C.to(tl.float32), dC.to(tl.float32)), 0)
            # The diagonal: what a step reads of its own write. No gate lies between, so it is kept apart.
            own = tl.sum(tl.where(r[:, None] == r[None, :], weights_q * scale, 0.0), 1)[:, None]  # (L, 1)
            # With correction, pairs that dq or dr are sums of take operands in tf32: bfloat16 would cost too much.
            SHORT: tl.constexpr = dO.dtype.element_ty == tl.bfloat16
            OPERAND_Q: tl.constexpr = tl.float32 if CORRECT else OPERAND
            OPERAND_R: tl.constexpr = tl.float32 if READ_KEY else OPERAND
            PRECISION_Q: tl.constexpr = "tf32" if CORRECT and SHORT else PRECISION
            PRECISION_R: tl.constexpr = "tf32" if READ_KEY and SHORT else PRECISION
            weights_q = as_operand(tl.where(r[:, None] > r[None, :], weights_q * scale, 0.0), OPERAND_Q, PRECISION_Q)
            weights_r = as_operand(tl.where(r[:, None] > r[None, :], -weights_r, 0.0), OPERAND_R, PRECISION_R)
            # (2) The decays of pairs in one block, and those from the start of the tile and to its end
            inside = (r < steps)[:, None] & (c < DK)[None, :]
            f_at = F + row * fb + h * fh + at * ft + c[None, :] * fd
            if ACTIVATION == "none":
                g = load_exponents(f_at, inside)  # (L, BK)
            else:
                rate, bias = load_activation(
                    A_log, Bias, h, c[None, :], rate_stride, bias_h, bias_c, DK, HAS_RATE, HAS_BIAS
                )
                z = tl.load(f_at, inside, 0.0).to(tl.float32) + bias
                g = exponents(activated_gate(z, rate, gate_factor, ACTIVATION == "softplus"), inside)
            middle, shift, _top = block_exponents(g, r, BOUND, LEVELS, LEVELED, SUMS)
            up = tl.exp2(middle)  # factors of reads in one block
            down = tl.exp2(-middle)  # factors of writes
            up_r = up
            if CORRECT and READ_BEFORE:
                if LEVELED:
                    up_r = tl.exp2(tl.where(shift == 0, 0.0, sums_from_middle(g, e, 4, SUMS)))
                else:
                    up_r = tl.exp2(middle - g)
            if LEVELED:
                before = decay_to(g, r, SUMS)
                before_r = before
                if CORRECT and READ_BEFORE:
                    before_r = decay_to(g, e, SUMS)
                after = decay_after(g, r, SUMS)
                across *= tl.exp2(tl.sum(g, 0))
            else:
                to_middle, from_middle = half_decays(g)
                before = up * to_middle[None, :]
                before_r = up_r * to_middle[None, :]
                after = down * from_middle[None, :]
                across *= to_middle * from_middle
            # (3) What the tile reads of the state before it and writes to the one after it. The gradient of a step's
            # gates sums state_reads from the step on, and over the steps before it Z: what a step writes less what it
            # reads of writes in the tile.
            b_at = beta + row_of_slice * bb + h * bh + (t0 + r) * bt
            b = tl.load(b_at, r < steps, 0.0).to(tl.float32)[:, None]  # (L, 1)
            q_at, k_at, r_at = key_addresses(Q, K, R, row, hx, at, c, qb, qt, qh, kb, kt, kh, rb, rt, rh)
            k = tl.load(k_at, inside, 0.0)  # (L, BK)
            q = tl.load(q_at, inside, 0.0)  # (L, BK)
            if NORMALIZED:
                norm_at = row_of_slice * norm_b + h + (t0 + r).to(tl.int64)[:, None] * norm_t
                q = q * tl.load(q_norms + norm_at, (r < steps)[:, None], 0.0)
                k = k * tl.load(k_norms + norm_at, (r < steps)[:, None], 0.0)
            read = k  # read keys, (L, BK)
            if READ_KEY:
                read = tl.load(r_at, inside, 0.0)  # (L, BK)
            dq *= before * scale
            state_reads = q * dq
            W *= after
            Z = k * b * W
            state_reads_r = tl.zeros([L, BK], tl.float32)  # with READ_BEFORE, what read keys read of the state
            Z_before = tl.zeros([L, BK], tl.float32)  # with READ_BEFORE, what counts from the read on
            if CORRECT:
                dr *= -before_r
                if READ_BEFORE:
                    state_reads_r = read * dr
                else:
                    state_reads += read * dr
            # (4) Pairs inside the tile add to dq, dr, W and Z
            dq += own * k.to(tl.float32) * b
            W += own * q.to(tl.float32)
            if CORRECT and READ_BEFORE:  # no gate lies between a step and what the step before it wrote either
                last = e[:, None] == r[None, :]
                previous = tl.where(last, weights_r, 0.0).to(OPERAND_R)
                weights_r = tl.where(last, 0.0, weights_r).to(OPERAND_R)
                dr = tl.dot(previous, as_operand(k * b, OPERAND_R, PRECISION_R), dr, input_precision=PRECISION_R)
                W = tl.dot(tl.trans(previous), read.to(OPERAND_R), W, input_precision=PRECISION_R)
            if LEVELED:
                for level in tl.range(0, LEVELS - shift, num_stages=1, disable_licm=True):
                    factor = level_factors(g, r, level, LEVELS, SUMS)
                    odd = in_odd_block(r, level, L, LEVELS)[:, None]
                    writes = tl.where(odd, 0.0, k * b * factor)
                    writes_q = as_operand(writes, OPERAND_Q, PRECISION_Q)
                    queries = as_operand(tl.where(odd, q * factor, 0.0), OPERAND_Q, PRECISION_Q)
                    pairs = tl.where(level_pairs(r, level, L, LEVELS), weights_q, 0.0).to(OPERAND_Q)
                    of_q = tl.dot(pairs, writes_q, input_precision=PRECISION_Q)
                    dq += tl.where(odd, of_q * factor, 0.0)
                    Z -= queries.to(tl.float32) * of_q
                    of_k = tl.dot(tl.trans(pairs), queries, input_precision=PRECISION_Q)
                    W += tl.where(odd, 0.0, of_k * factor)
                    Z += writes_q.to(tl.float32) * of_k
                    if CORRECT:
                        factor_r = factor
                        odd_r = odd
                        if READ_BEFORE:
                            factor_r = level_factors(g, e, level, LEVELS, SUMS)
                            odd_r = in_odd_block(e, level, L, LEVELS)[:, None]
                        writes_r = as_operand(writes, OPERAND_R, PRECISION_R)
                        reads = as_operand(tl.where(odd_r, read * factor_r, 0.0), OPERAND_R, PRECISION_R)
                        pairs_r = tl.where(level_pairs(e, level, L, LEVELS), weights_r, 0.0).to(OPERAND_R)
                        of_r = tl.dot(pairs_r, writes_r, input_precision=PRECISION_R)
                        of_k = tl.dot(tl.trans(pairs_r), reads, input_precision=PRECISION_R)
                        dr += tl.where(odd_r, of_r * factor_r, 0.0)
                        if READ_BEFORE:
                            Z_before -= reads.to(tl.float32) * of_r
                        else:
                            Z -= reads.to(tl.float32) * of_r
                        W += tl.where(odd, 0.0, of_k * factor)
                        Z += writes_r.to(tl.float32) * of_k
                weights_q = tl.where((r[:, None] >> shift) == (r[None, :] >> shift), weights_q, 0.0).to(OPERAND_Q)
                weights_r = tl.where((e[:, None] >> shift) == (r[None, :] >> shift), weights_r, 0.0).to(OPERAND_R)
            queries = as_operand(q * up, OPERAND_Q, PRECISION_Q)
            writes = k * b * down
            writes_q = as_operand(writes, OPERAND_Q, PRECISION_Q)
            of_q = tl.dot(weights_q, writes_q, input_precision=PRECISION_Q)
            dq += of_q * up
            Z -= queries.to(tl.float32) * of_q
            place = (r * H)[:, None] * DK + c[None, :]  # (L, BK)
            tl.store(dQ + of_rows * DK + place, dq.to(dQ.dtype.element_ty), inside)
            of_k = tl.dot(tl.trans(weights_q), queries, input_precision=PRECISION_Q)
            W += of_k * down
            Z += writes_q.to(tl.float32) * of_k
            if CORRECT:
                reads = as_operand(read * up_r, OPERAND_R, PRECISION_R)
                writes_r = as_operand(writes, OPERAND_R, PRECISION_R)
                of_r = tl.dot(weights_r, writes_r, input_precision=PRECISION_R)
                of_k = tl.dot(tl.trans(weights_r), reads, input_precision=PRECISION_R)
                dr += of_r * up_r
                if READ_BEFORE:
                    Z_before -= reads.to(tl.float32) * of_r
                else:
                    Z -= reads.to(tl.float32) * of_r
                if READ_KEY:
                    tl.store(dR + of_rows * DK + place, dr.to(dR.dtype.element_ty), inside)
                W += of_k * down
                Z += writes_r.to(tl.float32) * of_k
            # (5) Results
            dk = b * W
            if CORRECT and not READ_KEY:
                dk += dr
            tl.store(dK + of_rows * DK + place, dk.to(dK.dtype.element_ty), inside)
            of_part = (of_tile + r * H) * PARTS + part
            found = tl.sum(rounded_product(k.to(tl.float32), W), 1)
            if DOTS > 0:
                by_errors = tl.zeros([L], tl.float32)  # (L), dv_t . E_t, which is beta_t dbeta_t
                tokens = T.to(tl.int64) * (1 if IS_VARLEN else sequences)  # of all batch rows
                for n in tl.static_range(DOTS):
                    by_errors += tl.load(dots + n * tokens * H + of_tile + r * H, (r < steps) & (part == 0), 0.0)
                b = tl.reshape(b, [L])
                found = tl.where(tl.abs(b) > 1e-6, by_errors / b, found)
            tl.store(dbeta + of_part, found, r < steps)
            dg = tl.zeros([L, BK], tl.float32) + across[None, :]
            if CORRECT and READ_BEFORE:
                dg = add_sums_after(dg, state_reads_r, r, SUMS)
                dg = add_sums_to(dg, Z_before, r, SUMS)
            dg = add_sums_after(dg, state_reads, r - 1, SUMS)
            dg = add_sums_to(dg, Z, r - 1, SUMS)
            if ACTIVATION == "none":
                dg = gate_gradient_of(dg, tl.load(f_at, inside, 0.0), False)  # (L, BK)
            else:
                z = tl.load(f_at, inside, 0.0).to(tl.float32) + bias
                gate, of_bias, of_rate = gate_derivatives(z, rate, gate_factor, ACTIVATION == "softplus")
                kept = inside & (gate_gradient_of(tl.full([L, BK], 1.0, tl.float32), gate, False) != 0.0)
                of_rate = tl.where(kept, of_rate * dg, 0.0)
                dg = tl.where(kept, of_bias * dg, 0.0)
                if HAS_RATE or HAS_BIAS:
                    to = sums + h * sum_h + (tile - h * tiles_of_head) * DK + c
                    tl.store(to, tl.sum(of_rate, 0), c < DK)
                    tl.store(to + H * sum_h, tl.sum(dg, 0), c < DK)
            if STEP_GATES:
                tl.store(dF + of_part, tl.sum(tl.where(inside, dg, 0.0), 1), r < steps)
            else:
                tl.store(dF + of_rows * DK + place, dg.to(dF.dtype.element_ty), inside)


@triton.jit
def project(X, dX, r, c, inside, place):
    """Replace the gradient of rows of norm 1, r x, by that of the rows x: r (dy - r^2 (x . dy) x) for dy in dX.

    Args:
        X: pointers to x, (L, BK).
        dX: the gradient in memory, at the offsets `place`, (L, BK).
        r: 1 / |x|, (L, 1).
        inside: which elements exist, (L, BK).
    """
    x = tl.load(X, inside, 0.0).to(tl.float32)  # (L, BK)
    dy = tl.load(dX + place, inside, 0.0).to(tl.float32)  # (L, BK)
    along = r * r * tl.sum(x * dy, 1)[:, None]  # (L, 1)
    tl.store(dX + place, (r * (dy - along * x)).to(dX.dtype.element_ty), inside)


@triton.jit(do_not_specialize=[
    "sequences", "T", "tiles_of_head", "H", "GROUP", "per_program", "pitch", "first_row", "first_step", "norm_b",
    "norm_t",
])  # fmt: skip
def project_gradients(
    Q, K, cu, needs_levels, q_norms, k_norms, dQ, dK, sequences, T, tiles_of_head, H, GROUP, per_program,
    qb, qt, qh, kb, kt, kh, norm_b, norm_t, pitch, first_row, first_step,
    DK: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, IS_VARLEN: tl.constexpr, PITCHED: tl.constexpr,
    SLICED: tl.constexpr,
):  # fmt: skip
    """Make the gradients of q and k from those of the normalized ones, for tiles that need levels.

    A program of `channel_gradients` has some of the channels of a tile, and the norm needs all. The arguments are those
    of `channel_gradients`, with BK channels for a program, all of them. The grid is (tiles * H / per_program).
    """
    n0, count = tiles_of_program(needs_levels, per_program, tiles_of_head * H, True, 1)
    for i in tl.range(0, count, num_stages=1, disable_licm=True):
        h, chunk = head_and_chunk(n0 + i, tiles_of_head, H, True)
        s, first, length, start, _ = locate_chunk(cu, sequences, T, chunk, L, IS_VARLEN)
        tile = h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L
        if takes_tile(needs_levels + tile, start < length, True):
            row, t0, steps = locate_tile(s, first, length, start, IS_VARLEN)
            row_of_slice = row
            row, t0, of_rows = rows_of_results(
                row, t0, (first + start) * H + h, T, H, pitch, first_row, first_step, PITCHED, SLICED
            )  # fmt: skip
            r = tl.arange(0, L)
            c = tl.arange(0, BK)
            inside = (r < steps)[:, None] & (c < DK)[None, :]
            at = (t0 + r).to(tl.int64)[:, None]
            place = of_rows * DK + (r * H)[:, None] * DK + c[None, :]  # (L, BK)
            norm_at = row_of_slice * norm_b + h + at * norm_t
            of_q = tl.load(q_norms + norm_at, (r < steps)[:, None], 0.0)
            of_k = tl.load(k_norms + norm_at, (r < steps)[:, None], 0.0)
            hx = h // GROUP
            project(Q + row * qb + hx * qh + at * qt + c[None, :], dQ, of_q, c, inside, place)
            project(K + row * kb + hx * kh + at * kt + c[None, :], dK, of_k, c, inside, place)


class Gradients(NamedTuple):
    """The results of `channel_gradients`, with the heads of v."""

    q: Tensor  # (B, T, H, dqk)
    k: Tensor  # (B, T, H, dqk)
    read_key: Tensor | None  # (B, T, H, dqk)
    log_f: Tensor  # (B, T, H, dqk), or (B, T, H) of gates by step
    beta: Tensor  # (B, T, H) float32


# A launcher of another kernel for tiles that need no levels: it takes the context, the operands of scans, the tensors
# of :func:`launch` from dh on, of which the gradient of beta has a part for each 32 channels, and at last its `sums`.
Bounded = Callable[..., None]


def allocate(ctx: ChannelContext) -> Gradients:
    """Allocate the results."""
    base, x = ctx.base, ctx.x
    shape = base.B, base.T, base.H
    q, k = (base.new(*shape, base.K, dtype=x.q.dtype) for _ in range(2))
    read_key = None if x.read_key is None else base.new(*shape, base.K, dtype=x.q.dtype)
    beta = base.new(*shape)
    log_f = base.new(*shape, *(base.K,) * x.channel_gates, dtype=ctx.log_f.dtype)
    return Gradients(q, k, read_key, log_f, beta)


def launch(
    ctx: ChannelContext, operands: Operands, dh: Tensor, dv: Tensor, E: Tensor, states: Tensor, cotangents: Tensor,
    dots: Tensor | None, grads: Gradients, bounded: Bounded | None = None, sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `channel_gradients`, and where it normalizes q and k `project_gradients`.

    Args:
        ctx: The context of the call.
        operands: The result of :func:`.channel_tiles.launch`.
        dh, dv: The cotangents of h and v, (B, T, H, dhv).
        E: The prediction errors, or without correction the values.
        states, cotangents: The states before the tiles and the cotangents after them, (H, tiles, dhv, dqk).
        dots: dv . E over parts of dhv, (parts, B, T, H) float32, or None where dbeta is not computed from it.
        grads: The outputs. They and dv are dense, or all of them the same steps of dense tensors.
        bounded: A launcher of another kernel for the tiles that need no levels, or None.
        sums: Output for what tiles add to the gradients of A_log and dt_bias, (2, H, tiles, dqk), or None where
            the call has neither.
    """
    base, x, tiles = ctx.base, ctx.x, ctx.config.gradients
    parts = ceil_div(base.K, tiles.split)
    dbeta, log_f = grads.beta, grads.log_f  # with several programs for a tile, their sums over channels are added later
    if parts > 1:
        dbeta = base.new(base.B, base.T, base.H * parts, 1)
        log_f = grads.log_f if x.channel_gates else base.new(base.B, base.T, base.H * parts, 1)
    if bounded is not None:
        bounded(ctx, operands, dh, dv, E, states, cotangents, dots, grads._replace(beta=dbeta), sums)
    count, per_program = base.tiles * base.H, ctx.flags_of_program
    pitch = grads.q.stride(0) // (base.H * base.K) if base.B > 1 or ctx.first_row is not None else base.T
    for with_levels in (True,) if bounded is not None else (False, True):
        crowded = BEFORE_TRITON_3_5 and with_levels and not x.channel_gates
        num_warps = max(8, tiles.num_warps) if crowded else tiles.num_warps
        base.launch(channel_gradients, ((ceil_div(count, per_program) if with_levels else count) * parts,),
            x.q, x.k, ctx.read_key, ctx.log_f, ctx.beta, base.cu_seqlens, operands.needs_levels, dh, dv, E, states,
            cotangents, states if dots is None else dots, grads.q, grads.k,
            grads.q if grads.read_key is None else grads.read_key, log_f, dbeta, *operands.norms(ctx.beta),
            *ctx.activation, ctx.beta if sums is None else sums, ctx.spec.scale, base.x.sequences,
            base.T, base.tiles, base.H, base.group, per_program, *ctx.input_strides,
            *time_strides(dh), *time_strides(E), pitch, ctx.first_row or 0, ctx.first_step, *operands.norm_strides,
            *ctx.activation_numbers, 0 if sums is None else sums.stride(1),
            DV=base.V, BK=tiles.split, BV=tiles.block, STEP_GATES=not x.channel_gates, LEVELED=with_levels,
            DOTS=0 if dots is None else dots.shape[0], PITCHED=pitch != base.T, STAGES=tiles.stages,
            num_warps=num_warps, OPERAND=tl.bfloat16 if x.q.dtype == torch.bfloat16 else tl.float32,
            compilation=ampere_mmas(x.q.device), **ctx.tile_constants, **ctx.activation_constants,
        )  # fmt: skip
    if operands.q_norms is not None:
        base.launch(project_gradients, (ceil_div(count, per_program),),
            x.q, x.k, base.cu_seqlens, operands.needs_levels, *operands.norms(ctx.beta), grads.q, grads.k,
            base.x.sequences, base.T, base.tiles, base.H, base.group, per_program, *time_strides(x.q),
            *time_strides(x.k), *operands.norm_strides, pitch, ctx.first_row or 0, ctx.first_step,
            DK=base.K, BK=power_of_two(base.K), L=base.L, IS_VARLEN=base.packed, PITCHED=pitch != base.T,
            SLICED=ctx.first_row is not None, num_warps=8,
        )  # fmt: skip
    if dbeta is not grads.beta and x.beta is not None:
        reductions.launch(base, dbeta, parts, grads.beta, ctx.first_step)
    if log_f is not grads.log_f and x.log_f is not None:
        reductions.launch(base, log_f, parts, grads.log_f, ctx.first_step)
