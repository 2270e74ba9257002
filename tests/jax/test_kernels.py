"""The kernels for GPUs from JAX: the recurrence of cases.py, in every form.

They run on a GPU. With TRITON_INTERPRET=1 their plans run on the CPU, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import (
    FORMS,
    INTERPRETED,
    PER_STEP,
    TOLERANCE,
    check,
    check_beside_terms,
    error,
    gradients,
    problem,
    truth,
    truth_m,
)
from cases import call as torch_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import call, leaves_of, solve, to_jax, to_torch
from jax_plans import MARKS, ON_GPU, plans_run

import tfla
import tfla.jax
from tfla.jax import hosting, kernels

pytestmark = MARKS
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
SHAPE: dict[str, Any] = {"B": 2, "T": 50, "Hq": 1, "H": 2, "K": 16, "V": 24}
OPTIONS: dict[str, Any] = {"backend": "triton", "chunk_size": 32}


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with plans_run(monkeypatch):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_form_and_dtype(form: str, dtype: torch.dtype) -> None:
    p = problem(form, dtype=dtype, **SHAPE)
    check_beside_terms(solve(p, **OPTIONS), p, TOLERANCE[dtype])


def test_without_segments() -> None:
    p = problem(dtype=torch.float32, **SHAPE)
    check(solve(p, backend="triton", chunk_size=64), truth(p), p.dtype)


def test_packed_sequences() -> None:
    p = problem(dtype=torch.float32, lengths=(9, 0, 40), Hq=1, H=2, K=16, V=16)
    check(solve(p, **OPTIONS), truth(p), p.dtype)
    check(solve(p, **OPTIONS, cu_seqlens=(0, 9, 9, 49)), truth(p), p.dtype)


def test_without_initial_state_or_input_gate() -> None:
    p = problem("plain", dtype=torch.float32, carried=False, **SHAPE).but(i=None)
    found, exact = solve(p, **OPTIONS), truth(p)
    for name, x in found.items():
        assert (x - exact[name]).norm() <= TOLERANCE[p.dtype] * exact[name].norm(), name


HOPPER = {
    "whole": {"B": 2, "T": 300, "K": 128, "V": 256},
    "large state": {"B": 1, "T": 150, "K": 256, "V": 512},
    "small heads": {"B": 1, "T": 300, "K": 64, "V": 128, "Hq": 1},
    "padded": {"B": 1, "T": 150, "K": 96, "V": 192},
    "packed": {"lengths": (70, 0, 1, 79), "K": 128, "V": 256},
}
on_gpu = pytest.mark.skipif(not ON_GPU, reason="JAX has no GPU here")
on_hopper = pytest.mark.skipif(
    not ON_GPU or jax.devices()[0].compute_capability != "9.0", reason="JAX has no Hopper GPU here"
)


@on_hopper
@pytest.mark.parametrize("form", ["exp", "plain"])
@pytest.mark.parametrize("shape", HOPPER.values(), ids=HOPPER)
def test_hopper(shape: dict[str, Any], form: str) -> None:
    p = problem(form, dtype=torch.bfloat16 if form == "exp" else torch.float16, **shape)
    check_beside_terms(solve(p, backend="hopper", chunk_size=128 if shape["K"] == 128 else 512), p, TOLERANCE[p.dtype])


@on_gpu
@pytest.mark.parametrize(("backend", "K", "V", "dtype"), [
    pytest.param("hopper", 64, 128, torch.bfloat16, marks=on_hopper),
    pytest.param("hopper", 128, 256, torch.float16, marks=on_hopper),
    pytest.param("hopper", 256, 512, torch.bfloat16, marks=on_hopper),
    ("triton", 64, 128, torch.bfloat16),
    ("triton", 64, 128, torch.float16),
])  # fmt: skip
def test_bits_are_those_of_pytorch(backend: str, K: int, V: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU here")
    p = problem(dtype=dtype, B=1, T=300, K=K, V=V, carried=False)
    p = p.but(dstate=tfla.State(*(torch.zeros_like(x) for x in p.dstate)))
    found = solve(p, backend=backend, chunk_size=128)
    leaves = {name: x.cuda().requires_grad_() for name, x in p.leaves.items()}
    h, state = torch_call(p, leaves, backend=backend, kernel="fused", chunk_size=128)
    expected = gradients(p, leaves, h, state, truth_m(p))
    for name in PER_STEP:
        assert torch.equal(found[name], expected[name]), name


BITS: dict[str, dict[str, Any]] = {
    "sigmoid": {"form": "sigmoid", "carried": False},
    "packed": {"lengths": (21, 0, 1, 18), "carried": False},
    "carried": {},
    "packed, carried, sigmoid": {"form": "sigmoid", "lengths": (21, 0, 1, 18)},
    "packed, carried": {"lengths": (21, 0, 1, 18)},
}


@pytest.mark.parametrize("case", BITS.values(), ids=BITS)
@pytest.mark.parametrize(("backend", "K", "V"), [
    ("triton", 16, 32),
    pytest.param("triton", 64, 128, marks=on_gpu),
    pytest.param("hopper", 128, 256, marks=on_hopper),
])  # fmt: skip
def test_bits_of_states_and_their_gradients(backend: str, K: int, V: int, case: dict[str, Any]) -> None:
    """They are those of PyTorch: h, the final C, n and m, and all gradients, those of the initial C and n too."""
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU here")
    device, dtype, longer = ("cuda", torch.bfloat16, 8) if ON_GPU else ("cpu", torch.float32, 1)
    if "lengths" in case:
        case = case | {"lengths": tuple(longer * n for n in case["lengths"])}
    p = problem(dtype=dtype, B=1, T=40 * longer, Hq=1, H=2, K=K, V=V, **case)
    cotangents = [p.dh, p.dstate.C] + ([] if p.dstate.n is None else [p.dstate.n])
    leaves = {name: x.to(device).requires_grad_() for name, x in p.leaves.items()}
    h, state = torch_call(p, leaves, backend=backend, kernel="fused", chunk_size=32 * longer)
    outputs = [x for x in (h, state.C, state.n) if x is not None]
    grads = torch.autograd.grad(outputs, list(leaves.values()), [x.to(device) for x in cotangents])
    expected = {"h": h, **{name: x for name, x in state._asdict().items() if x is not None}}
    expected |= {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}

    def run(leaves: dict[str, Any]) -> Any:
        h, state = call(p.form, leaves, backend=backend, chunk_size=32 * longer, cu_seqlens=to_jax(p.cu_seqlens))
        return [x for x in (h, state.C, state.n) if x is not None], {"h": h, **state._asdict()}

    _, pullback, found = jax.jit(lambda x: jax.vjp(run, x, has_aux=True))(leaves_of(p))
    (found_gradients,) = pullback([to_jax(x) for x in cotangents])
    found |= {f"d{name}": x for name, x in found_gradients.items()}
    for name, x in expected.items():
        ours, theirs = to_torch(found[name]), x.detach().cpu()
        # No kernel computes the gradient of m, a sum over C and n.
        assert error(ours, theirs) <= 1e-6 if name == "dm0" else torch.equal(ours, theirs), name


@on_gpu
def test_no_context_of_pytorch() -> None:
    code = """
