"""Kernels of the activations of the delta rule's inputs, and of their gradients: one pass over a tensor each.

A row x (D,) is a query or a key of one step and head, f a pre-activation of a gate or of a write strength:

    y = r x,  r = (|x|^2 + EPS)^(-1/2)                                    dx = r dy - r^3 (x . dy) x          (1)
    softplus:  g = -a softplus(z),  z = f + b                             dz = -a sigmoid(z) dg               (2)
    sigmoid:   g = c sigmoid(a z)                                         dz = c a s (1 - s) dg, s = sigmoid  (3)

where a = exp(A_log) is a number of the head, b = dt_bias one of the head or of its channel, and c a constant. Log-gates
are clamped to [LOWEST, HIGHEST], outside of which they have no gradient; NaN stays NaN. The gradient of A_log sums
dg g over steps in (2) and dz z in (3), that of dt_bias sums dz. Everything is computed in float32.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two

ROW_ELEMENTS = 4096  # of a program that has whole rows
TOKENS, COLUMNS = 64, 32  # of a program that has gates


@triton.jit
def locate_rows(rows, T, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return batch row, step, head and channel of the elements of a program's rows (B T H, D), and which exist."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    return n // H // T, n // H % T, n % H, n, c, (n < rows)[:, None] & (c < D)[None, :]


@triton.jit(do_not_specialize=["rows", "T", "H"])
def normalize_rows(
    X, Y, rows, T, H, xb, xt, xh, EPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute y, (1). A program has ROWS rows.

    Args:
        X: (B, T, H, D) with the strides xb, xt, xh and 1.
        Y: the output, (B, T, H, D), dense.
        rows: B T H.
    """
    b, t, h, n, c, inside = locate_rows(rows, T, H, D, ROWS, BLOCK)
    x = tl.load(X + (b * xb + t * xt + h * xh)[:, None] + c[None, :], inside, 0.0).to(tl.float32)  # (ROWS, BLOCK)
    r = tl.rsqrt(tl.sum(x * x, 1) + EPS)  # (ROWS)
    tl.store(Y + n[:, None] * D + c[None, :], (x * r[:, None]).to(Y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "T", "H"])
