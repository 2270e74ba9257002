"""The scheme of the fused scans, and the operations on tiles and states that their kernels share.

The four large results o, dv, dq and dk, each computed by one kernel that keeps the state on chip from tile to tile,
have one shape. In each tile of L steps x and y update the state, z reads it, and the product
P = z x^T (o, dv) or z y^T (dq, dk) inside the tile is multiplied by the gate matrix and masked to the past, or with
REVERSE to the future. Operands, with the equations of docs/mathematics.md:

    result | kernel     | order   | x, y, z  | state          | split over | a      | w      | equations
    o      | o_dv_scan  | forward | k, v, q  | C^T (dhv, dqk) | dhv        | INTER  | UPDATE | (T1), (T2), (T5)
    dv     | o_dv_scan  | REVERSE | q, do, k | dC^T           | dhv        | UPDATE | INTER  | (T11), (T12)
    dq     | dq_dk_scan | forward | k, v, do | C (dqk, dhv)   | dqk        | INTER  | UPDATE | (T8), (T9), (T5)
    dk     | dq_dk_scan | REVERSE | q, do, v | dC             | dqk        | UPDATE | INTER  | (T8), (T10), (T12)

a is the weight of the state in the output, w the weight of a step in the state. Both are gate vectors of
`gpu/gate_kernels.py`; where there are denominators, the gate matrix and INTER have been divided by them (D', a').

The kernels compute outputs transposed, so that the state is the left operand of an MMA, from registers. The programs
that share a head split the output, so none needs partial results of another.

A program scans one sequence, or one segment of a sequence from the state at the segment's start. The states at segment
starts come from `o_dv_scan` or `normalizer_scan` without outputs, which store what each segment adds to the state, and
from state passing. A wide state is held as two blocks of columns, S0 and S1 (BLOCKS = 2). Gates are loaded right before
their use, because registers are scarce.
"""

import inspect
import re

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.gate_kernels import COLUMN, COLUMN_LOW, ROW, ROW_LOW, TINY, locate_chunk, locate_segment


def without_unknown_options(kernel):
    """Remove the option disable_licm from the loops of a kernel where Triton, before 3.5, does not have it.

    With disable_licm loop invariants stay in the loop: the parts of an address take fewer registers than the address.
    IEEE float32 (EXACT) uses no MMAs and is compiled without it.
    """
    if isinstance(kernel, triton.JITFunction) and "disable_licm" not in inspect.signature(tl.range).parameters:
        kernel._unsafe_update_src(re.sub(r", disable_licm=(not EXACT|True)", "", kernel.src))
    return kernel


def describable(*tensors: Tensor) -> bool:
    """Return whether TMA descriptors can address these tensors: addresses and strides are multiples of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0
        and all(s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        and t.shape[-1] * t.element_size() >= 16
        for t in tensors
    )


@triton.jit
def tile_access(base, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Return a TMA descriptor of a (length, width) matrix in tiles (L, W), or without TMA its address."""
    if TMA:
        return tl.make_tensor_descriptor(base, [length.to(tl.int32), width], [stride, 1], [L, W])
    else:
        return base