import jax.numpy as jnp, tfla.jax, torch
q, gate = jnp.ones((1, 64, 1, 64), jnp.bfloat16), jnp.zeros((1, 64, 1))
tfla.jax.mlstm(q, q, q, gate, gate, backend="triton").block_until_ready()
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_they_are_chosen_where_they_run() -> None:
    x = inputs()
    found = tfla.jax.explain(*x)
    assert (found.backend, found.kernel) == ("triton", "fused")
    assert "Hopper" in found.not_taken["hopper"] or "it takes bfloat16" in found.not_taken["hopper"]
    assert "comes before it" in found.not_taken["chunkwise"]
    kernels.warn_once.cache_clear()
    wide = [a.astype(jnp.float64) for a in x]
    with pytest.warns(UserWarning, match="the kernels for GPUs do not run, it computes in float32 at most") as warned:
        found = [tfla.jax.explain(*wide).backend for _ in range(2)]
    assert found == ["chunkwise"] * 2
    assert len(warned) == 1
    with pytest.raises(ValueError, match="backend: 'triton' cannot run this: it computes in float32 at most"):
        tfla.jax.mlstm(*wide, backend="triton")


def inputs(**shape: Any) -> list[Any]:
    x = leaves_of(problem(dtype=torch.float32, carried=False, **(SHAPE | shape)))
    return [x[name] for name in "qkvif"]


def loss(x: list[Any], **options: Any) -> Any:
    return jnp.sin(tfla.jax.mlstm(*x, **(OPTIONS | options))).sum()


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(y)


def test_vmap_is_a_batch() -> None:
    x = [jnp.stack([a, 2 * a, -a]) for a in inputs()]
    grads = jax.jit(jax.vmap(jax.grad(loss)))(x)
    close([g[2] for g in grads], jax.grad(loss)([a[2] for a in x]), 1e-6)
    h = jax.vmap(functools.partial(tfla.jax.mlstm, **OPTIONS), in_axes=(0, None, None, None, None))(
        x[0], *(a[0] for a in x[1:])
    )
    close(h[0], tfla.jax.mlstm(*(a[0] for a in x), **OPTIONS), 1e-6)


