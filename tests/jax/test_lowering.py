"""The lowering of plans for GPUs that need not be present: the attributes and operands of each kernel call."""

from __future__ import annotations

import functools
import json
import re
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import INTERPRETED
from jax_plans import forget_plans
from jaxlib import gpu_triton

import tfla.jax
from tfla.backends.delta import DeltaSpec
from tfla.backends.gpu import batch_slices, planning, time_parts
from tfla.jax import kernels, launches, plans, step_kernels
from tfla.jax.delta import kernels as delta_kernels

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")
SCRATCH = ["array", 128]  # the parameter for the memory in which programs make TMA descriptors


class Kernel:
    def __init__(self, name: str, warps: int, ctas: int, shared: int, code: str, ttir: str, arch: int):
        assert f".entry {name}(" in code
        self.facts = {"name": name, "threads": 32 * warps, "shared": shared, "arch": arch}
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
    monkeypatch.setattr(step_kernels, "AUTOMATIC", True)
    forget_plans()
    launches.unsupported.cache_clear()
    yield
    forget_plans()
    launches.unsupported.cache_clear()


def lowered(monkeypatch: pytest.MonkeyPatch, architecture: int, backend: str | None, K: int, V: int) -> str:
    """The module of a forward and a backward with an initial and a final state, 256 steps in two segments."""
    monkeypatch.setattr(kernels, "present_gpu", lambda: plans.GPU(architecture, 132, "tf32"))
    q, v, i = jnp.ones((1, 256, 2, K), jnp.bfloat16), jnp.ones((1, 256, 4, V), jnp.bfloat16), jnp.ones((1, 256, 4))
    state = tfla.jax.State.zeros(1, 4, K, V, dtype=jnp.float32)

    def loss(q: Any, v: Any, i: Any, state: Any) -> Any:
        h, last = tfla.jax.mlstm(q, q, v, i, i, initial_state=state, return_state=True, backend=backend, chunk_size=128)
        return h.astype(jnp.float32).sum() + last.C.sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, v, i, state)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def fields(message: bytes) -> dict[int, Any]:
    """The fields of a protocol buffer by number: numbers and bytes."""
    found, at = dict[int, Any](), 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        value: Any = number()
        if key & 7 == 2:
            value, at = message[at : at + value], at + value
        found[key >> 3] = value
    return found


def check_machine_code(told: dict[str, Any], message: bytes) -> None:
    """Check the message that is merged with that of a call: TritonAnyKernelCall with the image of one kernel."""
    assert list(fields(message)) == [1]
    kernel = fields(fields(message)[1])
    assert list(kernel) == [1]
    image = fields(fields(kernel[1])[11])
    assert image[1].startswith(b"\x7fELF")
    assert told["name"].encode() in image[1]
    assert (image[2].decode(), image[3]) == (told["name"], told["shared"])


