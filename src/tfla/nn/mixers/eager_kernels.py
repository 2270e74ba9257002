"""The requirements that the Triton kernels of layers have of the tensors of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from tfla.backends.triton import BACKEND
from tfla.ops.transforms import needs_dispatcher

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tensors_unsupported(x: Tensor, *others: Tensor | None) -> str | None:
    """Return why no kernel takes these tensors, or None if one can.

    Compilers, tracers, transforms and forward-mode AD need operations that they know, those of PyTorch.
    """
    given = [x, *(t for t in others if t is not None)]
    if needs_dispatcher(tuple(given)):
        return "a compiler, a transform or forward-mode AD takes part"
    if not {t.dtype for t in given}.issubset(DTYPES):
        return "it computes in float32"
    if len({t.device for t in given}) > 1:
        return "the tensors are on several devices"
    return BACKEND.device_unsupported(x)
