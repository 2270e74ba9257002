"""The Hopper backend with its kernels in the simulator."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import tfla.backends.hopper
from gluon_simulator import simulated
from tfla._util import caching

HOPPER = "tfla.backends.hopper"
KERNELS = {
    name: f"{name}_kernel"
    for name in (
        "o_dv", "dq_dk", "segment_states", "dk_dv", "small_head", "delta_action", "delta_h", "delta_dv_dk",
        "delta_dq_dk", "channel_operands", "channel_gradients", "channel_h", "channel_dv",
    )
} | {"delta_solve": "solve_kernel"}  # fmt: skip
SHARED_MODULES = (
    "scheduler", "pipeline", "mma", "gate_warp", "store_warp", "checkpoints", "split_reduce", "normalizer",
    "delta_tiles", "delta_dk_w", "reader_norms", "channel_states",
)  # fmt: skip


@contextlib.contextmanager
def on_cpu(files: Mapping[str, Path] | None = None) -> Iterator[None]:
    """Let the Hopper backend run on tensors of the CPU, its kernels in the simulator.

    The Triton kernels of the backend need Triton's interpreter, which has no bfloat16. Heads that share q and k, wide
    heads with a normalizer, and stored states can therefore not be bfloat16.

    Args:
        files: Modules of the backend whose source is read from these files instead.
    """
    from tfla.backends.hopper import fused, fused_small_head  # noqa: F401  what launches, with Triton's own language
    from tfla.backends.triton import delta_kernels  # noqa: F401

    shared = [
        f"tfla.backends.gpu.{name}" for name in ("gate_kernels", "rounded_sums", "gate_gradients", "gate_activations")
    ]
    names = [*shared, *(f"{HOPPER}.{name}" for name in (*SHARED_MODULES, *KERNELS))]
    modules = simulated(names, {f"{HOPPER}.{name}": file for name, file in (files or {}).items()})
    caching.clear_caches()  # launches recorded with other kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfla.backends.hopper, "_is_hopper", lambda device: True)
        patch.setattr(type(tfla.backends.hopper.TRITON), "device_unsupported", lambda backend, q: None)
        for module, name in KERNELS.items():
            kernel = getattr(modules[f"{HOPPER}.{module}"], name)
            patch.setattr(importlib.import_module(f"{HOPPER}.{module}"), name, kernel)
        yield
    caching.clear_caches()
