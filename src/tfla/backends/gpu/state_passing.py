"""State passing: from what each segment adds to the state to the state at each segment boundary.

For a segment c with decay a_c, the product of its forget gates, and the contribution S_c, the state that it reaches
from a zero initial state, the state after it is

    C_c = a_c C_{c-1} + S_c.    (S)

The cotangent dC obeys the same recurrence in reverse order. The states n are passed in the same way.
"""

import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.context import LaunchContext


@triton.jit
def rounded_product(a, b):
    """Return a b rounded to its dtype, so that the compiler cannot fuse the product with a later addition.

    In a sum over threads each thread adds its own products to rounded partial sums of other threads. A fused
    multiply-add would keep more digits of its own product, and threads that share a sum would get different results.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def _load_segment(states, decays, row, e, SIZE, exists):
    """Load elements e of the contribution S_c of a segment and its decay a_c; return zeros where not `exists`."""
    adds = tl.load(states + row * SIZE + e, mask=e < tl.where(exists, SIZE, 0), other=0.0)
    return adds.to(tl.float32), tl.load(decays + row, mask=exists, other=0.0)


@triton.jit
def _segments_of(cu, s, T, steps, IS_VARLEN: tl.constexpr):
    """Return the number of the first segment of sequence s, and how many segments the sequence has."""
    if IS_VARLEN:
        first = tl.load(cu + s).to(tl.int64)
        count = tl.cdiv(tl.load(cu + s + 1).to(tl.int64) - first, steps)
        return first // steps + s, count
    else:
        count = tl.cdiv(T, steps).to(tl.int64)
        return s * count, count


@triton.jit
def _locate(row, h, H, SIZE, e, inside, DV: tl.constexpr, POOL_DK: tl.constexpr, POOL_DV: tl.constexpr):
    """Return where elements e of a state, of SIZE elements, are in states (rows, H, SIZE), and which of them exist.

    With POOL_DV the states are (rows, H, POOL_DK, POOL_DV), without the padding of the state, which has DV columns.
    """
    at = (row * H + h).to(tl.int64)
    if POOL_DV > 0:
        k, v = e // DV, e % DV
        return at * (POOL_DK * POOL_DV) + k * POOL_DV + v, inside & (k < POOL_DK) & (v < POOL_DV)
    else:
        return at * SIZE + e, inside


@triton.jit
def _load_given(
    given, row, h, H, SIZE, BLOCK: tl.constexpr, USE_INITIAL_STATE: tl.constexpr, INDEXED: tl.constexpr,
    DV: tl.constexpr, POOL_DK: tl.constexpr, POOL_DV: tl.constexpr,
):  # fmt: skip
    """Return the elements of a state that this program passes, (BLOCK), which of them exist, and their first values.

    `row` is the index of the program's sequence in `given`. With INDEXED, -1 stands for no row, whose state is zero,
    and -2 for a row that the pool lacks, whose state is NaN.
    """
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < SIZE
    S = tl.zeros([BLOCK], tl.float32)
    if USE_INITIAL_STATE:
        at, exists = _locate(row, h, H, SIZE, e, inside, DV, POOL_DK, POOL_DV)
        if INDEXED:
            exists = exists & (row >= 0)
        S = tl.load(given + at, mask=exists, other=0.0).to(tl.float32)
        if INDEXED:
            S = tl.where(row < -1, float("nan"), S)
    return e, inside, S


@triton.jit(do_not_specialize=["T", "steps"])
def pass_states(
    states, decays, given, final, cu, T, H, steps, SIZE,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr, INDEXED: tl.constexpr, DV: tl.constexpr, POOL_DK: tl.constexpr,
    POOL_DV: tl.constexpr,
):  # fmt: skip
    """Replace the contribution of each segment by the state at its start, or with REVERSE by the cotangent at its end.

    Args:
        states: contributions S_c, (segments, H, SIZE); overwritten by the states.
        decays: decays a_c, (segments, H) float32.
        given: the initial states of the sequences, or with REVERSE the cotangents of their final states,
            (sequences, H, SIZE) float32; read with USE_INITIAL_STATE. With INDEXED a pool, (rows, H, SIZE), in any
            float dtype.
        final: the states after the last segments, of the shape of `given`; written with STORE_FINAL_STATE. With
            INDEXED a pool too, which may be the same.
        cu: offsets of packed sequences, (sequences + 1); read with IS_VARLEN. With INDEXED the indices of the rows of
            initial and of final states in their pools follow them, see `bound_sequences`.
        T: the number of steps.
        H: the number of heads.
        steps: the number of steps of a segment.
        SIZE: the number of elements of a state.
        DV, POOL_DK, POOL_DV: the columns of a state, and the rows and columns of those in pools without its padding; or
            zeros.

    The grid is (SIZE / BLOCK, sequences, H).
    """
    s = tl.program_id(1)
    h = tl.program_id(2)
    segment0, count = _segments_of(cu, s, T, steps, IS_VARLEN)
    state_row = s
    if INDEXED:
        state_row = tl.load(cu + tl.num_programs(1) + 1 + s).to(tl.int64)
    # S is the running state.
    e, inside, S = _load_given(
        given, state_row, h, H, SIZE, BLOCK, USE_INITIAL_STATE, INDEXED, DV, POOL_DK, POOL_DV
    )  # fmt: skip
    row = (segment0 + (count - 1 if REVERSE else 0)) * H + h
    step = -H if REVERSE else H
    adds, decay = _load_segment(states, decays, row, e, SIZE, count > 0)
    for c in range(0, count):
        # The next contribution is loaded before this store, since the compiler must assume that the two may overlap.
        later, later_decay = _load_segment(states, decays, row + step, e, SIZE, c + 1 < count)
        tl.store(states + row * SIZE + e, S.to(states.dtype.element_ty), mask=inside)
        S = S * decay + adds  # (S)
        adds, decay = later, later_decay
        row += step
    if STORE_FINAL_STATE:
        if INDEXED:
            state_row = tl.load(cu + 2 * tl.num_programs(1) + 1 + s).to(tl.int64)
            inside = inside & (state_row >= 0)
        at, inside = _locate(state_row, h, H, SIZE, e, inside, DV, POOL_DK, POOL_DV)
        tl.store(final + at, S, mask=inside)


@triton.jit(do_not_specialize=["T", "steps"])
def final_states(
    states, decays, given, final, cu, T, H, steps, SIZE,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
):  # fmt: skip
    """Store the states after the last segments, (S), and leave the contributions as they are.

    The arguments and the grid are those of :func:`pass_states`.
    """
    s = tl.program_id(1)
    h = tl.program_id(2)
    segment0, count = _segments_of(cu, s, T, steps, IS_VARLEN)
    e, inside, S = _load_given(given, s, h, H, SIZE, BLOCK, USE_INITIAL_STATE, False, 0, 0, 0)  # S: the state
    for c in range(0, count):
        row = (segment0 + (count - 1 - c if REVERSE else c)) * H + h
        adds, decay = _load_segment(states, decays, row, e, SIZE, count > 0)
        S = S * decay + adds  # (S)
    tl.store(final + (s * H + h).to(tl.int64) * SIZE + e, S, mask=inside)


def launch_final(ctx: LaunchContext, states: Tensor, decays: Tensor, given: Tensor | None, *, reverse: bool) -> Tensor:
    """Return the states after the last segments, (N, H, ...), from what segments add, which is left as it is.

    Args:
        ctx: The context of the call.
        states, decays, given, reverse: As in :func:`launch`.
    """
    size = states[0, 0].numel()
    block = min(1024, power_of_two(size))
    final = ctx.new(ctx.x.sequences, *states.shape[1:])
    ctx.launch(final_states, (ceil_div(size, block), ctx.x.sequences, ctx.H),
        states, decays, states if given is None else given, final, ctx.cu_seqlens, ctx.T, ctx.H, ctx.segment_steps,
        size, BLOCK=block, REVERSE=reverse, IS_VARLEN=ctx.packed, USE_INITIAL_STATE=given is not None, num_warps=4,
    )  # fmt: skip
    return final


def launch(
    ctx: LaunchContext, states: Tensor, decays: Tensor, given: Tensor | None, final: Tensor | None, *, reverse: bool,
    steps: int = 0, indexed: bool = False,
) -> None:  # fmt: skip
    """Replace, in place, what each segment adds to a state by the state at its start, or with `reverse` at its end.

    Args:
        ctx: The context of the call.
        states: What segments add to C, (segments, H, K, V), to n, (segments, H, K), or to their cotangents.
        decays: The decays over segments, (segments, H) float32.
        given: The initial states of the sequences, or the cotangents of their final states, (N, H, ...); None: zeros.
        final: Output for the final states of the sequences, or the cotangents of their initial states, or None.
        reverse: Whether cotangents are passed.
        steps: The number of steps of a segment, if it is not that of the context.
        indexed: Whether `given` and `final` are pools, of which the context has the rows of the sequences.
    """
    size = states[0, 0].numel()
    block = min(1024, power_of_two(size))
    padded = (ctx.V, *ctx.pool_dims) if indexed and ctx.padded else (0, 0, 0)
    ctx.launch(pass_states, (ceil_div(size, block), ctx.x.sequences, ctx.H),
        states, decays, states if given is None else given, states if final is None else final, ctx.cu_seqlens, ctx.T,
        ctx.H, steps or ctx.segment_steps, size, BLOCK=block, REVERSE=reverse, IS_VARLEN=ctx.packed,
        USE_INITIAL_STATE=given is not None, STORE_FINAL_STATE=final is not None, INDEXED=indexed,
        DV=padded[0], POOL_DK=padded[1], POOL_DV=padded[2], num_warps=4,
    )  # fmt: skip
