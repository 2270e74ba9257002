"""Triton: fused kernels (:mod:`.walk`) for NVIDIA GPUs from Ampere on. Triton is imported on first use."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from tfla.backends.base import Backend, Grads, Inputs, Outputs, Spec

LARGEST_DQK, LARGEST_DHV = 512, 1024
WHOLE = 1 << 30  # a chunk size that no sequence reaches
INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@torch.compiler.assume_constant_result
def _ampere_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


class Triton(Backend):
    name = "triton"
    priority = -1  # asked for by name until its whole suite has passed on a GPU
    kernels = ("fused",)

    def unsupported(self, x: Inputs) -> str | None:
        if not INSTALLED:
            return 'Triton is not installed: pip install "tfla[triton]"'
        if x.q.device.type != "cuda" and not INTERPRETED:
            return f"it needs an NVIDIA GPU, the inputs are on {x.q.device.type}"
        if x.q.device.type == "cuda" and not _ampere_or_newer(x.q.device):
            return "it needs compute capability 8.0 (Ampere) or newer"
        if x.q.device.type != "cuda" and x.q.dtype == torch.bfloat16:
            return "Triton's interpreter takes bfloat16 for integers"
        if x.q.dtype == torch.float64:
            return "it computes in float32 at most, the inputs are float64"
        if x.q.shape[-1] > LARGEST_DQK or x.v.shape[-1] > LARGEST_DHV:
            return f"it takes dqk up to {LARGEST_DQK} and dhv up to {LARGEST_DHV}"
        return None

    def default_chunk_size(self, x: Inputs, kernel: str) -> int:
        if torch.compiler.is_compiling():  # a choice by length would make one graph for each
            return WHOLE
        from tfla.backends.triton import launch

        return launch.best_chunk_size(x)

    def stored_states(self, x: Inputs, chunk_size: int, kernel: str) -> int:
        if chunk_size >= WHOLE:
            return 0
        from tfla.backends.triton import launch

        steps = launch.segment_steps(x, chunk_size)
        return super().stored_states(x, steps, kernel) if steps < x.v.shape[1] else 0

    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        from tfla.backends.triton import launch

        return launch.forward(x, spec)

    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        from tfla.backends.triton import launch

        return launch.backward(x, out, dh, dC, dn, spec)


BACKEND = Triton()
