"""The lowering of plans for GPUs that are not there: what each call of a kernel says and which operands it has."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from cases import INTERPRETED
from jaxlib import gpu_triton

import tfla.jax
from tfla.jax import kernels, launches

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")


class Kernel:
    def __init__(self, name: str, warps: int, ctas: int, shared: int, code: str, ttir: str, arch: int, *scratch: int):
        assert f".entry {name}(" in code
        self.facts = {"name": name, "threads": 32 * warps, "shared": shared, "arch": arch, "scratch": list(scratch)}
        self.declared = len(set(re.findall(rf"{name}_param_(\d+)", code)))


class KernelCall:
    def __init__(self, kernel: Kernel, x: int, y: int, z: int, parameters: list[Any]) -> None:
        self.told = kernel.facts | {"grid": [x, y, z], "parameters": parameters, "declared": kernel.declared}

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return json.dumps(self.told).encode()


@pytest.fixture(autouse=True)
def _absent_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for jaxlib's plugin for CUDA, which writes a protocol buffer."""
    made = {
        "TritonKernel": Kernel, "TritonKernelCall": KernelCall,
        "create_array_parameter": lambda zero, divisor: ["array", divisor],
        "create_scalar_parameter": lambda value, kind: [kind, value],
        "create_tma_descriptor_parameter": lambda **facts: ["descriptor", facts["shape"], facts["strides"]],
    }  # fmt: skip
    for name, x in made.items():
        monkeypatch.setattr(gpu_triton, name, x, raising=False)
    monkeypatch.setattr(launches, "jaxlib_version", lambda: (0, 11, 1))
    monkeypatch.setattr(kernels, "AUTOMATIC", True)
    forget()
    yield
    forget()


def forget() -> None:
    cached = (
        kernels.unsupported, kernels.best_chunk_size, kernels._forward_plan, kernels._backward_plan,
        launches.unsupported,
    )  # fmt: skip
    for function in cached:
        function.cache_clear()
    kernels.compute.clear_cache()


def lowered(monkeypatch: pytest.MonkeyPatch, architecture: int, backend: str | None) -> str:
    """The module of a forward and a backward with an initial and a final state, 256 steps in two segments."""
    monkeypatch.setattr(kernels, "present_gpu", lambda: kernels.GPU(architecture, 132, "tf32"))
    q, v, i = jnp.ones((1, 256, 2, 64), jnp.bfloat16), jnp.ones((1, 256, 4, 128), jnp.bfloat16), jnp.ones((1, 256, 4))
    state = tfla.jax.State.zeros(1, 4, 64, 128, dtype=jnp.float32)

    def loss(q: Any, v: Any, i: Any, state: Any) -> Any:
        h, last = tfla.jax.mlstm(q, q, v, i, i, initial_state=state, return_state=True, backend=backend, chunk_size=128)
        return h.astype(jnp.float32).sum() + last.C.sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, v, i, state)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def calls(module: str) -> list[tuple[dict[str, Any], list[str]]]:
    """What each call of a kernel says, and its operands."""
    found = []
    for operands, opaque in re.findall(r'@triton_kernel_call_ffi\(([^)]*)\).*?opaque = "([^"]*)"', module):
        raw = re.sub(rb"\\([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), opaque.encode("latin-1"))
        found.append((json.loads(zlib.decompress(raw.replace(b"\\\\", b"\\"))), operands.split(", ")))
    return found


@pytest.mark.parametrize(("architecture", "backend", "names"), [
    (80, "triton", ["chunk_aggregates", "chunk_gates", "o_dv_scan", "pass_states", "normalizer_scan", "pass_states",
                    "normalizer_scan", "o_dv_scan"]),
    (90, "hopper", ["chunk_aggregates", "chunk_gates", "small_head_kernel", "pass_states", "pass_states",
                    "small_head_kernel"]),
])  # fmt: skip
def test_calls(architecture: int, backend: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = lowered(monkeypatch, architecture, backend)
    found = calls(module)
    assert [told["name"] for told, _ in found][: len(names)] == names
    assert found[-1][0]["name"] in ("gate_gradients", "sum_head_groups")
    for told, operands in found:
        kinds = [kind for kind, *_ in told["parameters"]]
        assert sum(kind in ("array", "descriptor") for kind in kinds) == len(operands), told["name"]
        assert told["declared"] == len(kinds) + 2, told["name"]  # Triton adds two addresses of scratch memory
        assert told["arch"] == architecture
        assert all(n >= 1 for n in told["grid"])
    if backend == "hopper":  # warps of a specialized kernel are those of all its partitions
        assert max(told["threads"] for told, _ in found) == 384
        assert any("descriptor" in map(str, (p[0] for p in told["parameters"])) for told, _ in found)
    assert "dot_general" not in module  # no chunkwise form beside the kernels


def test_the_fastest_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ((1, 64, 2, 64), "bfloat16")
    given = (x, x, x, *[((1, 64, 2), "float32")] * 2, None, None, None, None)
    q, i = jnp.ones(x[0], jnp.bfloat16), jnp.ones((1, 64, 2))
    for architecture, expected in ((90, "hopper"), (120, "triton"), (75, None)):
        gpu = kernels.GPU(architecture, 132, "tf32")
        monkeypatch.setattr(kernels, "present_gpu", lambda gpu=gpu: gpu)
        if expected is None:
            kernels.warn_once.cache_clear()
            with pytest.warns(UserWarning, match="the kernels for GPUs do not run, it needs compute capability 8.0"):
                assert kernels.choose(q, q, q, i, i, None, None, None) is None
        else:
            assert kernels.choose(q, q, q, i, i, None, None, None) == expected
    assert "Ampere" in str(kernels.unsupported("triton", gpu, given))


def test_unknown_versions_of_jaxlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that was not tested gives a reason instead of a failure."""
    monkeypatch.setattr(launches, "jaxlib_version", lambda: (0, 13, 0))
    assert "it is tested with jaxlib 0.10 to 0.11" in str(launches.unsupported())
    launches.unsupported.cache_clear()
    monkeypatch.setattr(launches, "jaxlib_version", lambda: (0, 10, 2))
    assert launches.unsupported() is None
    gpu, x = kernels.GPU(90, 132, "tf32"), ((1, 64, 2, 64), "bfloat16")
    given = (x, x, x, *[((1, 64, 2), "float32")] * 2, None, None, None, None)
    assert kernels.unsupported("triton", gpu, given) == "it needs jaxlib 0.11.1 or newer"


def test_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported function holds its kernels: it can be called where Triton is not installed."""
    monkeypatch.setattr(kernels, "present_gpu", lambda: kernels.GPU(80, 132, "tf32"))
    q, i = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64, 2), jnp.float32)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(launches.TARGET)]
    exported = jax.export.export(jax.jit(tfla.jax.mlstm), platforms=["cuda"], disabled_checks=allowed)(q, q, q, i, i)
    assert [told["name"] for told, _ in calls(str(exported.mlir_module()))] == [
        "chunk_gates", "normalizer_scan", "o_dv_scan",
    ]  # fmt: skip
