"""The kernels of the cross-entropy of soft-capped logits, and of its gradient.

For the logits x (V,) of a token before the soft cap, its target t, and the gradient dloss of its loss,

    z_j = c tanh(x_j / c)                                          (1), (110) of the paper
    loss = s - z_t,  s = log(sum_j exp(z_j))                       (2)
    dx_j = dloss (exp(z_j - s) - [j = t]) (1 - (z_j / c)^2)        (3)

Everything is computed in float32, from x in any float dtype. The kernel of (2) reads x once, with a program for each
token, and that of (3) once more, with several programs for each token. Of the first one, the second one needs s alone.
"""

import triton
import triton.language as tl


@triton.jit
def load_logits(X, j, V, cap):
    """Return the capped logits z_j, (1), (COLUMNS,) float32, and which columns j exist; z_j is -inf at the others."""
    inside = j < V
    x = tl.load(X + j, inside, 0.0).to(tl.float32)
    e = tl.exp(-2.0 * tl.abs(x) / cap)  # at most 1, so that no logit overflows
    tanh = (1.0 - e) / (1.0 + e)
    return tl.where(inside, cap * tl.where(x < 0.0, -tanh, tanh), float("-inf")), inside


@triton.jit(do_not_specialize=["V", "cap"])
def capped_losses(X, stride, targets, losses, sums, V, cap, IGNORED: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the loss and s of one token, (2).

    The loss is 0 where the target is IGNORED, and NaN where the target is no token of the vocabulary.

    Args:
        X: the logits before the soft cap, (N, V), with strides `stride` and 1.
        stride: the distance between rows of X.
        targets: (N,) int64.
        losses: the losses, (N,) float32; written.
        sums: s, (N,) float32; written.
        V: the size of the vocabulary.
        cap: c.
        IGNORED: the target of a token without a loss.
        COLUMNS: the number of columns that are read at a time.
    """
    n = tl.program_id(0).to(tl.int64)
    t = tl.load(targets + n)
    X += n * stride
    largest, total, z_target = float("-inf"), 0.0, 0.0  # total: the sum of exp(z_j - largest) so far
    for start in range(0, V, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        z, _ = load_logits(X, j, V, cap)
        higher = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(z - higher), 0)
        largest = higher
        z_target += tl.sum(tl.where(j == t, z, 0.0), 0)
    s = largest + tl.log(total)
    loss = tl.where((t >= 0) & (t < V), s - z_target, float("nan"))
    tl.store(losses + n, tl.where(t == IGNORED, 0.0, loss))
    tl.store(sums + n, s)


@triton.jit(do_not_specialize=["V", "cap"])
def capped_losses_backward(
    X, stride, targets, sums, dloss, dX, V, cap, IGNORED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Compute the gradient of COLUMNS logits of one token, (3).

    The grid is (N, V / COLUMNS, rounded up).

    Args:
        X, stride, targets, V, cap, IGNORED: as in `capped_losses`.
        sums: s, (N,) float32, from `capped_losses`.
        dloss: the gradients of the losses, (N,) float32.
        dX: the gradient of X, (N, V), contiguous; written.
        COLUMNS: the number of columns of a program.
    """
    n = tl.program_id(0).to(tl.int64)
    t = tl.load(targets + n)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z, inside = load_logits(X + n * stride, j, V, cap)
    weight = tl.where(t == IGNORED, 0.0, tl.load(dloss + n))
    dz = tl.exp(z - tl.load(sums + n)) - tl.where(j == t, 1.0, 0.0)
    slope = tl.where(inside, 1.0 - (z / cap) * (z / cap), 0.0)
    tl.store(dX + n * V + j, (weight * dz * slope).to(dX.dtype.element_ty), inside)
