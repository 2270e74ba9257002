"""The kernels of the delta rule for GPUs from JAX: the recurrence of delta_cases.py.

They run on a GPU. With TRITON_INTERPRET=1 their plans run on the CPU, in Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_delta_cases
import numpy as np
import pytest
import torch
from cases import INTERPRETED
from delta_cases import check_beside_terms, delta_problem
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_delta_cases import call, leaves_of
from jax_plans import MARKS, plans_run

import tfla.jax
from tfla.backends import DELTA_BACKENDS
from tfla.backends import DeltaInputs as TorchInputs
from tfla.backends.gpu.runtime import PlannedGPU, planned_for
from tfla.jax import hosting, kernels, plans
from tfla.jax.delta import kernels as delta_kernels
from tfla.jax.delta.inputs import DeltaArrays, DeltaSpec, Rule
from tfla.jax.delta.kernels import arrays_of
from tfla.ops.delta_dispatch import choose_kernel

pytestmark = MARKS
DTYPE, KIND = (torch.float32, jnp.float32) if INTERPRETED else (torch.bfloat16, jnp.bfloat16)
SHAPE: dict[str, Any] = {"B": 2, "T": 70, "Hq": 1, "H": 2, "K": 16, "V": 16, "dtype": DTYPE}


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with plans_run(monkeypatch):
        yield


def solve(p: Any, **given: Any) -> Any:
    return jax_delta_cases.solve(p, backend="triton", **given)


@pytest.mark.parametrize("model", ["deltanet", "gdn", "read", "kda", "gla", "comba", "before"])
def test_every_model(model: str) -> None:
    p = delta_problem(model, **SHAPE)
    check_beside_terms(p, solve(p))


@pytest.mark.parametrize("model", ["gdn", "kda"])
def test_packed_and_without_a_state(model: str) -> None:
    p = delta_problem(model, lengths=(5, 0, 66), carried=False, **SHAPE)
    check_beside_terms(p, solve(p))
    check_beside_terms(p, solve(p, cu_seqlens=(0, 5, 5, 71)))


@pytest.mark.parametrize("model", ["deltanet", "gdn", "read"])
@pytest.mark.parametrize(("batch", "carried"), [(2, True), (1, False)])
def test_segments(model: str, batch: int, carried: bool) -> None:
    p = delta_problem(model, **SHAPE | {"B": batch, "T": 150, "carried": carried})
    check_beside_terms(p, solve(p, kernel="segmented", chunk_size=64))


def test_transforms_of_segments() -> None:
    """Their second derivatives are those of the chunkwise form, as those of whole sequences are."""
    x = arguments(T=70)
    run = functools.partial(loss, kernel="segmented", chunk_size=64)
    both = [jnp.stack([a, a[:, ::-1]]) for a in x]
    exact = jax.grad(loss)([a[1] for a in both])
    close([g[1] for g in jax.jit(jax.vmap(jax.grad(run)))(both)], exact)
    close(jax.grad(jax.checkpoint(run))([a[1] for a in both]), exact)


def test_segments_on_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "PLATFORM", "rocm")
    p = delta_problem("gdn", **SHAPE | {"T": 150})
    check_beside_terms(p, solve(p, kernel="segmented", chunk_size=64))


def test_calls_that_are_not_cut() -> None:
    x = arguments()
    for given, reason in (({"cu_seqlens": (0, 20)}, "no packed sequences"), ({"read_before_decay": True}, "after")):
        with pytest.raises(ValueError, match=f"kernel: 'segmented' .*cannot run these inputs: .*{reason}"):
            loss([a[:1] for a in x], kernel="segmented", **given)
    wide = [jnp.broadcast_to(a[:, :1], (2, 128 * 2**14, *a.shape[2:])) for a in x]
    with pytest.raises(ValueError, match="chunk_size: got 64, which makes 65536 segments of 2 heads"):
        jax.eval_shape(functools.partial(loss, kernel="segmented", chunk_size=1), wide)
    found = tfla.jax.explain_delta_rule(*x, backend="triton", kernel="segmented", chunk_size=65)
    assert (found.kernel, found.chunk_size, found.stored_states) == ("segmented", 65, 2)


def arguments(**changed: Any) -> list[Any]:
    x = leaves_of(delta_problem("gdn", **SHAPE | {"T": 20} | changed))
    return [x[name] for name in ("q", "k", "v", "beta", "log_f")]


def loss(x: list[Any], **given: Any) -> Any:
    h = tfla.jax.delta_rule(*x, **{"backend": "triton"} | given)
    assert isinstance(h, jax.Array)
    return jnp.sin(h).sum()


def close(a: Any, b: Any, tolerance: float = 1e-5 if INTERPRETED else 2e-2) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(np.asarray(x - y, float)) <= tolerance * np.linalg.norm(np.asarray(y, float))


def test_vmap_and_derivatives_of_gradients() -> None:
    x = arguments()
    both = [jnp.stack([a, a[:, ::-1]]) for a in x]
    close([g[1] for g in jax.jit(jax.vmap(jax.grad(loss)))(both)], jax.grad(loss)([a[1] for a in both]))

    def slope(x: list[Any], **given: Any) -> Any:
        return sum((g * jnp.cos(a)).sum() for g, a in zip(jax.grad(loss)(x, **given), x, strict=True))

    found = jax.jit(jax.grad(slope))(x)
    close(found, jax.jit(jax.grad(lambda x: slope(x, backend="chunkwise")))(x), 1e-4 if INTERPRETED else 5e-2)


def test_shard_map() -> None:
    x = leaves_of(delta_problem("kda", **SHAPE | {"T": 20}))
    count = min(2, jax.device_count())
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    run = jax.shard_map(
        lambda x: call("kda", x, backend="triton"), mesh=mesh, in_specs=(dict.fromkeys(x, P("x")),),
        out_specs=(P("x"), tfla.jax.State(P("x"))),
    )  # fmt: skip

    def total(run: Any, x: Any) -> Any:
        h, state = run(x)
        return jnp.sin(h).sum() + state.C.sum()

    found = jax.jit(jax.grad(lambda x: total(run, x)))(x)
    close(found, jax.jit(jax.grad(lambda x: total(lambda x: call("kda", x, backend="triton"), x)))(x))


def test_packed_sequences_over_a_mesh_axis() -> None:
    """Each device launches a packed call of its own, whose first state has come from the devices before it."""
    lengths = (3, 0, 40, 37)
    count = min(4, jax.device_count())
    x = leaves_of(delta_problem("gdn", **SHAPE | {"lengths": lengths}))
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    specs = {name: P() if name == "C" else P(None, "x") for name in x}
    one = functools.partial(call, "gdn", cu_seqlens=(0, 3, 3, 43, 80), backend="chunkwise")
    parts = jax.shard_map(
        functools.partial(one, backend="triton", context_parallel="x"), mesh=mesh, in_specs=(specs,),
        out_specs=(P(None, "x"), tfla.jax.State(P())),
    )  # fmt: skip

    def total(run: Any, x: Any) -> Any:
        h, state = run(x)
        return jnp.sin(h).sum() + jnp.sin(state.C).sum()

    close(*(jax.jit(jax.value_and_grad(functools.partial(total, run)))(x) for run in (parts, one)))


def test_explanation() -> None:
    x = arguments()
    found = tfla.jax.explain_delta_rule(*x, chunk_size=64, backend="triton")
    assert (found.backend, found.kernel, found.chunk_size) == ("triton", "fused", 64)
    assert found.not_taken["chunkwise"] == "it could, but 'triton' was asked for"
    found = tfla.jax.explain_delta_rule(*x, backend="chunkwise")
    assert found.not_taken["triton"] == "it could, but 'chunkwise' was asked for"


def test_they_are_chosen_where_they_run() -> None:
    x = arguments()
    found = tfla.jax.explain_delta_rule(*x)
    assert (found.backend, found.kernel, found.chunk_size) == ("triton", "fused", 64)
    assert found.not_taken["chunkwise"] == "it could, but 'triton' comes before it"
    assert all(map(jnp.array_equal, jax.grad(loss)(x), jax.grad(lambda x: loss(x, backend=None))(x)))
    kernels.warn_once.cache_clear()
    wide = [a.astype(jnp.float64) for a in x]
    with pytest.warns(UserWarning, match="the kernels for GPUs do not run, it ") as warned:
        every = [tfla.jax.explain_delta_rule(*wide) for _ in range(2)]
    assert [found.backend for found in every] == ["chunkwise"] * 2
    assert len(warned) == 1
    assert every[0].not_taken["triton"] in str(warned[0].message)


def over_a_mesh_axis(run: Any) -> Any:
    """Return a function of the arguments of a call with batch 1 whose steps are divided over some devices."""
    count = min(2, jax.device_count())
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    return jax.shard_map(run, mesh=mesh, in_specs=(P(None, "x"),) * 5, out_specs=P(None, "x"))


def test_the_choice_with_context_parallel() -> None:
    """Packed sequences of each device are calls of the kernels; what else is divided is computed by XLA."""
    x = arguments(B=1)
    found: list[Any] = []

    def run(*x: Any, **given: Any) -> Any:
        found.append(tfla.jax.explain_delta_rule(*x, context_parallel="x", **given))
        return tfla.jax.delta_rule(*x, context_parallel="x", **given)

    kernels.warn_once.cache_clear()
    reason = "with context_parallel it takes packed sequences alone"
    with pytest.warns(UserWarning, match=f"the kernels for GPUs do not run, {reason}"):
        h = jax.jit(over_a_mesh_axis(run))(*x)
    close(h, tfla.jax.delta_rule(*x, backend="chunkwise"))
    assert (found[-1].backend, found[-1].not_taken["triton"]) == ("chunkwise", reason)
    at = (0, 7, 7, 20)
    h = jax.jit(over_a_mesh_axis(functools.partial(run, cu_seqlens=at)))(*x)
    close(h, tfla.jax.delta_rule(*x, backend="chunkwise", cu_seqlens=at))
    assert found[-1].backend == "triton"
    jax.jit(over_a_mesh_axis(functools.partial(run, cu_seqlens=at, backend="chunkwise")))(*x)
    assert found[-1].not_taken["triton"] == "it could, but 'chunkwise' was asked for"


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's launches run in the interpreter in tests of their own")
@pytest.mark.parametrize("model", ["deltanet", "gdn", "read", "kda", "gla", "comba", "before"])
def test_bits_are_those_of_pytorch(model: str) -> None:
    jax_delta_cases.check_bits(delta_problem(model, **SHAPE | {"K": 64, "V": 64}), "triton", "fused")


@pytest.mark.skipif(INTERPRETED, reason="PyTorch's launches run in the interpreter in tests of their own")
@pytest.mark.parametrize("model", ["deltanet", "gdn"])
def test_bits_of_segments_are_those_of_pytorch(model: str) -> None:
    """One long sequence of one head is cut into segments by default."""
    p = delta_problem(model, **SHAPE | {"B": 1, "T": 8192, "H": 1, "K": 64, "V": 64})
    jax_delta_cases.check_bits(p, "triton", "segmented")


def test_segments_are_chosen_where_pytorch_chooses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_kernels, "present_gpu", lambda: plans.GPU(80, 132, "ieee"))

    def chosen(B: int, T: int, H: int, *, by_channel: bool = False, **given: Any) -> tuple[str, int]:
        q, beta = jax.ShapeDtypeStruct((B, T, H, 64), KIND), jax.ShapeDtypeStruct((B, T, H), jnp.float32)
        found: list[Any] = []

        def explained(*x: Any) -> Any:
            found.append(tfla.jax.explain_delta_rule(*x, **given))
            return x

        jax.eval_shape(explained, q, q, q, beta, q if by_channel else beta)
        return found[0].kernel, found[0].chunk_size

    def of_pytorch(B: int, T: int, H: int, chunk_size: int | None = None) -> tuple[str, int]:
        q = torch.empty(B, T, H, 64, dtype=DTYPE, device="meta")
        x = TorchInputs(q, q, q, q[..., 0], q[..., 0], None, None, None, None, None)
        with planned_for(PlannedGPU(80, 132, "ieee")):
            return choose_kernel(DELTA_BACKENDS["triton"], x, False, None, chunk_size)

    for shape in ((1, 65536, 4), (2, 16384, 2), (1, 8192, 1)):
        assert chosen(*shape) == of_pytorch(*shape)
        assert chosen(*shape)[0] == "segmented"
    for shape in ((8, 8192, 16), (1, 1024, 4)):
        assert chosen(*shape)[0] == of_pytorch(*shape)[0] == "fused"
    long = 1, 65536, 4
    assert chosen(*long, chunk_size=4096)[0] == of_pytorch(*long, 4096)[0] == "fused"
    for given in ({"by_channel": True}, {"cu_seqlens": (0, 65536)}, {"read_before_decay": True}, {"kernel": "fused"}):
        assert chosen(*long, **given | {"backend": "triton"})[0] == "fused"
    assert chosen(*long, kernel="segmented", backend="triton", chunk_size=200) == ("segmented", 200)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernels_get_gates_as_they_are(dtype: Any) -> None:
    """The kernels of a rule that reads before the decay get gates of the shape and dtype that PyTorch's get."""
    q = jnp.ones((1, 4, 2, 8), dtype)
    spec = DeltaSpec(Rule(1.0, True, True, False, "none", "none", -5.0), "triton", "fused", 64, 1, None, None)
    for log_f in (-q[..., 0], -q):
        arrays = arrays_of(spec, DeltaArrays(q, q, q, None, log_f, None, None, None, None, None))
        assert arrays.log_f is not None
        assert (arrays.log_f.shape, arrays.log_f.dtype) == (log_f.shape, dtype)


