"""Kernels for the activations of the delta rule's inputs, and for their gradients. Each reads a tensor once.

A row x (D,) is a query or a key of one step and head. It is divided by its norm:

    y = r x,  r = (|x|^2 + EPS)^(-1/2)                          dx = r dy - r^3 (x . dy) x                    (1)

The activations of log-gates and write strengths are (2) and (3) of :mod:`tfla.backends.gpu.gate_activations`.
Log-gates are clamped to [LOWEST, HIGHEST], outside of which they have no gradient; NaN stays NaN. The arithmetic is in
float32.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfla.backends.gpu.config import ceil_div, power_of_two
from tfla.backends.gpu.gate_activations import activated_gate, gate_derivatives

ROW_ELEMENTS = 4096  # the elements of the rows that a program normalizes


class GateTile(NamedTuple):
    """The part of the gates, a matrix (B T, H K), that a program computes."""

    tokens: int  # steps of all batch rows
    rows: int  # tokens at a time
    columns: int  # heads times channels
    num_warps: int


BY_CHANNEL = GateTile(256, 16, 128, 4)
# A thread has 4 numbers of each tensor, so that its accesses to tensors of 16 and of 32 bits have one layout.
BY_CHANNEL_BACKWARD = GateTile(256, 4, 64, 2)
BY_STEP = GateTile(64, 64, 32, 4)


@triton.jit
def locate_rows(rows, T, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Locate a program's tile (ROWS, BLOCK) of a tensor (B, T, H, D), whose rows are numbered from 0 to B T H - 1.

    Returns:
        batch row, step, head and number of each row, (ROWS); the channels, (BLOCK); and which elements exist.
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    return n // H // T, n // H % T, n % H, n, c, (n < rows)[:, None] & (c < D)[None, :]


@triton.jit(do_not_specialize=["rows", "T", "H"])
def normalize_rows(
    X, Y, rows, T, H, xb, xt, xh, EPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute y of equation (1) for ROWS rows. The grid is (rows / ROWS).

    Args:
        X: x, (B, T, H, D) with the strides xb, xt, xh and 1.
        Y: the output, (B, T, H, D), dense.
        rows: B T H.
        BLOCK: D, rounded up to a power of two.
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
    """Compute dx of equation (1) for ROWS rows. The grid is (rows / ROWS).

    Args:
        X, rows, BLOCK: as in `normalize_rows`.
        DY: the cotangent of y, (B, T, H, D) with the strides gb, gt, gh and 1.
        DX: the output, (B, T, H, D), dense.
    """
    b, t, h, n, c, inside = locate_rows(rows, T, H, D, ROWS, BLOCK)
    x = tl.load(X + (b * xb + t * xt + h * xh)[:, None] + c[None, :], inside, 0.0).to(tl.float32)  # (ROWS, BLOCK)
    dy = tl.load(DY + (b * gb + t * gt + h * gh)[:, None] + c[None, :], inside, 0.0).to(tl.float32)  # (ROWS, BLOCK)
    r = tl.rsqrt(tl.sum(x * x, 1) + EPS)  # (ROWS)
    projection = r * r * tl.sum(x * dy, 1)  # (ROWS)
    dx = r[:, None] * (dy - projection[:, None] * x)  # (ROWS, BLOCK)
    tl.store(DX + n[:, None] * D + c[None, :], dx.to(DX.dtype.element_ty), inside)


@triton.jit
def load_columns(A_log, Bias, columns, bh, bk, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the parameters of a program's columns of the gates, a matrix (B T, H K); the arguments are the kernels'.

    Returns:
        the columns, their heads and their channels, (COLUMNS); a and b of these heads and channels, (1, COLUMNS).
    """
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    h, k = c // K, c % K
    a = tl.full([COLUMNS], 1.0, tl.float32)
    if A_log is not None:
        a = tl.exp(tl.load(A_log + h, c < columns, 0.0).to(tl.float32))
    b = tl.zeros([COLUMNS], tl.float32)
    if Bias is not None:
        b = tl.load(Bias + h * bh + k * bk, c < columns, 0.0).to(tl.float32)
    return c, h, k, a[None, :], b[None, :]