def calls(module: str) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the attributes and the operands of each kernel call."""
    found = []
    for operands, opaque in re.findall(r'@triton_kernel_call_ffi\(([^)]*)\).*?opaque = "([^"]*)"', module):
        escaped = opaque.encode("latin-1")
        raw = re.sub(rb"\\(\\|[0-9A-F]{2})", lambda m: b"\\" if m[1] == b"\\" else bytes([int(m[1], 16)]), escaped)
        message = zlib.decompress(raw)
        told, end = json.JSONDecoder().raw_decode(message.decode("latin-1"))
        found.append((told, operands.split(", ")))
        if launches.jaxlib_version() >= (0, 11, 1):
            check_machine_code(told, message[end:])
        else:  # it has no field for machine code
            assert end == len(message)
    return found


def check_parameters(found: list[tuple[dict[str, Any], list[str]]], architecture: int) -> None:
    for told, operands in found:
        kinds = [kind for kind, *_ in told["parameters"]]
        scratch = told["parameters"][-1] == SCRATCH
        arrays = sum(kind in ("array", "descriptor") for kind in kinds) - scratch
        # Of the last two some launches alone.
        overwritten = told["name"] in ("delta_dq_dk_kernel", "dq_dk_kernel", "channel_dv_kernel")
        assert len(operands) in ((arrays, arrays - 1) if overwritten else (arrays,)), told["name"]
        # Triton adds two addresses of memory, of which the first is told where the kernel uses it.
        assert told["declared"] == len(kinds) - scratch + 2, told["name"]
        assert told["arch"] == architecture
        assert all(n >= 1 for n in told["grid"])


@pytest.mark.parametrize(("architecture", "backend", "names"), [
    (80, "triton", ["chunk_aggregates", "chunk_gates", "o_dv_scan", "pass_states", "normalizer_scan", "pass_states",
                    "normalizer_scan", "o_dv_scan"]),
    (90, "hopper", ["chunk_aggregates", "chunk_gates", "small_head_kernel", "pass_states", "pass_states",
                    "small_head_kernel"]),
])  # fmt: skip
def test_calls(architecture: int, backend: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    K, V = (48, 96) if backend == "hopper" else (64, 128)  # Hopper's kernels pad states to 64 x 128
    module = lowered(monkeypatch, architecture, backend, K, V)
    found = calls(module)
    assert [told["name"] for told, _ in found][: len(names)] == names
    assert found[-1][0]["name"] in ("gate_gradients", "sum_head_groups")
    # One forward is planned, with the backward, and none that saves nothing.
    assert plans.forward_plan.cache_info().misses == plans.backward_plan.cache_info().misses == 1
    check_parameters(found, architecture)
    if backend == "hopper":  # warps of a specialized kernel are those of all its partitions
        assert max(told["threads"] for told, _ in found) == 384
        assert any("descriptor" in map(str, (p[0] for p in told["parameters"])) for told, _ in found)
        assert "stablehlo.pad" in module
    assert "dot_general" not in module  # no chunkwise form beside the kernels


def test_no_launch_allocates_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph of XLA has no launches that allocate: memory for TMA descriptors is a result of the call."""
    module = lowered(monkeypatch, 90, "triton", 64, 128)
    lines = [line for line in module.splitlines() if "triton_kernel_call_ffi" in line]
    with_scratch = [told["parameters"][-1] == SCRATCH for told, _ in calls(module)]
    assert any(with_scratch)
    for line, scratch in zip(lines, with_scratch, strict=True):
        made = [n for n, kind in enumerate(line.rpartition("->")[2].split(",")) if "ui8" in kind]
        assert bool(made) == scratch
        aliased = [int(n) for n in re.findall(r"output_tuple_indices = \[(\d+)\]", line)]
        assert not set(made) & set(aliased)


NAMES = ["chunk_gates", "solve_tiles", "delta_h_scan", "chunk_gates", "delta_dv_scan"]
OF_TILES = ["decay_operands", "decay_operands", "channel_h_scan"]
NAMES_BY_CHANNEL = [*OF_TILES, *OF_TILES, "channel_dv_scan", "channel_gradients"]


HOPPER = [
    "chunk_gates", "solve_kernel", "delta_h_kernel",
    "chunk_gates", "delta_dv_dk_kernel", "delta_dq_dk_kernel", "gate_gradients",
]  # fmt: skip
HOPPER_BY_CHANNEL = [
    "channel_operands_kernel", "solve_kernel", "decay_operands", "channel_h_kernel",
    "channel_operands_kernel", "decay_operands", "channel_h_kernel", "channel_dv_kernel",
    "channel_gradients_kernel", "channel_gradients",
]  # fmt: skip


