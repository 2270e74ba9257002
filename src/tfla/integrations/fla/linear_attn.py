"""The functions of linear attention without decay, normalized or not."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.integrations.arguments import check_flags
from tfla.integrations.fla.scan import count_heads, log_decays, scan
from tfla.ops.checks import check_float, check_shape

__all__ = ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"]
EPSILON = 1e-10  # added to the denominator
LinearAttentionState = Tensor | tuple[Tensor, Tensor]


def _split_state(state: object, normalize: bool, q: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Check `state` and return its C (N, H, K, V) and its sum of keys (N, 1, H, K), each of which may be None."""
    if state is None or isinstance(state, Tensor):
        return state, None
    if not normalize:
        raise TypeError(f"initial_state: got a {type(state).__name__}, expected a tensor with normalize=False")
    if not isinstance(state, tuple) or len(state) != 2:
        got = f"a tuple of {len(state)}" if isinstance(state, tuple) else type(state).__name__
        raise TypeError(f"initial_state: got {got}, expected a tensor or a tuple (state, sum of keys)")
    C, keys = state
    if keys is not None:
        check_float("initial_state", keys)
        check_shape("initial_state", keys, ("N", 1, v.shape[2], q.shape[3]))
    return C, keys


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: LinearAttentionState | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, LinearAttentionState | None]:
    """Compute linear attention; the arguments and the results are those of :func:`fused_recurrent_linear_attn`."""
    g = log_decays(None, None, v)
    count_heads(q)
    check_flags(normalize=normalize)
    C, keys = _split_state(initial_state, normalize, q, v)
    o, last = scan(q, k, v, g, scale, C, output_final_state, cu_seqlens, reverse=reverse)
    if not normalize:
        return o, last
    # The denominator is the same recurrence with one value per head, which is 1 at every step.
    ones = torch.ones((), dtype=v.dtype, device=v.device).expand(*v.shape[:3], 1)
    keys = None if keys is None else keys.transpose(1, 2).transpose(-1, -2)
    d, sums = scan(q, k, ones, g, scale, keys, output_final_state, cu_seqlens, reverse=reverse)
    dtype = torch.promote_types(o.dtype, torch.float32)
    o = (o.to(dtype) / (d.to(dtype) + EPSILON)).to(o.dtype)
    if last is None or sums is None:
        return o, None
    return o, (last, sums.transpose(-1, -2).transpose(1, 2))


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: LinearAttentionState | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState | None]:
    """Compute linear attention without decay, normalized or not.

    With the state C_t = C_{t-1} + k_t v_t^T and the sum of keys z_t = z_{t-1} + k_t, the output is scale C_t^T q_t or,
    with `normalize`,

        o_t = scale C_t^T q_t / (1e-10 + scale q_t^T z_t)

    The arguments that are not listed here and the errors are those of
    :func:`~tfla.integrations.fla.chunk_simple_gla`.

    Args:
        initial_state: C (N, H, K, V), or with `normalize` the pair of C and z (N, 1, H, K).
        output_final_state: also return the state after the last step, with `normalize` the pair.
        normalize: divide by the denominator.

    Returns:
        o (B, T, H, V), and the final state or None.
    """
    return _attend(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: LinearAttentionState | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState | None]:
    """Compute the same as :func:`chunk_linear_attn`.

    The arguments, the results and the errors are those of that function.
    """
    return _attend(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: LinearAttentionState | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LinearAttentionState | None]:
    """Compute linear attention, with `reverse` from the last step of each sequence to its first.

    The arguments that are not listed here, the results and the errors are those of :func:`chunk_linear_attn`.

    Args:
        reverse: C_t and z_t are sums over the steps from the last one back to t, `initial_state` precedes the last step
            in this order, and the final state is the one after the first step.
    """
    return _attend(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, reverse=reverse)