def test_vmap_over_packed_sequences() -> None:
    x = [jnp.stack([a, -a]) for a in inputs(B=1)]
    run = functools.partial(tfla.jax.mlstm, **OPTIONS)
    offsets = jnp.array([[0, 20, 50], [0, 31, 50]], jnp.int32)
    h = jax.vmap(lambda cu, *x: run(*x, cu_seqlens=cu))(offsets, *x)
    close(h[1], run(*(a[1] for a in x), cu_seqlens=offsets[1]), 1e-6)


def test_checkpoint_and_scan_over_layers() -> None:
    x = inputs()

    def layer(v: Any, factor: Any) -> tuple[Any, None]:
        return tfla.jax.mlstm(x[0], x[1], v * factor, x[3], x[4], **OPTIONS), None

    def stack(v: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), v, jnp.array([1, 2], jnp.float32))[0].sum()

    def unrolled(v: Any) -> Any:
        return layer(layer(v, np.float32(1))[0], np.float32(2))[0].sum()

    close(jax.jit(jax.grad(stack))(x[2]), jax.grad(unrolled)(x[2]), 1e-6)


def test_derivatives_of_gradients() -> None:
    """Products with the Hessian are those of the chunkwise form."""
    x = inputs(T=20)

    def slope(x: list[Any], **options: Any) -> Any:
        return sum((g * jnp.cos(a)).sum() for g, a in zip(jax.grad(loss)(x, **options), x, strict=True))

    close(jax.jit(jax.grad(slope))(x), jax.jit(jax.grad(functools.partial(slope, backend="chunkwise")))(x), 1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma: bool) -> None:
    x = leaves_of(problem(dtype=torch.float32, **(SHAPE | {"Hq": 2})))
    count = min(2, jax.device_count())
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    run = jax.shard_map(
        lambda x: call("exp", x, **OPTIONS), mesh=mesh, in_specs=(dict.fromkeys(x, P("x")),),
        out_specs=(P("x"), tfla.jax.State(P("x"), P("x"), P("x"))), check_vma=check_vma,
    )  # fmt: skip

    def total(run: Any, x: Any) -> Any:
        h, state = run(x)
        return jnp.sin(h).sum() + state.C.sum()

    found = jax.jit(jax.grad(functools.partial(total, run)))(x)
    close(found, jax.jit(jax.grad(functools.partial(total, lambda x: call("exp", x, **OPTIONS))))(x), 1e-5)


DIVIDED = {"batch": (P("x"), P("x")), "heads": (P(None, None, "x"), P(None, "x"))}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("divided", DIVIDED)
def test_automatic_partitioning(divided: str, kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    """jit divides the launches over batch and heads, which need no communication.

    On CPUs the chunkwise form stands for the launches, because the partitioner drops callbacks of Python.
    """
    monkeypatch.setattr(hosting, "PLATFORM", "cuda")
    x = leaves_of(problem(dtype=torch.float32, **(SHAPE | {"Hq": 2, "H": 4, "T": 20})))

    def total(x: Any) -> Any:
        h, state = call("exp", x, backend="triton", chunk_size=16)
        return jnp.sin(h).sum() + state.C.sum()

    expected = jax.jit(jax.grad(total))(x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    steps, states = DIVIDED[divided]
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(a, NamedSharding(mesh, steps if name in "qkvif" else states)) for name, a in x.items()
        }
        compiled = jax.jit(jax.grad(total)).lower(placed).compile()
        found = compiled(placed)
    close(found, expected)
    assert not any(name in compiled.as_text() for name in ("all-gather(", "all-to-all(", "collective-permute("))
    assert found["q"].sharding.is_equivalent_to(placed["q"].sharding, 4)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_state_that_explicit_axes_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device gets its part of a state that all of them hold, whose gradient is whole again."""
    monkeypatch.setattr(hosting, "PLATFORM", "cuda")
    x = leaves_of(problem("exp", dtype=torch.float32, **(SHAPE | {"T": 20})))

    def total(x: Any) -> Any:
        return jnp.sin(call("exp", x, backend="triton", chunk_size=16)[0]).sum()

    expected = jax.jit(jax.grad(total))(x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(a, NamedSharding(mesh, P("x" if n in "qkvif" else None))) for n, a in x.items()}
        found = jax.jit(jax.grad(total))(placed)
    close(found, expected)
    assert not any(found["C0"].sharding.spec)
