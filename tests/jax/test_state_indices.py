"""Pools of states on JAX: rows read and written by index are those that gather and scatter give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import INTERPRETED, problem
from delta_cases import delta_problem
from jax_cases import to_jax
from jax_delta_cases import leaves_of
from jax_plans import MARKS, ON_GPU, plans_run

import tfla.jax

WITH_KERNELS = [*MARKS] if INTERPRETED else []
pytestmark = WITH_KERNELS
SHAPE: dict[str, Any] = {"B": 3, "T": 2, "Hq": 1, "H": 2, "K": 16, "V": 24, "dtype": torch.float32}
ROWS = jnp.array([4, -1, 1])
Arrays = dict[str, Any]


@pytest.fixture(autouse=True)
def _plans_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let kernels of steps run where Triton's interpreter is on; elsewhere XLA compiles the same calls."""
    if not (INTERPRETED or ON_GPU):
        yield
        return
    with plans_run(monkeypatch):
        yield


def arrays(operator: str) -> tuple[Any, Arrays, tfla.jax.State]:
    """Return the operator's steps, what they are given, and a pool of 6 states."""
    if operator == "mlstm":
        p = problem("exp", **SHAPE)
        assert p.state is not None
        x, state = {name: to_jax(getattr(p, name)) for name in "qkvif"}, tfla.jax.State(*map(to_jax, p.state))
        steps: Any = tfla.jax.mlstm_steps
    else:
        x = leaves_of(delta_problem(operator, **SHAPE))
        state, steps = tfla.jax.State(x.pop("C")), tfla.jax.delta_rule_steps
    pool = tfla.jax.State(*(None if a is None else jnp.concatenate([a, 2 * a]) for a in state))  # type: ignore[arg-type]
    return steps, x, pool


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(t, np.float64) for t in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("operator", ["mlstm", "gdn", "kda"])
def test_steps(operator: str) -> None:
    """Rows are those of a gather and a scatter; the others stay, and h is 0 at -1."""
    steps, x, pool = arrays(operator)
    there = jnp.array([0, 2])
    some = {name: a[there] for name, a in x.items()}
    h, new = steps(**some, state=pool.gather(ROWS[there]), backend="chunkwise")
    expected = jnp.zeros((3, *h.shape[1:]), h.dtype).at[there].set(h), pool.scatter(ROWS[there], new)
    run = jax.jit(lambda pool, rows, x: steps(**x, state=pool, state_indices=rows), donate_argnums=0)
    close(run(jax.tree.map(jnp.array, pool), ROWS, x), expected)
    close(steps(**x, state=pool, state_indices=ROWS, return_state=False), expected[0])
    lengths = jnp.array([1, 2, 0])
    found = steps(**x, state=pool, state_indices=ROWS, lengths=lengths)[1]
    close(found, steps(**x, state=pool, state_indices=ROWS, lengths=lengths, backend="chunkwise")[1])
    close(jax.tree.map(lambda a: a[1], found), jax.tree.map(lambda a: a[1], pool))  # after no step


def test_gradients_and_vmap() -> None:
    steps, x, pool = arrays("mlstm")

    def loss(x: Arrays, pool: Any, backend: Any = None) -> Any:
        h, new = steps(**x, state=pool, state_indices=ROWS, backend=backend)
        return (h**2).sum() + (new.C**2).sum()

    close(jax.grad(loss, (0, 1))(x, pool), jax.grad(loss, (0, 1))(x, pool, "chunkwise"))
    two = jnp.stack([ROWS, jnp.array([0, 2, -1])])
    found = jax.vmap(lambda rows: steps(**x, state=pool, state_indices=rows))(two)
    close(jax.tree.map(lambda a: a[1], found), steps(**x, state=pool, state_indices=two[1]))


