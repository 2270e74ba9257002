"""The functions of simple GLA, gated linear attention (arXiv 2312.06635) with one gate per step and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfla.integrations.arguments import check_flags
from tfla.integrations.fla.options import check_options, read_state_layout
from tfla.integrations.fla.scan import log_decays, scan

__all__ = ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"]


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA, with a log-decay for every step and head.

        C_t = exp(g_t) C_{t-1} + k_t v_t^T        o_t = scale C_t^T q_t

    Args:
        q, k: (B, T, H, K). They may have fewer heads, of which H is a multiple.
        v: (B, T, H, V).
        g: (B, T, H), log-decays in any float dtype.
        g_gamma: (H,), log-decays that are the same at every step, instead of `g`.
        scale: the factor of the queries; None is 1/sqrt(K).
        initial_state: (N, H, K, V), or (N, H, V, K) with `state_v_first`, the states before the first steps; zeros if
            None.
        output_final_state: also return the states after the last steps, in the same layout.
        state_v_first: states have V before K.
        cu_seqlens: (N + 1,) int, for B = 1: the first step of each packed sequence and, last, T.
        cu_seqlens_cpu: accepted without effect.
        kwargs: `chunk_size` (a power of 2) and `head_first=False`, accepted without effect.

    Returns:
        o (B, T, H, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit or is unknown; the message names it, what it is and what is
            allowed.
    """
    check_options(chunk_simple_gla, kwargs)
    g = log_decays(g, g_gamma, v)
    return scan(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first=state_v_first)


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the same as :func:`chunk_simple_gla`, with states (N, H, K, V).

    The arguments, the results and the errors are those of that function.
    """
    g = log_decays(g, g_gamma, v)
    return scan(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA, with `reverse` from the last step of each sequence to its first.

    The arguments that are not listed here, the results and the errors are those of :func:`chunk_simple_gla`.

    Args:
        reverse: `initial_state` precedes the last step in this order, and the final state is the one after the first
            step.
        kwargs: those of :func:`chunk_simple_gla`, and `transpose_state_layout`, the deprecated name of
            `state_v_first`, which gives a DeprecationWarning.
    """
    state_v_first = read_state_layout(kwargs, state_v_first)
    check_options(fused_recurrent_simple_gla, kwargs)
    g = log_decays(g, g_gamma, v)
    return scan(
        q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, reverse=reverse, state_v_first=state_v_first
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute simple GLA without states, and its attention scores with `output_attentions`.

    The arguments that are not listed here and the errors are those of :func:`chunk_simple_gla`.

    Args:
        output_attentions: also return the scores, which takes memory and time that grow with T^2. Packed sequences do
            not allow it.

    Returns:
        o (B, T, H, V), and the scores (B, H, T, T) in the dtype of o, or None. The score of step s in step t is
        scale q_t^T k_s exp(g_{s+1} + ... + g_t) for s <= t, else 0.
    """
    check_flags(output_attentions=output_attentions)
    if output_attentions and cu_seqlens is not None:
        raise ValueError("output_attentions: got True with cu_seqlens, expected False for packed sequences")
    g = log_decays(g, None, v)
    o, _ = scan(q, k, v, g, scale, cu_seqlens=cu_seqlens)
    return o, _scores(q, k, g, scale).to(o.dtype) if output_attentions else None


def _scores(q: Tensor, k: Tensor, g: Tensor, scale: float | None) -> Tensor:
    """Return the causal scores (B, H, T, T) of q, k (B, T, Hq, K), where Hq divides the heads of g (B, T, H)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, T = g.shape[2], g.shape[1]
    q, k = (t.to(dtype).repeat_interleave(heads // t.shape[2], 2) for t in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = torch.einsum("bthk,bshk->bhts", q, k) * scale
    # The sum of g over s < j <= t is taken for each pair: differences of one cumulative sum would cancel.
    g_t = g.to(dtype).transpose(1, 2)[..., None].expand(*products.shape)  # (B, H, T, T), the same for all s
    t_after_s = torch.ones(T, T, dtype=torch.bool, device=g.device).tril(-1)
    return (products * g_t.masked_fill(~t_after_s, 0).cumsum(-2).exp()).tril()