@triton.jit
def locate_gates(n0, c, h, k, tokens, T, columns, fb, ft, fh, fk, ROWS: tl.constexpr):
    """Locate the gates of the tokens from n0 on, (ROWS, COLUMNS), for the columns of `load_columns`.

    Returns:
        their offsets in F and in a dense tensor (B, T, H, K); and which of them exist.
    """
    r = tl.arange(0, ROWS)
    t = (n0 % T).to(tl.int32) + r  # from the batch row of the first token on, which takes 32-bit divisions
    offset = ((n0 // T + t // T) * fb + (t % T).to(tl.int64) * ft)[:, None] + (h * fh + k * fk)[None, :]
    return offset, (n0 + r)[:, None] * columns + c[None, :], (r < tokens - n0)[:, None] & (c < columns)[None, :]


@triton.jit(do_not_specialize=["tokens", "T", "columns", "factor"])
def activate_gates(
    F, A_log, Bias, G, tokens, T, columns, fb, ft, fh, fk, bh, bk, factor, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    SOFTPLUS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute g by equation (2) with SOFTPLUS, else by (3). The grid is (tokens / TOKENS, columns / COLUMNS).

    Args:
        F: the pre-activations, (B, T, H, K) with the strides fb, ft, fh, fk; K is 1 for gates by step.
        A_log: (H,), dense; None stands for 0.
        Bias: dt_bias, (H, K) with the strides bh and bk; None stands for 0.
        G: the output, (B, T, H, K) float32, dense.
        tokens: B T.
        columns: H K.
        factor: the factor of (3).
        ROWS: the tokens that a program has at a time.
    """
    c, h, k, a, b = load_columns(A_log, Bias, columns, bh, bk, K, COLUMNS)
    for i in range(0, TOKENS, ROWS):
        n0 = tl.program_id(0).to(tl.int64) * TOKENS + i
        offset, at, inside = locate_gates(n0, c, h, k, tokens, T, columns, fb, ft, fh, fk, ROWS)
        z = tl.load(F + offset, inside, 0.0).to(tl.float32) + b  # (ROWS, COLUMNS)
        g = activated_gate(z, a, factor, SOFTPLUS)
        g = tl.where(g < LOWEST, LOWEST, tl.where(g > HIGHEST, HIGHEST, g))
        tl.store(G + at, g, inside)


@triton.jit(do_not_specialize=["tokens", "T", "columns", "factor"])
def activate_gates_backward(
    F, A_log, Bias, DG, DF, sums, tokens, T, columns, fb, ft, fh, fk, bh, bk, factor, LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr, SOFTPLUS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute df, and the sums over a program's steps of the gradients of A_log and dt_bias. The grid is the forward's.

    Args:
        F, A_log, Bias, tokens, columns, factor, ROWS: as in `activate_gates`.
        DG: the cotangent of g, (B, T, H, K), dense.
        DF: the output, (B, T, H, K), dense.
        sums: the sums for A_log and for dt_bias, (2, tokens / TOKENS, columns) float32, or None if neither is given.
    """
    c, h, k, a, b = load_columns(A_log, Bias, columns, bh, bk, K, COLUMNS)
    of_A_log = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(0, TOKENS, ROWS):
        n0 = tl.program_id(0).to(tl.int64) * TOKENS + i
        offset, at, inside = locate_gates(n0, c, h, k, tokens, T, columns, fb, ft, fh, fk, ROWS)
        z = tl.load(F + offset, inside, 0.0).to(tl.float32) + b  # (ROWS, COLUMNS)
        dg = tl.load(DG + at, inside, 0.0).to(tl.float32)  # (ROWS, COLUMNS)
        g, dz, dA_log = gate_derivatives(z, a, factor, SOFTPLUS)
        kept = inside & ((g < LOWEST) | (g > HIGHEST) == 0)  # clamped gates have no gradient, NaN is not clamped
        dz = tl.where(kept, dz * dg, 0.0)
        tl.store(DF + at, dz.to(DF.dtype.element_ty), inside)
        of_A_log += tl.where(kept, dA_log * dg, 0.0)
        of_bias += dz
    if sums is not None:
        row = sums + tl.program_id(0).to(tl.int64) * columns + c
        tl.store(row, tl.sum(of_A_log, 0), c < columns)
        tl.store(row + tl.num_programs(0).to(tl.int64) * columns, tl.sum(of_bias, 0), c < columns)


def _on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that makes the device of x the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def launch_normalize(x: Tensor, eps: float) -> Tensor:
    """Return y of equation (1), dense, for x (B, T, H, D), whose last dimension is dense."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rows(normalize_rows, x, x, y, strides=x.stride()[:3], eps=eps)
    return y


def launch_normalize_backward(x: Tensor, dy: Tensor, eps: float) -> Tensor:
    """Return dx of equation (1), dense, for x and dy (B, T, H, D), whose last dimensions are dense."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rows(normalize_rows_backward, x, x, dy, dx, strides=(*x.stride()[:3], *dy.stride()[:3]), eps=eps)
    return dx


def _launch_rows(kernel: Any, x: Tensor, *tensors: Tensor, strides: tuple[int, ...], eps: float) -> None:
    """Launch a kernel on the rows of x (B, T, H, D); `tensors` and `strides` are its arguments."""
    B, T, H, D = x.shape
    rows, block = B * T * H, power_of_two(D)
    if not rows * D:
        return
    rows_per_program = max(1, ROW_ELEMENTS // block)
    with _on_device(x):
        kernel[(ceil_div(rows, rows_per_program),)](
            *tensors, rows, T, H, *strides, EPS=eps, D=D, ROWS=rows_per_program, BLOCK=block, num_warps=4
        )


def launch_gates(
    f: Tensor, A_log: Tensor | None, bias: Tensor | None, softplus: bool, factor: float, limits: tuple[float, float]
) -> Tensor:
    """Return g of equation (2) or (3), in the shape of f, float32 and dense.

    Args:
        f: the pre-activations, (B, T, H) or (B, T, H, K).
        A_log: (H,), or None.
        bias: dt_bias, (H,) or (H, K), or None.
        softplus: whether to compute (2).
        factor: the factor of (3).
        limits: the smallest and the largest g.
    """
    g = torch.empty(f.shape, dtype=torch.float32, device=f.device)
    tile = BY_CHANNEL if f.dim() == 4 else BY_STEP
    _launch_gates(activate_gates, tile, f, A_log, bias, (g,), softplus, factor, limits)
    return g


def launch_gates_backward(
    f: Tensor, A_log: Tensor | None, bias: Tensor | None, dg: Tensor, softplus: bool, factor: float,
    limits: tuple[float, float],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of f, A_log and bias, from the arguments of :func:`launch_gates` and dg, which is dense."""
    df = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    B, T, H = f.shape[:3]
    K = f.shape[3] if f.dim() == 4 else 1
    tile = BY_CHANNEL_BACKWARD if f.dim() == 4 else BY_STEP
    sums = None
    if A_log is not None or bias is not None:
        sums = torch.zeros(2, ceil_div(B * T, tile.tokens), H, K, dtype=torch.float32, device=f.device)
    _launch_gates(activate_gates_backward, tile, f, A_log, bias, (dg, df, sums), softplus, factor, limits)
    if sums is None:
        return df, None, None
    of_A_log, of_bias = sums.sum(1)  # (H, K) each
    dA_log = None if A_log is None else of_A_log.sum(1).to(A_log.dtype)
    dbias = None if bias is None else (of_bias.sum(1) if bias.dim() == 1 else of_bias).to(bias.dtype)
    return df, dA_log, dbias


def _launch_gates(
    kernel: Any, tile: GateTile, f: Tensor, A_log: Tensor | None, bias: Tensor | None,
    tensors: tuple[Tensor | None, ...], softplus: bool, factor: float, limits: tuple[float, float],
) -> None:  # fmt: skip
    """Launch a kernel on all gates of f; `tensors` are its arguments after the bias."""
    B, T, H = f.shape[:3]
    K = f.shape[3] if f.dim() == 4 else 1
    if not f.numel():
        return
    strides = (*f.stride()[:3], f.stride(3) if f.dim() == 4 else 0)
    bias_strides = (0, 0) if bias is None else (*bias.stride(), 0)[:2]
    with _on_device(f):
        kernel[(ceil_div(B * T, tile.tokens), ceil_div(H * K, tile.columns))](
            f, None if A_log is None else A_log.contiguous(), bias, *tensors, B * T, T, H * K, *strides,
            *bias_strides, factor, LOWEST=limits[0], HIGHEST=limits[1], SOFTPLUS=softplus, K=K, TOKENS=tile.tokens,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps,
        )  # fmt: skip
