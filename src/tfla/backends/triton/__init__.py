"""The Triton backend, for NVIDIA GPUs from Ampere on.

It has the fused scans (:mod:`.fused`), the kernels of the paper (:mod:`.paper`) and decoding (:mod:`.decode`).
Triton is imported on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tfla.backends.base import (
    Backend,
    Exchange,
    FinalRows,
    Grads,
    Inputs,
    Outputs,
    Replay,
    Spec,
    Starts,
    StepInputs,
    StepOutputs,
    StepSpec,
)
from tfla.backends.gpu import pool_rows
from tfla.backends.gpu.runtime import DEFERRED_CHUNK_SIZE, INSTALLED, INTERPRETED, constant, planned_gpu
from tfla.backends.triton.delta_backend import TritonDelta

if TYPE_CHECKING:
    from tfla.backends.gpu.family import KernelFamily

LARGEST_DQK, LARGEST_DHV = 1024, 1024
LARGEST_FUSED_DQK = 512  # largest dqk for which a program of the fused scans can hold some columns of the state
TFLA_CHUNK = 256  # the optimum of the paper's Figure 5


@constant
def _ampere_or_newer(device: torch.device) -> bool:
    """Return whether the GPU has compute capability 8.0 or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@constant
def _cheapest(dqk: int, dhv: int, itemsize: int, chunk_size: int, device: torch.device) -> str:
    """Return the kernel with the smallest predicted time, see :mod:`.kernel_choice`."""
    from tfla.backends.triton import kernel_choice

    return kernel_choice.cheapest(dqk, dhv, itemsize, chunk_size, device)


@functools.cache  # an import inside a function takes a microsecond
def _family(kernel: str) -> KernelFamily:
    """Return the launch code of a kernel."""
    from tfla.backends.triton import fused
    from tfla.backends.triton.paper import tfla

    return tfla.FAMILY if kernel == "tfla" else fused.FAMILY