DIVIDED = {"batch": (P("x"), P("x")), "heads": (P(None, None, "x"), P(None, "x"))}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize(
    ("model", "options"),
    [("gdn", {}), ("gla", {}), ("gdn", {"backend": "triton", "kernel": "segmented", "chunk_size": 64})],
    ids=["gdn", "gla", "segments"],  # GLA has no write strengths
)
def test_automatic_partitioning(
    model: str, options: dict[str, Any], divided: str, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jit divides the launches over batch and heads, which need no communication.

    On CPUs the chunkwise form stands for the launches, because the partitioner drops callbacks of Python.
    """
    monkeypatch.setattr(hosting, "PLATFORM", "cuda")
    x = leaves_of(delta_problem(model, **SHAPE | {"Hq": 2, "H": 4, "T": 70 if options else 20}))

    def total(x: Any) -> Any:
        h, state = call(model, x, **options)
        return jnp.sin(h).sum() + state.C.sum()

    expected = jax.jit(jax.grad(total))(x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    steps, states = DIVIDED[divided]
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(a, NamedSharding(mesh, states if n == "C" else steps)) for n, a in x.items()}
        compiled = jax.jit(jax.grad(total)).lower(placed).compile()
        found = compiled(placed)
    close(found, expected)
    assert not any(name in compiled.as_text() for name in ("all-gather(", "all-to-all(", "collective-permute("))
    assert found["q"].sharding.is_equivalent_to(placed["q"].sharding, 4)


def test_what_they_do_not_run() -> None:
    with pytest.raises(ValueError, match=r"^backend: 'triton' cannot run this: "):
        tfla.jax.delta_rule(*(a.astype(jnp.float64) for a in arguments()), backend="triton")
