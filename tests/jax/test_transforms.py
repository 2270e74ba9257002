"""Transforms of JAX: jit, vmap, checkpoint, second derivatives, export, and forward mode; arrays of NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import problem
from jax_cases import SHAPE, call, leaves_of

import tfla.jax
from tfla.jax.nn import KeyValues, MixerState

Arrays = list[Any]


def inputs(T: int = 20, **shape: Any) -> Arrays:
    x = leaves_of(problem(T=T, carried=False, **shape))
    return [x[name] for name in "qkvif"]


def loss(x: Arrays, **options: Any) -> Any:
    return jnp.sin(tfla.jax.mlstm(*x, **options)).sum()


def close(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_jit_and_eager_and_value_and_grad() -> None:
    x = inputs()
    value, grads = jax.jit(jax.value_and_grad(loss))(x)
    close(value, loss(x))
    close(grads, jax.grad(loss)(x))


def test_options_as_static_arguments_of_jit() -> None:
    x = inputs()
    state = tfla.jax.State.zeros(2, 2, 5, 7, dtype=jnp.float64)
    run = jax.jit(tfla.jax.mlstm, static_argnames=("return_state", "input_gate", "chunk_size"))
    h, new = run(*x, initial_state=state, return_state=True, chunk_size=16)
    close(h, tfla.jax.mlstm(*x))
    assert isinstance(new, tfla.jax.State)


def test_vmap_folds_a_batch() -> None:
    x = [jnp.stack([a, 2 * a, -a]) for a in inputs()]
    h = jax.jit(jax.vmap(tfla.jax.mlstm))(*x)
    close(h[1], tfla.jax.mlstm(*(a[1] for a in x)))
    grads = jax.jit(jax.vmap(jax.grad(loss)))(x)
    close([g[2] for g in grads], jax.grad(loss)([a[2] for a in x]))
    shared = jax.vmap(tfla.jax.mlstm, in_axes=(0, None, None, None, None))(x[0], *(a[0] for a in x[1:]))
    close(shared[0], h[0])


@pytest.mark.parametrize("name", ["mlstm", "delta_rule"])
def test_an_axis_of_vmap_divides_no_sequence(name: str) -> None:
    """Gradients from outside would not find the axis, and those from inside would count a returned state twice."""
    x = [jnp.stack([a, 2 * a]) for a in inputs()]
    run = jax.vmap(lambda *x: getattr(tfla.jax, name)(*x, context_parallel="x"), axis_name="x")
    message = "^context_parallel: got 'x', an axis of jax.vmap, expected an axis of the mesh of a jax.shard_map around"
    for fn in (run, jax.grad(lambda *x: run(*x).sum())):
        with pytest.raises(ValueError, match=message):
            fn(*x)


def test_checkpoint() -> None:
    x = inputs()
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(x), jax.grad(loss)(x))


def test_scan_over_layers() -> None:
    x = inputs()

    def layer(v: Any, scale: Any) -> tuple[Any, None]:
        return tfla.jax.mlstm(x[0], x[1], v * scale, x[3], x[4]), None

    def stack(v: Any, body: Any = layer) -> Any:
        return jax.lax.scan(body, v, jnp.array([1.0, 2.0]))[0].sum()

    def unrolled(v: Any) -> Any:
        return layer(layer(v, 1.0)[0], 2.0)[0].sum()

    close(jax.jit(jax.grad(stack))(x[2]), jax.grad(unrolled)(x[2]))


def test_derivatives_of_gradients() -> None:
    """Products with the Hessian are those of the reference, which JAX differentiates twice by itself."""
    x = inputs(9, Hq=1, H=2)
    direction = [jnp.cos(a) for a in x]

    def product(**options: Any) -> Any:
        def slope(x: Arrays) -> Any:
            return sum((g * d).sum() for g, d in zip(jax.grad(loss)(x, **options), direction, strict=True))

        return jax.jit(jax.grad(slope))(x)

    for a, b in zip(product(), product(backend="reference"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("offsets", [None, (0, 3, 9)], ids=["dense", "packed"])
@pytest.mark.parametrize("form", ["exp", "normalized"])
def test_derivatives_of_gradients_through_a_state(form: str, offsets: tuple[int, ...] | None) -> None:
    """The max state, by which the state is scaled, is a constant in them as in the gradients themselves."""
    x = leaves_of(problem(form, T=9, B=1, positive_qk=form == "normalized"))
    if offsets is not None:
        x |= {name: jnp.repeat(x[name], 2, 0) for name in ("C0", "n0", "m0")}
    directions = {name: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for name, a in x.items()}

    def second(backend: str | None) -> Any:
        options = {"cu_seqlens": offsets, "backend": backend, "chunk_size": 2}

        def total(x: dict[str, Any]) -> Any:
            h1, state = call(form, x, **options)
            h2, state = call(form, x, initial_state=state, **options)
            return sum(jnp.sin(a).sum() for a in (h1, h2, state.C, state.n))

        def product(x: dict[str, Any]) -> Any:
            return sum((g * directions[name]).sum() for name, g in jax.grad(total)(x).items())

        return jax.grad(product)(x)

    found, expected = second(None), second("reference")
    for name, exact in expected.items():
        np.testing.assert_allclose(found[name], exact, rtol=0, atol=1e-9 * np.abs(exact).max(), err_msg=name)


def test_forward_mode_of_the_reference() -> None:
    x = inputs(9)
    direction = [jnp.cos(a) for a in x]
    _, slope = jax.jit(lambda x, d: jax.jvp(lambda x: loss(x, backend="reference"), (x,), (d,)))(x, direction)
    grads = jax.grad(loss)(x)
    close(slope, sum((g * d).sum() for g, d in zip(grads, direction, strict=True)))


@pytest.mark.parametrize("name", ["mlstm", "delta_rule"])
def test_forward_mode_of_other_backends_is_an_error(name: str) -> None:
    x = inputs(9)
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(getattr(tfla.jax, name), x, x)


def test_a_returned_m_carries_no_gradient() -> None:
    x = inputs(9)

    def of_m(x: Arrays) -> Any:
        return tfla.jax.mlstm(*x, return_state=True)[1].m.sum()

    for backend in ("chunkwise", "reference"):
        grads = jax.grad(lambda x, backend=backend: tfla.jax.mlstm(*x, return_state=True, backend=backend)[1].m.sum())(
            x
        )
        assert not any(g.any() for g in grads)


@pytest.mark.parametrize("form", ["exp", "sigmoid"])
def test_repeatable(form: str) -> None:
    x = [leaves_of(problem(form, **SHAPE))[name] for name in "qkvif"]
    run = jax.jit(jax.grad(lambda x: loss(x, input_gate=form)))
    for a, b in zip(run(x), run(x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_float32_where_x64_is_off() -> None:
    x = inputs(9)
    with jax.enable_x64(False):
        rounded = [jnp.asarray(np.asarray(a)) for a in x]
        h, state = tfla.jax.mlstm(*rounded, return_state=True)
        grads = jax.grad(loss)(rounded)
    assert {str(a.dtype) for a in (h, *state, *grads)} == {"float32"}
    np.testing.assert_allclose(h, tfla.jax.mlstm(*x), rtol=1e-4, atol=1e-5)


def with_write_strengths(x: Arrays) -> Arrays:
    """Return the arguments of the delta rule, with log-gates by channel."""
    return [*x[:3], jax.nn.sigmoid(x[3]), -jnp.abs(x[0])]


@pytest.mark.parametrize("name", ["mlstm", "delta_rule"])
def test_export_with_a_symbolic_batch(name: str) -> None:
    x = inputs(9, B=3) if name == "mlstm" else with_write_strengths(inputs(9, B=3))
    run = getattr(tfla.jax, name)
    (b,) = jax.export.symbolic_shape("b")
    given = [jax.ShapeDtypeStruct((b, *a.shape[1:]), a.dtype) for a in x]

    def from_zeros(*x: Any) -> Any:
        B, _, H, dhv = x[2].shape
        state = tfla.jax.State.zeros(B, H, x[0].shape[3], dhv, normalize=name == "mlstm")
        return run(*x, initial_state=state)

    for function in (lambda *x: run(*x, return_state=True)[0], from_zeros):
        close(jax.export.export(jax.jit(function))(*given).call(*x), run(*x))


@pytest.mark.parametrize("kind", [tfla.jax.State, MixerState, KeyValues])
def test_exports_with_states_can_be_serialized(kind: Any) -> None:
    """JAX knows the states already, by their public names; to write the bytes it needs flatbuffers."""
    with pytest.raises(ValueError, match=r"[Dd]uplicate serialization registration"):
        jax.export.register_namedtuple_serialization(kind, serialized_name="another")


@pytest.mark.parametrize("name", ["mlstm", "delta_rule"])
def test_symbolic_steps_are_an_error(name: str) -> None:
    (T,) = jax.export.symbolic_shape("t")
    given = [jax.ShapeDtypeStruct((a.shape[0], T, *a.shape[2:]), a.dtype) for a in inputs(9)]
    with pytest.raises(ValueError, match=r"^q: got T = t, expected a number: steps of an export may not be symbolic"):
        jax.export.export(jax.jit(getattr(tfla.jax, name)))(*given)


def test_ranks_are_not_promoted() -> None:
    x = inputs(9, B=1)
    more = {"gate_activation": "softplus", "A_log": jnp.ones(2), "dt_bias": jnp.ones((2, 5))}

    def every(x: Arrays) -> Any:
        packed = loss(x, cu_seqlens=jnp.array([0, 4, 9])) + loss(x, cu_seqlens=(0, 4, 9), backend="reference")
        return packed + loss(x) + jnp.sin(tfla.jax.delta_rule(*with_write_strengths(x), **more)).sum()

    expected = jax.grad(every)(x)
    with jax.numpy_rank_promotion("raise"):
        close(jax.jit(jax.grad(every))(x), expected)


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_in_float64_where_x64_is_off() -> None:
    """JAX reads them in float32, beside arrays of its own too, and nothing warns of a dtype that is not there."""
    x = [np.asarray(a) for a in inputs(9)]
    expected = tfla.jax.mlstm(*x)
    pool = tfla.jax.State(np.zeros((4, 2, 5, 7)), np.zeros((4, 2, 5)), np.zeros((4, 2)))  # type: ignore[arg-type]
    with jax.enable_x64(False):
        found = [
            tfla.jax.mlstm(x[0], *map(jnp.asarray, x[1:])),
            tfla.jax.mlstm(*x, return_state=True, states_every=4)[0],
            tfla.jax.mlstm(*x, return_state=True, initial_state=pool, state_indices=np.array([3, 1]))[0],
            tfla.jax.mlstm_steps(*x, pool, state_indices=np.array([3, 1]))[0],
        ]
    for h in found:
        assert h.dtype == jnp.float32
        np.testing.assert_allclose(h, expected, rtol=1e-4, atol=1e-5)


def test_states_of_numpy() -> None:
    rng = np.random.default_rng(0)
    state = tfla.jax.State(*(rng.normal(size=shape) for shape in ((4, 2, 5, 7), (4, 2, 5), (4, 2))))  # type: ignore[arg-type]
    of_jax = jax.tree.map(jnp.asarray, state)
    close(state.reset([1]), of_jax.reset([1]))
    close(state.scatter([1, 3], state.gather([0, 1])), of_jax.scatter([1, 3], of_jax.gather([0, 1])))
    x, rows = [a[:, 0] for a in inputs(1)], np.array([3, -1])
    close(tfla.jax.mlstm_step(*x, state, state_indices=rows), tfla.jax.mlstm_step(*x, of_jax, state_indices=rows))


def test_offsets_as_a_tuple_of_integers_of_numpy() -> None:
    x = inputs(9, B=1)
    close(tfla.jax.mlstm(*x, cu_seqlens=tuple(np.cumsum([0, 4, 5]))), tfla.jax.mlstm(*x, cu_seqlens=(0, 4, 9)))
