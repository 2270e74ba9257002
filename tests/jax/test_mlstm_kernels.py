"""The interface of mlstm_kernels for JAX against the package: signatures, results, gradients and errors."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tfla.integrations.mlstm_kernels_jax as ours

pytest.importorskip("mlstm_kernels.jax", reason='pip install "tfla[baselines]"')
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The package. It imports jax_triton, which only its kernels for GPUs call, and which is not installed here."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("jax_triton") is None:
            patch.setitem(sys.modules, "jax_triton", types.ModuleType("jax_triton"))
        package = importlib.import_module("mlstm_kernels.jax")
        package.get_available_mlstm_kernels()  # imports all of them
        yield package


def inputs(S: int = 64, i_mean: float = 0.0, dtype: Any = jnp.float32) -> Arrays:
    rng = np.random.default_rng(0)
    shapes = {"q": (8,), "k": (8,), "v": (6,), "i": (), "f": ()}
    x = {name: rng.standard_normal((2, 3, S, *shape)) for name, shape in shapes.items()}
    x["i"], x["f"] = x["i"] + i_mean, x["f"] + 2
    return {name: jnp.asarray(a, dtype) for name, a in x.items()}


def states(dtype: Any = jnp.float32) -> Arrays:
    rng = np.random.default_rng(1)
    shapes = {"c_initial": (8, 6), "n_initial": (8,), "m_initial": ()}
    return {name: jnp.asarray(rng.standard_normal((2, 3, *shape)), dtype) for name, shape in shapes.items()}


def agree(run: Any, original: Any, given: Arrays, tolerance: float = 1e-5, **options: Any) -> None:
    """Compare all results of two functions, and the gradients of all inputs from random cotangents."""

    @functools.partial(jax.jit, static_argnums=0)
    def solved(function: Any, given: Arrays) -> Any:
        found, pullback = jax.vjp(lambda x: function(**x, **options), given)
        rng = np.random.default_rng(2)
        return found, pullback(jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), found))

    # With x64 the package returns float64 of float32 in some kernels.
    with jax.enable_x64(given["q"].dtype == jnp.float64):
        results = [jax.tree.leaves(solved(function, given)) for function in (run, original)]
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("table", ["mlstm_kernel", "mlstm_step_kernel"])
def test_names_and_signatures(theirs: Any, table: str) -> None:
    available = table.replace("mlstm", "available_mlstm") + "s"
    names = getattr(theirs, f"get_{available}")()
    assert getattr(ours, f"get_{available}")() == names
    for name in names:
        parameters = [
            [
                (p.name, p.kind, p.default)
                for p in inspect.signature(getattr(m, f"get_{table}")(name)).parameters.values()
            ]
            for m in (ours, theirs)
        ]
        assert parameters[0] == parameters[1], name
    with pytest.raises(ValueError, match=r"^name: got 'chunkwise--none', allowed are"):
        getattr(ours, f"get_{table}")("chunkwise--none")


def test_chunkwise_with_states(theirs: Any) -> None:
    name = "chunkwise--native_autograd"
    run, original = ours.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name)
    agree(run, original, inputs() | states(), return_last_states=True)
    agree(run, original, inputs(i_mean=3.0, dtype=jnp.float64), 1e-9, eps=0.3, chunk_size=32)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("name", ["native_autograd", "native_custbw", "native_siging_autograd", "native_siging_custbw"])
def test_parallel(theirs: Any, name: str, eps: float) -> None:
    name = f"parallel--{name}"
    agree(ours.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name), inputs(32), 2e-5, eps=eps)


def test_siging_without_normalizer(theirs: Any) -> None:
    name = "parallel--native_siging_autograd"
    agree(ours.get_mlstm_kernel(name), theirs.get_mlstm_kernel(name), inputs(32), normalize=False)


def test_kernels_for_gpus_compute_the_same() -> None:
    """Where Triton does not run, they are what the native ones are, with the gradients of the paper."""

    def results(name: str, x: Arrays, **options: Any) -> list[Any]:
        kernel = functools.partial(ours.get_mlstm_kernel(name), **options)
        return jax.tree.leaves(jax.jit(lambda x: kernel(**x))(x))

    x = inputs(32)
    expected = results("chunkwise--native_autograd", x | states(), return_last_states=True)
    for name in ("chunkwise--triton_limit_chunk", "chunkwise--triton_xl_chunk"):
        found = results(name, x | states(), return_last_states=True)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    siging = "chunkwise--triton_xl_chunk_siging"
    (whole,) = results("parallel--native_siging_custbw", x)
    _, c, n = results(siging, {name: a[:, :, :16] for name, a in x.items()}, return_last_states=True)
    rest = {name: a[:, :, 16:] for name, a in x.items()}
    (second,) = results(siging, rest | {"c_initial": c, "n_initial": n})
    np.testing.assert_allclose(second, whole[:, :, 16:], rtol=1e-4, atol=1e-6)
    low = {name: a.astype(jnp.bfloat16) for name, a in rest.items()}
    assert results(siging, low)[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_steps(theirs: Any, eps: float) -> None:
    x = {name: a[:, :, 0] for name, a in inputs().items()}
    x |= {"i": x["i"][..., None], "f": x["f"][..., None]}
    s = {name.removesuffix("_initial"): a for name, a in states().items()}
    s["m"] = s["m"][..., None]
    agree(ours.get_mlstm_step_kernel("native"), theirs.get_mlstm_step_kernel("native"), x | s, eps=eps)
    h, new = ours.get_mlstm_step_kernel("triton")(**x, **s, eps=eps, dtype_state=jnp.bfloat16)
    np.testing.assert_allclose(h, ours.get_mlstm_step_kernel("native")(**x, **s, eps=eps)[0], rtol=1e-6)
    assert {str(a.dtype) for a in new} == {"bfloat16"}


@pytest.mark.parametrize("i", [-80.0, -95.0, -1e4])
def test_gradients_of_steps_after_closed_input_gates(i: float) -> None:
    """exp(-m) overflows in float32; gradients of the gates were NaN."""
    x = {name: a[:, :, 0].astype(jnp.float32) for name, a in inputs().items()}
    x |= {"i": jnp.full_like(x["i"], i)[..., None], "f": x["f"][..., None]}
    s = {name.removesuffix("_initial"): jnp.zeros_like(a, dtype=jnp.float32) for name, a in states().items()}
    s["m"] = jnp.full_like(s["m"], -1e4)[..., None]
    kernel = ours.get_mlstm_step_kernel("native")
    h, gradients = jax.value_and_grad(lambda x: kernel(**x, **s, eps=1e-6)[0].sum())(x)
    assert abs(h) < 1e-6
    for name, g in gradients.items():
        assert jnp.isfinite(g).all(), name


def test_wrong_arguments() -> None:
    x = inputs(8)
    kernel = ours.get_mlstm_kernel("chunkwise--native_autograd")
    with pytest.raises(TypeError, match=r"^chunk_sise: got an argument that chunkwise_autograd does not take"):
        kernel(**x, chunk_sise=3)
    with pytest.raises(ValueError, match=r"^eps: got -1, expected a finite number of at least 0"):
        kernel(**x, eps=-1)
    with pytest.raises(ValueError, match=r"^i: got shape \(2, 8, 3\), expected \(2, 3, 8\)"):
        kernel(**x | {"i": jnp.swapaxes(x["i"], 1, 2)})
    with pytest.raises(ValueError, match=r"parallel kernels have no states"):
        ours.get_mlstm_kernel("parallel--native_custbw")(**x, return_last_states=True)
    m = states()["m_initial"]
    np.testing.assert_array_equal(kernel(**x, m_initial=m), kernel(**x, m_initial=m[..., None]))
    with pytest.raises(ValueError, match=r"^m_initial: got shape \(3, 2\), expected \(2, 3\)"):
        kernel(**x, m_initial=m.T)
    with pytest.raises(ValueError, match=r"^c_initial: got shape \(2, 3, 6, 8\), expected \(2, 3, 8, 6\)"):
        kernel(**x, c_initial=jnp.swapaxes(states()["c_initial"], 2, 3))