@pytest.mark.parametrize(
    ("by_channel", "dtype", "architecture", "backend", "names"),
    [
        (False, "float32", 90, "triton", NAMES),
        (False, "bfloat16", 90, "triton", NAMES),
        pytest.param(True, "float32", 80, "triton", NAMES_BY_CHANNEL, marks=pytest.mark.compiles),
        pytest.param(False, "float32", 90, "hopper", HOPPER, marks=pytest.mark.compiles),
        pytest.param(True, "float32", 90, "hopper", HOPPER_BY_CHANNEL, marks=pytest.mark.compiles),
    ],
)
def test_calls_of_the_delta_rule(
    by_channel: bool, dtype: str, architecture: int, backend: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_kernels, "present_gpu", lambda: plans.GPU(architecture, 132, "tf32"))
    dim = 128 if backend == "hopper" else 16
    q, gates = jnp.ones((1, 256, 2, dim), jnp.bfloat16), jnp.ones((1, 256, 2), dtype)
    log_f = -jnp.ones((1, 256, 2, dim), dtype) if by_channel else -gates
    activated = by_channel and backend == "hopper"
    parameters = {"A_log": jnp.ones(2), "dt_bias": jnp.ones((2, dim))} if activated else {}
    options: dict[str, Any] = {"gate_activation": "softplus"} if activated else {}

    def loss(q: Any, beta: Any, log_f: Any, parameters: dict[str, Any]) -> Any:
        h, last = tfla.jax.delta_rule(
            q, q, q, beta, log_f, return_state=True, normalize_qk=True, backend=backend, **parameters, **options
        )  # fmt: skip
        return h.astype(jnp.float32).sum() + last.C.sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(q, gates, log_f, parameters)
    module = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = calls(module)
    assert [told["name"] for told, _ in found][: len(names)] == names
    check_parameters(found, architecture)
    assert "dot_general" not in module
    assert not re.search("exponential|log_plus_one|rsqrt", module) or backend != "hopper"  # kernels do it
    assert delta_kernels._plan.cache_info().misses == 2  # a forward and its backward
    if backend == "hopper":  # warps of a specialized kernel are those of all its partitions
        assert max(told["threads"] for told, _ in found) >= 320
        assert any("descriptor" in map(str, (p[0] for p in told["parameters"])) for told, _ in found)


@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_calls_of_segments(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernels, "present_gpu", lambda: plans.GPU(90, 132, "tf32"))
    q, gates = jnp.ones((2, 256, 2, 64), jnp.bfloat16), jnp.ones((2, 256, 2), jnp.float32)

    def loss(q: Any, beta: Any, log_f: Any) -> Any:
        return tfla.jax.delta_rule(q, q, q, beta, log_f, backend=backend, kernel="segmented", chunk_size=128).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, gates, -gates)
    found = calls(traced.lower(lowering_platforms=("cuda",)).as_text())
    names = [told["name"] for told, _ in found if told["name"].startswith(("delta", "solve", "pass", "dq_dk"))]
    own = {
        "triton": ["solve_tiles", "delta_action_scan", "pass_delta_states", "delta_h_scan"],
        "hopper": ["solve_kernel", "delta_action_kernel", "pass_delta_states", "delta_h_kernel"],
    }
    against = "delta_dv_scan" if backend == "triton" else "delta_dv_dk_kernel"
    assert names[:7] == [*own[backend], against, "pass_delta_states", against]
    check_parameters(found, 90)


