"""The activations of the delta rule's inputs on a GPU, each as one kernel in the forward and one in the backward.

Eager calls launch these kernels; calls under a compiler or a transform use the operations of :mod:`.delta_activations`.
The kernels and their equations are in :mod:`tfla.backends.triton.activation_kernels`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tfla.backends.delta import BetaActivation, DeltaInputs, GateActivation
from tfla.ops import delta_activations
from tfla.ops.delta_activations import EPS
from tfla.ops.derivatives import recorded_gradients
from tfla.ops.gates import LOG_GATE_MAX, LOG_GATE_MIN, clamp

LIMITS = LOG_GATE_MIN, LOG_GATE_MAX  # of log-gates, which the kernels clamp


def activated(
    x: DeltaInputs, normalize_qk: bool, beta_activation: BetaActivation, gate_activation: GateActivation,
    lower_bound: float, clamp_gates: bool = True,
) -> DeltaInputs:  # fmt: skip
    """Return inputs with the activations applied, as :func:`.delta_activations.activated` does.

    The gradients of A_log and dt_bias are sums over all steps in float32, in an order that does not vary between runs.
    """
    q, k, r, beta, log_f = x.q, x.k, x.read_key, x.beta, x.log_f
    if normalize_qk:
        q, k, r = _Normalized.apply(q), _Normalized.apply(k), None if r is None else _Normalized.apply(r)
    if beta is not None and beta_activation != "none":
        beta = _Gates.apply(beta, None, None, "sigmoid", 2.0 if beta_activation == "2sigmoid" else 1.0)
    elif beta is not None:
        beta = delta_activations.write_strength(beta, beta_activation)
    if log_f is not None and gate_activation != "none":
        log_f = _Gates.apply(log_f, x.A_log, x.dt_bias, gate_activation, lower_bound)
    elif log_f is not None and clamp_gates:
        log_f = clamp(log_f)
    return x._replace(q=q, k=k, read_key=r, beta=beta, log_f=log_f, A_log=None, dt_bias=None)


class _Normalized(torch.autograd.Function):
    """The division of rows by their norms, which saves only its input for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y: Tensor = _kernels().launch_normalize(x, EPS)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            (dx,) = torch.autograd.grad(delta_activations.normalized(x), (x,), dy, create_graph=True)
        else:
            dx = _kernels().launch_normalize_backward(x, dy if dy.stride(-1) == 1 else dy.contiguous(), EPS)
        return dx


class _Gates(torch.autograd.Function):
    """An activation of gates or of write strengths, which saves only its inputs for the backward."""

    @staticmethod
    def forward(
        ctx: Any, f: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, activation: GateActivation, factor: float
    ) -> Tensor:
        ctx.save_for_backward(f, A_log, dt_bias)
        ctx.activation, ctx.factor = activation, factor
        g: Tensor = _kernels().launch_gates(f, A_log, dt_bias, activation == "softplus", factor, LIMITS)
        return g

    @staticmethod
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor | None, ...]:
        f, A_log, dt_bias = inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradients are to be differentiated

            def gates(f: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
                return delta_activations.log_gate(f, ctx.activation, A_log, dt_bias, ctx.factor)

            return *recorded_gradients(gates, inputs, dg), None, None
        grads = _kernels().launch_gates_backward(
            f, A_log, dt_bias, dg.contiguous(), ctx.activation == "softplus", ctx.factor, LIMITS
        )
        return *grads, None, None


def _kernels() -> ModuleType:
    """Return the module of the kernels. It imports Triton, which is an optional dependency."""
    from tfla.backends.triton import activation_kernels

    return activation_kernels
