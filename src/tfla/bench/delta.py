"""Calls of the delta rule and of gated linear attention (GLA): this library's, and flash-linear-attention's."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

import tfla
from tfla.backends.delta import DeltaInputs
from tfla.measure.problem import Problem, Work
from tfla.measure.roofline import DeltaModel
from tfla.ops.delta_dispatch import choose

# For each model the module of flash-linear-attention, the suffix of its functions, and the name of the gates' argument
# in the recurrent function.
FLA = {
    "gdn": ("gated_delta_rule", "gated_delta_rule", "g"),
    "kda": ("kda", "kda", "g"),
    "gla": ("gla", "gla", "gk"),
}


def inputs(problem: Problem, model: DeltaModel) -> list[Tensor]:
    """Draw q, k, v, the log-gates and, but for GLA, the write strengths; q and k have norm 1.

    Gates are those of a model early in training: one for each step in float32, for each key channel in the dtype of q.
    """
    q, k, v, f, *beta = preactivations(problem, model)
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    log_f = -torch.nn.functional.softplus(f.float()).to(f.dtype)
    return [q, k, v, log_f, *(x.sigmoid() for x in beta)]


def preactivations(problem: Problem, model: DeltaModel) -> list[Tensor]:
    """Draw q, k, v, the gates and, but for GLA, the write strengths before normalization, softplus and sigmoid."""
    q, k, v = problem.qkv()
    if model == "gdn":
        return [q, k, v, -problem.gates()[1], problem.randn(problem.B, problem.T, problem.H, dtype="float32")]
    f = -(problem.randn(problem.B, problem.T, problem.H, problem.dqk, dtype="float32") + 4.5)
    if model == "gla":
        return [q, k, v, f.to(q.dtype)]
    return [q, k, v, f.to(q.dtype), problem.randn(problem.B, problem.T, problem.H, dtype="float32")]


def gate_parameters(problem: Problem, model: DeltaModel) -> dict[str, Tensor]:
    """Return zeros as A_log and dt_bias of the gates."""
    channels = (problem.dqk,) if model == "kda" else ()
    return {
        "A_log": torch.zeros(problem.H, device=problem.device),
        "dt_bias": torch.zeros(problem.H, *channels, device=problem.device),
    }


def chunk(
    problem: Problem, model: DeltaModel, packed: bool = False, backend: str | None = None, activated: bool = False
) -> Work:
    """Return a call of `tfla.delta_rule` or `tfla.linear_attention`, with facts on the backend and kernel that run.

    Args:
        problem: the sizes, dtype and device.
        model: the recurrence.
        packed: whether the sequences are packed, with exponentially distributed lengths.
        backend: the backend, or None for the library's choice.
        activated: whether the call normalizes q and k and applies the activations of beta and the gates, as in layers.
    """
    given, cu_seqlens = preactivations(problem, model) if activated else inputs(problem, model), None
    options: dict[str, Any] = {}
    if activated:
        options = {"normalize_qk": True, "beta_activation": "sigmoid", "gate_activation": "softplus"}
        options |= gate_parameters(problem, model)
    if packed:
        given, cu_seqlens = problem.packed(given)
    q, k, v, log_f, *beta = given
    x = DeltaInputs(q, k, v, beta[0] if beta else None, log_f, None, None, None, None, cu_seqlens)
    chosen, kernel, _ = choose(x, False, backend, None, None)

    def run(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, beta: Tensor | None = None) -> Any:
        if beta is None:
            return tfla.linear_attention(q, k, v, log_f, cu_seqlens=cu_seqlens, backend=backend)
        return tfla.delta_rule(q, k, v, beta, log_f, cu_seqlens=cu_seqlens, backend=backend, **options)

    return Work(run, given, {"implementation": f"{chosen.name} {kernel}"})


def step(problem: Problem, model: DeltaModel, in_place: bool = False) -> Work:
    """Return a call of `tfla.delta_rule_step` or `tfla.linear_attention_step` from a state that is not zero."""
    state = tfla.State(problem.randn(problem.B, problem.H, problem.dqk, problem.dhv, dtype="float32"))

    def run(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, beta: Tensor | None = None) -> Tensor:
        if beta is None:
            return tfla.linear_attention_step(q, k, v, log_f, state, in_place=in_place)[0]
        return tfla.delta_rule_step(q, k, v, beta, state, log_f, in_place=in_place)[0]

    return Work(run, [x[:, 0] for x in inputs(problem, model)])


def fla_chunk(problem: Problem, model: DeltaModel, packed: bool = False, activated: bool = False) -> Work:
    """Return a call of flash-linear-attention's chunk kernels for the same inputs."""
    module, name, _ = FLA[model]
    run = getattr(importlib.import_module(f"fla.ops.{module}"), f"chunk_{name}")
    given = preactivations(problem, model) if activated else inputs(problem, model)
    options: dict[str, Any] = {}
    if packed:
        given, options["cu_seqlens"] = problem.packed(given)
    if activated:
        names = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
        options |= dict.fromkeys(names, True) | {n: x.flatten() for n, x in gate_parameters(problem, model).items()}

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor) -> Tensor:
        found: Tensor = run(q=q, k=k, v=v, g=g, **({"beta": beta[0]} if beta else {}), **options)[0]
        return found

    return Work(call, given)


def fla_step(problem: Problem, model: DeltaModel) -> Work:
    """Return a call of one step of flash-linear-attention's recurrent kernel, from a state to the next."""
    module, name, gates = FLA[model]
    run = getattr(importlib.import_module(f"fla.ops.{module}"), f"fused_recurrent_{name}")
    C = problem.randn(problem.B, problem.H, problem.dqk, problem.dhv, dtype="float32")

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor) -> Tensor:
        options = {gates: g} | ({"beta": beta[0]} if beta else {})
        found: Tensor = run(q=q, k=k, v=v, **options, initial_state=C, output_final_state=True)[0]
        return found

    return Work(call, inputs(problem, model))
