"""The Hopper backend: fused scans with TMA, warpgroup MMAs and specialized warps, see docs/hopper.md."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tfla.backends.base import Backend, Exchange, FinalRows, Grads, Inputs, Outputs, Replay, Spec, Starts
from tfla.backends.gpu import pool_rows
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE, constant, planned_gpu
from tfla.backends.hopper.delta_backend import HopperDelta
from tfla.backends.hopper.head_dims import DIMS, SMALL_HEADS, padded_dims_of, supports
from tfla.backends.triton import BACKEND as TRITON

if TYPE_CHECKING:
    from tfla.backends.gpu.family import KernelFamily

DTYPES = (torch.bfloat16, torch.float16)


@constant
def _is_hopper(device: torch.device) -> bool:
    """Return whether `device` is a GPU of compute capability 9.0."""
    planned = planned_gpu(device)
    if planned is not None:
        return planned.architecture == 90
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@constant
def _cannot_build() -> str | None:
    """Return why the installed Triton cannot build the kernels, or None. A reason is also given as a warning, once."""
    return _error_of_kernels()


@functools.cache
def _error_of_kernels() -> str | None:
    """Return the reason of :func:`_cannot_build`. Dynamo warns where it traces into a cached function."""
    try:
        from tfla.backends.hopper import delta_h, fused, fused_small_head  # noqa: F401
    except (ImportError, AttributeError) as error:
        reason = f"it needs Triton 3.6 or newer: {error}"
        warnings.warn(f"tfla: the Hopper kernels cannot be built, {reason}; using the Triton backend", stacklevel=2)
        return reason
    return None


def _aligned(x: Tensor) -> bool:
    """Return whether TMA can address `x`: positive strides that are multiples of 16 bytes."""
    return all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1])


def _family(x: Inputs) -> KernelFamily:
    """Return the launch code for inputs `x`."""
    if padded_dims_of(x) in SMALL_HEADS:
        from tfla.backends.hopper import fused_small_head

        return fused_small_head.FAMILY
    from tfla.backends.hopper import fused

    return fused.FAMILY


def _with_positive_scale(x: Inputs, spec: Spec) -> tuple[Inputs, Spec]:
    """Return inputs and spec of the same result with a scale that is not negative; its sign is moved to q.

    The kernels compute the gate matrix as powers of two, which contain the scale.
    """
    return (x, spec) if spec.scale >= 0 else (x._replace(q=-x.q), spec._replace(scale=-spec.scale))


def _device_unsupported(q: Tensor) -> str | None:
    """Return why the kernels cannot run on the device of q with its Triton, or None."""
    if not _is_hopper(q.device):
        return "it needs a Hopper GPU (compute capability 9.0)"
    return TRITON.device_unsupported(q) or _cannot_build()


class Hopper(Backend):
    """The backend of GPUs of compute capability 9.0, with scans in Gluon and all other kernels in Triton."""

    name = "hopper"
    priority = 20
    kernels = ("fused",)
    takes_gates = True
    exchanges = True
    row_kernels = ("fused",)

    def unsupported(self, x: Inputs) -> str | None:
        """Return why the kernels cannot run these inputs, or None."""
        if not _is_hopper(x.q.device):
            return "it needs a Hopper GPU (compute capability 9.0)"
        if (reason := TRITON.unsupported(x)) is not None:
            return reason
        if (reason := _cannot_build()) is not None:
            return reason
        if x.q.dtype not in DTYPES:
            return f"it takes bfloat16 and float16, the inputs are {x.q.dtype}"
        if not supports(x.q.shape[3], x.v.shape[3]):
            return (
                f"it takes dqk and dhv of {DIMS}, or (dqk, dhv) of {SMALL_HEADS}, and multiples of 8 down to "
                "half of these"
            )
        if not all(map(_aligned, (x.q, x.k, x.v))):
            return "it needs strides that are multiples of 16 bytes"
        return None

    def default_chunk_size(self, x: Inputs, kernel: str) -> int:
        """Return the chunk size that the cost model of segments predicts to be the fastest."""
        if torch.compiler.is_compiling():  # a choice by length would compile a graph for each length
            return DEFERRED_CHUNK_SIZE
        from tfla.backends.hopper import config

        return config.best_chunk_size(x)

    def details(self, x: Inputs, chunk_size: int, kernel: str) -> dict[str, object]:
        """Return the segments and the configuration of the kernels for these inputs."""
        from tfla.backends.hopper import config

        return config.details(x, chunk_size)

    def stored_states(self, x: Inputs, chunk_size: int, kernel: str) -> int:
        """Return the segment boundary states that a forward keeps for its backward."""
        if chunk_size >= DEFERRED_CHUNK_SIZE:
            return 0
        if padded_dims_of(x) != (x.q.shape[3], x.v.shape[3]):  # the states have the shape of the padded heads
            return 0
        from tfla.backends.hopper import config

        steps = config.kernel_config(x).segment_steps(chunk_size)
        return super().stored_states(x, steps, kernel) if steps < x.v.shape[1] else 0

    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        """Compute the forward with a scale that is not negative."""
        x, spec = _with_positive_scale(x, spec)
        return _family(x).run_forward(x, spec)

    def forward_by_rows(
        self, x: Inputs, rows: Tensor, spec: Spec, final_rows: FinalRows | None = None
    ) -> Tensor | None:
        """Compute h and read and overwrite rows of the pool, or return None."""
        if x.cu_seqlens is None or not pool_rows.can_be_indexed(x, rows, final_rows):
            return None
        x, spec = _with_positive_scale(x, spec)
        return _family(x).run_forward_by_rows(x, spec, rows.contiguous(), final_rows)

    def forward_replay(self, x: Inputs, spec: Spec) -> Replay | None:
        """Return a function that replays the last `forward` on other inputs of the same signature, or None."""
        return _family(x).forward_replay(x, spec)

    def has_segments(self, x: Inputs, spec: Spec) -> bool:
        """Return whether sequences are cut into segments, whose states are not padded."""
        if padded_dims_of(x) != (x.q.shape[3], x.v.shape[3]):
            return False
        from tfla.backends.hopper import config

        chosen = spec.chunk_size if spec.chunk_size < DEFERRED_CHUNK_SIZE else config.best_chunk_size(x)
        return config.kernel_config(x).segment_steps(chosen) < x.v.shape[1]

    def forward_exchanging(self, x: Inputs, spec: Spec, exchange: Exchange) -> tuple[Outputs, Starts]:
        """Compute the forward of this process's steps with a scale that is not negative."""
        x, spec = _with_positive_scale(x, spec)
        return _family(x).run_forward_exchanging(x, spec, exchange)

    def backward_exchanging(
        self, x: Inputs, out: Outputs, dh: Tensor, saved: Sequence[Tensor], spec: Spec, exchange: Exchange
    ) -> Grads:
        """Compute the gradients with a scale that is not negative and a dh that TMA can address."""
        if not _aligned(dh):
            dh = dh.contiguous()
        signed, positive = _with_positive_scale(x, spec)
        grads = _family(x).run_backward_exchanging(signed, out, dh, saved, positive, exchange)
        return grads if signed is x else grads._replace(q=-grads.q)

    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        """Compute the gradients with a scale that is not negative and a dh that TMA can address."""
        if not _aligned(dh):
            dh = dh.contiguous()
        signed, positive = _with_positive_scale(x, spec)
        grads = _family(x).run_backward(signed, out, dh, dC, dn, positive)
        return grads if signed is x else grads._replace(q=-grads.q)


BACKEND = Hopper()
DELTA_BACKEND = HopperDelta(_device_unsupported, _aligned)