@pytest.mark.compiles
@pytest.mark.parametrize(("correct", "K", "V"), [(True, 128, 128), (False, 256, 128)], ids=["KDA", "GLA"])
def test_parts_of_a_backward_get_whole_tensors(correct: bool, K: int, V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only beta, its gradient, states and what tiles have one of are taken apart and put together."""
    for module in (batch_slices, time_parts):
        monkeypatch.setattr(module, "SMALLEST", 0)
    monkeypatch.setattr(batch_slices, "FEWEST_TOKENS", 1)
    monkeypatch.setattr(batch_slices, "processors", lambda device: 2)
    monkeypatch.setattr(time_parts, "FEWEST_TILES", 2)
    options = DeltaSpec(
        scale=1.0, correct=correct, read_before_decay=False, chunk_size=64, kernel="fused", save=True, final_state=True
    )  # fmt: skip
    spec = delta_kernels.KernelSpec("hopper", plans.GPU(90, 132, "tf32"), options, None)  # type: ignore[arg-type]
    B, T, H = 2, 256, 2
    keys, values, states = ((B, T, H, K), "bfloat16"), ((B, T, H, V), "bfloat16"), ((B, H, K, V), "float32")
    saved = (values, ((B, T, H, 64), "float16")) if correct else (((0,), "float32"),) * 2
    beta = ((B, T, H), "float32") if correct else None
    given = (keys, keys, values, beta, keys, None, None, None, states, None, *saved, values, states)
    plan = delta_kernels._plan(spec, None, given, False)
    arrays = [None if x is None else jax.ShapeDtypeStruct(x[0], x[1]) for x in given]
    module = jax.jit(plan).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    found = calls(module)
    operands, scan, of_half = HOPPER_BY_CHANNEL[4:6], HOPPER_BY_CHANNEL[6], HOPPER_BY_CHANNEL[7:]
    of_half += ["sum_head_groups"] * correct  # with a write strength, of whose gradient there are parts
    of_slice = [*operands, scan, scan, *of_half * 2]
    assert [told["name"] for told, _ in found] == of_slice * 2
    check_parameters(found, 90)
    assert len({step.compiled for step in plan.plan.steps if isinstance(step, planning.Launch)}) == len({*of_slice})
    parts = re.findall(r"stablehlo\.(?:slice|concatenate).*tensor<([^>]*)>$", module, re.MULTILINE)
    assert {shape.split("x")[-1] for shape in parts} == {"f32", "i8"}
    assert not re.search(r"stablehlo\.(transpose|copy|dynamic)", module)


def test_the_fastest_backend_of_the_delta_rule_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(architecture: int, dqk: int, backend: str | None = None, **options: Any) -> Any:
        monkeypatch.setattr(delta_kernels, "present_gpu", lambda: plans.GPU(architecture, 132, "tf32"))
        q, gate = jnp.ones((1, 64, 2, dqk), jnp.bfloat16), jnp.ones((1, 64, 2))
        return tfla.jax.explain_delta_rule(q, q, q, gate, -gate, backend=backend, **options)

    found = chosen(90, 128)
    assert (found.backend, found.kernel, found.chunk_size) == ("hopper", "fused", 64)
    assert found.not_taken["triton"] == found.not_taken["chunkwise"] == "it could, but 'hopper' comes before it"
    assert chosen(90, 256).backend == chosen(80, 128).backend == "triton"
    assert "dqk from 64 to 128" in chosen(90, 256).not_taken["hopper"]
    found = chosen(90, 128, read_before_decay=True)
    assert (found.backend, found.not_taken["hopper"]) == ("triton", "it computes reads after the decay only")
    kernels.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="the kernels for GPUs do not run, it needs compute capability 8.0"):
        assert chosen(75, 128).backend == "chunkwise"
    assert chosen(90, 128, kernel="segmented").backend == "chunkwise"
    with pytest.raises(ValueError, match=r"^backend: 'hopper' cannot run this: it needs a Hopper GPU"):
        chosen(80, 128, "hopper")


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_keep_float64_where_x64_is_off(compiled: bool) -> None:
    """Kernels read such tensors as float64, whatever JAX's flag says."""
    wide = torch.empty(3, 1, dtype=torch.float64)
    steps = (
        *(planning.Allocate(n, (3, 1), torch.float64) for n in (1, 2)),
        planning.Fill(1),
        planning.Copy(2, 0),
        planning.ScaledColumns(3, (1, 2), (2.0, -1.0)),
        planning.Resize(4, 3, (4, 2)),
    )
    plan = launches.LoweredPlan(planning.LaunchPlan((True,), steps, (1, 2, 3, 4), dict.fromkeys(range(1, 5), wide)))
    with jax.enable_x64(False):
        given = jnp.array([[1.0], [2.0], [3.0]])
        found = (jax.jit(plan) if compiled else plan)([given])
        assert given.dtype == jnp.float32
    assert [x.dtype for x in found] == [jnp.float64] * 4
    assert np.array_equal(found[3], [[0, -1], [0, -2], [0, -3], [0, 0]])


def test_sums_over_the_tiles_of_rows() -> None:
    """What slices of rows and parts of the steps add is in the rows of the whole."""
    x = torch.empty(3, 2, 4)
    steps = (
        planning.Allocate(2, (3, 2, 4), torch.float32),
        planning.Fill(2),
        planning.AddTiles(2, 0, 2, 0, 1),
        planning.AddTiles(2, 2, 3, 1, 0),
        planning.AddTiles(2, 0, 2, 0, 0),
    )
    plan = launches.LoweredPlan(planning.LaunchPlan((True, True), steps, (2,), {2: x}))
    first, last = (np.random.default_rng(n).random((2, 2, 6, 4), np.float32) for n in range(2))  # 2 heads, 6 tiles
    (found,) = jax.jit(plan)([jnp.asarray(first), jnp.asarray(last)])
    both = first.sum(0)
    expected = [both[:, :3].sum(1), both[:, 3:].sum(1), last[0].sum(1)]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-6)


