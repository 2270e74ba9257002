"""The kernels of the short causal convolution of every channel, followed by SiLU, and of its gradients.

For inputs x_t (C,) of tokens t, where x_s counts as 0 in the sums of token t if s comes before the document of t,

    p_t = sum_j w_j x_{t-j} + b,  j from 0 to SIZE - 1                             (1)
    y_t = silu(p_t)                                                                (2)

and with the cotangent dy_t of y_t

    dp_t = dy_t silu'(p_t)                                                         (3)
    dx_s = sum_j w_j dp_{s+j}, over those s + j that are in the document of s      (4)
    dw_j = sum_t dp_t x_{t-j},  db = sum_t dp_t                                    (5)

Everything is computed in float32. A program has a tile of tokens and channels. The backward computes p of its tokens
and of the SIZE - 1 tokens after them again, so that it reads x and dy and writes dx, and nothing is stored in between.
"""

import triton
import triton.language as tl


@triton.jit
def locate_tile(rows, C, BEFORE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the sequence (int64), the tokens (TOKENS,) and the channels (CHANNELS,) of this program, and its number.

    The number counts tiles of tokens over all sequences. The first token of the `rows` inputs of a sequence is -BEFORE.
    """
    across = tl.cdiv(C, CHANNELS)
    number = tl.program_id(0) // across
    tiles = tl.cdiv(rows, TOKENS)
    token = number % tiles * TOKENS - BEFORE + tl.arange(0, TOKENS)
    channel = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    return (number // tiles).to(tl.int64), token, channel, number


@triton.jit
def load_rows(X, stride, token, first, T, channel, C):
    """Return rows of X (., C) as float32 (TOKENS, CHANNELS), zeros for tokens before `first` and from T on."""
    inside = ((token >= first) & (token < T))[:, None] & (channel < C)[None, :]
    return tl.load(X + token.to(tl.int64)[:, None] * stride + channel[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def load_weight(W, j, channel, C, SIZE: tl.constexpr):
    """Return w_j (CHANNELS,) as float32 from W (SIZE, C), whose last row is w_0."""
    return tl.load(W + (SIZE - 1 - j) * C + channel, channel < C, 0.0).to(tl.float32)


@triton.jit
def load_first(First, stride, token, T):
    """Return the first token (TOKENS,) of the document of each token; any number where `token` is outside of 0 to T."""
    return tl.load(First + token.to(tl.int64) * stride, (token >= 0) & (token < T), 0).to(tl.int32)


@triton.jit
def preactivations(
    X, stride, W, Bias, token, first, T, channel, C, SHIFT: tl.constexpr, SIZE: tl.constexpr, BEFORE: tl.constexpr
):
    """Compute (1), p (TOKENS, CHANNELS) of the tokens SHIFT after `token`.

    X is the place of token 0 of the sequence, and `first` (TOKENS,) the first tokens of documents, or None.
    """
    p = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    for j in tl.static_range(SIZE):
        x = load_rows(X, stride, token + (SHIFT - j), -BEFORE, T, channel, C)
        if first is not None:
            x = tl.where((token + (SHIFT - j) >= first)[:, None], x, 0.0)
        p += x * load_weight(W, j, channel, C, SIZE)[None, :]
    if Bias is not None:
        p += tl.load(Bias + channel, channel < C, 0.0).to(tl.float32)[None, :]
    return p


@triton.jit(do_not_specialize=["T"])
def convolve(
    X, x_sequence, x_token, W, Bias, First, first_sequence, first_token, Y, T, C,
    SIZE: tl.constexpr, BEFORE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute (1) and (2) of a tile.

    X is (B, BEFORE + T, C) with strides x_sequence, x_token and 1; W (SIZE, C); Bias (C,) or None; First, the first
    token of each token's document, (B, T) with strides first_sequence and first_token, or None; Y (B, T, C).
    """
    b, token, channel, _ = locate_tile(T, C, 0, TOKENS, CHANNELS)
    first = None
    if First is not None:
        first = load_first(First + b * first_sequence, first_token, token, T)
    X += b * x_sequence + BEFORE * x_token
    p = preactivations(X, x_token, W, Bias, token, first, T, channel, C, 0, SIZE, BEFORE)
    at = (b * T + token)[:, None] * C + channel[None, :]
    y = p * tl.sigmoid(p)  # (2)
    tl.store(Y + at, y.to(Y.dtype.element_ty), (token < T)[:, None] & (channel < C)[None, :])


@triton.jit(do_not_specialize=["T"])
def convolve_backward(
    X, x_sequence, x_token, W, Bias, First, first_sequence, first_token, dY, dy_sequence, dy_token, dX, Sums, T, C,
    SIZE: tl.constexpr, BEFORE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute (3) and (4) of a tile, and its part of the sums (5).

    dY is (B, T, C) with strides dy_sequence, dy_token and 1, and dX (B, BEFORE + T, C). Sums (tiles of tokens, SIZE or
    with a bias SIZE + 1, C) float32 receives the tile's dw in the order of the rows of W, and db. The other operands
    are those of `convolve`.
    """
    b, token, channel, number = locate_tile(BEFORE + T, C, BEFORE, TOKENS, CHANNELS)
    X += b * x_sequence + BEFORE * x_token
    dY += b * dy_sequence
    sums = SIZE if Bias is None else SIZE + 1
    Sums += number.to(tl.int64) * sums * C + channel
    dx = tl.zeros((TOKENS, CHANNELS), tl.float32)
    # j = 0, which stores sums, is the last one, so that the compiler joins equal loads of all j before the stores.
    for j in tl.static_range(SIZE - 1, -1, -1):
        first = None
        if First is not None:
            first = load_first(First + b * first_sequence, first_token, token + j, T)
        p = preactivations(X, x_token, W, Bias, token, first, T, channel, C, j, SIZE, BEFORE)
        sigmoid = tl.sigmoid(p)
        dy = load_rows(dY, dy_token, token + j, 0, T, channel, C)
        inside = ((token + j >= 0) & (token + j < T))[:, None]
        dp = tl.where(inside, dy * sigmoid * (1.0 + p * (1.0 - sigmoid)), 0.0)  # (3)
        term = dp * load_weight(W, j, channel, C, SIZE)[None, :]
        if First is not None:
            term = tl.where((token >= first)[:, None], term, 0.0)
        dx += term  # (4)
        if j == 0:  # (5)
            for i in tl.static_range(SIZE):
                x = load_rows(X, x_token, token - i, -BEFORE, T, channel, C)
                if First is not None:
                    x = tl.where((token - i >= first)[:, None], x, 0.0)
                # `where` stands between product and sum: joined to FMAs, they would round differently by thread.
                tl.store(Sums + (SIZE - 1 - i) * C, tl.sum(tl.where(inside, dp * x, 0.0), 0), channel < C)
            if Bias is not None:
                tl.store(Sums + SIZE * C, tl.sum(dp, 0), channel < C)
    at = (b * (BEFORE + T) + BEFORE + token)[:, None] * C + channel[None, :]
    tl.store(dX + at, dx.to(dX.dtype.element_ty), (token < T)[:, None] & (channel < C)[None, :])
