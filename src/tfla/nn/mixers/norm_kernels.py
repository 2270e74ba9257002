"""The kernels of a norm with an output gate, and of its gradients.

For a row x (D,), a skip connection v (D,) with a factor f of each number, its gate g (D,), the weight w (D,) of the
row's head, and an activation a,

    h = x + f v                                                                    (0)
    s = a(g),  z = h s where the gate comes first, else h                          (1)
    n = r z,  r = 1 / sqrt(mean(z^2) + eps), for LayerNorm with z - mean(z) as z   (2)
    y = w n where the gate comes first, else w n s                                 (3)

and with the cotangent dy of y, p = w dy where the gate comes first, else w s dy,

    dz = r (p - n mean(p n)), for LayerNorm with p - mean(p) as p                  (4)
    dh = s dz,  ds = h dz where the gate comes first, else dh = dz,  ds = w n dy
    dg = a'(g) ds,  dx = dh,  dv = f dh                                            (5)
    dw = the sum of n dy over the rows where the gate comes first, else of n s dy  (6)
    df = the sum of v dh over the rows                                             (7)

Without a gate s is 1, and without a skip connection h is x. Everything is computed in float32. The forward reads x, v
and g and writes y. The backward reads x, v, g and dy and writes dx, dv and dg, and nothing is stored in between. Rows
do not depend on each other, so that a row has the same bits in every batch.
"""

import triton
import triton.language as tl


@triton.jit
def locate_rows(r, c, rows, D: tl.constexpr):
    """Return the places of rows r (ROWS,) and columns c (COLUMNS,) of the program's head, and whether they exist.

    A tensor of rows is (rows, heads, D) and contiguous; the grid has the heads in its second dimension.
    """
    place = (r.to(tl.int64) * tl.num_programs(1) + tl.program_id(1))[:, None] * D + c[None, :]
    return place, (r < rows)[:, None] & (c < D)[None, :]


@triton.jit
def load_weight(W, c, D: tl.constexpr):
    """Return the weights of columns c (COLUMNS,) of the program's head from W (heads, D): (1, COLUMNS) float32."""
    return tl.load(W + tl.program_id(1) * D + c, c < D, 0.0).to(tl.float32)[None, :]