def test_whole_sequences() -> None:
    """Sequences start at -1 from zero, and their final states replace the rows."""
    _, x, pool = arrays("mlstm")
    rows = pool.gather(jnp.array([4, 0, 1]))
    start = tfla.jax.State(*(a.at[1].set(0) for a in rows))  # type: ignore[union-attr]
    h, last = tfla.jax.mlstm(**x, initial_state=start, return_state=True)
    found, new = tfla.jax.mlstm(**x, initial_state=pool, return_state=True, state_indices=ROWS)
    close((found, new), (h, pool.scatter(ROWS[jnp.array([0, 2])], last.gather(jnp.array([0, 2])))))
    close(tfla.jax.mlstm(**x, initial_state=pool, state_indices=ROWS), h)
    _, x, pool = arrays("kda")
    h = tfla.jax.delta_rule(**x, initial_state=pool.gather(jnp.array([5, 0, 1])))
    close(tfla.jax.delta_rule(**x, initial_state=pool, state_indices=jnp.array([5, 0, 1])), h)
    plain = [x[name] for name in ("q", "k", "v", "log_f")]
    h = tfla.jax.linear_attention(*plain, initial_state=pool.gather(jnp.array([5, 0, 1])))
    close(tfla.jax.linear_attention(*plain, initial_state=pool, state_indices=jnp.array([5, 0, 1])), h)


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([0, 1, 2], TypeError, "got list, expected an int32 or int64 array"),
        (jnp.array([0.0, 1, 2]), TypeError, "got float64, expected an int32 or int64 array"),
        (jnp.array([0, 1]), ValueError, r"got shape \(2,\), expected \(3\)"),
        (jnp.array([0, 1, 6]), ValueError, "got 6, expected -1 or from 0 to 5, a row of the state"),
        (jnp.array([1, 0, 1]), ValueError, "got 1 more than once, expected each row at most once"),
    ],
)
def test_bad_indices(indices: Any, error: type[Exception], message: str) -> None:
    steps, x, pool = arrays("mlstm")
    with pytest.raises(error, match=f"^state_indices: {message}"):
        steps(**x, state=pool, state_indices=indices)
    with pytest.raises(error, match=f"^state_indices: {message}"):
        tfla.jax.mlstm(**x, initial_state=pool, state_indices=indices)
    with pytest.raises(TypeError, match=r"^state_indices: got them with initial_state NoneType, expected"):
        tfla.jax.mlstm(**x, state_indices=ROWS)
    with pytest.raises(ValueError, match=r"^state_indices: got them with context_parallel, expected at most one"):
        tfla.jax.mlstm(**x, initial_state=pool, state_indices=ROWS, context_parallel="x")


def test_a_max_state_of_16_bits_is_read_but_not_written() -> None:
    """Rounding it would multiply the whole state, which is exp(m) C."""
    steps, x, pool = arrays("mlstm")
    low = pool._replace(m=pool.m.astype(jnp.bfloat16))  # type: ignore[union-attr]
    message = "m: got dtype bfloat16, expected float32 to be overwritten"
    with pytest.raises(TypeError, match=f"^state.{message}"):
        steps(**x, state=low, state_indices=ROWS)
    for more in ({}, {"states_every": 1}):
        with pytest.raises(TypeError, match=f"^initial_state.{message}"):
            tfla.jax.mlstm(**x, initial_state=low, state_indices=ROWS, return_state=True, **more)
    h = tfla.jax.mlstm(**x, initial_state=low, state_indices=jnp.array([4, 0, 1]))
    close(h, tfla.jax.mlstm(**x, initial_state=low.gather(jnp.array([4, 0, 1]))))


def test_zeros_in_16_bits_are_written() -> None:
    """The max state of a pool in 16 bits is in float32, so that only C and n are rounded."""
    _, x, pool = arrays("mlstm")
    rows = jnp.array([4, 0, 1])
    low, pool = (tfla.jax.State.zeros(6, *pool.C.shape[1:], dtype=dtype) for dtype in (jnp.bfloat16, pool.C.dtype))
    found = tfla.jax.mlstm(**x, initial_state=low, state_indices=rows, return_state=True)[1]
    exact = tfla.jax.mlstm(**x, initial_state=pool, state_indices=rows, return_state=True)[1]
    assert found.C.dtype == found.n.dtype == jnp.bfloat16
    assert found.m.dtype == exact.m.dtype
    close(jax.tree.map(lambda a: a.astype(jnp.float32), found), exact, 2**-8)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float16, jnp.float32, float, "float64"])
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_of_zeros(dtype: Any, x64: bool) -> None:
    with jax.enable_x64(x64):
        kept = jax.dtypes.canonicalize_dtype(dtype)
        C, n, m = tfla.jax.State.zeros(2, 1, 4, 4, dtype=dtype)
    assert (C.dtype, n.dtype, m.dtype) == (kept, kept, jnp.float64 if kept == jnp.float64 else jnp.float32)
