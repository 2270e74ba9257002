"""Sums: over threads, of segments to the states between them, and of heads that share q and k."""

import triton
import triton.language as tl


@triton.jit
def rounded_product(a, b):
    """a b, rounded, for sums over threads. An addition that takes in its product has more digits of a thread's own than
    of what it is sent, so threads that share a sum would each have another, and any of them may be the one to store it.
    """
    return tl.fma(a, b, 0.0)


@triton.jit
def _load_segment(states, decays, row, e, SIZE, there):
    """What a segment adds to a state, and its decay."""
    adds = tl.load(states + row * SIZE + e, mask=e < tl.where(there, SIZE, 0), other=0.0)
    return adds.to(tl.float32), tl.load(decays + row, mask=there, other=0.0)


@triton.jit(do_not_specialize=["T", "steps"])
def join(
    states, decays, given, final, cu, T, H, steps, SIZE,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, IS_VARLEN: tl.constexpr, USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
):  # fmt: skip
    """Turns what each segment adds to the state into the state that it starts from, or walking back ends with."""
    s = tl.program_id(1)
    h = tl.program_id(2)
    if IS_VARLEN:
        first = tl.load(cu + s).to(tl.int64)
        count = tl.cdiv(tl.load(cu + s + 1).to(tl.int64) - first, steps)
        slot0 = first // steps + s
    else:
        count = tl.cdiv(T, steps).to(tl.int64)
        slot0 = s * count
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < SIZE
    S = tl.zeros([BLOCK], tl.float32)
    if USE_INITIAL_STATE:
        S = tl.load(given + (s * H + h).to(tl.int64) * SIZE + e, mask=inside, other=0.0)
    row = (slot0 + (count - 1 if REVERSE else 0)) * H + h
    step = -H if REVERSE else H
    adds, decay = _load_segment(states, decays, row, e, SIZE, count > 0)
    for c in range(0, count):
        # Read before what is written here, which for all the compiler knows might be the same.
        later, later_decay = _load_segment(states, decays, row + step, e, SIZE, c + 1 < count)
        tl.store(states + row * SIZE + e, S.to(states.dtype.element_ty), mask=inside)
        S = S * decay + adds
        adds, decay = later, later_decay
        row += step
    if STORE_FINAL_STATE:
        tl.store(final + (s * H + h).to(tl.int64) * SIZE + e, S, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_of_groups(X, Out, rows, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[r, d] = the sum over g of x[r, g, d], added up in float32."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (r < rows) & (d < D)
    total = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for g in tl.static_range(GROUP):
        total += tl.load(X + (r * GROUP + g) * D + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + r * D + d, total.to(Out.dtype.element_ty), mask=inside)