def normalize_rows_backward(
    X, DY, DX, rows, T, H, xb, xt, xh, gb, gt, gh, EPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx, (1). A program has ROWS rows.

    Args:
        X, rows: as in `normalize_rows`.
        DY: the cotangent of y, (B, T, H, D) with the strides gb, gt, gh and 1.
        DX: the output, (B, T, H, D), dense.
    """
    b, t, h, n, c, inside = locate_rows(rows, T, H, D, ROWS, BLOCK)
    x = tl.load(X + (b * xb + t * xt + h * xh)[:, None] + c[None, :], inside, 0.0).to(tl.float32)  # (ROWS, BLOCK)
    dy = tl.load(DY + (b * gb + t * gt + h * gh)[:, None] + c[None, :], inside, 0.0).to(tl.float32)  # (ROWS, BLOCK)
    r = tl.rsqrt(tl.sum(x * x, 1) + EPS)  # (ROWS)
    projection = r * r * tl.sum(x * dy, 1)  # (ROWS)
    dx = r[:, None] * (dy - projection[:, None] * x)
    tl.store(DX + n[:, None] * D + c[None, :], dx.to(DX.dtype.element_ty), inside)


@triton.jit
def softplus(z):
    """Return log(1 + exp(z)), also where it is small, to the precision of float32."""
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    return tl.maximum(z, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))  # log(1 + e): u - 1 is exact


@triton.jit
def sigmoid(z):
    """Return 1 / (1 + exp(-z)), also where it is small, to the precision of float32."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def load_gates(
    F, A_log, Bias, tokens, T, columns, fb, ft, fh, fk, bh, bk, K: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return z and a of a tile of gates, their places in a dense tensor (B T, columns), and which exist.

    The grid is (tiles of B T, tiles of columns = H K).
    """
    n = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    h, k = c // K, c % K
    inside = (n < tokens)[:, None] & (c < columns)[None, :]
    at = (n // T * fb + n % T * ft)[:, None] + (h * fh + k * fk)[None, :]
    z = tl.load(F + at, inside, 0.0).to(tl.float32)  # (TOKENS, COLUMNS)
    if Bias is not None:
        z += tl.load(Bias + h * bh + k * bk, c < columns, 0.0).to(tl.float32)[None, :]
    a = tl.full([COLUMNS], 1.0, tl.float32)
    if A_log is not None:
        a = tl.exp(tl.load(A_log + h, c < columns, 0.0).to(tl.float32))
    return z, a[None, :], n[:, None] * columns + c[None, :], inside


@triton.jit(do_not_specialize=["tokens", "T", "columns", "bound"])
def activate_gates(
    F, A_log, Bias, G, tokens, T, columns, fb, ft, fh, fk, bh, bk, bound, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    SOFTPLUS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute log-gates or write strengths g, (2) with SOFTPLUS, else (3). A program has TOKENS steps of COLUMNS.

    Args:
        F: the pre-activations, (B, T, H, K) with the strides fb, ft, fh, fk.
        A_log: (H,), or None, which is 0.
        Bias: dt_bias, (H, K) with the strides bh and bk, or None, which is 0.
        G: the output, (B, T, H, K) float32, dense.
        tokens: B T.
        columns: H K.
        bound: c of (3).
    """
    z, a, at, inside = load_gates(
        F, A_log, Bias, tokens, T, columns, fb, ft, fh, fk, bh, bk, K, TOKENS, COLUMNS
    )  # fmt: skip
    if SOFTPLUS:
        g = -a * softplus(z)
    else:
        g = bound * sigmoid(a * z)
    g = tl.where(g < LOWEST, LOWEST, tl.where(g > HIGHEST, HIGHEST, g))
    tl.store(G + at, g, inside)


@triton.jit(do_not_specialize=["tokens", "T", "columns", "bound"])
def activate_gates_backward(
    F, A_log, Bias, DG, DF, sums, tokens, T, columns, fb, ft, fh, fk, bh, bk, bound, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, SOFTPLUS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute df, and the sums of a program's steps for the gradients of A_log and dt_bias.

    Args:
        F, A_log, Bias, tokens, columns, bound: as in `activate_gates`.
        DG: the cotangent of g, (B, T, H, K), dense.
        DF: the output, (B, T, H, K), dense.
        sums: the sums for A_log and dt_bias, (2, tiles of B T, columns) float32, or None where neither is given.
    """
    z, a, at, inside = load_gates(
        F, A_log, Bias, tokens, T, columns, fb, ft, fh, fk, bh, bk, K, TOKENS, COLUMNS
    )  # fmt: skip
    dg = tl.load(DG + at, inside, 0.0).to(tl.float32)
    if SOFTPLUS:
        g = -a * softplus(z)
        dz = -a * sigmoid(z)
        by_rate = g
    else:
        s = sigmoid(a * z)
        g = bound * s
        by_rate = g * sigmoid(-a * z) * (a * z)
        dz = g * sigmoid(-a * z) * a
    passes = inside & (g >= LOWEST) & (g <= HIGHEST)
    dz = tl.where(passes, dz * dg, tl.where(g == g, 0.0, g))
    tl.store(DF + at, dz.to(DF.dtype.element_ty), inside)
    if sums is not None:
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        by_rate = tl.where(passes, by_rate * dg, tl.where(g == g, 0.0, g))
        row = sums + tl.program_id(0).to(tl.int64) * columns + c
        tl.store(row, tl.sum(by_rate, 0), c < columns)
        tl.store(row + tl.num_programs(0).to(tl.int64) * columns, tl.sum(dz, 0), c < columns)


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which kernels run on the device of x."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def launch_normalize(x: Tensor, eps: float) -> Tensor:
    """Return x (B, T, H, D), whose last dimension is dense, divided by the norms of its rows."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rows(normalize_rows, x, x, y, strides=x.stride()[:3], eps=eps)
    return y


def launch_normalize_backward(x: Tensor, dy: Tensor, eps: float) -> Tensor:
    """Return the gradient of x, (B, T, H, D), dense; the last dimensions of x and dy are dense."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rows(normalize_rows_backward, x, x, dy, dx, strides=(*x.stride()[:3], *dy.stride()[:3]), eps=eps)
    return dx


def _launch_rows(kernel: Any, x: Tensor, *tensors: Tensor, strides: tuple[int, ...], eps: float) -> None:
    """Launch a kernel on the rows of x (B, T, H, D)."""
    B, T, H, D = x.shape
    rows, block = B * T * H, power_of_two(D)
    if not rows * D:
        return
    of_program = max(1, ROW_ELEMENTS // block)
    with _on_device(x):
        kernel[(ceil_div(rows, of_program),)](
            *tensors, rows, T, H, *strides, EPS=eps, D=D, ROWS=of_program, BLOCK=block, num_warps=4
        )


def launch_gates(
    f: Tensor, A_log: Tensor | None, bias: Tensor | None, softplus: bool, bound: float, limits: tuple[float, float]
) -> Tensor:
    """Return the log-gates of f (B, T, H) or (B, T, H, K), float32, dense; bias is (H,) or (H, K)."""
    g = torch.empty(f.shape, dtype=torch.float32, device=f.device)
    _launch_gates(activate_gates, f, A_log, bias, (g,), softplus, bound, limits)
    return g


def launch_gates_backward(
    f: Tensor, A_log: Tensor | None, bias: Tensor | None, dg: Tensor, softplus: bool, bound: float,
    limits: tuple[float, float],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of f, A_log and bias; dg is dense."""
    df = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    B, T, H = f.shape[:3]
    K = f.shape[3] if f.dim() == 4 else 1
    sums = None
    if A_log is not None or bias is not None:
        sums = torch.zeros(2, ceil_div(B * T, TOKENS), H, K, dtype=torch.float32, device=f.device)
    _launch_gates(activate_gates_backward, f, A_log, bias, (dg, df, sums), softplus, bound, limits)
    if sums is None:
        return df, None, None
    by_rate, by_bias = sums.sum(1)
    dA = None if A_log is None else by_rate.sum(1).to(A_log.dtype)
    db = None if bias is None else (by_bias.sum(1) if bias.dim() == 1 else by_bias).to(bias.dtype)
    return df, dA, db


def _launch_gates(
    kernel: Any, f: Tensor, A_log: Tensor | None, bias: Tensor | None, results: tuple[Tensor | None, ...],
    softplus: bool, bound: float, limits: tuple[float, float],
) -> None:  # fmt: skip
    """Launch a kernel on all gates of f, (B, T, H) or (B, T, H, K)."""
    B, T, H = f.shape[:3]
    K = f.shape[3] if f.dim() == 4 else 1
    if not f.numel():
        return
    strides = (*f.stride()[:3], f.stride(3) if f.dim() == 4 else 0)
    of_bias = (0, 0) if bias is None else (*bias.stride(), 0)[:2]
    with _on_device(f):
        kernel[(ceil_div(B * T, TOKENS), ceil_div(H * K, COLUMNS))](
            f, None if A_log is None else A_log.contiguous(), bias, *results, B * T, T, H * K, *strides, *of_bias,
            bound, LOWEST=limits[0], HIGHEST=limits[1], SOFTPLUS=softplus, K=K, TOKENS=TOKENS, COLUMNS=COLUMNS,
            num_warps=4,
        )  # fmt: skip
