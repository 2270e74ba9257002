"""The FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tfla.backends import BACKENDS
from tfla.backends.base import TILE


def forward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """Return the FLOPs of a forward: output and state of every tile, and the causal half of both products inside it."""
    return heads * (4 * T * dqk * dhv + T * L * (dqk + dhv))


def backward_flops(T: int, heads: int, dqk: int, dhv: int, L: int = TILE) -> int:
    """Return the FLOPs of a backward: dq, dk, dv, dC and the states once more; the causal half of five products."""
    return heads * (10 * T * dqk * dhv + T * L * (3 * dqk + 2 * dhv))


def attend_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count the matrix products of the chunkwise form, (36)-(56), in tiles as the backend takes them.

    Derived from the equations, a product of (a, b) and (b, c) being 2 a b c: per head and step 4 dqk dhv for output and
    state, and L (dqk + dhv) for both products inside a tile of L steps, of which the causal half counts. Gates and
    normalizer, which grow with dqk alone, are left out, as are products that a kernel forms a second time. Packed
    sequences count as one, since their lengths are not read.
    """
    return _count(forward_flops, q, v, *args[6:])


def attend_backward_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count as :func:`attend_flops` does, of the backward: per head and step 10 dqk dhv, and L (3 dqk + 2 dhv)."""
    return _count(backward_flops, q, v, *args[13:])


def _count(flops: Any, q: Any, v: Any, scale: float, normalize: bool, _: bool, chunk_size: int, backend: str,
           kernel: str, *rest: Any) -> int:  # fmt: skip
    """Return the FLOPs of a call with the tile of its backend, from the shapes of q and v and the options."""
    B, T, H, dhv = v
    return int(B * flops(T, H, q[3], dhv, BACKENDS[backend].tile_steps(T, chunk_size, kernel)))


def steps_flops(
    q: Any, k: Any, v: Any, i: Any, f: Any, C: Any, n: Any, m: Any, lengths: Any, scale: float, gates: str,
    backend: str, final_state: bool, eps: float = 0.0, out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """Count the products of the recurrence, (1)-(8): per head and step 2 dqk dhv for the output, and for the state."""
    B, T, H, dhv = v
    return int(B * T * H * q[3] * dhv * (4 if final_state else 2))


def steps_in_place_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Count as :func:`steps_flops` does; the state is always written."""
    B, T, H, dhv = v
    return int(B * T * H * q[3] * dhv * 4)


def register() -> None:
    """Register the formulas with PyTorch's counter and with every counter that is active.

    This happens at a call under a dispatch mode and not at the import, because the counter's module imports Triton.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    formulas = {
        torch.ops.tfla.attend: attend_flops,
        torch.ops.tfla.attend_backward: attend_backward_flops,
        torch.ops.tfla.steps: steps_flops,
        torch.ops.tfla.steps_: steps_in_place_flops,
    }
    if torch.ops.tfla.attend not in counting.flop_registry:
        for operator, formula in formulas.items():
            counting.register_flop_formula(operator)(formula)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", mode)
        if isinstance(counter, counting.FlopCounterMode):
            for operator in formulas:  # an active counter has its own copy of the registry
                counter.flop_registry.setdefault(operator, counting.flop_registry[operator])
