"""The states after every n steps on JAX are those of calls that stop there."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import problem
from delta_cases import delta_problem
from jax_cases import to_jax
from jax_delta_cases import leaves_of
from several_writes import writes_problem

import tfla
import tfla.jax

OPERATORS = ("mlstm", "linear_attention", "kda")


def arrays(operator: str, **shape: Any) -> tuple[Any, dict[str, Any], tfla.jax.State]:
    """Return the operator, what it is given, and initial states, of 23 steps in 2 rows."""
    shape = {"T": 23, "Hq": 1, "H": 2, "K": 4, "V": 3} | shape
    if operator == "kda":
        x = leaves_of(delta_problem("kda", B=2, **shape))
        start = tfla.jax.State(x.pop("C"))
        return tfla.jax.delta_rule, x, start
    p = problem("exp" if operator == "mlstm" else "plain", B=2, **shape)
    assert p.state is not None
    x, start = {name: to_jax(getattr(p, name)) for name in "qkvif"}, tfla.jax.State(*map(to_jax, p.state))
    if operator == "mlstm":
        return tfla.jax.mlstm, x, start
    return tfla.jax.linear_attention, {**{n: x[n] for n in "qkv"}, "log_f": x["f"], "log_i": x["i"]}, start


def true(state: tfla.jax.State) -> Any:
    """Return the true C, which does not depend on the choice of m."""
    return state.C if state.m is None else state.C * jnp.exp(state.m)[..., None, None]


def near(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def true_state_after(run: Any) -> Any:
    """Return a function of arrays of one row, an initial state and a range of steps: the true C after these steps.

    It is compiled once for all ranges, which are traced offsets of a packed sequence.
    """

    @jax.jit
    def after(x: dict[str, Any], start: tfla.jax.State, first: int, end: int) -> Any:
        return true(run(**x, initial_state=start, return_state=True, cu_seqlens=jnp.array([first, end]))[1])

    return after


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("n", [5, 30])
def test_dense(operator: str, n: int) -> None:
    run, x, start = arrays(operator)
    given = functools.partial(run, initial_state=start, return_state=True)
    h, last, states = jax.jit(functools.partial(given, states_every=n))(**x)
    expected, end = jax.jit(given)(**x)
    near(h, expected)
    near(true(last), true(end))
    assert states.C.shape[:2] == (2, 23 // n)
    after, found = true_state_after(run), true(states)
    for row in range(2):
        of_row, begin = ({name: a[row : row + 1] for name, a in x.items()}, start.gather([row]))
        for j in range(23 // n):
            near(found[row : row + 1, j], after(of_row, begin, 0, (j + 1) * n))


@pytest.mark.parametrize("operator", ["mlstm", "kda"])
def test_packed_sequences_and_rows_of_a_pool(operator: str) -> None:
    run, x, start = arrays(operator)
    x = {name: a[:1] for name, a in x.items()}
    at, rows = (0, 9, 9, 23), jnp.array([1, -1, 0])
    given = functools.partial(run, initial_state=start, return_state=True, cu_seqlens=at, state_indices=rows)
    h, pool, states = jax.jit(functools.partial(given, states_every=4))(**x)
    expected, new = jax.jit(given)(**x)
    near(h, expected)
    near(true(pool), true(new))
    filled, after, found = [], true_state_after(run), true(states)
    for s, (a, b, row) in enumerate(((0, 9, 1), (9, 9, -1), (9, 23, 0))):
        for j in range((b - a) // 4):
            filled.append(at[s] // 4 + j)
            near(found[:, filled[-1]], after(x, start.gather([row]), a, a + 4 * (j + 1)))
    empty = sorted(set(range(23 // 4)) - set(filled))
    assert not np.asarray(states.C[:, jnp.array(empty, int)]).any()


@pytest.mark.parametrize("name", ["delta_product", "dplr"])
def test_several_writes_in_a_step(name: str) -> None:
    """Numbers of steps count no writes, in packed sequences that read and write rows of a pool."""
    p = writes_problem(name, lengths=(9, 0, 14), carried=False, by_channel=name == "dplr")
    x = {each: p.flat(each, t) for each, t in p.leaves.items()}
    C = torch.cat([p.dC, -p.dC])
    more: dict[str, Any] = {"states_every": 4, "return_state": True} | ({"writes": 2} if "beta" in x else {})
    h, pool, states = getattr(tfla, name)(
        **x,
        initial_state=tfla.State(C.clone()),
        state_indices=torch.tensor([4, -1, 0]),
        cu_seqlens=p.cu_seqlens,
        **more,
    )
    own = {each: to_jax(t) for each, t in x.items()}
    run = functools.partial(getattr(tfla.jax, name), **own, initial_state=tfla.jax.State(to_jax(C)), **more)
    given = {"state_indices": jnp.array([4, -1, 0]), "cu_seqlens": (0, 9, 9, 23)}
    found = run(**given)
    for a, b in zip(found, (h, pool, states), strict=True):
        near(getattr(a, "C", a), to_jax(getattr(b, "C", b)))
    for change, message in (
        ({"states_every": -2}, "got -2, expected"),
        ({"return_state": False}, "got 4 with return_st"),
    ):
        with pytest.raises(ValueError, match=f"^states_every: {message}"):
            run(**given | change)


def test_gradients() -> None:
    run, x, start = arrays("mlstm", T=11)

    def loss(x: Any, every: Any) -> Any:
        h, last, *_ = run(**x, initial_state=start, return_state=True, states_every=every)
        return jnp.sin(h).sum() + jnp.sin(true(last)).sum()

    for a, b in zip(jax.tree.leaves(jax.grad(loss)(x, 4)), jax.tree.leaves(jax.grad(loss)(x, None)), strict=True):
        near(a, b)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"states_every": 2.0}, TypeError, "states_every: got float, expected None or an int"),
        ({"states_every": 0}, ValueError, "states_every: got 0, expected at least 1"),
        ({"return_state": False}, ValueError, "states_every: got 4 with return_state False, expected return_state"),
        ({"context_parallel": "x"}, ValueError, "states_every: got it with context_parallel, expected at most one"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    run, x, _ = arrays("mlstm")
    with pytest.raises(error, match=f"^{message}"):
        run(**{"return_state": True, "states_every": 4} | x | change)


BAD_ARRAYS: dict[str, dict[str, Any]] = {
    "q, none": {"q": None},
    "k, none": {"k": None},
    "v, none": {"v": None},
    "gate, none": {"gate": None},
    "gate, steps": {"gate": jnp.ones((2, 3, 2))},
    "q, three dims": {"q": jnp.ones((4, 2, 3))},
    "q, two dims": {"q": jnp.ones((4, 4))},
    "v, no heads": {"v": jnp.ones((2, 23, 0, 3))},
    "v, dtype": {"v": jnp.ones((2, 23, 2, 3), jnp.float32)},
    "no steps": {"T": 0},
}


@pytest.mark.parametrize("change", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
@pytest.mark.parametrize("operator", [*OPERATORS, "gla"])
def test_arrays_are_checked_as_without_it(operator: str, change: dict[str, Any]) -> None:
    """The first error is that of the same call that returns no states in between."""
    run, x, _ = arrays("linear_attention" if operator == "gla" else operator)
    gate = "i" if operator == "mlstm" else "log_f"
    if operator == "gla":
        x["log_f"] = jnp.zeros((2, 23, 2, 4))
    if "T" in change:
        x = {name: t[:, :0] for name, t in x.items()}
    else:
        x |= {gate if name == "gate" else name: t for name, t in change.items()}
    if operator == "kda" and x["log_f"] is None:
        return  # no decay
    with pytest.raises((TypeError, ValueError)) as expected:
        run(**x)
    with pytest.raises(type(expected.value)) as found:
        run(**x, return_state=True, states_every=4)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("name", ["mlstm", "delta_rule"])
def test_heads_of_v_divided_beside_whole_queries(name: str) -> None:
    """Types of states say over which mesh axes any input differs, not the queries alone."""
    key = jax.random.key(0)
    q, v, gate = (jax.random.normal(key, (1, 6, *dims)) for dims in ((1, 4), (1, 3), (1,)))
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, whole = jax.P(None, None, "heads"), jax.P()

    def run(*x: Any) -> Any:
        return getattr(tfla.jax, name)(*x, return_state=True, states_every=2)

    given = q, q, v, jax.nn.sigmoid(gate), -jnp.abs(gate)
    specs = whole, whole, heads, heads, heads
    divided = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(heads, jax.P(None, "heads"), heads))
    for a, b in zip(jax.tree.leaves(divided(*given)), jax.tree.leaves(run(*given)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
