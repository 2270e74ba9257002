"""Any value of an option of a public function either works or raises an error that names an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import problem
from delta_cases import delta_problem
from hypothesis import given
from hypothesis import strategies as st

import tfla

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**70, 0.5, float("nan"), float("inf"), 1j, "", "exp", "chunkwise", "1", b"x", (),
    [], [1], (1.0,), {}, {"a": 1}, {"chunkwise"}, object, object(), len, slice(2), range(3), ..., NotImplemented,
    np.float32(0.5), np.int64(16), np.bool_(True), np.ones(2), np.array(["exp"]), torch.float16, torch.int8,
    torch.device("cpu"), torch.ones(()), torch.ones(2), torch.zeros(0), torch.tensor(1), torch.tensor([0, 3]),
    torch.tensor([0, 9], device="meta"), torch.ones((), requires_grad=True), torch.tensor(True),
    torch.zeros(2, 2, dtype=torch.complex64), tfla.State(torch.zeros(2, 2, 5, 7)), tfla.State.zeros(2, 2, 5, 7),
    tfla.State(None), tfla.State(3, 4, 5),
]  # fmt: skip
TENSORS = ("q", "k", "v", "i", "f", "log_i", "log_f", "beta", "read_key", "a", "b")


def arguments_of_gates_by_step(function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of a function with a gate for each step."""
    p = problem(dtype=torch.float32, T=3, B=2)
    plain = function in (tfla.linear_attention_step, tfla.linear_attention_steps)
    x = dict(p.leaves) | {"log_f": -p.f.abs(), "log_i": p.i, "state": tfla.State.zeros(2, 2, 5, 7, normalize=not plain)}
    return fitting(function, x)


def arguments_of_the_delta_rule(function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of a function with gates by channel, or of one with the delta rule."""
    p = delta_problem("kda", dtype=torch.float32, T=3, B=2, K=5, V=7)
    x: dict[str, Any] = dict(p.leaves) | {"state": tfla.State(p.leaves["C"].clone()), "writes": 1}
    return fitting(function, x | {"a": -x["k"], "b": x["k"]})


def fitting(function: Callable[..., Any], x: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that the function has; of one step without a dimension of time."""
    if function.__name__.endswith("_step"):
        x = {name: t[:, 0] if name in TENSORS else t for name, t in x.items()}
    return {name: x[name] for name in inspect.signature(function).parameters if name in x}


BY_STEP = [
    tfla.mlstm, tfla.linear_attention, tfla.explain, tfla.mlstm_step, tfla.mlstm_steps, tfla.linear_attention_step,
    tfla.linear_attention_steps,
]  # fmt: skip
DELTA = [
    tfla.delta_rule, tfla.explain_delta_rule, tfla.delta_rule_step, tfla.delta_rule_steps, tfla.delta_product, tfla.dplr
]  # fmt: skip
BY_CHANNEL = [tfla.linear_attention, tfla.linear_attention_step, tfla.linear_attention_steps]
FUNCTIONS = [
    *(pytest.param(function, arguments_of_gates_by_step, id=function.__name__) for function in BY_STEP),
    *(pytest.param(function, arguments_of_the_delta_rule, id=function.__name__) for function in DELTA),
    *(pytest.param(f, arguments_of_the_delta_rule, id=f"{f.__name__}, gates by channel") for f in BY_CHANNEL),
]
OTHERS = {
    "cu_seqlens": ("q",), "normalize": ("state", "initial_state"), "writes": ("k",), "beta_activation": ("beta",),
    "gate_activation": ("log_f", "A_log", "lower_bound"), **dict.fromkeys("qkv", TENSORS),
}  # fmt: skip


def wrong(function: Callable[..., Any], given: dict[str, Any], changed: dict[str, Any]) -> str | None:
    """Return what is wrong with the error that the call raises, or None."""
    names = {other for name in changed for other in (name, *OTHERS.get(name, ()))}
    try:
        with torch.no_grad():
            function(**given | changed)
    except (TypeError, ValueError) as error:
        fine = any(str(error).startswith((f"{name}:", f"{name}.")) for name in names)
        return None if fine else repr(error)
    except Exception as error:
        return repr(error)
    return None


@pytest.mark.parametrize(("function", "arguments"), FUNCTIONS)
def test_each_option_with_each_value(function: Callable[..., Any], arguments: Callable[..., dict[str, Any]]) -> None:
    """After a call that is right, whose checks are not made again."""
    function(**arguments(function))
    options = inspect.signature(function).parameters
    found = {
        f"{name} = {value!r}": wrong(function, arguments(function), {name: value}) for name in options for value in ODD
    }
    assert not any(found.values()), "\n".join(f"{call}: {error}" for call, error in found.items() if error)


@pytest.mark.parametrize(("function", "arguments"), FUNCTIONS)
@given(data=st.data())
def test_several_options(
    function: Callable[..., Any], arguments: Callable[..., dict[str, Any]], data: st.DataObject
) -> None:
    options = st.sampled_from(list(inspect.signature(function).parameters))
    changed = data.draw(st.dictionaries(options, st.sampled_from(ODD), min_size=2, max_size=4), "changed")
    assert wrong(function, arguments(function), changed) is None


@pytest.mark.parametrize("function", BY_CHANNEL)
@pytest.mark.parametrize("option", ["normalize", "normalizer_grad"])
def test_flags_of_gates_by_channel(function: Callable[..., Any], option: str) -> None:
    """They are checked although this form does not read them."""
    given = arguments_of_the_delta_rule(function)
    if option in inspect.signature(function).parameters:
        with pytest.raises(TypeError, match=f"^{option}: got '', expected True or False"):
            function(**given, **{option: ""})
