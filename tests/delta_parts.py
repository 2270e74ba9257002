"""What ranks compute in the tests of the delta rule with context parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from context_parts import own_steps
from delta_cases import DeltaProblem, delta_problem, gradients
from torch import Tensor

import tfla
from tfla.distributed import ContextParallel

PER_STEP = ("q", "k", "v", "beta", "log_f", "read_key")


def call(p: DeltaProblem, leaves: dict[str, Tensor], **options: Any) -> Any:
    """Call the public function on these leaves."""
    q, k, v, beta, log_f, read_key = (leaves.get(name) for name in PER_STEP)
    state = tfla.State(leaves["C"]) if "C" in leaves else None
    options = {"initial_state": state, "cu_seqlens": p.x.cu_seqlens, "scale": p.scale, **options}
    if not p.correct:
        return tfla.linear_attention(q, k, v, log_f, **options)  # type: ignore[arg-type,call-overload]
    return tfla.delta_rule(  # type: ignore[call-overload]
        q, k, v, beta, log_f, read_key=read_key, read_before_decay=p.read_before_decay, **options
    )


def solve(p: DeltaProblem, device: str = "cpu", **options: Any) -> dict[str, Tensor]:
    """Return all quantities of a problem; offsets stay on the CPU."""
    leaves = {name: x.detach().to(device, copy=True).requires_grad_() for name, x in p.leaves.items()}
    h, state = call(p, leaves, return_state=True, **options)
    return gradients(p, leaves, h, state.C)


def part(p: DeltaProblem, group: dist.ProcessGroup, order: str, lengths: tuple[int, ...], share: float) -> DeltaProblem:
    """Return the problem of this rank; `share`: its share of the cotangents of the final states."""
    steps = own_steps(dist.get_rank(group), dist.get_world_size(group), order, lengths)
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
    """Return all quantities of this rank's part of `delta_problem(**given)`.

    Args:
        group: the ranks.
        given: the arguments of `delta_problem`.
        order, lengths: of :class:`ContextParallel`.
        share: this rank's share of the cotangents of the final states.
        dtype: of q, k and v.
        compiled: compile the call.
        options: further options of the call, and the device.
    """
    mine = part(delta_problem(**given, dtype=dtype), group, order, lengths, share)
    options["context_parallel"] = ContextParallel(group, order=order, lengths=lengths)
    if not compiled:
        return solve(mine, **options)
    leaves = {name: x.detach().clone().requires_grad_() for name, x in mine.leaves.items()}
    torch._dynamo.reset()
    run = torch.compile(
        lambda leaves: call(mine, leaves, return_state=True, **options), backend="aot_eager", fullgraph=True
    )
    h, state = run(leaves)
    return gradients(mine, leaves, h, state.C)


def outputs_alone(group: dist.ProcessGroup, *, given: dict[str, Any], order: str, lengths: tuple[int, ...]) -> Tensor:
    """Return h of this rank without gradients and without final states."""
    mine = part(delta_problem(**given), group, order, lengths, 0.0)
    context = ContextParallel(group, order=order, lengths=lengths)
    with torch.no_grad():
        found: Tensor = call(mine, mine.leaves, context_parallel=context)
    return found
