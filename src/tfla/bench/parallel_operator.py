"""The operator on several GPUs that share the steps of a sequence: context parallelism, and all-to-alls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import tfla
from tfla.measure.problem import Problem, Work


def _part(problem: Problem) -> list[Tensor]:
    """Draw q, k, v, i and f of this process's steps.

    Raises:
        ValueError: the steps or the heads cannot be shared equally.
    """
    size = dist.get_world_size()
    for name in ("T", "H"):
        if getattr(problem, name) % size:
            raise ValueError(f"{name}: got {getattr(problem, name)}, expected a multiple of the {size} processes")
    own = replace(problem, T=problem.T // size)
    torch.manual_seed(dist.get_rank())
    return [*own.qkv(), *own.gates()]


def context_parallel(problem: Problem, gate: Literal["exp", "sigmoid"]) -> Work:
    """Return a call of `tfla.mlstm` with `context_parallel`; T are the steps of all processes."""
    assert dist.group.WORLD is not None
    group = dist.group.WORLD
    return Work(lambda *x: tfla.mlstm(*x, input_gate=gate, context_parallel=group), _part(problem))


class _Swap(torch.autograd.Function):
    """The all-to-all from parts of the steps to parts of the heads, or back.

    The gradient is the all-to-all in the other direction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        """Return (B, T, H / R, D) from (B, T / R, H, D), or with `to_heads` False the reverse."""
        ctx.to_heads = to_heads
        return _swapped(x, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient."""
        return _swapped(grad, not ctx.to_heads), None


def _swapped(x: Tensor, to_heads: bool) -> Tensor:
    """Return the result of the all-to-all, see :class:`_Swap`."""
    size = dist.get_world_size()
    if to_heads:
        given = x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()  # (R, B, T / R, H / R, D)
    else:
        given = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    found = torch.empty_like(given)
    dist.all_to_all_single(found, given)
    if to_heads:
        return found.transpose(0, 1).flatten(1, 2)
    return found.permute(1, 2, 0, 3, 4).flatten(2, 3)


def all_to_all(problem: Problem, gate: Literal["exp", "sigmoid"]) -> Work:
    """Return a call of `tfla.mlstm` on all steps of this process's share of the heads.

    Libraries without context parallelism for a recurrence run it so on parts of a sequence. T are the steps of all
    processes. Two all-to-alls give each process its heads of q, k and v, which share a message, and of the gates; a
    third one gives h back.
    """
    sizes = problem.dqk, problem.dqk, problem.dhv

    def run(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        q, k, v = _Swap.apply(torch.cat([q, k, v], -1), True).split(sizes, -1)
        i, f = _Swap.apply(torch.stack([i, f], -1), True).unbind(-1)
        h: Tensor = _Swap.apply(tfla.mlstm(q, k, v, i, f, input_gate=gate), False)
        return h

    return Work(run, _part(problem))
