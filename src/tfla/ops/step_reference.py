"""Decoding steps in plain PyTorch: differentiable, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends import StepInputs
from tfla.backends.base import StepSpec
from tfla.backends.reference import bounded_denominator
from tfla.backends.reference import step as reference_step
from tfla.ops.autocast import without_autocast
from tfla.ops.checked_values import checked_lengths
from tfla.ops.gates import clamp, log_gates
from tfla.ops.state import State
from tfla.ops.transforms import needs_dispatcher, transforms_active

LARGEST = 1e30  # bounds exp(-m), which overflows where all gates are closed: inf / (inf + eps) is NaN


def compute_steps(x: StepInputs, spec: StepSpec) -> tuple[Tensor, State]:
    """Compute the steps one after another with the step of the reference.

    Equations (1)-(8) or (22)-(24); `spec.eps` is added to the denominator that is stabilized by exp(-m).

    Returns:
        h (B, T, H, dhv) in v's dtype, and the state after `x.lengths` steps of each sequence (after all T where None).
    """
    dtype, group = x.acc_dtype, x.v.shape[2] // x.q.shape[2]
    q, k = (t.repeat_interleave(group, 2).to(dtype) if group > 1 else t.to(dtype) for t in (x.q, x.k))
    if spec.gates != "log":
        assert x.i is not None
        log_i, log_f = log_gates(x.i, x.f, spec.gates)
    else:
        log_f = clamp(x.f)
        log_i = torch.zeros_like(log_f) if x.i is None else clamp(x.i)
    none = x.C.new_empty(0)
    normalize = x.n is not None
    n, m = (none, none) if x.n is None or x.m is None else (x.n.to(dtype), clamp(x.m).to(dtype))
    C, lengths = x.C.to(dtype), x.lengths
    if lengths is not None and normalize and (m.requires_grad or transforms_active()):
        # A state after no steps, too, has the derivatives in m in C and n: m is then a constant.
        weight = (m - m.detach()).exp()
        C, n, m = weight[..., None, None] * C, weight[..., None] * n, m.detach()
    now = kept = C, n, m
    hs = []
    if lengths is not None and lengths.device.type == "cpu" and needs_dispatcher((lengths,)):
        lengths = checked_lengths(lengths, x.v.shape[1])
    with without_autocast(x.q.device.type):
        for t in range(x.v.shape[1]):
            q_t, k_t, v_t, i_t, f_t = (part[:, t].to(dtype) for part in (q, k, x.v, log_i, log_f))
            h, d, now = reference_step(q_t, k_t, v_t, i_t, f_t, *now, spec.scale, normalize)
            if spec.eps:
                d = bounded_denominator(d, now[2]).clamp(max=LARGEST)
                h = h * (d / (d + spec.eps))[..., None]
            hs.append(h.to(x.v.dtype))
            if lengths is None:
                kept = now
            else:
                at = t < lengths
                kept = tuple(
                    torch.where(at.view(-1, *[1] * (a.dim() - 1)), a, b) if a.dim() > 1 else a
                    for a, b in zip(now, kept, strict=True)
                )  # type: ignore[assignment]
    C, n, m = kept
    C = C.to(x.kept_dtype(x.C))
    return torch.stack(hs, 1), State(C) if x.n is None else State(C, n.to(x.kept_dtype(x.n)), m)
