"""The configuration of JAX in tests: float64, and a CPU as four devices. Tests of absent libraries are left out."""

from __future__ import annotations

import importlib.util
import os

FLAGS = [
    "--xla_force_host_platform_device_count=4",
    # Without costly passes XLA compiles in a third of the time.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]

missing = {name for name in ("jax", "flax", "optax") if importlib.util.find_spec(name) is None}
NEED_FLAX = [
    "test_attention.py",
    "test_mixers.py",
    "test_model.py",
    "test_page.py",
    "test_train_example.py",
]  # the last one needs optax too
collect_ignore_glob = ["test_*.py"] if "jax" in missing else [*NEED_FLAX] if missing else []
if os.environ.get("TRITON_INTERPRET") == "1":  # the cases of the chunkwise form run no kernels
    collect_ignore_glob.append("test_shared_cases.py")

if "jax" not in missing:
    import jax

    if jax.__version_info__ < (0, 11):  # XLA ends the process at a flag that it does not know
        FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    # XLA reads its flags once, at the first use of a device.
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
    jax.config.update("jax_enable_x64", True)