@triton.jit
def load_tile(at, t, c, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Load the tile (L, W) at row t and column c; elements outside of the matrix are 0."""
    if TMA:
        return at.load([t, c])
    else:
        r = t + tl.arange(0, L)
        w = c + tl.arange(0, W)
        return tl.load(
            at + r.to(tl.int64)[:, None] * stride + w[None, :], (r < length)[:, None] & (w < width)[None, :], 0.0
        )


@triton.jit
def store_tile(at, x, t, c, length, width, stride, L: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """Store the tile x, (L, W), at row t and column c; elements outside of the matrix are left out."""
    if TMA:
        at.store([t, c], x)
    else:
        r = t + tl.arange(0, L)
        w = c + tl.arange(0, W)
        tl.store(at + r.to(tl.int64)[:, None] * stride + w[None, :], x, (r < length)[:, None] & (w < width)[None, :])


@triton.jit
def load_keys(
    q_at, k_at, r_at, t, length, qt, kt, rt, DK: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    READ_KEY: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load the tiles (L, BK) of q, k and read keys at row t; without READ_KEY read keys are k."""
    q = load_tile(q_at, t, 0, length, DK, qt, L, BK, TMA)
    k = load_tile(k_at, t, 0, length, DK, kt, L, BK, TMA)
    read = k
    if READ_KEY:
        read = load_tile(r_at, t, 0, length, DK, rt, L, BK, TMA)
    return q, k, read


@triton.jit
def wide_heads(h, GROUP):
    """Return the head of q and k of head h, and h, as 64-bit numbers."""
    return (h // GROUP).to(tl.int64), h.to(tl.int64)


@triton.jit
def locate_scan(cu, sequences, T, H, L: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Return what a program of a grid (programs of a head, sequences * H) scans: its head, and a whole sequence.

    Returns:
        The head, then as `locate_segment` the first token, the number of steps, the batch row, the step of the first
        token in that row, and the first tile.
    """
    segment = tl.program_id(1) // H
    h = tl.program_id(1) % H
    first, steps, b, t0, tile0 = locate_segment(cu, sequences, T, segment, T, L, False, IS_VARLEN)
    return h, first, steps, b, t0, tile0


@triton.jit
def locate_tile(s, first, length, start, IS_VARLEN: tl.constexpr):
    """Return where a tile of the tensors (B, T, ...) lies, from the results of `locate_chunk`.

    Returns:
        The batch row, the step of the tile's first token in that row, and the number of steps from there on.
    """
    row = first * 0 if IS_VARLEN else s.to(tl.int64)
    t0 = first + start if IS_VARLEN else start
    return row, t0, length - start


@triton.jit
def rows_from(first_row, row, token, tokens_of_row):
    """Return a batch row and a token, counted with all heads, in a tensor whose row `first_row` is row 0 here."""
    skipped = first_row.to(tl.int64)
    return row + skipped, token + skipped * tokens_of_row


@triton.jit
def key_addresses(Q, K, R, row, h, at, c, qb, qt, qh, kb, kt, kh, rb, rt, rh):
    """Return the addresses of queries, write keys and read keys of head h at steps at, (L, 1), and channels c, (D)."""
    q_at = Q + row * qb + h * qh + at * qt + c[None, :]
    k_at = K + row * kb + h * kh + at * kt + c[None, :]
    r_at = R + row * rb + h * rh + at * rt + c[None, :]
    return q_at, k_at, r_at


@triton.jit
def locate_columns(
    places, H, col, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, INDEXED: tl.constexpr
):
    """Locate BV columns of a state, from column `col`, for a program of `locate_scan`; they are transposed.

    With INDEXED the state is in a pool, and `places` has the places of the sequences' rows.

    Returns:
        Where the columns, (BV, BK), are in the states of all sequences; which of them exist; and the place.
    """
    rk = tl.arange(0, BK)
    rv = col + tl.arange(0, BV)
    at = tl.program_id(1).to(tl.int64)
    place = at
    if INDEXED:
        place = tl.load(places + tl.program_id(1) // H).to(tl.int64)
        at = place * H + tl.program_id(1) % H
    state_at = (at * DK + rk[None, :]) * DV + rv[:, None]
    inside = (rv < DV)[:, None] & (rk < DK)[None, :]
    if INDEXED:
        inside = inside & (place >= 0)
    return state_at, inside, place


@triton.jit
def load_initial_columns(
    state_in, cu, sequences, H, col, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Load BV columns of an initial state, from column `col`, for a program of `locate_scan`; they are transposed.

    Args:
        state_in: the initial states, (sequences, H, DK, DV), read with USE_INITIAL_STATE; with INDEXED a pool.
        cu: with INDEXED, the places of the sequences' rows in the pool follow the offsets, see `bound_sequences`.

    Returns:
        The columns, (BV, BK) float32, zeros without USE_INITIAL_STATE or a row, NaN where the pool has no such row; and
        where they are in the states of all sequences, with the mask of those that exist.
    """
    state_at, inside, place = locate_columns(cu + sequences + 1, H, col, DK, DV, BK, BV, INDEXED)
    S = tl.zeros([BV, BK], tl.float32)
    if USE_INITIAL_STATE:
        S = tl.load(state_in + state_at, mask=inside, other=0.0).to(tl.float32)
        if INDEXED:
            S = tl.where(place < -1, float("nan"), S)
    return S, state_at, inside


@triton.jit
def store_final_columns(
    S, state_out, state_at, inside, cu, sequences, H, col, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, INDEXED: tl.constexpr,
):  # fmt: skip
    """Store the columns of a final state; the arguments are those and the results of `load_initial_columns`.

    With INDEXED, `state_out` is a pool, and the places of the final states follow those of the initial ones.
    """
    if INDEXED:
        state_at, inside, _ = locate_columns(cu + 2 * sequences + 1, H, col, DK, DV, BK, BV, INDEXED)
    tl.store(state_out + state_at, S, mask=inside)


@triton.jit
def count_tiles(
    cu, sequences, T, segment, length, steps, L: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr,
    SKIP_LAST: tl.constexpr,
):  # fmt: skip
    """Return the number of tiles of a scan.

    With SKIP_LAST it is 0 for the segment that the scan of a sequence reaches last, whose final state is not read.
    """
    tiles = tl.cdiv(steps, L).to(tl.int32)
    if SKIP_LAST:
        _, _, whole, start, _ = locate_chunk(cu, sequences, T, segment, length, IS_VARLEN)
        if start + steps >= whole and not REVERSE:
            tiles *= 0
        if start == 0 and REVERSE:
            tiles *= 0
    return tiles


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """Return the matrix product a b, (M, N).

    IEEE float32 has no MMAs: a thread loads whole rows of a and columns of b into registers. The product is therefore
    summed over slices of the contracted dim.
    """
    M: tl.constexpr = a.shape[0]
    K: tl.constexpr = a.shape[1]
    N: tl.constexpr = b.shape[1]
    SLICE: tl.constexpr = 64 if K <= 256 else 32
    if PRECISION == "ieee" and K > SLICE:
        a = tl.permute(tl.reshape(a, (M, K // SLICE, SLICE)), (1, 0, 2))
        return tl.sum(tl.dot(a, tl.reshape(b, (K // SLICE, SLICE, N)), input_precision=PRECISION), 0)
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def split_rounding(w, place, dtype: tl.constexpr):
    """Return w, (L), as an MMA operand (16, L): row 0 is w rounded to `dtype`, row 1 the rounding error, the rest 0."""
    high = w.to(dtype)
    low = (w - high).to(dtype)
    return tl.where(place == 0, high[None, :], tl.where(place == 1, low[None, :], 0.0)).to(dtype)


@triton.jit
def scale_to_range(w, dtype: tl.constexpr, DELTA: tl.constexpr):
    """Return w and 1, or with DELTA and float16 w / max |w| and max |w|: weights times delta can exceed float16."""
    if DELTA and dtype == tl.float16:
        top = tl.maximum(tl.max(tl.abs(w), 0), TINY)
        return w / top, top
    else:
        return w, 1.0


@triton.jit
def gate_matrix(gate, r, L: tl.constexpr, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """Return the transposed gate matrix D^T, [updating step, reading step], (L, L); 0 where the update comes later.

    With REVERSE the updating steps are the rows of D and the reading steps its columns: the result is D itself. Entries
    are exp2 of sums of the vectors ROW and COLUMN, with EXACT also of their LOW vectors.
    """
    update: tl.constexpr = ROW if REVERSE else COLUMN
    read: tl.constexpr = COLUMN if REVERSE else ROW
    e = tl.load(gate + update * L + r)[:, None] + tl.load(gate + read * L + r)[None, :]
    if EXACT:
        u = tl.load(gate + (ROW_LOW if REVERSE else COLUMN_LOW) * L + r)
        e += u[:, None] + tl.load(gate + (COLUMN_LOW if REVERSE else ROW_LOW) * L + r)[None, :]
    if REVERSE:
        return tl.where(r[:, None] >= r[None, :], tl.exp2(e), 0.0)
    else:
        return tl.where(r[:, None] <= r[None, :], tl.exp2(e), 0.0)


@triton.jit
def store_checkpoint(checkpoints, at, S, rk, rv, DK: tl.constexpr, DV: tl.constexpr):
    """Store the block S of a state, rows rk and columns rv, in `checkpoints`, (rows, DV), from row `at`."""
    inside = (rk < DK)[:, None] & (rv < DV)[None, :]
    tl.store(checkpoints + (at + rk[:, None]) * DV + rv[None, :], S.to(checkpoints.dtype.element_ty), mask=inside)


# With touch_tile(), wait_for_mma() and load_opaque() a kernel needs at most half of the shared memory and of the
# registers of a Hopper multiprocessor, which then runs two programs (WGMMA in `dq_dk.py`). Triton gives a tile that
# only MMAs read one buffer more than its pipeline needs; touch_tile() is another read and avoids it. wait_for_mma()
# completes the MMAs before the next load. load_opaque() keeps the scaled tile out of the registers.


@triton.jit
def _take_first(a, b):
    """Return the first of two values, for a reduction that only has to read them."""
    return a


@triton.jit
def touch_tile(x):
    """Read a tile (rows, columns) outside of MMAs and return one number a row."""
    return tl.reduce(x, 1, _take_first)


@triton.jit
def wait_for_mma(x):
    """Return the accumulator of an MMA unchanged, after the MMA is complete."""
    return tl.inline_asm_elementwise("", "=r,0", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def keep_reads(x, touched, T):
    """Return the number x unchanged; the compiler cannot tell, and keeps the reads of `touch_tile`."""
    if T < 0:  # never true
        x += tl.sum(touched.to(tl.float32), 0)
    return x


@triton.jit
def complete_mmas(S0, S1, BLOCKS: tl.constexpr, WGMMA: tl.constexpr):
    """Return both blocks of the state, with WGMMA after their MMAs are complete."""
    if WGMMA:
        S0 = wait_for_mma(S0)
        if BLOCKS == 2:
            S1 = wait_for_mma(S1)
    return S0, S1


@triton.jit
def load_opaque(p):
    """Load float32 values through inline assembly, which Triton does not rearrange."""
    return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [p], dtype=tl.float32, is_pure=True, pack=1)
