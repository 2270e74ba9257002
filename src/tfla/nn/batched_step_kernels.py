"""The kernels of :mod:`tfla.nn.step_kernels` for one token of each of 2 to 16 sequences, with the same equations.

A step still reads every weight once and is bound by the memory's bandwidth, so that the sequences of a batch have to
share what a program reads. A program computes ROWS rows of a product for all sequences, by tensor cores: the tokens are
the 16 rows of a tile, of which those from BATCH on are zero. It runs through the columns in blocks of BK, of which
several are on their way at a time. Each token is normalized as in the kernels for one sequence, by a factor after the
product; its product with the weight of the norm is rounded to the dtype of the weights, as the model's own step does.

Names of all kernels: b is a sequence, r a column of a weight matrix. X and Out have a row for each sequence.
"""

import triton
import triton.language as tl

from tfla.nn.step_kernels import capped

TOKENS = tl.constexpr(16)  # rows of a tile of tensor cores


@triton.jit
def load_weights(W, first, rows, start, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Return a block (ROWS, BK) of W (rows, K), zero outside of it."""
    row = first + tl.arange(0, ROWS)  # (ROWS,)
    r = start + tl.arange(0, BK)  # (BK,)
    return tl.load(
        W + row.to(tl.int64)[:, None] * K + r[None, :], (row < rows)[:, None] & (r < K)[None, :], 0.0
    )  # (ROWS, BK)


@triton.jit
def load_tokens(X, start, K: tl.constexpr, BATCH: tl.constexpr, BK: tl.constexpr):
    """Return a block (TOKENS, BK) of X (BATCH, K), zero outside of it."""
    b = tl.arange(0, TOKENS)  # (TOKENS,)
    r = start + tl.arange(0, BK)  # (BK,)
    return tl.load(X + b[:, None] * K + r[None, :], (b < BATCH)[:, None] & (r < K)[None, :], 0.0)  # (TOKENS, BK)


@triton.jit
def weighted(x, norm, start, K: tl.constexpr, BK: tl.constexpr):
    """Return x (TOKENS, BK) times the weight of the norm (K,), in x's dtype."""
    r = start + tl.arange(0, BK)  # (BK,)
    return (x.to(tl.float32) * tl.load(norm + r, r < K, 0.0).to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def inverse_rms_of(squares, eps, K: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) (TOKENS,) from the squares (TOKENS, BK) of all blocks, added up."""
    return tl.rsqrt(tl.sum(squares, 1) / K + eps)


@triton.jit
def normed_products(
    W, first, rows, X, norm, eps, K: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr
):
    """Return the products (TOKENS, ROWS) of rows of W (rows, K) from ``first`` on with RMSNorm(x) of X (BATCH, K)."""
    y = tl.zeros((TOKENS, ROWS), tl.float32)
    squares = tl.zeros((TOKENS, BK), tl.float32)
    for start in range(0, K, BK):
        w = load_weights(W, first, rows, start, K, ROWS, BK)  # (ROWS, BK)
        x = load_tokens(X, start, K, BATCH, BK)  # (TOKENS, BK)
        squares += x.to(tl.float32) * x.to(tl.float32)
        y = tl.dot(weighted(x, norm, start, K, BK), tl.trans(w), y, input_precision="ieee")
    return y * inverse_rms_of(squares, eps, K)[:, None]


@triton.jit
def store_rows(y, Out, first, rows, BATCH: tl.constexpr, ROWS: tl.constexpr):
    """Store y (TOKENS, ROWS) in the columns of Out (BATCH, rows) from ``first`` on."""
    b = tl.arange(0, TOKENS)  # (TOKENS,)
    row = first + tl.arange(0, ROWS)  # (ROWS,)
    tl.store(
        Out + b[:, None] * rows + row[None, :], y.to(Out.dtype.element_ty), (b < BATCH)[:, None] & (row < rows)[None, :]
    )


@triton.jit
def project(
    W, first, X, norm, eps, Out,
    D: tl.constexpr, N: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store the products of rows of W (N, D) from ``first`` on with RMSNorm(x) of X (BATCH, D) in Out (BATCH, N)."""
    store_rows(normed_products(W, first, N, X, norm, eps, D, BATCH, ROWS, BK), Out, first, N, BATCH, ROWS)


@triton.jit
def gate(
    W, bias, first, X, norm, eps, cap, Out,
    D: tl.constexpr, N: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store pre-activations (3) of the heads from ``first`` on in Out (BATCH, N): W (N, D) and bias (N,)."""
    row = first + tl.arange(0, ROWS)  # (ROWS,)
    y = normed_products(W, first, N, X, norm, eps, D, BATCH, ROWS, BK)
    y += tl.load(bias + row, row < N, 0.0).to(tl.float32)[None, :]
    store_rows(capped(y, cap), Out, first, N, BATCH, ROWS)


@triton.jit
def mixer_inputs(
    X, norm, eps, Q, K, V, O, I, I_bias, F, F_bias, cap, Out, Gates,
    DQ: tl.constexpr, DV: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Compute a tile of (1)-(3): the first programs the gates, the others q, k, v and o.

    X is x (BATCH, D). Out receives q, k (BATCH, DQ), v and o (BATCH, DV), one after the other, and Gates (2, BATCH, H)
    float32 receives i and f. The other operands are those of the kernel for one sequence.
    """
    tile = tl.program_id(0)
    gates: tl.constexpr = (H + ROWS - 1) // ROWS
    keys: tl.constexpr = (DQ + ROWS - 1) // ROWS
    values: tl.constexpr = (DV + ROWS - 1) // ROWS
    if tile < gates:
        gate(I, I_bias, tile * ROWS, X, norm, eps, cap, Gates, D, H, BATCH, ROWS, BK)
    elif tile < 2 * gates:
        gate(F, F_bias, (tile - gates) * ROWS, X, norm, eps, cap, Gates + BATCH * H, D, H, BATCH, ROWS, BK)
    else:
        tile -= 2 * gates
        if tile < keys:
            project(Q, tile * ROWS, X, norm, eps, Out, D, DQ, BATCH, ROWS, BK)
        elif tile < 2 * keys:
            project(K, (tile - keys) * ROWS, X, norm, eps, Out + BATCH * DQ, D, DQ, BATCH, ROWS, BK)
        elif tile < 2 * keys + values:
            project(V, (tile - 2 * keys) * ROWS, X, norm, eps, Out + 2 * BATCH * DQ, D, DV, BATCH, ROWS, BK)
        else:
            to = Out + 2 * BATCH * DQ + BATCH * DV
            project(O, (tile - 2 * keys - values) * ROWS, X, norm, eps, to, D, DV, BATCH, ROWS, BK)


@triton.jit
def swiglu(
    X,
    norm,
    eps,
    W_gate,
    W_up,
    Out,
    D: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute ROWS columns of silu(W_gate z) * W_up z for z = RMSNorm(x), (5) and (6).

    X and norm are (BATCH, D) and (D,), W_gate and W_up (N, D), and Out is (BATCH, N).
    """
    first = tl.program_id(0) * ROWS
    gate = tl.zeros((TOKENS, ROWS), tl.float32)
    up = tl.zeros((TOKENS, ROWS), tl.float32)
    squares = tl.zeros((TOKENS, BK), tl.float32)
    for start in range(0, D, BK):
        w_gate = load_weights(W_gate, first, N, start, D, ROWS, BK)  # (ROWS, BK)
        w_up = load_weights(W_up, first, N, start, D, ROWS, BK)  # (ROWS, BK)
        x = load_tokens(X, start, D, BATCH, BK)  # (TOKENS, BK)
        squares += x.to(tl.float32) * x.to(tl.float32)
        y = weighted(x, norm, start, D, BK)
        gate = tl.dot(y, tl.trans(w_gate), gate, input_precision="ieee")
        up = tl.dot(y, tl.trans(w_up), up, input_precision="ieee")
    scale = inverse_rms_of(squares, eps, D)[:, None]
    gate, up = gate * scale, up * scale
    store_rows(gate * tl.sigmoid(gate) * up, Out, first, N, BATCH, ROWS)


@triton.jit
def add_product(W, Z, X, D: tl.constexpr, N: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """Add ROWS columns of W z to the residual stream x in place, (4) and (6): W (N, D), Z (BATCH, D), X (BATCH, N)."""
    first = tl.program_id(0) * ROWS
    y = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, D, BK):
        w = load_weights(W, first, N, start, D, ROWS, BK)  # (ROWS, BK)
        y = tl.dot(load_tokens(Z, start, D, BATCH, BK), tl.trans(w), y, input_precision="ieee")
    b = tl.arange(0, TOKENS)  # (TOKENS,)
    row = first + tl.arange(0, ROWS)  # (ROWS,)
    at = X + b[:, None] * N + row[None, :]
    y += tl.load(at, (b < BATCH)[:, None] & (row < N)[None, :], 0.0).to(tl.float32)
    store_rows(y, X, first, N, BATCH, ROWS)


@triton.jit
def logits(
    X,
    norm,
    eps,
    W,
    cap,
    Out,
    D: tl.constexpr,
    N: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute ROWS logits of each token, (7): X (BATCH, D), W (N, D) -> Out (BATCH, N) float32."""
    first = tl.program_id(0) * ROWS
    y = normed_products(W, first, N, X, norm, eps, D, BATCH, ROWS, BK)
    store_rows(capped(y, cap), Out, first, N, BATCH, ROWS)
