"""The kernels of the cross-entropy of soft-capped logits, and of its gradient.

For the products x (V,) of a token with the unembedding and its target t,

    z_j = c tanh(x_j / c)                                          (1), (110) of the paper
    loss = s - z_t,  s = log(sum_j exp(z_j))                       (2)
    dx_j = dloss (exp(z_j - s) - [j = t]) (1 - (z_j / c)^2)        (3)

Everything is computed in float32. A program has a token: it reads x once for (2), and for (3) once more, so that
nothing but s is stored in between.
"""

import triton
import triton.language as tl


@triton.jit
def load_logits(X, j, V, cap):
    """Return the capped logits z_j (COLUMNS,) float32, (1), and which of the columns j exist; the others are -inf."""
    inside = j < V
    x = tl.load(X + j, inside, 0.0).to(tl.float32)
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    tanh = (1.0 - e) / (1.0 + e)
    return tl.where(inside, cap * tl.where(x < 0.0, -tanh, tanh), float("-inf")), inside


@triton.jit(do_not_specialize=["V", "cap"])
def capped_losses(X, stride, targets, losses, sums, V, cap, IGNORED: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute (2) of the token of this program.

    X is (N, V) with strides `stride` and 1; targets (N,) int64, IGNORED where a token has no loss; losses and sums, s,
    (N,) float32. A target that is no token yields NaN.
    """
    n = tl.program_id(0).to(tl.int64)
    t = tl.load(targets + n)
    X += n * stride
    largest, total, of_target = float("-inf"), 0.0, 0.0
    for start in range(0, V, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        z, _ = load_logits(X, j, V, cap)
        higher = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(z - higher), 0)
        largest = higher
        of_target += tl.sum(tl.where(j == t, z, 0.0), 0)
    s = largest + tl.log(total)
    loss = tl.where((t >= 0) & (t < V), s - of_target, float("nan"))
    tl.store(losses + n, tl.where(t == IGNORED, 0.0, loss))
    tl.store(sums + n, s)


@triton.jit(do_not_specialize=["V", "cap"])
def capped_losses_backward(
    X, stride, targets, sums, dloss, dX, V, cap, IGNORED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Compute (3) of COLUMNS columns of a token.

    The grid is (N, V / COLUMNS). dloss is (N,) float32 and dX (N, V), dense; the other operands are those of
    `capped_losses`.
    """
    n = tl.program_id(0).to(tl.int64)
    t = tl.load(targets + n)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z, inside = load_logits(X + n * stride, j, V, cap)
    weight = tl.where(t == IGNORED, 0.0, tl.load(dloss + n))
    dz = tl.exp(z - tl.load(sums + n)) - tl.where(j == t, 1.0, 0.0)
    slope = tl.where(inside, 1.0 - (z / cap) * (z / cap), 0.0)
    tl.store(dX + n * V + j, (weight * dz * slope).to(dX.dtype.element_ty), inside)