class Triton(Backend):
    """The backend of the Triton kernels."""

    name = "triton"
    priority = 10
    kernels = ("fused", "tfla")
    takes_gates = True
    exchanges = True
    row_kernels = ("fused", "tfla")

    def unsupported(self, x: Inputs) -> str | None:
        """Return why the kernels cannot run these inputs, or None."""
        if why := self.device_unsupported(x.q):
            return why
        if x.q.shape[-1] > LARGEST_DQK or x.v.shape[-1] > LARGEST_DHV:
            return f"it takes dqk up to {LARGEST_DQK} and dhv up to {LARGEST_DHV}"
        return None

    def steps_unsupported(self, x: StepInputs) -> str | None:
        """Return why the decoding kernel cannot run these steps, or None."""
        if x.q.device.type != "cuda" and torch.bfloat16 in (x.C.dtype, None if x.n is None else x.n.dtype):
            return "Triton's interpreter takes bfloat16 for integers"
        return self.device_unsupported(x.q)

    def device_unsupported(self, q: Tensor) -> str | None:
        """Return why tensors on this device and of this dtype are not supported, or None."""
        if not INSTALLED:
            return 'Triton is not installed: pip install "tfla[triton]"'
        if (planned := planned_gpu(q.device)) is not None:
            if planned.architecture < 80:
                return "it needs compute capability 8.0 (Ampere) or newer"
            return "it computes in float32 at most, the inputs are float64" if q.dtype == torch.float64 else None
        if q.device.type != "cuda" and not INTERPRETED:
            return f"it needs an NVIDIA GPU, the inputs are on {q.device.type}"
        if q.device.type == "cuda" and not _ampere_or_newer(q.device):
            return "it needs compute capability 8.0 (Ampere) or newer"
        if q.device.type != "cuda" and q.dtype == torch.bfloat16:
            return "Triton's interpreter takes bfloat16 for integers"
        if q.dtype == torch.float64:
            return "it computes in float32 at most, the inputs are float64"
        return None

    def kernel_unsupported(self, x: Inputs, kernel: str) -> str | None:
        """Return why the fused scans cannot run these head dims, or None."""
        if kernel == "fused" and x.q.shape[-1] > LARGEST_FUSED_DQK:
            return f"it takes dqk up to {LARGEST_FUSED_DQK}"
        return None

    def default_kernel(self, x: Inputs, chunk_size: int | None) -> str:
        """Return the kernel that the cost model predicts to be the fastest."""
        dims = int(x.q.shape[-1]), int(x.v.shape[-1])
        if dims[0] > LARGEST_FUSED_DQK:
            return "tfla"
        return _cheapest(*dims, x.q.element_size(), TFLA_CHUNK if chunk_size is None else chunk_size, x.q.device)

    def default_chunk_size(self, x: Inputs, kernel: str) -> int:
        """Return the paper's optimum, or for fused scans that of the cost model of segments."""
        if kernel == "tfla":
            return TFLA_CHUNK
        if torch.compiler.is_compiling():  # a choice by length would compile one graph for each length
            return DEFERRED_CHUNK_SIZE
        from tfla.backends.triton import fused

        return fused.best_chunk_size(x)

    def details(self, x: Inputs, chunk_size: int, kernel: str) -> dict[str, object]:
        """Return the configuration of the kernels for these inputs."""
        from tfla.backends.gpu import config
        from tfla.backends.triton import fused
        from tfla.backends.triton.paper import block_sizes

        products: dict[str, object] = {"float32": config.float32_products()} if x.q.dtype == torch.float32 else {}
        if kernel == "tfla":
            return block_sizes.details(x, chunk_size) | products
        return fused.details(x, chunk_size) | products

    def stored_states(self, x: Inputs, chunk_size: int, kernel: str) -> int:
        """Return the chunk or segment boundary states that a forward keeps for its backward."""
        if kernel == "tfla":
            from tfla.backends.triton.paper import block_sizes

            return super().stored_states(x, block_sizes.chunk_steps(x, chunk_size), kernel)
        if chunk_size >= DEFERRED_CHUNK_SIZE:
            return 0
        from tfla.backends.gpu import config

        steps = config.kernel_config(x).segment_steps(chunk_size)
        return super().stored_states(x, steps, kernel) if steps < x.v.shape[1] else 0

    def tile_steps(self, T: int, chunk_size: int, kernel: str) -> int:
        """Return the steps whose products are quadratic: a chunk of the paper's kernels, else a tile."""
        return min(chunk_size, T) if kernel == "tfla" else super().tile_steps(T, chunk_size, kernel)

    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        """Compute the forward with the kernels that `spec.kernel` names."""
        return _family(spec.kernel).run_forward(x, spec)

    def forward_by_rows(
        self, x: Inputs, rows: Tensor, spec: Spec, final_rows: FinalRows | None = None
    ) -> Tensor | None:
        """Compute h and read and overwrite rows of the pool, or return None."""
        if x.cu_seqlens is None or not pool_rows.can_be_indexed(x, rows, final_rows):
            return None
        return _family(spec.kernel).run_forward_by_rows(x, spec, rows.contiguous(), final_rows)

    def forward_replay(self, x: Inputs, spec: Spec) -> Replay | None:
        """Return a function that replays the last `forward` on other inputs of the same signature, or None."""
        return _family(spec.kernel).forward_replay(x, spec)

    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        """Compute the gradients with the kernels that `spec.kernel` names."""
        return _family(spec.kernel).run_backward(x, out, dh, dC, dn, spec)

    def cuts_sequences(self, x: Inputs, spec: Spec) -> bool:
        """Return whether sequences are cut into segments, or into the chunks of the paper."""
        return spec.kernel == "tfla" or self.has_segments(x, spec)

    def has_segments(self, x: Inputs, spec: Spec) -> bool:
        """Return whether the fused scans cut sequences into segments."""
        if spec.kernel != "fused":
            return False
        from tfla.backends.gpu import config
        from tfla.backends.triton import fused

        chosen = spec.chunk_size if spec.chunk_size < DEFERRED_CHUNK_SIZE else fused.best_chunk_size(x)
        return config.kernel_config(x).segment_steps(chosen) < x.v.shape[1]

    def forward_exchanging(self, x: Inputs, spec: Spec, exchange: Exchange) -> tuple[Outputs, Starts]:
        """Compute the forward of this process's steps with the fused scans."""
        return _family(spec.kernel).run_forward_exchanging(x, spec, exchange)

    def backward_exchanging(
        self, x: Inputs, out: Outputs, dh: Tensor, saved: Sequence[Tensor], spec: Spec, exchange: Exchange
    ) -> Grads:
        """Compute the gradients of this process's steps with the fused scans."""
        return _family(spec.kernel).run_backward_exchanging(x, out, dh, saved, spec, exchange)

    def steps(self, x: StepInputs, spec: StepSpec, into: Tensor | None) -> StepOutputs:
        """Compute a few decoding steps in one kernel."""
        from tfla.backends.triton import decode

        return decode.run(x, spec, into)

    def steps_replay(self, x: StepInputs, spec: StepSpec, into: Tensor | None, time: bool) -> Replay | None:
        """Return a function that replays the last `steps` on other inputs of the same signature, or None."""
        from tfla.backends.gpu import replay
        from tfla.backends.triton import decode

        return replay.recorded_steps(decode.call_signature(x, spec, into), x.v, time)


BACKEND = Triton()
DELTA_BACKEND = TritonDelta(BACKEND.device_unsupported)
