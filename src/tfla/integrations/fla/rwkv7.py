"""The function of RWKV-7 (arXiv 2503.14456), by the delta rule with a diagonal plus low-rank transition."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tfla.integrations.fla.generalized_delta_rule import chunk_dplr_delta_rule
from tfla.integrations.fla.scan import check_gates
from tfla.ops.checks import check_float, check_shape

__all__ = ["chunk_rwkv7"]


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the recurrence of RWKV-7.

    It is :func:`~tfla.integrations.fla.chunk_dplr_delta_rule` with q = r and gk = w; the other arguments, the results
    and the errors are those of that function.

    Args:
        r: (B, T, H, K), the queries.
        w: (B, T, H, K), log-decays.
        scale: the factor of the queries.
    """
    check_float("r", r)
    check_shape("r", r, ("B", "T", "H", "K"))
    check_gates("w", w, r, v, by_channel=True)
    return chunk_dplr_delta_rule(
        r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, safe_gate, chunk_size,
        disable_recompute, cp_context, lower_bound,
    )  # fmt: skip