def test_rows_are_the_memory_of_the_whole() -> None:
    """What is written to rows, whichever step took them, is in the tensor that a later step reads."""
    x = torch.empty(2, 1)
    steps = (
        planning.Allocate(1, (4, 1), torch.float32),
        planning.Rows(2, 1, 0, 2),
        planning.Fill(2),
        planning.Rows(3, 1, 2, 4),
        planning.Copy(3, 0),
        planning.ScaledColumns(4, (1, 1), (1.0, 2.0)),
        planning.Rows(5, 1, 0, 2),
        planning.Copy(5, 0),
    )
    plan = launches.LoweredPlan(planning.LaunchPlan((True,), steps, (1, 4), {1: x, 4: x}))
    whole, before = jax.jit(plan)([jnp.array([[1.0], [2.0]])])
    assert np.array_equal(whole, [[1], [2], [1], [2]])
    assert np.array_equal(before, [[0, 0], [0, 0], [1, 2], [2, 4]])
    more = planning.Rows(8, 1, 2, 4), planning.Fill(8), planning.ScaledColumns(9, (1, 1), (1.0, 1.0))
    whole, after = launches.LoweredPlan(planning.LaunchPlan((True,), (*steps, *more), (1, 9), {1: x, 9: x}))(
        [jnp.array([[1.0], [2.0]])]
    )
    assert np.array_equal(whole, [[1], [2], [0], [0]])
    assert np.array_equal(after, np.repeat(whole, 2, 1))
    again = planning.Fill(1), planning.Rows(6, 1, 0, 2), planning.Copy(6, 0)
    (whole,) = launches.LoweredPlan(
        planning.LaunchPlan((True,), (*steps, *again, planning.Rows(7, 1, 2, 4)), (1,), {1: x})
    )([jnp.array([[1.0], [2.0]])])
    assert np.array_equal(whole, [[1], [2], [0], [0]])
    with pytest.raises(NotImplementedError, match=r"rows of shape \(2, 1\) of a tensor of \(4, 1\)"):
        launches.LoweredPlan(planning.LaunchPlan((True,), (*steps[:3], steps[5]), (4,), {4: x}))([jnp.ones((2, 1))])
    with pytest.raises(NotImplementedError, match="rows 2 to 4"):
        launches.LoweredPlan(planning.LaunchPlan((True,), (steps[0], steps[3]), (1,), {1: x}))


def test_a_descriptor_that_a_kernel_does_not_read_gets_no_tensor_of_the_call() -> None:
    """XLA would copy a tensor for it that another parameter overwrites, as large as h."""
    source = SimpleNamespace(signature={"X": "tensordesc", "Out": "tensordesc", "gates": "*fp32"})
    target = SimpleNamespace(arch=90)
    metadata = SimpleNamespace(
        name="k", num_warps=4, num_ctas=1, shared=0, global_scratch_size=0, target=target,
        tensordesc_meta=[{"elem_type": 10, "swizzle": 3, "block_size": [64, 64]}] * 2,
    )  # fmt: skip
    # A descriptor is followed by its shape and its strides, so that Out is parameter 5.
    ptx = ".entry k(k_param_0, k_param_5, k_param_10) { ld k_param_5; ld k_param_10; }"
    compiled = SimpleNamespace(asm={"ptx": ptx, "cubin": b"code"}, src=source, metadata=metadata)
    kernel, descriptor = SimpleNamespace(arg_names=["X", "Out", "gates"]), SimpleNamespace(shape=(8, 8), strides=(8, 1))
    described = {n: planning.Describe(n, 2, descriptor) for n in (3, 4)}
    launch = planning.Launch(kernel, compiled, (1,), (3, 4, 1), (), {}, 4)
    assert launches.KernelCall(launch, described, unused=0).operands == [0, 2, 1]


