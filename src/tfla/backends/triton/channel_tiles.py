"""The operands of the scans with gates by channel, of each tile: inputs times their decays, P and X.

For every head, with the decays of :mod:`.channel_decays` and B = diag(beta):

    q a, r a_r      queries and read keys times the decays from the start of the tile, q also times scale
    k w B           write keys times the decays to the end of the tile and beta; scans with correction read them as the
                    sum of two 16-bit numbers, for head dims up to 128
    P B             P_ij = scale sum over channels of q_i k_j D_ij for j <= i, D the decays between the steps
    X B             X = M (I + B M)^-1 with M_ij = sum over channels of r_i k_j D_ij for j < i
    g               the decay of the tile, for each channel

The scans (:mod:`.channel_scans`) then need neither gates nor beta:

    R = V - (r a_r) C,  E = R - (X B) R,  h = (q a) C + (P B) E,  C <- g C + (k w B)^T E
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ampere_mmas, ceil_div
from tfla.backends.gpu.context import time_strides
from tfla.backends.gpu.gate_activations import activated_gate, load_activation
from tfla.backends.gpu.gate_kernels import first_tile, locate_chunk
from tfla.backends.triton.channel_decays import (
    block_exponents,
    decay_after,
    decay_to,
    exponents,
    half_decays,
    head_and_chunk,
    in_odd_block,
    level_factors,
    level_pairs,
    sums_from_middle,
    takes_tile,
    tiles_of_program,
)
from tfla.backends.triton.correction_dtype import correction_dtype
from tfla.backends.triton.delta_kernels import corrections, solve_precision
from tfla.backends.triton.precise_products import nearest_tf32, split
from tfla.backends.triton.scan_tiles import key_addresses, locate_tile, rows_from, without_unknown_options

if TYPE_CHECKING:
    from tfla.backends.gpu.time_parts import TimePart
    from tfla.backends.triton.channel_rule import ChannelContext


@without_unknown_options
@triton.jit(do_not_specialize=["sequences", "T", "tiles_of_head", "H", "GROUP", "first_row", "low_row", "per_program"])
def decay_operands(
    Q, K, R, F, beta, cu, Qa, Ra, Kw, Kw_low, P, X, decays, needs_levels, q_norms, k_norms, A_log, Bias, scale,
    sequences, T, tiles_of_head, H, GROUP, first_row, low_row, per_program, qb, qt, qh, kb, kt, kh, rb, rt, rh,
    fb, ft, fh, fd, bb, bt, bh, gate_factor, rate_stride, bias_h, bias_c,
    DK: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, CORRECT: tl.constexpr, READ_KEY: tl.constexpr,
    READ_BEFORE: tl.constexpr, SOLVE: tl.constexpr, IS_VARLEN: tl.constexpr, SLICED: tl.constexpr,
    PRECISION: tl.constexpr, SUMS: tl.constexpr, SOLVE_PRECISION: tl.constexpr, BOUND: tl.constexpr,
    LEVELS: tl.constexpr, LEVELED: tl.constexpr, SPLIT: tl.constexpr, BASE: tl.constexpr, DOUBLINGS: tl.constexpr,
    STAGES: tl.constexpr, NORMALIZED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Compute the operands of tiles. The grid is (tiles * H), or with LEVELED (tiles * H / per_program).

    Args:
        Q, K, R: queries, write keys and read keys, (B, T, H / GROUP, DK). R is read with READ_KEY; else it is K.
        F: the log-gates, (B, T, H, DK), with the strides fb, ft, fh, fd, or their pre-activations if ACTIVATION
            is not "none".
        beta: (B, T, H), any float dtype.
        cu: the offsets of packed sequences, (sequences + 1).
        Qa, Ra, Kw, Kw_low: the operands, (B, T, H, DK); Ra is written with CORRECT, Kw_low, what Kw loses as it is
            rounded, with SPLIT.
        P: P B, (B, T, H, L).
        X: X B, (B, T, H, L); written with SOLVE.
        decays: g, (H, tiles, DK) float32.
        needs_levels: (H, tiles) int8, 1 for tiles that need levels. The launch without LEVELED writes it; that with
            LEVELED then overwrites what the first one computed for these tiles.
        q_norms, k_norms: 1 / |q| and 1 / |k|, (B, T, H) float32. With NORMALIZED they are read, and q and k are divided
            by their norms. The kernel for tiles that need no levels computes them, so that NORMALIZED comes with
            LEVELED alone.
        A_log, Bias: the parameters of the activation of gates, see `load_activation`.
        scale: the factor of the queries.
        gate_factor: the factor of the activation "sigmoid".
        first_row: with SLICED the row of Q, K, R, F, Qa, Ra and Kw at which those of the other tensors start.
        low_row: with SLICED the row of Kw_low at which they start.
        per_program: with LEVELED how many tiles a program looks at, at most TILE_FLAGS; it computes those with a flag.
        CORRECT: whether there are read keys.
        ACTIVATION: "none", or "softplus" or "sigmoid", (2) and (3) of :mod:`tfla.backends.gpu.gate_activations`.
        READ_BEFORE: whether a step reads the state before its decay.
        BASE, DOUBLINGS: see `corrections`; LEVELS is log2(L).
    """
    n0, count = tiles_of_program(needs_levels, per_program, tiles_of_head * H, LEVELED, 1)
    for i in tl.range(0, count, num_stages=1, disable_licm=True):
        h, chunk = head_and_chunk(n0 + i, tiles_of_head, H, LEVELED)
        s, first, length, start, _ = locate_chunk(cu, sequences, T, chunk, L, IS_VARLEN)
        tile = h * tiles_of_head + first_tile(first, s, T, L, IS_VARLEN) + start // L
        if takes_tile(needs_levels + tile, start < length, LEVELED):
            hx = h // GROUP
            row, t0, steps = locate_tile(s, first, length, start, IS_VARLEN)
            r = tl.arange(0, L)
            e = r - 1 if READ_BEFORE else r  # a step reads the state after step e
            at = (t0 + r).to(tl.int64)[:, None]
            to = ((first + start + r) * H + h)[:, None]
            row_of_keys, to_keys, to_low = row, to, to
            if SLICED:
                row_of_keys, to_keys = rows_from(first_row, row, to, T * H)
                _row, to_low = rows_from(low_row, row, to, T * H)
            b = tl.load(beta + row * bb + h * bh + (t0 + r) * bt, r < steps, 0.0).to(tl.float32)  # (L)
            worst = 0.0  # the largest exponent of a factor; above BOUND the tile needs levels
            S = tl.zeros([L, L], tl.float32)  # P, [reading step, writing step]
            M = tl.zeros([L, L], tl.float32)
            for c0 in tl.range(0, DK, BK, num_stages=STAGES, disable_licm=True):
                c = c0 + tl.arange(0, BK)
                inside = (r < steps)[:, None] & (c < DK)[None, :]
                q_at, k_at, r_at = key_addresses(Q, K, R, row_of_keys, hx, at, c, qb, qt, qh, kb, kt, kh, rb, rt, rh)
                f = tl.load(F + row_of_keys * fb + h * fh + at * ft + c[None, :] * fd, inside, 0.0).to(tl.float32)
                if ACTIVATION != "none":
                    rate, bias = load_activation(
                        A_log, Bias, h, c[None, :], rate_stride, bias_h, bias_c, DK, HAS_RATE, HAS_BIAS
                    )
                    f = activated_gate(f + bias, rate, gate_factor, ACTIVATION == "softplus")
                g = exponents(f, inside)  # (L, BK)
                q = tl.load(q_at, inside, 0.0)  # (L, BK)
                k = tl.load(k_at, inside, 0.0)  # (L, BK)
                if NORMALIZED:
                    q = q * tl.load(q_norms + to, (r < steps)[:, None], 0.0)
                    k = k * tl.load(k_norms + to, (r < steps)[:, None], 0.0)
                read = k  # read keys, (L, BK)
                if READ_KEY:
                    read = tl.load(r_at, inside, 0.0)  # (L, BK)
                middle, shift, top = block_exponents(g, r, BOUND, LEVELS, LEVELED, SUMS)
                if CORRECT and READ_BEFORE:  # the first step of the tile reads the state before it
                    top = tl.maximum(top, tl.max(tl.abs(middle - g)))
                worst = tl.maximum(worst, top)
                # (1) S and M of pairs of steps in different blocks, level by level: odd blocks read, even ones write
                for level in tl.range(0, LEVELS - shift, num_stages=1, disable_licm=True):
                    factor = level_factors(g, r, level, LEVELS, SUMS)
                    odd = in_odd_block(r, level, L, LEVELS)[:, None]
                    writes = tl.trans(nearest_tf32(tl.where(odd, 0.0, k * factor), PRECISION))
                    queries = nearest_tf32(tl.where(odd, q * factor, 0.0), PRECISION)
                    D = tl.dot(queries, writes, input_precision=PRECISION)
                    S += tl.where(level_pairs(r, level, L, LEVELS), D, 0.0)
                    if CORRECT:
                        if READ_BEFORE:
                            factor = level_factors(g, e, level, LEVELS, SUMS)
                            odd = in_odd_block(e, level, L, LEVELS)[:, None]
                        reads = nearest_tf32(tl.where(odd, read * factor, 0.0), PRECISION)
                        D = tl.dot(reads, writes, input_precision=PRECISION)
                        M += tl.where(level_pairs(e, level, L, LEVELS), D, 0.0)
                # (2) S and M of pairs of steps in one block
                up = tl.exp2(middle)  # factors of reads
                down = tl.exp2(-middle)  # factors of writes
                up_r = up
                if CORRECT and READ_BEFORE:
                    if LEVELED:
                        up_r = tl.exp2(tl.where(shift == 0, 0.0, sums_from_middle(g, e, 4, SUMS)))
                    else:
                        up_r = tl.exp2(middle - g)
                writes = tl.trans(nearest_tf32(k * down, PRECISION))
                queries = nearest_tf32(q * up, PRECISION)
                if LEVELED:
                    D = tl.dot(queries, writes, input_precision=PRECISION)
                    S += tl.where((r[:, None] >> shift) == (r[None, :] >> shift), D, 0.0)
                    if CORRECT:
                        D = tl.dot(nearest_tf32(read * up_r, PRECISION), writes, input_precision=PRECISION)
                        M += tl.where((e[:, None] >> shift) == (r[None, :] >> shift), D, 0.0)
                else:
                    S = tl.dot(queries, writes, S, input_precision=PRECISION)
                    if CORRECT:
                        M = tl.dot(nearest_tf32(read * up_r, PRECISION), writes, M, input_precision=PRECISION)
                # (3) Operands times their decays from the start of the tile and to its end, and the decay of the tile
                if LEVELED:
                    up = decay_to(g, r, SUMS)
                    down = decay_after(g, r, SUMS)
                    up_r = up
                    if CORRECT and READ_BEFORE:
                        up_r = decay_to(g, e, SUMS)
                    decay = tl.exp2(tl.sum(g, 0))
                else:
                    to_middle, from_middle = half_decays(g)
                    up *= to_middle[None, :]
                    up_r *= to_middle[None, :]
                    down *= from_middle[None, :]
                    decay = to_middle * from_middle
                place = to_keys * DK + c[None, :]
                dtype: tl.constexpr = Qa.dtype.element_ty
                tl.store(Qa + place, (q * up * scale).to(dtype), inside)
                key = k * down * b[:, None]
                if SPLIT:
                    high, low = split(key, dtype)
                    tl.store(Kw + place, high, inside)
                    tl.store(Kw_low + (to_low * DK + c[None, :]), low, inside)
                else:
                    tl.store(Kw + place, key.to(dtype), inside)
                if CORRECT:
                    tl.store(Ra + place, (read * up_r).to(dtype), inside)
                tl.store(decays + tile * DK + c, decay, c < DK)
            if not LEVELED:
                tl.store(needs_levels + tile, tl.where(worst <= BOUND, 0, 1))
            # (4) P B and X B, (L, L)
            place = to * L + r[None, :]
            S = tl.where(r[:, None] >= r[None, :], S * scale, 0.0) * b[None, :]
            tl.store(P + place, S.to(P.dtype.element_ty), (r < steps)[:, None])
            if SOLVE:
                M = tl.where(r[:, None] > r[None, :], M, 0.0)
                M = corrections(M, b, L, SOLVE_PRECISION, BASE, DOUBLINGS) * b[None, :]
                tl.store(X + place, M.to(X.dtype.element_ty), (r < steps)[:, None])


