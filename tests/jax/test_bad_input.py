"""Invalid arguments are refused on JAX with the messages of PyTorch's operator."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_cases import to_jax
from ops import test_delta_rule
from ops.test_bad_input import (
    CU_SEQLENS,
    OPTIONS,
    SEVERAL_WRITES,
    STEPS,
    TENSORS,
    as_log_gates,
    label,
    one_step,
    packed,
    whole,
    with_several_writes,
)
from torch import Tensor

import tfla
import tfla.jax

NOT_IN_JAX = ("meta", "requires a gradient")  # devices are JAX's own affair; gradients are not a property of arrays


TAKE_CHANNEL_GATES = (
    tfla.jax.linear_attention, tfla.jax.delta_rule, tfla.jax.delta_rule_steps, tfla.jax.delta_product, tfla.jax.dplr
)  # fmt: skip


def converted(x: Any) -> Any:
    if isinstance(x, tfla.State):
        return tfla.jax.State(*map(converted, x))
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return to_jax(x) if isinstance(x, Tensor) else x


def in_words_of_jax(text: str) -> str:
    text = text.replace("torch.dtype", "dtype").replace("torch.", "").replace("tensor", "array")
    return text.replace("tfla.State", "tfla.jax.State").replace("Tensor", "ArrayImpl").replace("a array", "an array")


def same_message(
    error: type[Exception] | tuple[type[Exception], ...],
    torch_function: Any,
    jax_function: Any,
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(error) as expected:
        torch_function(**arguments)
    with pytest.raises(error) as found:
        jax_function(**{name: converted(x) for name, x in arguments.items()})
    expected_text, text = in_words_of_jax(str(expected.value)), str(found.value)
    if jax_function not in TAKE_CHANNEL_GATES:
        expected_text = re.sub(r" or \(\d+, \d+, \d+, \d+\)$", "", expected_text)
    if text.startswith(("backend:", "kernel:")):  # there are other backends
        assert re.match(r"(backend|kernel): got .*, (allowed are None and|backend '\w+' has) '", text)
    elif text.startswith("cu_seqlens: got") and "array" in text:
        assert text == expected_text + " or a tuple of ints"
    elif text.startswith("store_dtype"):
        assert text.split(" or")[0] == expected_text.split(" or")[0]
    else:
        assert text == expected_text


def expressible(cases: list[Any]) -> list[Any]:
    return [case for case in cases if not any(word in part for word in NOT_IN_JAX for part in case[2])]


@pytest.mark.parametrize(("change", "error", "parts"), expressible(TENSORS + OPTIONS), ids=label)
def test_mlstm(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    same_message(error, tfla.mlstm, tfla.jax.mlstm, whole() | change)
    with pytest.raises(error):
        tfla.jax.explain(**{name: converted(x) for name, x in (whole() | change).items()})


@pytest.mark.parametrize(("change", "error", "parts"), expressible(TENSORS), ids=label)
def test_linear_attention(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    same_message(error, tfla.linear_attention, tfla.jax.linear_attention, as_log_gates(whole() | change))


@pytest.mark.parametrize(("name", "change", "parts"), SEVERAL_WRITES, ids=label)
def test_several_writes(name: str, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    same_message(
        (TypeError, ValueError), getattr(tfla, name), getattr(tfla.jax, name), with_several_writes(name, change)
    )


def test_options_that_gates_by_channel_do_not_read() -> None:
    x = {name: converted(t) for name, t in as_log_gates(whole()).items()}
    x["log_f"] = jnp.zeros(x["q"].shape)
    with pytest.raises(TypeError, match="normalizer_grad: got 'no', expected True or False"):
        tfla.jax.linear_attention(**x, normalizer_grad="no")


@pytest.mark.parametrize(("given", "name"), [(jnp.ones(2), "ArrayImpl"), (torch.ones(2), "Tensor")], ids=str)
def test_an_array_is_no_dtype(given: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"store_dtype: got {name}, expected a dtype or None"):
        tfla.jax.mlstm(**{name: converted(t) for name, t in whole().items()}, store_dtype=given)


@pytest.mark.parametrize(("cu_seqlens", "error", "parts"), expressible(CU_SEQLENS), ids=label)
def test_cu_seqlens(cu_seqlens: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    same_message(error, tfla.mlstm, tfla.jax.mlstm, packed() | {"cu_seqlens": cu_seqlens})


@pytest.mark.parametrize(("change", "error", "parts"), expressible(STEPS), ids=label)
def test_mlstm_step(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    same_message(error, tfla.mlstm_step, tfla.jax.mlstm_step, one_step() | change)


def of_delta(time: bool = True) -> dict[str, Any]:
    B, T, H, K, V = (getattr(test_delta_rule, name) for name in "BTHKV")
    lead = (B, T) if time else (B,)
    x = {"q": torch.zeros(*lead, H, K), "k": torch.zeros(*lead, H, K), "v": torch.zeros(*lead, H, V)}
    return x | {"beta": torch.zeros(*lead, H), "log_f": torch.zeros(*lead, H)}


@pytest.mark.parametrize(("change", "error", "text"), test_delta_rule.BAD)
def test_rule(change: dict[str, Any], error: type[Exception], text: str) -> None:
    same_message(error, tfla.delta_rule, tfla.jax.delta_rule, of_delta() | change)
    step_options = {"initial_state", "cu_seqlens", "chunk_size", "backend", "kernel"}
    if not step_options & change.keys():
        state = {"state": tfla.State.zeros(2, 4, 5, 7, normalize=False)}
        same_message(error, tfla.delta_rule_steps, tfla.jax.delta_rule_steps, of_delta() | change | state)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"normalize": True}, ValueError),
        ({"store_dtype": torch.bfloat16}, ValueError),
        ({"log_i": torch.zeros(2, 9)}, ValueError),
        ({"log_f": torch.zeros(2, 9, 4, 7)}, ValueError),
        ({"backend": "fastest"}, ValueError),
    ],
    ids=["normalize", "store_dtype", "log_i", "log_f", "backend"],
)
def test_gates_by_channel(change: dict[str, Any], error: type[Exception]) -> None:
    x = {name: t for name, t in of_delta().items() if name != "beta"} | {"log_f": torch.zeros(2, 9, 4, 5)}
    same_message(error, tfla.linear_attention, tfla.jax.linear_attention, x | change)


def test_steps_of_the_delta_rule() -> None:
    x = {name: converted(t) for name, t in of_delta(time=False).items()}
    state = tfla.jax.State.zeros(2, 4, 5, 7, normalize=False)
    with pytest.raises(ValueError, match=r"^in_place: got True, expected False: .*donate_argnames"):
        tfla.jax.delta_rule_step(**x, state=state, in_place=True)
    with pytest.raises(
        ValueError, match=r"^backend: got 'paper', allowed are None and 'hopper', 'triton', 'chunkwise'"
    ):
        tfla.jax.delta_rule_step(**x, state=state, backend="paper")
    with pytest.raises(ValueError, match=r"^state.n: got an array, expected None"):
        tfla.jax.delta_rule_step(**x, state=tfla.jax.State.zeros(2, 4, 5, 7))


def some() -> dict[str, Any]:
    return {name: converted(x) for name, x in whole().items()}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"cu_seqlens": (0, 4.0, 9)}, TypeError, "cu_seqlens: got (0, 4.0, 9), expected an int32 or int64 array or a"),
        ({"cu_seqlens": (0, 4, 9)}, ValueError, "q: got batch 2, expected 1 with cu_seqlens"),
        ({"q": torch.zeros(2, 9, 4, 5)}, TypeError, "q: got Tensor, expected an array"),
        ({"store_dtype": "fast"}, TypeError, "store_dtype: got str, expected a dtype or None"),
        ({"store_dtype": "float16"}, ValueError, "store_dtype: got float16, allowed are None, float32, bfloat16"),
        ({"context_parallel": 3}, TypeError, "context_parallel: got int, expected the name of a mesh axis or None"),
        ({"context_parallel": "cp"}, ValueError, "context_parallel: got 'cp', expected an axis of the mesh"),
        (
            {"context_parallel": "cp", "backend": "reference"},
            ValueError,
            "context_parallel: got it with backend 'reference', expected 'hopper', 'triton', 'chunkwise'",
        ),
        ({"kernel": "recurrent"}, ValueError, "kernel: got 'recurrent', backend 'chunkwise' has 'segmented'"),
    ],
    ids=str,
)
def test_what_only_jax_has(change: dict[str, Any], error: type[Exception], text: str) -> None:
    for function in (tfla.jax.mlstm, tfla.jax.explain):
        with pytest.raises(error, match="^" + re.escape(text)):
            function(**some() | change)


def test_traced_scales_and_steps_in_place() -> None:
    x = some()
    with pytest.raises(TypeError, match=r"^scale: got an array that is traced, expected a number.* multiply q"):
        jax.jit(lambda scale: tfla.jax.mlstm(**x, scale=scale))(2.0)
    for scale in (2, np.float32(2), jnp.asarray(2.0)):
        np.testing.assert_array_equal(tfla.jax.mlstm(**x, scale=scale), tfla.jax.mlstm(**x, scale=2.0))
    step = {name: converted(t) for name, t in one_step().items()}
    with pytest.raises(ValueError, match=r"^in_place: got True, expected False: .*donate_argnames"):
        tfla.jax.mlstm_step(**step, in_place=True)


STATIC = "expected an option that is static: name it in static_argnames of jax.jit"
TRACED: dict[str, tuple[str, ...]] = {
    "mlstm": ("return_state", "chunk_size", "normalizer_grad", "states_every"),
    "linear_attention": ("normalize", "return_state", "states_every"),
    "gates by channel": ("normalize", "return_state", "chunk_size", "normalizer_grad", "states_every"),
    "mlstm_step": ("in_place",),
    "linear_attention_step": ("normalize", "in_place"),
    "linear_attention_steps": ("normalize", "return_state"),
    "delta_rule": ("return_state", "chunk_size", "read_before_decay", "normalize_qk", "lower_bound", "states_every"),
    "delta_rule_steps": ("return_state", "in_place", "normalize_qk", "lower_bound"),
    "delta_product": ("writes", "return_state", "chunk_size", "normalize_qk", "states_every"),
    "explain": ("return_state", "chunk_size"),
}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name, options in TRACED.items() for option in options])
def test_options_that_are_traced(name: str, option: str) -> None:
    """Under jit an option has to be static; the message says how."""
    x = {n: converted(t) for n, t in (one_step() if name.endswith("_step") else whole()).items() if n != "state"}
    state = tfla.jax.State.zeros(2, 4, 5, 7, normalize=name == "mlstm_step")
    more: dict[str, Any] = {"state": state} if "step" in name else {}
    i, f = x.pop("i"), x.pop("f")
    if name in ("mlstm", "explain", "mlstm_step"):
        x |= {"i": i, "f": f}
    elif name == "gates by channel":
        x["log_f"], name = jnp.zeros(x["q"].shape), "linear_attention"
    elif name.startswith("delta"):
        x["beta"] = i
    else:
        x["log_f"] = f
    if option != "writes" and name == "delta_product":
        more["writes"] = 1
    if option == "states_every":
        more["return_state"] = True
    value = {"chunk_size": 16, "writes": 1, "states_every": 2, "lower_bound": -5.0}.get(option, True)
    run = jax.jit(lambda value: getattr(tfla.jax, name)(**x, **more, **{option: value}))
    with pytest.raises(TypeError, match=rf"^{option}: got an array that is traced, {STATIC}"):
        run(value)


@pytest.mark.parametrize("name", ["mlstm", "linear_attention", "delta_rule"])
def test_whether_rows_are_returned_is_static(name: str) -> None:
    x, pool = some(), tfla.jax.State.zeros(4, 4, 5, 7, normalize=name == "mlstm")
    run = functools.partial(getattr(tfla.jax, name), *x.values(), initial_state=pool, state_indices=jnp.array([3, 1]))
    with pytest.raises(TypeError, match=rf"^return_state: got an array that is traced, {STATIC}"):
        jax.jit(lambda value: run(return_state=value))(True)


def test_offsets_that_are_traced_one_by_one() -> None:
    x = {name: t[:1] for name, t in some().items()}
    with pytest.raises(TypeError, match=r"^cu_seqlens: got a tuple of traced numbers, expected an array, or a tuple"):
        jax.jit(lambda cu_seqlens: tfla.jax.mlstm(**x, cu_seqlens=cu_seqlens))((0, 4, 9))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"lengths": [1, 2]}, TypeError, "lengths: got list, expected an int32 or int64 array"),
        ({"lengths": np.array([1, 10])}, ValueError, "lengths: got values from 1 to 10, expected from 0 to T = 9"),
        ({"lengths": np.array([1])}, ValueError, "lengths: got shape (1,), expected (2)"),
        (
            {"lengths": np.array([1, 2]), "return_state": False},
            ValueError,
            "lengths: got it with return_state=False, expected it with a state to return",
        ),
    ],
    ids=str,
)
def test_few_steps(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match="^" + re.escape(text)):
        tfla.jax.mlstm_steps(**some(), state=tfla.jax.State.zeros(2, 4, 5, 7), **change)


def test_too_many_steps() -> None:
    x = {name: np.repeat(np.asarray(t), 4, 1) for name, t in some().items()}
    with pytest.raises(ValueError, match=r"^v: got T = 36, expected from 1 to 32"):
        tfla.jax.mlstm_steps(**x, state=tfla.jax.State.zeros(2, 4, 5, 7))


def test_sizes_of_states() -> None:
    with pytest.raises(TypeError, match=r"^batch: got 1.0, expected an int"):
        tfla.jax.State.zeros(1.0, 1, 1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^heads: got 0, expected at least 1"):
        tfla.jax.State.zeros(1, 0, 1, 1)
    with pytest.raises(TypeError, match=r"^dtype: got <class 'int'>, expected a float dtype"):
        tfla.jax.State.zeros(1, 1, 1, 1, dtype=int)


@pytest.mark.parametrize(
    "rows",
    [1, None, "x", [True, False], [0.5], [4], [-1], torch.tensor([True]), torch.tensor([0, 4]), torch.tensor([[1]]),
     torch.tensor([0.5])],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["gather", "reset", "scatter"])
def test_rows_of_a_state(name: str, rows: Any) -> None:
    """Messages are those of PyTorch's state; rows out of range are no longer clamped."""
    state = tfla.State.zeros(4, 2, 3, 5)
    more = {"states": state.gather([0])} if name == "scatter" else {}
    of_jax = converted(state)
    same_message((TypeError, ValueError), getattr(state, name), getattr(of_jax, name), {"rows": rows} | more)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"C": None}, TypeError, "initial_state.C: got NoneType, expected an array"),
        ({"C": jnp.zeros((4, 4, 5, 7), int)}, TypeError, "initial_state.C: got dtype int64, expected a float dtype: "),
        ({"C": jnp.zeros((4, 4, 5))}, ValueError, "initial_state.C: got shape (4, 4, 5), expected (rows, H, dqk, dhv)"),
        ({"n": jnp.zeros((2, 4, 5))}, ValueError, "initial_state.n: got shape (2, 4, 5), expected (4, H, dqk)"),
        ({"m": jnp.zeros((2, 4), int)}, TypeError, "initial_state.m: got dtype int64, expected a float dtype: "),
    ],
    ids=["missing", "integers", "dims", "rows", "integers_m"],
)
def test_pools_of_whole_sequences(change: dict[str, Any], error: type[Exception], text: str) -> None:
    """Rows that a part lacks were read as zeros."""
    pool = tfla.jax.State.zeros(4, 4, 5, 7)._replace(**change)
    for more in ({}, {"return_state": True, "states_every": 2}):
        with pytest.raises(error, match="^" + re.escape(text)):
            tfla.jax.mlstm(**some(), initial_state=pool, state_indices=jnp.array([3, 1]), **more)


