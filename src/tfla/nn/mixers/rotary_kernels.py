"""The kernel of the rotary embedding.

For the halves a and b of a head's channels and the angles of their token,

    y = [a cos - b sin, b cos + a sin]

in float32. The kernel reads and writes every number once, and the angles once for all heads of a token.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "angles"])
def rotate(X, table, Y, tokens, angles, H, HALF: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Rotate the heads of TOKENS tokens. The grid is (tokens / TOKENS rounded up).

    Args:
        X: (tokens, H, 2 HALF), contiguous.
        table: cosines and sines, (2, angles, HALF); token t has those of t modulo angles.
        Y: the result, like X; written.
        tokens, angles, H: sizes.
        CHANNELS: a power of 2 that is HALF or above it.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, CHANNELS)
    inside = (t < tokens)[:, None] & (c < HALF)[None, :]
    own = table + (t % angles).to(tl.int64)[:, None] * HALF + c[None, :]
    cos = tl.load(own, inside, 0.0).to(tl.float32)
    sin = tl.load(own + angles.to(tl.int64) * HALF, inside, 0.0).to(tl.float32)
    place = t.to(tl.int64)[:, None] * (H * 2 * HALF) + c[None, :]
    for _ in range(H):
        a = tl.load(X + place, inside, 0.0).to(tl.float32)
        b = tl.load(X + place + HALF, inside, 0.0).to(tl.float32)
        tl.store(Y + place, (a * cos - b * sin).to(Y.dtype.element_ty), inside)
        tl.store(Y + place + HALF, (b * cos + a * sin).to(Y.dtype.element_ty), inside)
        place += 2 * HALF
