"""How JAX runs in tests: float64, on a CPU that is four devices."""

from __future__ import annotations

import os

import pytest

jax = pytest.importorskip("jax", reason='pip install "tfla[jax]"')
pytest.importorskip("flax", reason='pip install "tfla[jax]"')

# XLA reads its flags once, at the first use of a device. Without costly passes it compiles in a third of the time.
FLAGS = [
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if jax.__version_info__ < (0, 11):  # XLA ends the process at a flag that it does not know
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
jax.config.update("jax_enable_x64", True)