def test_rows_on_other_devices_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would wait for them; results are those that the docstrings name."""
    state = tfla.jax.State(jnp.arange(3.0).reshape(3, 1, 1, 1))
    rows = jnp.array([-1, 5, -7])
    monkeypatch.setattr(type(rows), "devices", lambda _: [types.SimpleNamespace(platform="gpu")])
    assert state.gather(rows).C.ravel().tolist() == [2, 2, 0]
    assert state.reset(rows).C.ravel().tolist() == [0, 1, 0]
    assert state.scatter(jnp.array([5, 1]), state.gather([0, 2])).C.ravel().tolist() == [0, 2, 2]
    x = jnp.ones((2, 1, 1))
    _, pool = tfla.jax.linear_attention_step(x, x, x, jnp.zeros((2, 1)), state, state_indices=jnp.array([1, 5]))
    assert pool.C.ravel().tolist() == [0, 2, 2]
    with pytest.raises(ValueError, match=r"^rows: got 5, expected from 0 to 2"):
        state.gather(np.array([5]))


@pytest.mark.parametrize("rows", [[0], [1, 1], [2, 1, 1, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("states", [tfla.State.zeros(2, 2, 3, 5), tfla.State.zeros(1, 2, 3, 5, normalize=False), 3])
def test_states_that_do_not_fit_into_a_state(rows: list[int], states: Any) -> None:
    state = tfla.State.zeros(4, 2, 3, 5)
    given = {"rows": rows, "states": states}
    same_message((TypeError, ValueError), state.scatter, converted(state).scatter, given)


def test_explanation() -> None:
    text = str(tfla.jax.explain(**some(), chunk_size=4))
    assert re.search(r"^backend +chunkwise$", text, re.MULTILINE)
    assert re.search(r"^chunk_size +4 \(6 stored states\)$", text, re.MULTILINE)
    assert "not reference" in text
    assert tfla.jax.explain(**some(), backend="reference").kernel == "recurrent"


def test_explanation_of_shapes() -> None:
    """Arrays may be shapes and dtypes alone, all of them or some."""

    def shapes(x: Any) -> Any:
        return jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype), x)

    x = some() | {"initial_state": tfla.jax.State.zeros(2, 4, 5, 7)}
    expected = str(tfla.jax.explain(**x, chunk_size=4))
    assert str(tfla.jax.explain(**shapes(x), chunk_size=4)) == expected
    assert str(tfla.jax.explain(**x | {"q": shapes(x["q"])}, chunk_size=4)) == expected
    with pytest.raises(ValueError, match=r"^k: got shape \(2, 9, 4, 1\), expected \(2, 9, 4, 5\)"):
        tfla.jax.explain(**shapes(x | {"k": x["k"][..., :1]}))
    of_one = {name: t[:1] for name, t in some().items()}
    offsets = (0, 4, 9)
    expected = str(tfla.jax.explain(**of_one, cu_seqlens=offsets))
    for cu_seqlens in (offsets, jnp.array(offsets), jax.ShapeDtypeStruct((3,), jnp.int32)):
        assert str(tfla.jax.explain(**shapes(of_one), cu_seqlens=cu_seqlens)) == expected
    rule = {name: converted(t) for name, t in of_delta().items()}
    assert str(tfla.jax.explain_delta_rule(**shapes(rule))) == str(tfla.jax.explain_delta_rule(**rule))


def test_the_import_leaves_cuda_alone() -> None:
    """Nor does a module of tfla.jax use PyTorch by itself."""
    code = (
        "import torch, sys\n"
        "def fail(*a): raise AssertionError('CUDA is initialized')\n"
        "torch.cuda._lazy_init = fail\n"
        "import jax.numpy as jnp, tfla.jax\n"
        "x = jnp.ones((1, 3, 2, 4)); print(tfla.jax.mlstm(x, x, x, x[..., 0], x[..., 0]).shape)\n"
        "print([name for name, m in sys.modules.items() if name.startswith('tfla.jax') and 'torch' in vars(m)])\n"
        "print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "(1, 3, 2, 4)\n[]\nFalse\n", done.stderr