def test_the_last_tensor_of_a_kernel_may_be_one_before_it() -> None:
    """It is the first result of the call, which has the memory of the operand."""

    def launch(*read: int) -> planning.Launch:
        source = SimpleNamespace(signature=dict.fromkeys("abc", "*fp32"))
        metadata = SimpleNamespace(
            name="k", num_warps=4, num_ctas=1, shared=0, global_scratch_size=0, target=SimpleNamespace(arch=90)
        )
        ptx = ".entry k(k_param_0, k_param_1, k_param_2) { ld k_param_0; ld k_param_1; ld k_param_2; }"
        compiled = SimpleNamespace(asm={"ptx": ptx, "cubin": b"code"}, src=source, metadata=metadata)
        return planning.Launch(SimpleNamespace(arg_names=["a", "b", "c"]), compiled, (1,), read, (), {}, 4)

    meta = {n: torch.empty(4, n + 1) for n in range(3)}
    made = [planning.Allocate(n, (4, n + 1), torch.float32) for n in (1, 2)]

    def lower(*launches_: planning.Launch) -> str:
        plan = launches.LoweredPlan(planning.LaunchPlan((True,), (*made, *launches_), (1, 2), meta))
        return str(jax.jit(plan).trace([jnp.ones((4, 1))]).lower(lowering_platforms=("cuda",)).as_text())

    module = lower(launch(2, 1, 1), launch(1, 0, 2))
    (line, other) = (line for line in module.splitlines() if "triton_kernel_call_ffi" in line)
    assert line.endswith("(tensor<4x3xf32>, tensor<4x2xf32>) -> (tensor<4x2xf32>, tensor<4x3xf32>)")
    aliases = r"output_tuple_indices = \[(\d)\], operand_index = (\d)"
    assert sorted(re.findall(aliases, line)) == [("0", "1"), ("1", "0")]
    assert sorted(re.findall(aliases, other)) == [("0", "0"), ("1", "2")]
    first, second = re.search(r"%(\w+):2 = .*ffi", line), re.search(r"ffi\(([^)]*)\)", other)
    assert first is not None
    assert second is not None
    assert second[1].split(", ")[0::2] == [f"%{first[1]}#0", f"%{first[1]}#1"]
    for read in ((1, 1, 2), (1, 1, 1)):
        with pytest.raises(NotImplementedError, match="kernel k reads one tensor by two parameters"):
            lower(launch(*read))


def test_a_kernel_without_its_text_is_an_error() -> None:
    """A damaged cache of Triton would leave every parameter unread, and jaxlib would take kernels for each other."""
    compiled = SimpleNamespace(
        asm={"ptx": "", "cubin": b"code"}, src=SimpleNamespace(signature={}), metadata=SimpleNamespace(name="k")
    )
    launch = planning.Launch(SimpleNamespace(arg_names=[]), compiled, (1,), (), (), {}, 4)
    with pytest.raises(RuntimeError, match="kernel k: got 0 characters of PTX without its entry, expected its code"):
        launches.KernelCall(launch, {}, unused=0)


