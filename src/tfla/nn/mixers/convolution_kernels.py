# Triton compiles no starred tuples, and loops that it unrolls make a tuple longer.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

"""The kernels of the short causal convolution of every channel, followed by SiLU, and of its gradients.

For inputs x_t (C,) of tokens t, where x_s counts as 0 in the sums of token t if s comes before the document of t,

    p_t = sum_j w_j x_{t-j} + b,  j from 0 to SIZE - 1                             (1)
    y_t = silu(p_t)                                                                (2)

and with the cotangent dy_t of y_t

    dp_t = dy_t silu'(p_t)                                                         (3)
    dx_s = sum_j w_j dp_{s+j}, over those s + j that are in the document of s      (4)
    dw_j = sum_t dp_t x_{t-j},  db = sum_t dp_t                                    (5)

Everything is computed in float32. A program has some channels of consecutive tokens and walks through them, with the
SIZE - 1 inputs before a token in registers. In the backward it also keeps the sums (4) of so many tokens, and of (5),
and goes on for SIZE - 1 tokens, whose dp is computed twice. It reads x and dy and writes dx, and nothing is stored in
between. UNROLL rows are loaded at a time, before any of them is used, so that their loads overlap.
"""

import triton
import triton.language as tl


@triton.jit
def locate_tile(rows, C, BEFORE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the sequence (int64), the first token and the channels (CHANNELS,) of this program, and its number.

    The number counts tiles of tokens over all sequences. The first token of the `rows` inputs of a sequence is -BEFORE.
    """
    across = tl.cdiv(C, CHANNELS)
    number = tl.program_id(0) // across
    tiles = tl.cdiv(rows, TOKENS)
    channel = tl.program_id(0) % across * CHANNELS + tl.arange(0, CHANNELS)
    return (number // tiles).to(tl.int64), number % tiles * TOKENS - BEFORE, channel, number


@triton.jit
def load_row(X, stride, token, first, T, channel, C):
    """Return the row of a token in X (., C) as float32 (CHANNELS,), zeros for tokens before `first` and from T on."""
    inside = (token >= first) & (token < T) & (channel < C)
    return tl.load(X + token.to(tl.int64) * stride + channel, inside, 0.0).to(tl.float32)


@triton.jit
def load_rows(X, stride, token, first, T, channel, C, COUNT: tl.constexpr):
    """Return the rows of COUNT tokens from `token` on, as :func:`load_row` does."""
    rows = ()
    for u in tl.static_range(COUNT):
        rows = rows + (load_row(X, stride, token + u, first, T, channel, C),)
    return rows


@triton.jit
def load_earlier(X, stride, token, BEFORE: tl.constexpr, T, channel, C, SIZE: tl.constexpr):
    """Return the SIZE - 1 rows before `token`, the last one first."""
    rows = ()
    for j in tl.static_range(1, SIZE):
        rows = rows + (load_row(X, stride, token - j, -BEFORE, T, channel, C),)
    return rows


@triton.jit
def load_weights(W, channel, C, SIZE: tl.constexpr):
    """Return w_0, w_1, ... (CHANNELS,) as float32 from W (SIZE, C), whose last row is w_0."""
    weights = ()
    for j in tl.static_range(SIZE):
        weights = weights + (tl.load(W + (SIZE - 1 - j) * C + channel, channel < C, 0.0).to(tl.float32),)
    return weights


@triton.jit
def load_first(First, stride, token, T):
    """Return the first token of the document of a token from First; any number where `token` is outside of 0 to T."""
    return tl.load(First + token.to(tl.int64) * stride, (token >= 0) & (token < T), 0).to(tl.int32)


@triton.jit
def preactivation(inputs, weights, bias, SIZE: tl.constexpr):
    """Compute (1), p (CHANNELS,) of a token from what it convolves, x_t, x_{t-1}, ..."""
    p = inputs[0] * weights[0]
    for j in tl.static_range(1, SIZE):
        p += inputs[j] * weights[j]
    if bias is not None:
        p += bias
    return p


@triton.jit
def within_document(rows, token, first, SIZE: tl.constexpr):
    """Return rows of the tokens `token`, `token` - 1, ..., with zeros for those before `first` if that is not None."""
    if first is None:
        return rows
    else:
        inside = ()
        for j in tl.static_range(SIZE):
            inside = inside + (tl.where(token - j >= first, rows[j], 0.0),)
        return inside


@triton.jit(do_not_specialize=["T"])
def convolve(
    X, x_sequence, x_token, W, Bias, First, first_sequence, first_token, Y, T, C,
    SIZE: tl.constexpr, BEFORE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute (1) and (2) of a tile.

    X is (B, BEFORE + T, C) with strides x_sequence, x_token and 1; W (SIZE, C); Bias (C,) or None; First, the first
    token of each token's document, (B, T) with strides first_sequence and first_token, or None; Y (B, T, C).
    """
    b, start, channel, _ = locate_tile(T, C, 0, TOKENS, CHANNELS)
    X += b * x_sequence + BEFORE * x_token
    Y += b * T * C + channel
    weights, bias = load_weights(W, channel, C, SIZE), None
    if Bias is not None:
        bias = tl.load(Bias + channel, channel < C, 0.0).to(tl.float32)
    earlier = load_earlier(X, x_token, start, BEFORE, T, channel, C, SIZE)
    for done in range(0, tl.minimum(TOKENS, T - start), UNROLL):
        rows = load_rows(X, x_token, start + done, -BEFORE, T, channel, C, UNROLL)
        for u in tl.static_range(UNROLL):
            token = start + done + u
            first = None
            if First is not None:
                first = load_first(First + b * first_sequence, first_token, token, T)
            inputs = (rows[u],) + earlier
            earlier = inputs[: SIZE - 1]
            p = preactivation(within_document(inputs, token, first, SIZE), weights, bias, SIZE)
            y = p * tl.sigmoid(p)  # (2)
            tl.store(Y + token.to(tl.int64) * C, y.to(Y.dtype.element_ty), (token < T) & (channel < C))


@triton.jit
def gradients(
    x, dy, earlier, pending, sums, token, weights, bias, First, first_token, T, SIZE: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """Compute (3) of a token and its terms of (4) and, with ADD, of (5).

    Args:
        x: the input of the token, (CHANNELS,).
        dy: its cotangent, (CHANNELS,).
        earlier: the SIZE - 1 inputs before it, the last one first.
        pending: the sums (4) of the SIZE - 1 tokens before it, without later tokens, the last one first.
        sums: the sums (5) so far, of dw_0, dw_1, ... and of db with a bias.

    Returns:
        (4) of the token SIZE - 1 before this one, which is complete; and `earlier`, `pending` and `sums` of the next
        token.
    """
    first = None
    if First is not None:
        first = load_first(First, first_token, token, T)
    inputs = (x,) + earlier
    convolved = within_document(inputs, token, first, SIZE)
    p = preactivation(convolved, weights, bias, SIZE)
    sigmoid = tl.sigmoid(p)
    dp = tl.where((token >= 0) & (token < T), dy * sigmoid * (1.0 + p * (1.0 - sigmoid)), 0.0)  # (3)
    terms = ()
    for j in tl.static_range(SIZE):
        terms = terms + (weights[j] * dp,)
    terms = within_document(terms, token, first, SIZE)
    dx = (terms[0],)
    for j in tl.static_range(1, SIZE):
        dx = dx + (pending[j - 1] + terms[j],)  # (4)
    if ADD:
        added = ()
        for j in tl.static_range(SIZE):
            added = added + (sums[j] + dp * convolved[j],)  # (5)
        if bias is not None:
            added = added + (sums[SIZE] + dp,)
        sums = added
    return dx[SIZE - 1], inputs[: SIZE - 1], dx[: SIZE - 1], sums


@triton.jit(do_not_specialize=["T"])
def convolve_backward(
    X, x_sequence, x_token, W, Bias, First, first_sequence, first_token, dY, dy_sequence, dy_token, dX, Sums, T, C,
    SIZE: tl.constexpr, BEFORE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Compute (3) and (4) of a tile, and its part of the sums (5).

    dY is (B, T, C) with strides dy_sequence, dy_token and 1, and dX (B, BEFORE + T, C). Sums (tiles of tokens, SIZE or
    with a bias SIZE + 1, C) float32 receives the tile's dw in the order of the rows of W, and db. The other operands
    are those of `convolve`.
    """
    b, start, channel, number = locate_tile(BEFORE + T, C, BEFORE, TOKENS, CHANNELS)
    X += b * x_sequence + BEFORE * x_token
    dY += b * dy_sequence
    dX += (b * (BEFORE + T) + BEFORE) * C + channel
    if First is not None:
        First += b * first_sequence
    weights, bias = load_weights(W, channel, C, SIZE), None
    if Bias is not None:
        bias = tl.load(Bias + channel, channel < C, 0.0).to(tl.float32)
    earlier = load_earlier(X, x_token, start, BEFORE, T, channel, C, SIZE)
    zero = tl.zeros((CHANNELS,), tl.float32)
    pending = (zero,) * (SIZE - 1)
    sums = (zero,) * (SIZE if Bias is None else SIZE + 1)
    count = tl.cdiv(tl.minimum(TOKENS, T - start), UNROLL) * UNROLL
    for done in range(0, count, UNROLL):
        at = start + done
        rows = load_rows(X, x_token, at, -BEFORE, T, channel, C, UNROLL)
        cotangents = load_rows(dY, dy_token, at, 0, T, channel, C, UNROLL)
        for u in tl.static_range(UNROLL):
            dx, earlier, pending, sums = gradients(
                rows[u], cotangents[u], earlier, pending, sums, at + u, weights, bias, First, first_token, T, SIZE, True
            )  # fmt: skip
            store_row(dX, dx, at + u - (SIZE - 1), start, T, channel, C)
    end = start + count
    rows = load_rows(X, x_token, end, -BEFORE, T, channel, C, SIZE - 1)
    cotangents = load_rows(dY, dy_token, end, 0, T, channel, C, SIZE - 1)
    for u in tl.static_range(SIZE - 1):
        dx, earlier, pending, sums = gradients(
            rows[u], cotangents[u], earlier, pending, sums, end + u, weights, bias, First, first_token, T, SIZE, False
        )  # fmt: skip
        store_row(dX, dx, end + u - (SIZE - 1), start, T, channel, C)
    Sums += number.to(tl.int64) * len(sums) * C + channel
    for j in tl.static_range(SIZE):
        tl.store(Sums + (SIZE - 1 - j) * C, sums[j], channel < C)
    if Bias is not None:
        tl.store(Sums + SIZE * C, sums[SIZE], channel < C)


@triton.jit
def store_row(dX, dx, token, start, T, channel, C):
    """Store the gradient of a token from `start` to T; dX is the place of the program's channels of token 0."""
    inside = (token >= start) & (token < T) & (channel < C)
    tl.store(dX + token.to(tl.int64) * C, dx.to(dX.dtype.element_ty), inside)
