"""The FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tfla.backends import BACKENDS, DELTA_BACKENDS
from tfla.backends.base import TILE, Spec, StepSpec
from tfla.backends.delta import DeltaSpec, DeltaStepSpec
from tfla.ops.schema import Schema


def forward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """Return the FLOPs of a forward: output and state of every tile, and the causal half of both products inside it."""
    return heads * (4 * T * dqk * dhv + T * L * (dqk + dhv))


def backward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """Return the FLOPs of a backward: dq, dk, dv, dC and the states once more; the causal half of five products."""
    return heads * (10 * T * dqk * dhv + T * L * (3 * dqk + 2 * dhv))


def attend_flops(x: Any, backend: str, spec: Spec) -> int:
    """Count the matrix products of the chunkwise form, (36)-(56), in tiles as the backend takes them.

    A product of (a, b) and (b, c) is 2 a b c FLOPs. Per head and step there are 4 dqk dhv for the output and the state,
    and L (dqk + dhv) for both products inside a tile of L steps, of which the causal half counts. Gates and
    normalizer, which grow with dqk alone, are left out, as are products that a kernel forms a second time. Packed
    sequences count as one, since their lengths are not read.

    Args:
        x: the shapes of :class:`Inputs`.
        backend: the name of the backend.
        spec: the options.
    """
    return _count(forward_flops, x, backend, spec)


def attend_backward_flops(x: Any, backend: str, spec: Spec) -> int:
    """Count the products of a backward as :func:`attend_flops` does.

    Per head and step these are 10 dqk dhv with states and L (3 dqk + 2 dhv) inside a tile.
    """
    return _count(backward_flops, x, backend, spec)


def _count(flops: Callable[[int, int, int, int, int], int], x: Any, backend: str, spec: Spec) -> int:
    """Return the FLOPs of a call with the tile of its backend."""
    B, T, H, dhv = x.v
    return B * flops(T, H, x.q[3], dhv, BACKENDS[backend].tile_steps(T, spec.chunk_size, spec.kernel))


def delta_forward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """Return the FLOPs of a forward of the delta rule (docs/delta-rule.md).

    It has the reads of the state by q and by the read keys, and the update of the state; in each tile the causal half
    of the products of q and of the read keys with k, of X with R and of P with E, and the solution for X.
    """
    return heads * (6 * T * dqk * dhv + 2 * T * L * (dqk + dhv) + T * L * L // 3)


def delta_backward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """Return the FLOPs of a backward of the delta rule: seven products with states, nine in each tile."""
    return heads * (14 * T * dqk * dhv + T * L * (5 * dqk + 4 * dhv))


def delta_flops(x: Any, backend: str, spec: DeltaSpec) -> int:
    """Count the matrix products of the delta rule, or without correction of GLA, as :func:`attend_flops` does.

    Args:
        x: the shapes of :class:`DeltaInputs`.
        backend: the name of the backend.
        spec: the options.
    """
    return _count_delta(delta_forward_flops if spec.correct else forward_flops, x, backend, spec)


def delta_gradient_flops(x: Any, backend: str, spec: DeltaSpec) -> int:
    """Count the products of a backward as :func:`delta_flops` does."""
    return _count_delta(delta_backward_flops if spec.correct else backward_flops, x, backend, spec)


def _count_delta(flops: Callable[[int, int, int, int, int], int], x: Any, backend: str, spec: DeltaSpec) -> int:
    """Return the FLOPs of a call with the tile of its backend."""
    B, T, H, dhv = x.v
    return B * flops(T, H, x.q[3], dhv, DELTA_BACKENDS[backend].tile_steps(T, spec.chunk_size, spec.kernel))


def steps_flops(x: Any, backend: str, spec: StepSpec) -> int:
    """Count the products of the recurrence, (1)-(8): per head and step 2 dqk dhv for the output, and for the state.

    Args:
        x: the shapes of :class:`StepInputs`.
        backend: the name of the backend.
        spec: the options.
    """
    B, T, H, dhv = x.v
    return int(B * T * H * x.q[3] * dhv * (4 if spec.final_state else 2))


def delta_steps_flops(x: Any, backend: str, spec: DeltaStepSpec) -> int:
    """Count the products of the delta rule's recurrence: per head and step 2 dqk dhv for the write and each read.

    Args:
        x: the shapes of :class:`DeltaStepInputs`.
        backend: the name of the backend.
        spec: the options.
    """
    B, T, H, dhv = x.v
    return int(B * T * H * x.q[3] * dhv * (6 if spec.correct else 4))


# The formulas by operator, as PyTorch's counter calls them.
_FORMULAS: dict[Any, Callable[..., int]] = {}


def add(operator: Any, schema: Schema[Any, Any], formula: Callable[[Any, str, Any], int]) -> None:
    """Add the formula of an operator, from the shapes of its inputs, the name of the backend and the options."""

    def flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        x, _, backend, spec = schema.unpack(args)
        return formula(x, backend, spec)

    _FORMULAS[operator] = flops


def register() -> None:
    """Register the formulas with PyTorch's counter and with every counter that is active.

    This happens at a call under a dispatch mode and not at the import, because the counter's module imports Triton.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    for operator, formula in _FORMULAS.items():
        if operator not in counting.flop_registry:
            counting.register_flop_formula(operator)(formula)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", mode)
        if isinstance(counter, counting.FlopCounterMode):
            for operator in _FORMULAS:  # an active counter has its own copy of the registry
                counter.flop_registry.setdefault(operator, counting.flop_registry[operator])
