"""Decoding steps of the delta rule in plain PyTorch: differentiable, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends.delta import DeltaStepInputs, DeltaStepSpec
from tfla.backends.reference_delta import step
from tfla.ops.autocast import without_autocast
from tfla.ops.checked_values import checked_lengths
from tfla.ops.delta_activations import activated
from tfla.ops.transforms import needs_dispatcher


def compute_steps(x: DeltaStepInputs, spec: DeltaStepSpec) -> tuple[Tensor, Tensor]:
    """Compute the steps one after another with the reference: differentiable, on any device.

    Returns:
        h (B, T, H, dhv) in v's dtype, and C after `x.lengths` steps of each sequence (after all T where None).
    """
    dtype, group = x.acc_dtype, x.v.shape[2] // x.q.shape[2]
    lengths = x.lengths
    if lengths is not None and lengths.device.type == "cpu" and needs_dispatcher((lengths,)):
        lengths = checked_lengths(lengths, x.v.shape[1])
    with without_autocast(x.q.device.type):
        x = activated(x, spec.normalize_qk, spec.beta_activation, spec.gate_activation, spec.lower_bound)
        q, k = (t.to(dtype).repeat_interleave(group, 2) for t in (x.q, x.k))
        r = k if x.read_key is None else x.read_key.to(dtype).repeat_interleave(group, 2)
        gates = x.v.shape[:3]
        beta = q.new_ones(gates) if x.beta is None else x.beta.to(dtype)
        log_f = q.new_zeros(gates) if x.log_f is None else x.log_f.to(dtype)
        log_f = log_f if log_f.dim() == 4 else log_f.unsqueeze(-1)
        C = kept = x.C.to(dtype)
        hs = []
        for t in range(x.v.shape[1]):
            h, C = step(
                q[:, t], k[:, t], x.v[:, t].to(dtype), beta[:, t], log_f[:, t], r[:, t], C, spec.scale, spec.correct,
                spec.read_before_decay,
            )  # fmt: skip
            hs.append(h.to(x.v.dtype))
            kept = C if lengths is None else torch.where((t < lengths).view(-1, 1, 1, 1), C, kept)
    return torch.stack(hs, 1), kept.to(x.kept_dtype)
