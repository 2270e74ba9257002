"""The kernels of :mod:`tfla.nn.step_kernels` for one token of each of 2 to 64 sequences, with the same equations.

A step still reads every weight once and is bound by the memory's bandwidth, so that the sequences of a batch have to
share what a program reads. A program computes ROWS rows of a product for all sequences, by tensor cores: the tokens are
TOKENS rows of a tile, of which those from BATCH on are zero. It runs through the columns in blocks of BK, of which
several are on their way at a time.

With SWAPPED the product of a block is (W x^T)^T in place of x W^T, so that the weights are the 64 rows that tensor
cores of Hopper multiply where they lie in shared memory. With SPLITS these 64 rows are parts of the columns of fewer
rows of W, one below the other, so that a matrix of few rows still occupies all multiprocessors.

The loop over blocks loads nothing but weights and tokens, which are copied asynchronously: a load that the loop waits
for would queue after all copies that are on their way. So the kernel that computes the residual stream x also stores
x times the weight of the next norm, rounded to the dtype of the weights as the model's own step does, and the sums of
the squares of its columns. The kernel after it scales its products by 1 / sqrt(mean(x^2) + eps).

Names of all kernels: b is a sequence, r a column of a weight matrix. X, Y and Out have a row for each sequence; Y is x
times the weight of a norm. Squares (PARTS, TOKENS) float32 adds up to the sum of x^2 of each sequence.
"""

import triton
import triton.language as tl

from tfla.nn.step_kernels import capped, load_vector


