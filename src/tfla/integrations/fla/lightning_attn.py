"""The functions of Lightning Attention (arXiv 2405.17381): simple GLA with a constant decay for each head and layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.integrations.fla.options import check_options
from tfla.integrations.fla.scan import count_heads, log_decays, scan

__all__ = ["chunk_lightning_attn", "fused_recurrent_lightning_attn"]


def _log_decays(q: Tensor, v: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """Check the layer and return the log-decays -8 h / H (1 - layer_idx / num_layers) as (B, T, H)."""
    for name, value in {"layer_idx": layer_idx, "num_layers": num_layers}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {type(value).__name__}, expected an int")
    if num_layers < 1:
        raise ValueError(f"num_layers: got {num_layers}, expected at least 1")
    if not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx: got {layer_idx}, expected from 0 to num_layers - 1 = {num_layers - 1}")
    H = count_heads(q, v)
    dtype = torch.promote_types(q.dtype, torch.float32)
    slope = 8 / H * (1 - layer_idx / num_layers)
    return log_decays(None, -slope * torch.arange(H, dtype=dtype, device=q.device), v)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute Lightning Attention: head h of H in layer l of L has the log-decay -8 h / H (1 - l / L).

    Args:
        layer_idx: l, counted from 0.
        num_layers: L, at least 1.

    The other arguments, the results and the errors are those of :func:`~tfla.integrations.fla.chunk_simple_gla`.
    """
    check_options(chunk_lightning_attn, kwargs)
    g = _log_decays(q, v, layer_idx, num_layers)
    return scan(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute Lightning Attention, with `reverse` from the last step of each sequence to its first.

    The other arguments, the results and the errors are those of :func:`chunk_lightning_attn`.
    """
    g = _log_decays(q, v, layer_idx, num_layers)
    return scan(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, reverse=reverse)
