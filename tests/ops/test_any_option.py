"""Whatever is given for an option of a public function, it works or is an error that names an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import problem
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
TENSORS = ("q", "k", "v", "i", "f", "log_i", "log_f")
FUNCTIONS = [
    tfla.mlstm, tfla.linear_attention, tfla.explain, tfla.mlstm_step, tfla.mlstm_steps, tfla.linear_attention_step,
    tfla.linear_attention_steps,
]  # fmt: skip
OTHERS = {"cu_seqlens": ("q",), "normalize": ("state", "initial_state"), **dict.fromkeys("qkv", TENSORS)}


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    p = problem(dtype=torch.float32, T=3, B=2)
    plain = function in (tfla.linear_attention_step, tfla.linear_attention_steps)
    x = dict(p.leaves) | {"log_f": -p.f.abs(), "log_i": p.i, "state": tfla.State.zeros(2, 2, 5, 7, normalize=not plain)}
    if function in (tfla.mlstm_step, tfla.linear_attention_step):
        x = {name: t[:, 0] if name in TENSORS else t for name, t in x.items()}
    return {name: x[name] for name in inspect.signature(function).parameters if name in x}


def wrong(function: Callable[..., Any], changed: dict[str, Any]) -> str | None:
    """What is wrong with the error of the call, if it is one."""
    names = {other for name in changed for other in (name, *OTHERS.get(name, ()))}
    try:
        with torch.no_grad():
            function(**arguments(function) | changed)
    except (TypeError, ValueError) as error:
        fine = any(str(error).startswith((f"{name}:", f"{name}.")) for name in names)
        return None if fine else repr(error)
    except Exception as error:
        return repr(error)
    return None


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_option_with_each_value(function: Callable[..., Any]) -> None:
    """After a call that is right, whose checks are not made again."""
    function(**arguments(function))
    options = inspect.signature(function).parameters
    found = {f"{name} = {value!r}": wrong(function, {name: value}) for name in options for value in ODD}
    assert not any(found.values()), "\n".join(f"{call}: {error}" for call, error in found.items() if error)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@given(data=st.data())
def test_several_options(function: Callable[..., Any], data: st.DataObject) -> None:
    options = st.sampled_from(list(inspect.signature(function).parameters))
    changed = data.draw(st.dictionaries(options, st.sampled_from(ODD), min_size=2, max_size=4), "changed")
    assert wrong(function, changed) is None