@triton.jit
def wait_for_inputs(OVERLAPPED: tl.constexpr):
    """Let the next launch start and wait for the end of those before this one, with OVERLAPPED."""
    if OVERLAPPED:
        # Triton has functions for these two, but those of 3.4 cannot be called.
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_block(
    X, first, rows, start, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Return columns of ROWS rows of X (rows, K): BK of each part from ``start`` on.

    The parts are one below the other (SPLITS ROWS, BK), zero outside of X.
    """
    i = tl.arange(0, SPLITS * ROWS)
    row, r = first + i % ROWS, start + tl.arange(0, BK)
    part: tl.constexpr = (K + 16 * SPLITS - 1) // (16 * SPLITS) * 16  # columns
    column = (i // ROWS * part)[:, None] + r[None, :]
    inside = (row < rows)[:, None] & (r < part)[None, :] & (column < K)
    return tl.load(X + row.to(tl.int64)[:, None] * K + column, inside, 0.0)  # (SPLITS ROWS, BK)


@triton.jit
def accumulate(x, w, y, SWAPPED: tl.constexpr):
    """Return y + x w^T, or its transpose with SWAPPED, for x (SPLITS TOKENS, BK) and w (SPLITS ROWS, BK)."""
    if SWAPPED:
        y = tl.dot(w, tl.trans(x), y, input_precision="ieee")
    else:
        y = tl.dot(x, tl.trans(w), y, input_precision="ieee")
    return y


@triton.jit
def zeros(TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, SWAPPED: tl.constexpr):
    """Return the initial y of :func:`accumulate`."""
    height: tl.constexpr = SPLITS * (ROWS if SWAPPED else TOKENS)
    width: tl.constexpr = SPLITS * (TOKENS if SWAPPED else ROWS)
    return tl.zeros((height, width), tl.float32)


@triton.jit
def add_parts(y, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, SWAPPED: tl.constexpr):
    """Return the products (TOKENS, ROWS) from y of :func:`accumulate`.

    Its diagonal blocks are the products of parts with themselves; the others mean nothing.
    """
    if SWAPPED:
        y = tl.trans(y)
    if SPLITS > 1:
        part = tl.arange(0, SPLITS)
        diagonal = part[:, None, None, None] == part[None, None, :, None]
        y = tl.where(diagonal, y.reshape(SPLITS, TOKENS, SPLITS, ROWS), 0.0)
        y = tl.sum(tl.sum(y, 2), 0)
    return y


@triton.jit
def products(
    W, first, rows, X,
    K: tl.constexpr, BATCH, TOKENS: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Return the products (TOKENS, ROWS) of rows of W (rows, K) from ``first`` on with X (BATCH, K)."""
    y = zeros(TOKENS, ROWS, SPLITS, SWAPPED)
    for start in range(0, (K + 16 * SPLITS - 1) // (16 * SPLITS) * 16, BK):
        w = load_block(W, first, rows, start, K, ROWS, BK, SPLITS)  # (SPLITS ROWS, BK)
        x = load_block(X, 0, BATCH, start, K, TOKENS, BK, SPLITS)  # (SPLITS TOKENS, BK)
        y = accumulate(x, w, y, SWAPPED)
    return add_parts(y, TOKENS, ROWS, SPLITS, SWAPPED)


@triton.jit
def load_squares(Squares, PARTS: tl.constexpr, BP: tl.constexpr, TOKENS: tl.constexpr):
    """Return the partial sums of squares (BP, TOKENS), zero from PARTS on.

    Kernels load them before their loop and add them up after it.
    """
    part, b = tl.arange(0, BP), tl.arange(0, TOKENS)
    return tl.load(Squares + part[:, None] * TOKENS + b[None, :], (part < PARTS)[:, None], 0.0)  # (BP, TOKENS)


@triton.jit
def inverse_rms_of(squares, eps, K: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps) (TOKENS, 1) from the partial sums of squares (BP, TOKENS)."""
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]


@triton.jit
def store_rows(y, Out, first, rows, BATCH, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Store y (TOKENS, ROWS) in the columns of Out (BATCH, rows) from ``first`` on."""
    b = tl.arange(0, TOKENS)  # (TOKENS,)
    row = first + tl.arange(0, ROWS)  # (ROWS,)
    inside = (b < BATCH)[:, None] & (row < rows)[None, :]
    tl.store(Out + b[:, None] * rows + row[None, :], y.to(Out.dtype.element_ty), inside)


@triton.jit
def project(
    W, first, Y, squares, eps, Out,
    D: tl.constexpr, N: tl.constexpr, BATCH, TOKENS: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Store the products of rows of W (N, D) from ``first`` on with RMSNorm(x) in Out (BATCH, N)."""
    y = products(W, first, N, Y, D, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED)
    store_rows(y * inverse_rms_of(squares, eps, D), Out, first, N, BATCH, TOKENS, ROWS)


@triton.jit
def gate(
    W, bias, first, Y, squares, eps, cap, Out,
    D: tl.constexpr, N: tl.constexpr, BATCH, TOKENS: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """Store pre-activations (3) of the heads from ``first`` on in Out (BATCH, N): W (N, D) and bias (N,)."""
    row = first + tl.arange(0, ROWS)  # (ROWS,)
    y = products(W, first, N, Y, D, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED) * inverse_rms_of(squares, eps, D)
    y += tl.load(bias + row, row < N, 0.0).to(tl.float32)[None, :]
    store_rows(capped(y, cap), Out, first, N, BATCH, TOKENS, ROWS)


@triton.jit
def embed(
    Ids, Table, norm, X, Y, Squares,
    D: tl.constexpr, BD: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Compute x, y and the sum of squares of one sequence: Ids (BATCH,) and Table (vocabulary, D)."""
    b = tl.program_id(0)
    r, part = tl.arange(0, BD), tl.arange(0, BP)
    x = load_vector(Table + tl.load(Ids + b) * D, D, BD)  # (BD,)
    tl.store(X + b * D + r, x.to(X.dtype.element_ty), r < D)
    tl.store(Y + b * D + r, (x * load_vector(norm, D, BD)).to(Y.dtype.element_ty), r < D)
    # The other parts belong to programs of add_product.
    tl.store(Squares + part * TOKENS + b, tl.where(part == 0, tl.sum(x * x, 0), 0.0), part < PARTS)


@triton.jit
def mixer_inputs(
    Y, Squares, eps, Q, K, V, O, I, I_bias, F, F_bias, cap, Out, Gates,
    DQ: tl.constexpr, DV: tl.constexpr, H: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr,
    BATCH, TOKENS: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    SWAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of (1)-(3): the first programs the gates, the others q, k, v and o.

    Out receives q, k (BATCH, DQ), v and o (BATCH, DV), one after the other, and Gates (2, BATCH, H) float32 receives i
    and f. The other operands are those of the kernel for one sequence.
    """
    wait_for_inputs(OVERLAPPED)
    tile = tl.program_id(0)
    gates: tl.constexpr = (H + ROWS - 1) // ROWS
    keys: tl.constexpr = (DQ + ROWS - 1) // ROWS
    values: tl.constexpr = (DV + ROWS - 1) // ROWS
    s = load_squares(Squares, PARTS, BP, TOKENS)
    if tile < gates:
        gate(I, I_bias, tile * ROWS, Y, s, eps, cap, Gates, D, H, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED)
    elif tile < 2 * gates:
        at = (tile - gates) * ROWS
        gate(F, F_bias, at, Y, s, eps, cap, Gates + BATCH * H, D, H, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED)
    else:
        tile -= 2 * gates
        if tile < keys:
            project(Q, tile * ROWS, Y, s, eps, Out, D, DQ, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED)
        elif tile < 2 * keys:
            at = (tile - keys) * ROWS
            project(K, at, Y, s, eps, Out + BATCH * DQ, D, DQ, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED)
        elif tile < 2 * keys + values:
            at = (tile - 2 * keys) * ROWS
            project(V, at, Y, s, eps, Out + 2 * BATCH * DQ, D, DV, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED)
        else:
            at = (tile - 2 * keys - values) * ROWS
            project(O, at, Y, s, eps, Out + BATCH * (2 * DQ + DV), D, DV, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED)


@triton.jit
def swiglu(
    Y, Squares, eps, W_gate, W_up, Out,
    D: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, BATCH, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SWAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS columns of silu(W_gate z) * W_up z for z = RMSNorm(x), (5) and (6).

    W_gate and W_up are (N, D), and Out is (BATCH, N).
    """
    wait_for_inputs(OVERLAPPED)
    first = tl.program_id(0) * ROWS
    squares = load_squares(Squares, PARTS, BP, TOKENS)
    gate = zeros(TOKENS, ROWS, SPLITS, SWAPPED)
    up = zeros(TOKENS, ROWS, SPLITS, SWAPPED)
    for start in range(0, (D + 16 * SPLITS - 1) // (16 * SPLITS) * 16, BK):
        w_gate = load_block(W_gate, first, N, start, D, ROWS, BK, SPLITS)  # (SPLITS ROWS, BK)
        w_up = load_block(W_up, first, N, start, D, ROWS, BK, SPLITS)  # (SPLITS ROWS, BK)
        y = load_block(Y, 0, BATCH, start, D, TOKENS, BK, SPLITS)  # (SPLITS TOKENS, BK)
        gate = accumulate(y, w_gate, gate, SWAPPED)
        up = accumulate(y, w_up, up, SWAPPED)
    scale = inverse_rms_of(squares, eps, D)
    gate = add_parts(gate, TOKENS, ROWS, SPLITS, SWAPPED) * scale
    up = add_parts(up, TOKENS, ROWS, SPLITS, SWAPPED) * scale
    store_rows(gate * tl.sigmoid(gate) * up, Out, first, N, BATCH, TOKENS, ROWS)


@triton.jit
def add_product(
    W, Z, X, norm, Y, Squares,
    D: tl.constexpr, N: tl.constexpr, BATCH, TOKENS: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, SWAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Add ROWS columns of W z to the residual stream x in place, (4) and (6): W (N, D), Z (BATCH, D), X (BATCH, N).

    Y (BATCH, N) receives x times the weight of the next norm (N,), and Squares a part for each program.
    """
    wait_for_inputs(OVERLAPPED)
    tile = tl.program_id(0)
    first = tile * ROWS
    b = tl.arange(0, TOKENS)  # (TOKENS,)
    row = first + tl.arange(0, ROWS)  # (ROWS,)
    at = X + b[:, None] * N + row[None, :]
    x = tl.load(at, (b < BATCH)[:, None] & (row < N)[None, :], 0.0)  # (TOKENS, ROWS)
    weight = tl.load(norm + row, row < N, 0.0).to(tl.float32)[None, :]  # (1, ROWS)
    x = (products(W, first, N, Z, D, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED) + x.to(tl.float32)).to(
        X.dtype.element_ty
    )
    store_rows(x, X, first, N, BATCH, TOKENS, ROWS)
    x = x.to(tl.float32)
    store_rows(x * weight, Y, first, N, BATCH, TOKENS, ROWS)
    tl.store(Squares + tile * TOKENS + b, tl.sum(x * x, 1))


@triton.jit
def logits(
    Y, Squares, eps, W, cap, Out,
    D: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, BATCH, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, SWAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Compute ROWS logits of each token, (7): W (N, D) -> Out (BATCH, N) float32."""
    wait_for_inputs(OVERLAPPED)
    first = tl.program_id(0) * ROWS
    squares = load_squares(Squares, PARTS, BP, TOKENS)
    y = products(W, first, N, Y, D, BATCH, TOKENS, ROWS, BK, SPLITS, SWAPPED) * inverse_rms_of(squares, eps, D)
    store_rows(capped(y, cap), Out, first, N, BATCH, TOKENS, ROWS)
