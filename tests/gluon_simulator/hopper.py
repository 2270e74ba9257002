"""The Hopper backend with its kernels in the simulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import tfla.backends.hopper
from gluon_simulator import simulated
from tfla._util import caching

HOPPER = "tfla.backends.hopper"
KERNELS = {name: f"{name}_kernel" for name in ("o_dv", "dq_dk", "segment_states", "dk_dv", "small_head")}
SHARED = (
    "scheduler", "pipeline", "mma", "gate_warp", "store_warp", "checkpoints", "split_reduce", "normalizer",
)  # fmt: skip


@contextlib.contextmanager
def on_cpu(files: Mapping[str, Path] | None = None) -> Iterator[None]:
    """It takes tensors of the CPU. Triton's kernels beside its own need Triton's interpreter, which has no bfloat16:
    heads that share q and k, wide ones with a normaliser, and stored states may not be in it.

    files: modules of it that are to be read from elsewhere."""
    from tfla.backends.hopper import launch

    names = ["tfla.backends.triton.gates", *(f"{HOPPER}.{name}" for name in (*SHARED, *KERNELS))]
    modules = simulated(names, {f"{HOPPER}.{name}": file for name, file in (files or {}).items()})
    caching.clear_caches()  # tapes of other kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfla.backends.hopper, "_is_hopper", lambda device: True)
        patch.setattr(type(tfla.backends.hopper.TRITON), "_unsupported", lambda backend, q: None)
        for module, name in KERNELS.items():
            patch.setattr(launch, name, getattr(modules[f"{HOPPER}.{module}"], name))
        yield
    caching.clear_caches()
