"""The functions of retention, from RetNet (arXiv 2307.08621): simple GLA with a constant decay for each head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.integrations.fla.options import check_options, read_state_layout
from tfla.integrations.fla.scan import count_heads, log_decays, scan
from tfla.integrations.fla.simple_gla import parallel_simple_gla

__all__ = ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention"]


def _log_decays(q: Tensor, v: Tensor) -> Tensor:
    """Return the log-decays log(1 - 2^(-5-h)) of heads h as (B, T, H)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads = torch.arange(count_heads(q, v), dtype=dtype, device=q.device)
    return log_decays(None, torch.log1p(-torch.exp2(-5 - heads)), v)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute RetNet's retention: the state of head h decays by the factor 1 - 2^(-5-h) at every step.

    The arguments, the results and the errors are those of :func:`~tfla.integrations.fla.chunk_simple_gla`.
    """
    check_options(chunk_retention, kwargs)
    return scan(q, k, v, _log_decays(q, v), scale, initial_state, output_final_state, cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same as :func:`chunk_retention`.

    The arguments, the results and the errors are those of that function.
    """
    return scan(q, k, v, _log_decays(q, v), scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute RetNet's retention, with `reverse` from the last step of each sequence to its first.

    The arguments, the results and the errors are those of
    :func:`~tfla.integrations.fla.fused_recurrent_simple_gla`.
    """
    state_v_first = read_state_layout(kwargs, state_v_first)
    check_options(fused_recurrent_retention, kwargs)
    g = _log_decays(q, v)
    return scan(
        q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, reverse=reverse, state_v_first=state_v_first
    )


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute RetNet's retention without states, and its attention scores with `output_attentions`.

    The arguments, the results and the errors are those of :func:`~tfla.integrations.fla.parallel_simple_gla`.
    """
    return parallel_simple_gla(q, k, v, _log_decays(q, v), scale, output_attentions, cu_seqlens)
