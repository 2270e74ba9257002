"""The functions that ranks run in the tests of the delta rule with context parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_parts import own_steps, replays_on_other_inputs
from delta_cases import DeltaProblem, delta_problem, gradients
from several_writes import WritesProblem, recurrence, writes_problem
from torch import Tensor

import tfla
from tfla.distributed import ContextParallel

PER_STEP = ("q", "k", "v", "beta", "log_f", "read_key")


AnyProblem = DeltaProblem | WritesProblem


def problem_of(given: dict[str, Any], dtype: torch.dtype = torch.float64) -> AnyProblem:
    """Return the problem of these arguments of `writes_problem`, if they name a function, or of `delta_problem`."""
    return writes_problem(**given, dtype=dtype) if "function" in given else delta_problem(**given, dtype=dtype)


def truth_of_writes(p: WritesProblem) -> dict[str, Tensor]:
    """Return all quantities of a problem with several writes in each step, by the recurrence."""
    leaves = {name: x.clone().requires_grad_() for name, x in p.leaves.items()}
    return gradients(p, leaves, *recurrence(p, leaves))


def call(p: AnyProblem, leaves: dict[str, Tensor], **options: Any) -> Any:
    """Call the public function on these leaves."""
    if isinstance(p, WritesProblem):
        return p.call(leaves, **options)
    q, k, v, beta, log_f, read_key = (leaves.get(name) for name in PER_STEP)
    state = tfla.State(leaves["C"]) if "C" in leaves else None
    options = {"initial_state": state, "cu_seqlens": p.x.cu_seqlens, "scale": p.scale, **options}
    if not p.correct:
        return tfla.linear_attention(q, k, v, log_f, **options)  # type: ignore[arg-type,call-overload]
    return tfla.delta_rule(  # type: ignore[call-overload]
        q, k, v, beta, log_f, read_key=read_key, read_before_decay=p.read_before_decay, **options
    )


def solve(p: AnyProblem, device: str = "cpu", **options: Any) -> dict[str, Tensor]:
    """Return all quantities of a problem, on the CPU; offsets stay there."""
    leaves = {name: x.detach().to(device, copy=True).requires_grad_() for name, x in p.leaves.items()}
    h, state = call(p, leaves, return_state=True, **options)
    return {name: x.cpu() for name, x in gradients(p, leaves, h, state.C).items()}


def part(p: AnyProblem, group: dist.ProcessGroup, order: str, lengths: tuple[int, ...], share: float) -> AnyProblem:
    """Return the problem of this rank; `share`: its share of the cotangents of the final states."""
    steps = own_steps(dist.get_rank(group), dist.get_world_size(group), order, lengths)
    if isinstance(p, WritesProblem):
        return p.part(steps, share)
    own = {name: x[:, steps] for name in PER_STEP if (x := p.leaves.get(name)) is not None}
    return replace(p, x=p.x._replace(**own), dh=p.dh[:, steps], dC=p.dC * share)


def solve_part(
    group: dist.ProcessGroup,
    *,
    given: dict[str, Any],
    order: str,
    lengths: tuple[int, ...],
    share: float,
    dtype: torch.dtype = torch.float64,
    compiled: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Return all quantities of this rank's part of `problem_of(given)`.

    Args:
        group: the ranks.
        given: the arguments of `problem_of`.
        order, lengths: of :class:`ContextParallel`.
        share: this rank's share of the cotangents of the final states.
        dtype: of q, k and v.
        compiled: compile the call.
        options: further options of the call, and the device.
    """
    ours = part(problem_of(given, dtype), group, order, lengths, share)
    options["context_parallel"] = ContextParallel(group, order=order, lengths=lengths)
    if not compiled:
        return solve(ours, **options)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in ours.leaves.items()}
    torch._dynamo.reset()
    run = torch.compile(
        lambda leaves: call(ours, leaves, return_state=True, **options), backend="aot_eager", fullgraph=True
    )
    h, state = run(leaves)
    return gradients(ours, leaves, h, state.C)


def outputs_alone(group: dist.ProcessGroup, *, given: dict[str, Any], order: str, lengths: tuple[int, ...]) -> Tensor:
    """Return h of this rank without gradients and without final states."""
    ours = part(problem_of(given), group, order, lengths, 0.0)
    context = ContextParallel(group, order=order, lengths=lengths)
    with torch.no_grad():
        found: Tensor = call(ours, ours.leaves, context_parallel=context)
    return found


def captured(group: dist.ProcessGroup, *, model: str, order: str) -> bool:
    """Return whether a captured forward and backward give, on other inputs, the bits that eager ones give."""
    context = ContextParallel(group, order=order)
    gate = (1, 512, 4, 64) if model == "kda" else (1, 512, 4)
    shapes = [(1, 512, 4, 64), (1, 512, 4, 64), (1, 512, 4, 64), (1, 512, 4), gate]

    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, f: Tensor) -> Tensor:
        return tfla.delta_rule(  # type: ignore[no-any-return,call-overload]
            q, k, v, beta.sigmoid(), -F.softplus(f.float()), normalize_qk=True, context_parallel=context
        )

    return replays_on_other_inputs(group, shapes, run)