class Operands(NamedTuple):
    """The operands of scans, as in the module docstring."""

    q: Tensor  # (B, T, H, dqk)
    r: Tensor | None  # (B, T, H, dqk); None without correction
    k: Tensor  # (B, T, H, dqk)
    k_low: Tensor | None  # (B, T, H, dqk), what k loses as it is rounded; None where scans read k alone
    P: Tensor  # (B, T, H, L)
    X: Tensor | None  # (B, T, H, L); None without correction
    decays: Tensor  # (H, tiles, dqk) float32
    needs_levels: Tensor  # (H, tiles) int8, 1 for tiles that need levels
    q_norms: Tensor | None = None  # (B, T, H) float32, 1 / |q|; None where the kernels do not normalize q and k
    k_norms: Tensor | None = None  # (B, T, H) float32, 1 / |k|, likewise

    def norms(self, absent: Tensor) -> tuple[Tensor, Tensor]:
        """Return 1 / |q| and 1 / |k|, or twice what stands for them."""
        return absent if self.q_norms is None else self.q_norms, absent if self.k_norms is None else self.k_norms

    @property
    def norm_strides(self) -> tuple[int, int]:
        """The strides of the norms by batch row and token."""
        return (0, 0) if self.q_norms is None else time_strides(self.q_norms)[:2]

    def of_part(self, part: TimePart) -> Operands:
        """Return the operands of a part of the steps; in a plan only those with an entry per tile are cut."""
        found: Operands = part.fields(self)
        return found._replace(decays=part.of_tiles(self.decays), needs_levels=part.of_tiles(self.needs_levels))


