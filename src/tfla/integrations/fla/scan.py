"""The recurrence that every function of this package computes, by tfla's linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

import tfla
from tfla.integrations.arguments import check_flags
from tfla.ops.checks import check_cu_seqlens, check_float, check_shape


def log_decays(g: Tensor | None, g_gamma: Tensor | None, v: Tensor) -> Tensor:
    """Check v (B, T, H, V) and return its log-decays (B, T, H).

    Args:
        g: (B, T, H), the log-decay of each step and head, or None.
        g_gamma: (H,), log-decays that are the same at every step, or None. Without both there is no decay.
    """
    check_float("v", v)
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


def check_gates(name: str, g: object, q: object, v: object, by_channel: bool) -> None:
    """Check log-decays under the name that the caller gave them; tfla's operators have another one.

    Args:
        name: the argument's name.
        g: (B, T, H), or (B, T, H, K) with `by_channel`, by which the operators tell the two kinds apart.
        q, v: tensors with these B, T, H and K; the operators refuse others.

    Raises:
        TypeError: `g` is no tensor, or has no float dtype.
        ValueError: `g` has another shape, or is on another device.
    """
    if not hasattr(g, "device_mesh"):  # the operators take DTensors
        check_float(name, g)
    assert isinstance(g, Tensor)
    dims: tuple[int | str, ...] = ("B", "T", "H", "K") if by_channel else ("B", "T", "H")
    if g.dim() == len(dims) and all(isinstance(t, Tensor) and t.dim() == 4 for t in (q, v)):
        assert isinstance(q, Tensor)
        assert isinstance(v, Tensor)
        dims = (q.shape[0], q.shape[1], v.shape[2], q.shape[3])[: len(dims)]
        if g.device != q.device:
            raise ValueError(f"{name}: got device {g.device}, expected that of q, {q.device}")
    check_shape(name, g, dims)


def count_heads(q: Tensor, v: Tensor | None = None) -> int:
    """Check q (B, T, H, K), and that v (B, T, H, V) has as many heads if it is given, and return their number H."""
    check_float("q", q)
    check_shape("q", q, ("B", "T", "H", "K"))
    if v is not None:
        check_float("v", v)
        check_shape("v", v, ("B", "T", q.shape[2], "V"))
    return q.shape[2]


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    reverse: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the recurrence over whole sequences; a single step without gradients is computed as a decoding step.

    The arguments that are not listed here and the results are those of
    :func:`~tfla.integrations.fla.fused_recurrent_simple_gla`.

    Args:
        g: (B, T, H), the log-decays that :func:`log_decays` returns.
    """
    check_flags(output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first)
    if initial_state is not None:
        initial_state = key_first(initial_state, q, v, cu_seqlens, state_v_first)
    if reverse:
        o, last = _scan_reversed(q, k, v, g, scale, initial_state, cu_seqlens)
    else:
        o, last = _scan_forward(q, k, v, g, scale, initial_state, cu_seqlens)
    if not output_final_state:
        return o, None
    return o, last.transpose(-1, -2) if state_v_first else last


def key_first(state: Tensor, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, state_v_first: bool) -> Tensor:
    """Check an initial state and return it as (N, H, K, V)."""
    check_float("initial_state", state)
    count_heads(q)
    check_float("v", v)
    check_shape("v", v, ("B", "T", "H", "V"))
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        check_cu_seqlens(cu_seqlens, q)
    sequences = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    check_shape("initial_state", state, (sequences, v.shape[2], *dims))
    if state.device != q.device:
        raise ValueError(f"initial_state: got device {state.device}, expected that of q, {q.device}")
    return state.transpose(-1, -2) if state_v_first else state


def state_of_step(initial: Tensor | None, q: Tensor, v: Tensor) -> tfla.State:
    """Return the state before a decoding step in the dtype of the one after it, which is that of whole sequences."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if initial is None:
        initial = torch.zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype, device=v.device)
    return tfla.State(initial.to(dtype))


def _scan_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o (B, T, H, V) and the state (N, H, K, V) after the last step of each sequence."""
    if v.shape[1] == 1 and cu_seqlens is None and not torch.is_grad_enabled():  # a decoding step
        count_heads(q)
        o, last = tfla.linear_attention_steps(q, k, v, g, state_of_step(initial, q, v), scale=scale)
    else:
        state = None if initial is None else tfla.State(initial)
        o, last = tfla.linear_attention(
            q, k, v, g, scale=scale, initial_state=state, return_state=True, cu_seqlens=cu_seqlens
        )
    return o, last.C


def _scan_reversed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the same as :func:`_scan_forward`, from the last step of each sequence to its first.

    o is in the order of the inputs, and the state is the one after the first step of each sequence.
    """
    for name, x in {"q": q, "k": k}.items():
        check_float(name, x)
        check_shape(name, x, ("B", "T", "H", "K"))
    if cu_seqlens is not None:  # when time is flipped, the last packed sequence comes first
        check_cu_seqlens(cu_seqlens, q)
        cu_seqlens = v.shape[1] - cu_seqlens.flip(0)
        initial = None if initial is None else initial.flip(0)
    q, k, v, g = (t.flip(1) for t in (q, k, v, g))
    o, last = _scan_forward(q, k, v, g, scale, initial, cu_seqlens)
    return o.flip(1), last if cu_seqlens is None else last.flip(0)
