"""The kernels of a norm with an output gate, and of its gradients.

For a row h (D,), its gate g (D,), the weight w (D,) of the row's head, and an activation a,

    s = a(g),  z = h s where the gate comes first, else h                          (1)
    n = r z,  r = 1 / sqrt(mean(z^2) + eps), for LayerNorm with z - mean(z) as z   (2)
    y = w n where the gate comes first, else w n s                                 (3)

and with the cotangent dy of y, p = w dy where the gate comes first, else w s dy,

    dz = r (p - n mean(p n)), for LayerNorm with p - mean(p) as p                  (4)
    dh = s dz,  ds = h dz where the gate comes first, else dh = dz,  ds = w n dy
    dg = a'(g) ds                                                                  (5)
    dw = the sum of n dy over the rows where the gate comes first, else of n s dy  (6)

Without a gate s is 1. Everything is computed in float32. The forward reads h and g and writes y. The backward reads h,
g and dy and writes dh and dg, and nothing is stored in between. Rows do not depend on each other, so that a row has the
same bits in every batch.
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
    H, G, W, Y, rows, eps,
    D: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr, CENTERED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute (1) to (3) of ROWS rows of one head. The grid is (rows / ROWS rounded up, heads).

    Args:
        H: the rows, (rows, heads, D), contiguous.
        G: their gates, likewise; read with GATED.
        W: the weights, (heads, D).
        Y: the result, like H; written.
        rows: the number of rows.
        eps: the epsilon of (2).
        SILU: whether the activation is silu; otherwise it is the sigmoid.
        GATE_FIRST: whether the gate comes before the norm.
        CENTERED: whether the norm is LayerNorm; otherwise it is RMSNorm.
        COLUMNS: a power of 2 that is D or above it.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    place, inside = locate_rows(r, c, rows, D)
    factor = load_weight(W, c, D)
    z = tl.load(H + place, inside, 0.0).to(tl.float32)
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
    H, G, W, dY, dH, dG, sums, rows, eps,
    D: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, GATE_FIRST: tl.constexpr, CENTERED: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute (4) and (5) of STEPS times ROWS rows of one head, and what these add to (6).

    The grid is (rows / ROWS / STEPS rounded up, heads).

    Args:
        dY: the cotangent of Y, (rows, heads, D), contiguous.
        dH: the gradient of H, like H; written.
        dG: the gradient of G, like G; written with GATED.
        sums: the sums of (6) over the rows of each program, (programs, heads, D) float32; written.
        STEPS: how many times a program takes ROWS rows.
        H, G, W, rows, eps, D, GATED, SILU, GATE_FIRST, CENTERED, ROWS, COLUMNS: as in `gated_norm`.
    """
    c = tl.arange(0, COLUMNS)
    w = load_weight(W, c, D)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(STEPS):
        r = (tl.program_id(0) * STEPS + i) * ROWS + tl.arange(0, ROWS)
        place, inside = locate_rows(r, c, rows, D)
        h = tl.load(H + place, inside, 0.0).to(tl.float32)
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
        tl.store(dH + place, dz.to(dH.dtype.element_ty), inside)
        total += n * dy
    first, _ = locate_rows(tl.program_id(0) + tl.arange(0, 1), c, rows, D)
    tl.store(sums + first, tl.sum(total, 0)[None, :], (c < D)[None, :])
