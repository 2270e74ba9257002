"""Interface of flash-linear-attention's scalar-gated functions:

    C_t = exp(g_t) C_{t-1} + k_t v_t^T        o_t = scale C_t^T q_t

Names, argument order, layouts and defaults are those of flash-linear-attention 0.6. q, k (B, T, H, K), v (B, T, H, V);
states (N, H, K, V) for N sequences, in float32 (float64 where q is); outputs in v's dtype. What tunes kernels there
(`chunk_size`, `cu_seqlens_cpu`) is taken and changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tfla
from tfla.ops.checks import check_float, check_shape

__all__ = [
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_recurrent_simple_gla",
]
EPSILON = 1e-10  # of the normaliser of linear attention
State = Tensor | tuple[Tensor, Tensor]


def _log_decays(g: Tensor | None, g_gamma: Tensor | None, v: Tensor) -> Tensor:
    """Log-gates (B, T, H) of either; without any there is no decay."""
    check_shape("v", v, ("B", "T", "H", "V"))
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma: got a tensor beside g, expected one of them at most")
    if g is not None:
        check_float("g", g)
        check_shape("g", g, tuple(v.shape[:3]))
        return g
    if g_gamma is None:
        return torch.zeros((), device=v.device).expand(v.shape[:3])
    check_float("g_gamma", g_gamma)
    check_shape("g_gamma", g_gamma, (v.shape[2],))
    return g_gamma.expand(v.shape[:3])


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool = False,
    others: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    if others and others.get("head_first"):
        raise ValueError("head_first: got True, expected time before heads: (B, T, H, K)")
    state = None
    if initial_state is not None:
        check_float("initial_state", initial_state)
        sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        dims = (v.shape[3], q.shape[-1]) if state_v_first else (q.shape[-1], v.shape[3])
        check_shape("initial_state", initial_state, (sequences, v.shape[2], *dims))
        state = tfla.State(initial_state.transpose(-1, -2) if state_v_first else initial_state)
    if v.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled():  # decoding
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if state is None:
            state = tfla.State(v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[3], dtype=wide))
        o, last = tfla.linear_attention_steps(q, k, v, g, state, scale=scale)
    else:
        o, last = tfla.linear_attention(
            q, k, v, g, scale=scale, initial_state=state, return_state=True, cu_seqlens=cu_seqlens
        )
    if not output_final_state:
        return o, None
    return o, last.C.transpose(-1, -2) if state_v_first else last.C


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
    """Simple GLA, a log-decay for every step and head.

    Args:
        g: (B, T, H) log-decays, any float dtype; g_gamma: (H,), constant ones instead.
        scale: of the queries; None is 1/sqrt(K).
        initial_state: (N, H, K, V), or (N, H, V, K) with `state_v_first`, where the sequences start.
        output_final_state: also return the state behind the last step, in the same layout.
        cu_seqlens: (N + 1,) int, for B = 1: where packed sequences start and, last, T.

    Returns:
        o (B, T, H, V), and the final state or None.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
    """
    g = _log_decays(g, g_gamma, v)
    return _run(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first, kwargs)


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
    """Simple GLA, with `reverse` from the last step to the first; all else is as in :func:`chunk_simple_gla`."""
    g = _log_decays(g, g_gamma, v)
    if not reverse:
        return _run(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first, kwargs)
    q, k, v, g = (t.flip(1) for t in (q, k, v, g))
    if cu_seqlens is not None:  # the last sequence comes first
        cu_seqlens = v.shape[1] - cu_seqlens.flip(0)
        initial_state = None if initial_state is None else initial_state.flip(0)
    o, last = _run(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, state_v_first, kwargs)
    if last is not None and cu_seqlens is not None:
        last = last.flip(0)
    return o.flip(1), last


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
    """RetNet's retention: head h decays by 1 - 2^(-5-h). Arguments and results as of :func:`chunk_simple_gla`."""
    heads = torch.arange(q.shape[2], dtype=torch.float64, device=q.device)
    g = _log_decays(None, torch.log1p(-torch.exp2(-5 - heads)).float(), v)
    return _run(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, others=kwargs)


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
    """Lightning Attention: head h of H in layer l of L has the log-decay -8 h / H (1 - l / L).

    The other arguments and the results are those of :func:`chunk_simple_gla`.
    """
    H = q.shape[2]
    slope = 8 / H * (1 - layer_idx / num_layers)
    g = _log_decays(None, -slope * torch.arange(H, dtype=torch.float32, device=q.device), v)
    return _run(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens, others=kwargs)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """Linear attention without decay; normalised, o_t is divided by 1e-10 + scale q_t^T z_t,
    z_t being the sum of keys so far.

    Args:
        initial_state: (N, H, K, V), or with `normalize` a pair of it and the sum of keys so far, (N, 1, H, K).
        output_final_state: also return the same behind the last step, with `normalize` as a pair.

    The other arguments and the errors are those of :func:`chunk_simple_gla`.

    Returns:
        o (B, T, H, V), and the final state, the pair or None.
    """
    keys = None
    if isinstance(initial_state, tuple):
        if not normalize:
            raise TypeError("initial_state: got a tuple, expected a tensor with normalize=False")
        initial_state, keys = initial_state
    g = _log_decays(None, None, v)
    o, last = _run(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens)
    if not normalize:
        return o, last
    if keys is not None:
        check_shape("initial_state", keys, ("N", 1, v.shape[2], q.shape[-1]))
        keys = keys.transpose(1, 2).transpose(-1, -2)
    # The denominator is the same function of a single value, 1 at every step.
    ones = torch.ones((), dtype=v.dtype, device=v.device).expand(*v.shape[:3], 1)
    d, sums = _run(q, k, ones, g, scale, keys, output_final_state, cu_seqlens)
    wide = torch.promote_types(o.dtype, torch.float32)
    o = (o.to(wide) / (d.to(wide) + EPSILON)).to(o.dtype)
    if last is None or sums is None:
        return o, None
    return o, (last, sums.transpose(-1, -2).transpose(1, 2))