def test_a_step_overwrites_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new C is a result that has the memory of the old one, which the kernel gets by one pointer."""
    monkeypatch.setattr(kernels, "present_gpu", lambda: plans.GPU(90, 132, "tf32"))
    q, i = jnp.ones((2, 4, 64), jnp.bfloat16), jnp.ones((2, 4))
    state = tfla.jax.State.zeros(2, 4, 64, 64, dtype=jnp.float32)
    traced = jax.jit(tfla.jax.mlstm_step).trace(q, q, q, i, i, state)
    module = traced.lower(lowering_platforms=("cuda",)).as_text()
    ((told, operands),) = calls(module)
    assert told["name"] == "one_step"
    kinds = [kind for kind, *_ in told["parameters"]]
    assert kinds.count("array") == len(operands) == 12  # all but C_out
    assert told["declared"] == len(kinds) + 2
    state_operand = operands[5]
    of_result = re.findall(r"operand_index = (\d+)", module)
    assert "5" in of_result
    assert operands.count(state_operand) == 1


def test_a_step_of_the_delta_rule_overwrites_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "present_gpu", lambda: plans.GPU(90, 132, "tf32"))
    q, gate = jnp.ones((2, 4, 64), jnp.bfloat16), jnp.ones((2, 4))
    state = tfla.jax.State.zeros(2, 4, 64, 64, normalize=False, dtype=jnp.float32)
    traced = jax.jit(tfla.jax.delta_rule_step).trace(q, q, q, gate, state, -gate)
    module = traced.lower(lowering_platforms=("cuda",)).as_text()
    ((told, operands),) = calls(module)
    assert told["name"] == "delta_steps"
    check_parameters([(told, operands)], 90)
    assert operands.count(operands[8]) == 1
    assert "operand_index = 8" in module


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize(
    ("architecture", "K", "V", "gate", "states"),
    [
        (90, 64, 128, "sigmoid", True),
        (90, 64, 128, "exp", True),
        (90, 48, 96, "sigmoid", True),
        (80, 16, 32, "sigmoid", True),
        (80, 16, 32, "exp", True),
        (80, 16, 32, "exp", False),
    ],
)
def test_calls_of_context_parallelism(
    architecture: int, K: int, V: int, gate: str, states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls serve all devices, which read their places from memory, and all-gathers are between them.

    Hopper's kernels have heads of 64 x 128 at least. The cotangents of C and of n are exchanged one after the other.
    """
    monkeypatch.setattr(kernels, "present_gpu", lambda: plans.GPU(architecture, 132, "tf32"))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    steps = jax.sharding.PartitionSpec(None, "x")
    run = jax.shard_map(
        functools.partial(tfla.jax.mlstm, context_parallel="x", input_gate=gate, return_state=states), mesh=mesh,
        in_specs=(steps,) * 5, out_specs=(steps, jax.sharding.PartitionSpec()) if states else steps,
    )  # fmt: skip

    def total(found: Any) -> Any:
        h, C = (found[0], found[1].C) if states else (found, jnp.zeros(1))
        return h.astype(jnp.float32).sum() + C.astype(jnp.float32).sum()

    q, v, i = jnp.ones((1, 1024, 2, K), jnp.bfloat16), jnp.ones((1, 1024, 2, V), jnp.bfloat16), jnp.ones((1, 1024, 2))
    traced = jax.jit(jax.grad(lambda *x: total(run(*x)))).trace(q, q, v, i, i)
    module = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = calls(module)
    check_parameters(found, architecture)
    names = [told["name"] for told, _ in found]
    exchanges = ["own_rows", "join_spans"] * (3 if gate == "exp" else 2)
    assert [name for name in names if name in ("own_rows", "join_spans")] == exchanges
    assert ("small_head_kernel" in names) == (architecture == 90)
    assert "dot_general" not in module
    assert "all_gather" in module


def test_the_fastest_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ((1, 64, 2, 64), "bfloat16")
    given = (x, x, x, *[((1, 64, 2), "float32")] * 2, None, None, None, None)
    q, i = jnp.ones(x[0], jnp.bfloat16), jnp.ones((1, 64, 2))
    for architecture, expected in ((90, "hopper"), (120, "triton"), (75, None)):
        gpu = plans.GPU(architecture, 132, "tf32")
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
    gpu, x = plans.GPU(90, 132, "tf32"), ((1, 64, 2, 64), "bfloat16")
    given = (x, x, x, *[((1, 64, 2), "float32")] * 2, None, None, None, None)
    assert kernels.unsupported("triton", gpu, given) == "it needs jaxlib 0.11.1 or newer"


def test_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported function holds its kernels: it can be called where Triton is not installed."""
    monkeypatch.setattr(kernels, "present_gpu", lambda: plans.GPU(80, 132, "tf32"))
    q, i = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64, 2), jnp.float32)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(launches.TARGET)]
    exported = jax.export.export(jax.jit(tfla.jax.mlstm), platforms=["cuda"], disabled_checks=allowed)(q, q, q, i, i)
    module = str(exported.mlir_module())
    assert [told["name"] for told, _ in calls(module)] == ["chunk_gates", "normalizer_scan", "o_dv_scan"]
    # Beside the kernels a forward names memory for them and fills one tensor, as PyTorch's launches do.
    operations = set(re.findall(r"= \"?stablehlo\.(\w+)", module))
    assert operations <= {"custom_call", "constant", "case", "broadcast_in_dim"}
    assert module.count("stablehlo.broadcast_in_dim") == 1
    assert set(re.findall(r"custom_call @(\w+)", module)) == {launches.TARGET, "AllocateBuffer"}