# A launcher of other kernels for tiles that need no levels: it takes the context, the arguments of `decay_operands`
# before `per_program`, X where it is computed, and the flags of tiles that need levels, which it also writes.
Bounded = Callable[["ChannelContext", tuple[Any, ...], "Tensor | None", Tensor], None]


def launch(
    ctx: ChannelContext, X: Tensor | None, bounded: Bounded | None = None, memory: Sequence[Tensor] = ()
) -> Operands:
    """Compute the operands of all tiles.

    Args:
        ctx: The context of the call.
        X: The result for X of an earlier call, or None to compute it, with correction.
        bounded: A launcher of other kernels for the tiles that need no levels, or None.
        memory: Dense tensors that nothing reads before the operands have been read, such as gradients to come. Operands
            lie in those of their size and dtype.
    """
    base, x = ctx.base, ctx.x
    shape, dtype, correct = (base.B, base.T, base.H), x.q.dtype, ctx.spec.correct
    of_keys = x.v.shape[0], base.T, base.H, base.K  # with the rows of the inputs
    free = [t for t in memory if t.dtype == dtype and t.numel() == math.prod(of_keys)]

    def operand() -> Tensor:
        return base.recorder.reuse(free.pop(), 0, of_keys) if free else base.new(*of_keys, dtype=dtype)

    solve = correct and X is None
    if solve:
        X = base.new(*shape, base.L, dtype=correction_dtype(x))
    q, k = operand(), operand()
    r = operand() if correct else None
    k_low = None
    if ctx.split_keys:
        k_low = operand() if free else base.new(*shape, base.K, dtype=dtype)  # of a slice its rows alone
    P = base.new(*shape, base.L, dtype=dtype)
    decays = base.new(base.H, base.tiles, base.K)
    needs_levels = base.new(base.H, base.tiles, dtype=torch.int8)
    q_norms, k_norms = (base.new(*shape) if ctx.spec.normalize_qk else None for _ in range(2))
    tiles = ctx.config.solve if solve else ctx.config.tiles
    arguments = (
        x.q, x.k, ctx.read_key, ctx.log_f, ctx.beta, base.cu_seqlens, q, q if r is None else r, k,
        k if k_low is None else k_low, P, P if X is None else X, decays, needs_levels,
        ctx.beta if q_norms is None else q_norms, ctx.beta if k_norms is None else k_norms, *ctx.activation,
        ctx.spec.scale, base.x.sequences, base.T, base.tiles, base.H, base.group, ctx.first_row or 0,
        ctx.first_row_in(k_low),
    )  # fmt: skip
    if bounded is not None:
        bounded(ctx, arguments, X if solve else None, needs_levels)
    count, per_program = base.tiles * base.H, ctx.flags_of_program
    for with_levels in (True,) if bounded is not None else (False, True):
        base.launch(decay_operands, (ceil_div(count, per_program) if with_levels else count,),
            *arguments, per_program, *ctx.input_strides, *ctx.activation_numbers, SOLVE=solve, SPLIT=ctx.split_keys,
            DOUBLINGS=3, BASE=8, SOLVE_PRECISION=solve_precision(dtype), LEVELED=with_levels, **ctx.tile_constants,
            **ctx.activation_constants, BK=tiles.block, STAGES=tiles.stages, num_warps=tiles.num_warps,
            compilation=ampere_mmas(x.q.device),
        )  # fmt: skip
    return Operands(q, r, k, k_low, P, X, decays, needs_levels, q_norms, k_norms)