@triton.jit
def load_factors(F, c, D: tl.constexpr, SIZE: tl.constexpr):
    """Return the factors of columns c (COLUMNS,) from F (D // SIZE,), each of SIZE columns: (1, COLUMNS) float32."""
    return tl.load(F + c // SIZE, c < D, 0.0).to(tl.float32)[None, :]


@triton.jit
def activate(g, SILU: tl.constexpr):
    """Return silu(g) or sigmoid(g), and its derivative."""
    s = 1.0 / (1.0 + tl.exp(-g))
    if SILU:
        return g * s, s * (1.0 + g * (1.0 - s))
    else:
        return s, s * (1.0 - s)


@triton.jit
def mean(x, D: tl.constexpr):
    """Return the means of rows x (ROWS, COLUMNS) that are 0 from column D on: (ROWS, 1)."""
    return (tl.sum(x, 1) / D)[:, None]


@triton.jit
def normalize(z, inside, eps, D: tl.constexpr, CENTERED: tl.constexpr):
    """Return n and r of (2) for rows z (ROWS, COLUMNS), n being 0 outside."""
    if CENTERED:
        z = tl.where(inside, z - mean(z, D), 0.0)
    inverse = 1.0 / tl.sqrt(mean(z * z, D) + eps)
    return tl.where(inside, z * inverse, 0.0), inverse


@triton.jit(do_not_specialize=["rows", "eps"])
def gated_norm(
    X, G, V, W, F, Y, rows, eps,
    D: tl.constexpr, SKIP_SIZE: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute (0) to (3) of ROWS rows of one head. The grid is (rows / ROWS rounded up, heads).

    Args:
        X: the rows, (rows, heads, D), contiguous.
        G: their gates, likewise; read with GATED.
        V: their skip connections, likewise; read with SKIP_SIZE.
        W: the weights, (heads, D).
        F: the factors of skip connections, (D // SKIP_SIZE,); read with SKIP_SIZE.
        Y: the result, like X; written.
        rows: the number of rows.
        eps: the epsilon of (2).
        SKIP_SIZE: how many columns share a factor; 0 without skip connections.
        SILU: whether the activation is silu; otherwise it is the sigmoid.
        GATE_FIRST: whether the gate comes before the norm.
        CENTERED: whether the norm is LayerNorm; otherwise it is RMSNorm.
        COLUMNS: a power of 2 that is D or above it.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    place, inside = locate_rows(r, c, rows, D)
    factor = load_weight(W, c, D)
    z = tl.load(X + place, inside, 0.0).to(tl.float32)
    if SKIP_SIZE > 0:
        z += load_factors(F, c, D, SKIP_SIZE) * tl.load(V + place, inside, 0.0).to(tl.float32)
    if GATED:
        s, _ = activate(tl.load(G + place, inside, 0.0).to(tl.float32), SILU)
        if GATE_FIRST:
            z *= s
        else:
            factor *= s
    n, _ = normalize(z, inside, eps, D, CENTERED)
    tl.store(Y + place, (n * factor).to(Y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "eps"])
def gated_norm_backward(
    X, G, V, W, F, dY, dX, dG, dV, sums, factor_sums, rows, eps,
    D: tl.constexpr, SKIP_SIZE: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr,
    CENTERED: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute (4) and (5) of STEPS times ROWS rows of one head, and what these add to (6) and (7).

    The grid is (rows / ROWS / STEPS rounded up, heads).

    Args:
        dY: the cotangent of Y, (rows, heads, D), contiguous.
        dX, dG, dV: the gradients of X, G and V, like these; written.
        sums: the sums of (6) over the rows of each program, (programs, heads, D) float32; written.
        factor_sums: those of (7) for each column, likewise; written with SKIP_SIZE.
        STEPS: how many times a program takes ROWS rows.
        STAGES: of how many times the rows are in shared memory or on their way to it.
        X, G, V, W, F, rows, eps, D, SKIP_SIZE, GATED, SILU, GATE_FIRST, CENTERED, ROWS, COLUMNS: as in `gated_norm`.
    """
    c = tl.arange(0, COLUMNS)
    w = load_weight(W, c, D)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SKIP_SIZE > 0:
        f = load_factors(F, c, D, SKIP_SIZE)
        factor_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.range(STEPS, num_stages=STAGES):
        r = (tl.program_id(0) * STEPS + i) * ROWS + tl.arange(0, ROWS)
        place, inside = locate_rows(r, c, rows, D)
        h = tl.load(X + place, inside, 0.0).to(tl.float32)
        if SKIP_SIZE > 0:
            v = tl.load(V + place, inside, 0.0).to(tl.float32)
            h += f * v
        dy = tl.load(dY + place, inside, 0.0).to(tl.float32)
        z = h
        p = w * dy
        if GATED:
            s, slope = activate(tl.load(G + place, inside, 0.0).to(tl.float32), SILU)
            if GATE_FIRST:
                z = h * s
            else:
                p *= s
        n, inverse = normalize(z, inside, eps, D, CENTERED)
        dz = p - n * mean(p * n, D)
        if CENTERED:
            dz -= mean(p, D)
        dz *= inverse
        if GATED:
            if GATE_FIRST:
                ds = h * dz
                dz *= s
            else:
                ds = w * n * dy
                dy *= s
            tl.store(dG + place, (ds * slope).to(dG.dtype.element_ty), inside)
        tl.store(dX + place, dz.to(dX.dtype.element_ty), inside)
        if SKIP_SIZE > 0:
            tl.store(dV + place, (f * dz).to(dV.dtype.element_ty), inside)
            factor_total += v * dz
        total += n * dy
    first, _ = locate_rows(tl.program_id(0) + tl.arange(0, 1), c, rows, D)
    tl.store(sums + first, tl.sum(total, 0)[None, :], (c < D)[None, :])
    if SKIP_SIZE > 0:
        tl.store(factor_sums + first, tl.sum(factor_total, 0)[None, :], (c < D)[None, :])
