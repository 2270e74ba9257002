"""The functions that an mLSTMCell of xlstm calls, with the names and arguments that they have there.

The states have the scale 1 / sqrt(DH) of the keys, which tfla's operator has in the product with the queries:

    C_t = f_t C_{t-1} + i_t (k_t / sqrt(DH)) v_t^T
"""

from __future__ import annotations

import math

from torch import Tensor

from tfla.integrations.mlstm_kernels.kernels import EXP_EXACT, parallel_autograd
from tfla.integrations.mlstm_kernels.variants import compute_step
from tfla.ops.checks import check_float, check_shape


def parallel_stabilized_simple(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    igate_preact: Tensor,
    fgate_preact: Tensor,
    lower_triangular_matrix: Tensor | None = None,
    stabilize_rowwise: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Compute mLSTMexp over whole sequences of any length, with exact gradients.

    Args:
        queries, keys: (B, NH, S, DH).
        values: (B, NH, S, DHV); DHV is DH in the layers of the package.
        igate_preact, fgate_preact: (B, NH, S, 1), pre-activations of the gates.
        lower_triangular_matrix: without effect; the mask is always causal.
        stabilize_rowwise: True; the maximum over all rows is not supported.
        eps: the number that is added to the denominator, which is stabilized by the maximum of each row.

    Returns:
        h (B, NH, S, DHV).

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    if not stabilize_rowwise:
        raise ValueError(f"stabilize_rowwise: got {stabilize_rowwise!r}, expected True")
    check_float("queries", queries)
    check_shape("queries", queries, ("B", "NH", "S", "DH"))
    shapes: dict[str, int | str] = {"keys": queries.shape[-1], "values": "DHV", "igate_preact": 1, "fgate_preact": 1}
    for (name, last), t in zip(shapes.items(), (keys, values, igate_preact, fgate_preact), strict=True):
        check_float(name, t)
        check_shape(name, t, (*queries.shape[:3], last))
    h = parallel_autograd(queries, keys, values, igate_preact.squeeze(-1), fgate_preact.squeeze(-1), eps=eps)
    assert isinstance(h, Tensor)
    return h


def recurrent_step_stabilized_simple(
    c_state: Tensor,
    n_state: Tensor,
    m_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    igate_preact: Tensor,
    fgate_preact: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute one step of mLSTMexp.

    Args:
        c_state, n_state, m_state: the state before the step, (B, NH, DH, DHV), (B, NH, DH, 1) and (B, NH, 1, 1).
        q, k: (B, NH, 1, DH).
        v: (B, NH, 1, DHV).
        igate_preact, fgate_preact: (B, NH, 1, 1), pre-activations of the gates.
        eps: the number that is added to the stabilized denominator.

    Returns:
        h (B, NH, 1, DHV), and the new state in the shapes and the dtype of the old one.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    check_float("q", q)
    check_shape("q", q, ("B", "NH", 1, "DH"))
    B, NH, _, DH = q.shape
    check_float("v", v)
    check_shape("v", v, (B, NH, 1, "DHV"))
    shapes = {
        "k": (1, DH), "c_state": (DH, v.shape[-1]), "n_state": (DH, 1), "m_state": (1, 1), "igate_preact": (1, 1),
        "fgate_preact": (1, 1),
    }  # fmt: skip
    given = (k, c_state, n_state, m_state, igate_preact, fgate_preact)
    for (name, shape), t in zip(shapes.items(), given, strict=True):
        check_float(name, t)
        check_shape(name, t, (B, NH, *shape))
    n, m, i, f = (t.squeeze(-1) for t in given[2:])
    q, k, v = (t.squeeze(2) for t in (q, k, v))
    k = k / math.sqrt(DH)
    h, (c, n, m) = compute_step(EXP_EXACT, q, k, v, i, f, c_state, n, m, eps, c_state.dtype, scale=1.0)
    return h.unsqueeze(2), (c, n.unsqueeze(-1), m.unsqueeze(-1))
