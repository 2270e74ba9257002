"""The activations of q, k, beta and the gates of published models, in plain PyTorch.

The operator applies them before it calls a backend, unless `DeltaBackend.activations_by` says otherwise.
"""

from __future__ import annotations

from typing import TypeVar, get_args

import torch
from torch import Tensor

from tfla.backends.delta import BetaActivation, DeltaInputs, DeltaStepInputs, GateActivation
from tfla.ops.activations import sigmoid, softplus
from tfla.ops.gates import clamp

EPS = 1e-6  # added to the squared norm of q and k
BETA_ACTIVATIONS: tuple[str, ...] = get_args(BetaActivation)
GATE_ACTIVATIONS: tuple[str, ...] = get_args(GateActivation)
X = TypeVar("X", DeltaInputs, DeltaStepInputs)


def _wide(x: Tensor) -> Tensor:
    """Return x in float64 if it has that dtype, else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def normalized(x: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) over the last dimension, in the dtype of x."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


def write_strength(beta: Tensor, activation: BetaActivation) -> Tensor:
    """Return beta, sigmoid(beta) or 2 sigmoid(beta), in float64 if beta has that dtype, else in float32."""
    wide = _wide(beta)
    if activation == "none":
        return wide
    return sigmoid(wide) * (2.0 if activation == "2sigmoid" else 1.0)


def log_gate(
    f: Tensor, activation: GateActivation, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float
) -> Tensor:
    """Return the clamped log-gates of pre-activations f, in float64 if f has that dtype, else in float32.

        "softplus": -exp(A_log) softplus(f + dt_bias)      "sigmoid": lower_bound sigmoid(exp(A_log) (f + dt_bias))

    Args:
        f: (B, T, H) or (B, T, H, dqk).
        activation: the activation; "none" takes f as log-gates.
        A_log: (H,); None stands for 0.
        dt_bias: (H,) or (H, dqk); None stands for 0.
        lower_bound: the smallest log-gate that "sigmoid" returns.
    """
    if activation == "none":
        return clamp(f)
    by_channel = f.dim() == 4
    z = _wide(f)  # the argument of the activation
    if dt_bias is not None:
        z = z + (_wide(dt_bias).unsqueeze(-1) if by_channel and dt_bias.dim() == 1 else _wide(dt_bias))
    rate = None
    if A_log is not None:
        rate = _wide(A_log).exp()
        rate = rate.unsqueeze(-1) if by_channel else rate
    if activation == "softplus":
        decay = -softplus(z)
        return clamp(decay if rate is None else decay * rate)
    return clamp(lower_bound * sigmoid(z if rate is None else z * rate))


def activated(
    x: X, normalize_qk: bool, beta_activation: BetaActivation, gate_activation: GateActivation, lower_bound: float,
    clamp_gates: bool = True,
) -> X:  # fmt: skip
    """Return inputs with the activations applied and log-gates clamped; `A_log` and `dt_bias` are then None.

    Without `clamp_gates`, log-gates without an activation stay as they are, in their dtype.
    """
    q, k, r = x.q, x.k, x.read_key
    if normalize_qk:
        q, k, r = normalized(q), normalized(k), None if r is None else normalized(r)
    beta = None if x.beta is None else write_strength(x.beta, beta_activation)
    log_f = x.log_f
    if log_f is not None and (clamp_gates or gate_activation != "none"):
        log_f = log_gate(log_f, gate_activation, x.A_log, x.dt_bias, lower_bound)
    return x._replace(q=q, k=k, read_key=r, beta=beta, log_f=log_f, A_log=None, dt_bias=None)
