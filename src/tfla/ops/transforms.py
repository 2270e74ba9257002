"""The queries whether a tracer, a dispatch mode, a transform or forward-mode AD takes part in a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tfla.backends.gpu.runtime import constant

PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))  # types of arguments that no subclass has to see


def is_distributed(x: object) -> bool:
    """Return whether a tensor is a DTensor, without the import of that class."""
    return type(x) not in PLAIN and hasattr(x, "device_mesh")


def needs_dispatcher(tensors: tuple[Tensor | None, ...]) -> bool:
    """Return whether a tracer, a mode, a transform or a subclass of Tensor has to see the operator.

    Other calls are plain eager ones, which skip PyTorch's dispatcher. A meta tensor needs the dispatcher for the shapes
    of the results.

    Args:
        tensors: the tensors of the call, q first.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or not PLAIN.issuperset(map(type, tensors))
        or (tensors[0] is not None and tensors[0].is_meta)
    )


def forward_mode(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether tangents are computed: by a level of torch.func, or because a tensor carries a tangent."""
    if torch._C._are_functorch_transforms_active():
        levels = torch._C._functorch.get_interpreter_stack() or ()
        return any(level.key() == torch._C._functorch.TransformType.Jvp for level in levels)
    if forward_ad._current_level < 0:
        return False  # the query below would add views to a graph, which Inductor refuses for some operators
    return any(t is not None and torch._VF._unpack_dual(t, level=0).tangent is not None for t in tensors)


@constant
def transforms_active() -> bool:
    """Return whether a torch.func transform or a level of forward-mode AD is active, at the call or during tracing."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def compiles_alone() -> bool:
    """Return whether torch.compile or torch.export traces the call, and no transform takes part."""
    return torch.compiler.is_compiling() and not transforms_active()
