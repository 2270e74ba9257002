"""Invalid arguments are refused: the message names the argument, what was given and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import problem
from delta_cases import delta_problem
from torch import Tensor

import tfla


def label(part: Any) -> str:
    """A case is known by what its message must hold."""
    return " ".join(part) if isinstance(part, tuple) else ""


B, T, H, K, V = 2, 9, 4, 5, 7
INT = torch.int64


def whole() -> dict[str, Any]:
    """Arguments of mlstm that fit."""
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)
    return {"q": q, "k": k, "v": v, "i": torch.randn(B, T, H), "f": torch.randn(B, T, H)}


def packed() -> dict[str, Any]:
    return {name: x[:1] for name, x in whole().items()} | {"cu_seqlens": torch.tensor([0, 4, 9])}


def one_step() -> dict[str, Any]:
    return {name: x[:, 0] for name, x in whole().items()} | {"state": tfla.State.zeros(B, H, K, V)}


def state(**parts: Tensor | None) -> tfla.State:
    return tfla.State.zeros(B, H, K, V)._replace(**parts)


# What is changed; the error; what its message must hold.
TENSORS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"q": [1.0]}, TypeError, ("q:", "list", "tensor")),
    ({"f": None}, TypeError, ("f:", "NoneType", "tensor")),
    ({"q": torch.zeros(B, T, H, K, dtype=INT)}, TypeError, ("q:", "int64", "float dtype")),
    ({"i": torch.zeros(B, T, H, dtype=torch.bool)}, TypeError, ("i:", "bool", "float dtype")),
    ({"k": torch.zeros(B, T, H, K, dtype=torch.bfloat16)}, TypeError, ("k:", "bfloat16", "q", "float32")),
    ({"v": torch.zeros(B, T, H, V, dtype=torch.float64)}, TypeError, ("v:", "float64", "q", "float32")),
    ({"q": torch.zeros(B, T, K)}, ValueError, ("q:", "(2, 9, 5)", "(B, T, H, dqk)")),
    ({"k": torch.zeros(B, T, H, K + 1)}, ValueError, ("k:", "(2, 9, 4, 6)", "(2, 9, 4, 5)")),
    ({"k": torch.zeros(B, T, 1, K)}, ValueError, ("k:", "(2, 9, 1, 5)", "(2, 9, 4, 5)")),
    ({"v": torch.zeros(B, T, H)}, ValueError, ("v:", "(2, 9, 4)", "(2, 9, H, dhv)")),
    ({"v": torch.zeros(B, T + 1, H, V)}, ValueError, ("v:", "(2, 10, 4, 7)", "(2, 9, H, dhv)")),
    ({"v": torch.zeros(B, T, H + 1, V)}, ValueError, ("v:", "5 heads", "multiple of the 4")),
    ({"v": torch.zeros(B, T, 2, V)}, ValueError, ("v:", "2 heads", "multiple of the 4")),
    ({"i": torch.zeros(B, T)}, ValueError, ("i:", "(2, 9)", "(2, 9, 4)")),
    ({"f": torch.zeros(B, T, H, 1)}, ValueError, ("f:", "(2, 9, 4, 1)", "(2, 9, 4)")),
    ({"f": torch.zeros(B, H, T)}, ValueError, ("f:", "(2, 4, 9)", "(2, 9, 4)")),
    ({"k": torch.zeros(B, T, H, K, device="meta")}, ValueError, ("k:", "meta", "cpu")),
    ({"v": torch.zeros(B, T, H, V, device="meta")}, ValueError, ("v:", "meta", "cpu")),
    ({"f": torch.zeros(B, T, H, device="meta")}, ValueError, ("f:", "meta", "cpu")),
    ({"v": torch.zeros(B, T, H, 0)}, ValueError, ("v:", "(2, 9, 4, 0)", "no empty dimension")),
]
OPTIONS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"input_gate": "softplus"}, ValueError, ("input_gate:", "'softplus'", "'exp', 'sigmoid'")),
    ({"input_gate": None}, ValueError, ("input_gate:", "None", "'exp', 'sigmoid'")),
    ({"chunk_size": 0}, ValueError, ("chunk_size:", "0", "at least 1")),
    ({"chunk_size": -64}, ValueError, ("chunk_size:", "-64", "at least 1")),
    ({"chunk_size": 64.0}, TypeError, ("chunk_size:", "float", "int or None")),
    ({"chunk_size": True}, TypeError, ("chunk_size:", "bool", "int or None")),
    ({"q": torch.zeros(B, T, H, K, dtype=torch.float8_e4m3fn)}, TypeError, ("q:", "float8_e4m3fn", "bfloat16")),
    ({"i": torch.zeros(B, T, H, dtype=torch.float8_e5m2)}, TypeError, ("i:", "float8_e5m2", "float32")),
    ({"v": torch.zeros(B, T, H, V, dtype=torch.complex64)}, TypeError, ("v:", "complex64", "float dtype")),
    ({"scale": "1"}, TypeError, ("scale:", "str", "number or None")),
    ({"scale": [1.0]}, TypeError, ("scale:", "list", "number or None")),
    ({"scale": True}, TypeError, ("scale:", "bool", "number or None")),
    ({"scale": 1j}, TypeError, ("scale:", "complex", "number or None")),
    ({"scale": float("nan")}, ValueError, ("scale:", "nan", "finite number")),
    ({"scale": -float("inf")}, ValueError, ("scale:", "-inf", "finite number")),
    ({"scale": torch.ones(1)}, TypeError, ("scale:", "tensor of shape (1,)", "number or None")),
    ({"scale": torch.tensor(True)}, TypeError, ("scale:", "dtype torch.bool", "number or None")),
    ({"scale": torch.tensor(torch.inf)}, ValueError, ("scale:", "inf", "finite number")),
    (
        {"scale": torch.ones((), requires_grad=True)},
        TypeError,
        ("scale:", "requires a gradient", "multiply q", "scale=1.0"),
    ),
    ({"backend": ["chunkwise"]}, ValueError, ("backend:", "['chunkwise']", "None", "'chunkwise'")),
    ({"backend": 3}, ValueError, ("backend:", "3", "None", "'chunkwise'")),
    ({"kernel": {"segmented"}}, ValueError, ("kernel:", "{'segmented'}", "'segmented'")),
    ({"input_gate": ["exp"]}, ValueError, ("input_gate:", "['exp']", "'exp', 'sigmoid'")),
    ({"return_state": []}, TypeError, ("return_state:", "[]", "True or False")),
    ({"return_state": "no"}, TypeError, ("return_state:", "'no'", "True or False")),
    ({"normalizer_grad": None}, TypeError, ("normalizer_grad:", "None", "True or False")),
    ({"store_dtype": {"bfloat16"}}, TypeError, ("store_dtype:", "set", "torch.dtype or None")),
    ({"store_dtype": torch.float16}, ValueError, ("store_dtype:", "float16", "bfloat16")),
    ({"chunk_size": [64]}, TypeError, ("chunk_size:", "list", "int or None")),
    ({"chunk_size": "64"}, TypeError, ("chunk_size:", "str", "int or None")),
    ({"backend": "cuda"}, ValueError, ("backend:", "'cuda'", "None", "'chunkwise'", "'reference'")),
    ({"backend": "chunkwise", "kernel": "fast"}, ValueError, ("kernel:", "'fast'", "'chunkwise'", "'segmented'")),
    ({"initial_state": torch.zeros(B, H, K, V)}, TypeError, ("initial_state:", "Tensor", "tfla.State")),
    ({"initial_state": (1, 2, 3)}, TypeError, ("initial_state:", "tuple", "tfla.State")),
    (
        {"initial_state": state(C=torch.zeros(B, H, V, K))},
        ValueError,
        ("initial_state.C:", "(2, 4, 7, 5)", "(2, 4, 5, 7)"),
    ),
    ({"initial_state": state(n=torch.zeros(B, H, V))}, ValueError, ("initial_state.n:", "(2, 4, 7)", "(2, 4, 5)")),
    ({"initial_state": state(m=torch.zeros(B, 1))}, ValueError, ("initial_state.m:", "(2, 1)", "(2, 4)")),
    ({"initial_state": state(n=None)}, TypeError, ("initial_state.n:", "NoneType", "tensor")),
    ({"initial_state": state(m=None)}, TypeError, ("initial_state.m:", "NoneType", "tensor")),
    ({"initial_state": state(C=torch.zeros(B, H, K, V, dtype=INT))}, TypeError, ("initial_state.C:", "int64", "float")),
    (
        {"initial_state": state(n=torch.zeros(B, H, K, dtype=torch.float8_e4m3fn))},
        TypeError,
        ("initial_state.n:", "float8_e4m3fn", "float dtype"),
    ),
    ({"initial_state": state().to("meta")}, ValueError, ("initial_state.C:", "meta", "cpu")),
    (
        {"initial_state": state(), "input_gate": "sigmoid"},
        ValueError,
        ("initial_state.n:", "tensor", "None", "normalizer"),
    ),
]
CU_SEQLENS: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    ([0, 4, 9], TypeError, ("cu_seqlens:", "list", "int32 or int64")),
    (torch.tensor([0.0, 9.0]), TypeError, ("cu_seqlens:", "float32", "int32 or int64")),
    (torch.tensor([[0, 9]]), ValueError, ("cu_seqlens:", "(1, 2)", "(sequences + 1,)")),
    (torch.tensor([9]), ValueError, ("cu_seqlens:", "(1,)", "(sequences + 1,)")),
    (torch.tensor([1, 9]), ValueError, ("cu_seqlens:", "from 1 to 9", "from 0 to T = 9")),
    (torch.tensor([0, 8]), ValueError, ("cu_seqlens:", "from 0 to 8", "from 0 to T = 9")),
    (torch.tensor([0, 10]), ValueError, ("cu_seqlens:", "from 0 to 10", "from 0 to T = 9")),
    (torch.tensor([0, 5, 4, 9]), ValueError, ("cu_seqlens:", "[0, 5, 4, 9]", "never fall")),
    (torch.tensor([0, 9], device="meta"), ValueError, ("cu_seqlens:", "meta", "cpu")),
]


def message(error: type[Exception] | tuple[type[Exception], ...], function: Any, **arguments: Any) -> str:
    with pytest.raises(error) as caught:
        function(**arguments)
    return str(caught.value)


def as_log_gates(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of linear_attention from those of mlstm."""
    return {{"i": "log_i", "f": "log_f"}.get(name, name): x for name, x in arguments.items()}


@pytest.mark.parametrize(("change", "error", "parts"), TENSORS + OPTIONS, ids=label)
def test_mlstm(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    text = message(error, tfla.mlstm, **whole() | change)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(("change", "error", "parts"), TENSORS, ids=label)
def test_linear_attention(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    text = message(error, tfla.linear_attention, **as_log_gates(whole() | change))
    assert all(part.replace("i:", "log_i:").replace("f:", "log_f:") in text for part in parts), text


@pytest.mark.parametrize(("cu_seqlens", "error", "parts"), CU_SEQLENS, ids=label)
def test_cu_seqlens(cu_seqlens: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    text = message(error, tfla.mlstm, **packed() | {"cu_seqlens": cu_seqlens})
    assert all(part in text for part in parts), text


TWICE = pytest.mark.parametrize("calls", [1, 2], ids=["first call", "call after others"])


@TWICE
@pytest.mark.parametrize(
    "scale", [2, 2.0, np.float32(2.0), np.float64(2.0), torch.tensor(2.0), torch.tensor(2)], ids=repr
)
def test_scales_that_are_numbers(scale: Any, calls: int) -> None:
    arguments = whole()
    expected = tfla.mlstm(**arguments, scale=2.0)
    for _ in range(calls):
        assert torch.equal(tfla.mlstm(**arguments, scale=scale), expected)


@TWICE
@pytest.mark.parametrize(("change", "error", "parts"), OPTIONS, ids=label)
def test_explain(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...], calls: int) -> None:
    for _ in range(calls):
        text = message(error, tfla.explain, **whole() | change)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_a_scale_that_a_transform_is_of(transform: str) -> None:
    arguments = whole()

    def h(scale: Tensor) -> Tensor:
        return tfla.mlstm(**arguments, scale=scale)

    with pytest.raises(TypeError, match=r"scale: got a tensor that .* expected a number.* multiply q by"):
        torch.vmap(h)(torch.ones(2)) if transform == "vmap" else torch.func.jvp(h, (torch.ones(()),), (torch.ones(()),))


MALFORMED = [[5, 8, 16], [0, 4, 12], [0, 40, 16], [0, 12, 4, 16], [-4, 2, 16]]
BACKENDS_OF_CPUS = pytest.mark.parametrize("backend", ["chunkwise", "reference"])


def of_16_steps() -> list[Tensor]:
    return [torch.randn(1, 16, 2, *d) for d in ((4,), (4,), (6,), (), ())]


@BACKENDS_OF_CPUS
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_malformed_cu_seqlens_in_a_compiled_function(gradients: bool, backend: str) -> None:
    """Neither memory that was never written nor another library's error."""
    torch.compiler.reset()
    x = [t.requires_grad_(gradients) for t in of_16_steps()]
    compiled = torch.compile(
        lambda at, *x: tfla.mlstm(*x, cu_seqlens=at, backend=backend), fullgraph=True, backend="aot_eager"
    )
    assert torch.isfinite(compiled(torch.tensor([0, 4, 16]), *x)).all()
    for at in MALFORMED:
        with pytest.raises(ValueError, match=r"^cu_seqlens: (goes from|got)"):
            compiled(torch.tensor(at), *x)


@pytest.mark.parametrize("at", MALFORMED, ids=str)
def test_malformed_cu_seqlens_seen_by_the_operator_alone(at: list[int]) -> None:
    """Exported, mapped, in forward mode, under a mode, and in the backward."""
    x = of_16_steps()
    wrong, right = torch.tensor(at), torch.linspace(0, 16, len(at)).long()

    class Layer(torch.nn.Module):
        def forward(self, at: Tensor, *x: Tensor) -> Tensor:
            return tfla.mlstm(*x, cu_seqlens=at)

    exported = torch.export.export(Layer(), (right, *x)).module()
    calls: dict[str, Any] = {
        "exported": lambda: exported(wrong, *x),
        "vmap": lambda: torch.vmap(lambda at: tfla.mlstm(*x, cu_seqlens=at))(torch.stack([right, wrong])),
        "jvp": lambda: torch.func.jvp(lambda q: tfla.mlstm(q, *x[1:], cu_seqlens=wrong), (x[0],), (x[0],)),
        "grad": lambda: torch.func.grad(lambda q: tfla.mlstm(q, *x[1:], cu_seqlens=wrong).sum())(x[0]),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"^cu_seqlens: (goes from|got)"):
            call()
    none = (None,) * 3
    options = (0.5, True, True, 16, "chunkwise", "segmented")
    h, _, _, _, *kept = torch.ops.tfla.attend(*x, *none, right, *options, True, False)
    with pytest.raises(ValueError, match=r"^cu_seqlens: (goes from|got)"):
        torch.ops.tfla.attend_backward(*x, *none, wrong, h, *kept, torch.ones_like(h), None, None, *options)


@pytest.mark.parametrize("lengths", [[0, 4], [-1, 2]], ids=str)
def test_lengths_out_of_range_in_a_compiled_function(lengths: list[int]) -> None:
    torch.compiler.reset()
    x = [getattr(problem(dtype=torch.float32, T=3, carried=False), name) for name in "qkvif"]
    x[0].requires_grad_()
    compiled = torch.compile(lambda s, n, *x: tfla.mlstm_steps(*x, s, lengths=n), fullgraph=True, backend="aot_eager")
    start = tfla.State.zeros(2, 2, 5, 7)
    expected = tfla.mlstm_steps(*x, start, lengths=torch.tensor([1, 3]))
    found = compiled(start, torch.tensor([1, 3]), *x)
    assert torch.allclose(found[1].C, expected[1].C)
    with pytest.raises(ValueError, match=r"^lengths: got values from .* expected from 0 to T = 3"):
        compiled(start, torch.tensor(lengths), *x)
    with pytest.raises(ValueError, match=r"^lengths: got values from .* expected from 0 to T = 3"):
        torch.vmap(lambda n: tfla.mlstm_steps(*x, start, lengths=n)[0])(torch.tensor([[0, 3], lengths]))


SEVERAL_WRITES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *(("dplr", {name: torch.zeros(B, T, H, K).half()}, (f"{name}:", "torch.float16", "float32")) for name in "kab"),
    ("dplr", {"log_f": torch.zeros(2)}, ("log_f:", "(2,)", "(2, 9, 4) or (2, 9, 4, 5)")),
    ("dplr", {"log_f": torch.zeros(2, 9, 4, 0)}, ("log_f:", "(2, 9, 4, 0)", "(2, 9, 4) or (2, 9, 4, 5)")),
    ("dplr", {"v": torch.zeros(2, 9, 4, 0)}, ("v:", "(2, 9, 4, 0)", "no empty dimension")),
    ("delta_product", {"log_f": torch.zeros(2, 9)}, ("log_f:", "(2, 9)", "(2, 9, 4) or (2, 9, 4, 5)")),
    ("delta_product", {"log_f": torch.zeros(2, 9, 3)}, ("log_f:", "(2, 9, 3)", "(2, 9, 4) or (2, 9, 4, 5)")),
]


def with_several_writes(name: str, change: dict[str, Any]) -> dict[str, Any]:
    """Arguments of delta_product or dplr, some of them changed."""
    x = whole()
    given = {part: x[part] for part in "qkv"} | {"log_f": -torch.ones(B, T, H)}
    more = {"a": x["k"], "b": x["k"]} if name == "dplr" else {"beta": torch.ones(B, T, H), "writes": 1}
    return given | more | change


@pytest.mark.parametrize(("name", "change", "parts"), SEVERAL_WRITES, ids=label)
def test_several_writes(name: str, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    """Shapes in messages are those that the caller gives, not those of the writes."""
    text = message((TypeError, ValueError), getattr(tfla, name), **with_several_writes(name, change))
    assert all(part in text for part in parts), text


def test_cu_seqlens_with_a_batch() -> None:
    text = message(ValueError, tfla.mlstm, **whole() | {"cu_seqlens": torch.tensor([0, 4, 9])})
    assert all(part in text for part in ("q:", "batch 2", "1 with cu_seqlens")), text


def test_states_are_one_a_packed_sequence() -> None:
    text = message(ValueError, tfla.mlstm, **packed() | {"initial_state": tfla.State.zeros(1, H, K, V)})
    assert all(part in text for part in ("initial_state.C:", "(1, 4, 5, 7)", "(2, 4, 5, 7)")), text


def test_state_without_normalizer_where_one_is_needed() -> None:
    bare = tfla.State.zeros(B, H, K, V, normalize=False)
    arguments = as_log_gates(whole()) | {"initial_state": bare}
    assert "initial_state.n:" in message(TypeError, tfla.linear_attention, **arguments, normalize=True)
    assert tfla.linear_attention(**arguments).shape == (B, T, H, V)


STEPS: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"q": torch.zeros(B, 1, H, K)}, ValueError, ("q:", "(2, 1, 4, 5)", "(B, H, dqk)")),
    ({"k": torch.zeros(B, H, K + 1)}, ValueError, ("k:", "(2, 4, 6)", "(2, 4, 5)")),
    ({"v": torch.zeros(B, 6, V)}, ValueError, ("v:", "6 heads", "multiple of the 4")),
    ({"i": torch.zeros(B, 1)}, ValueError, ("i:", "(2, 1)", "(2, 4)")),
    ({"f": torch.zeros(B, H, dtype=INT)}, TypeError, ("f:", "int64", "float dtype")),
    ({"k": torch.zeros(B, H, K).half()}, TypeError, ("k:", "float16", "float32")),
    ({"state": None}, TypeError, ("state:", "NoneType", "tfla.State")),
    ({"state": state(C=torch.zeros(1, H, K, V))}, ValueError, ("state.C:", "(1, 4, 5, 7)", "(2, 4, 5, 7)")),
    ({"state": state(n=None)}, TypeError, ("state.n:", "NoneType", "tensor")),
    ({"q": torch.zeros(B, H, K, dtype=torch.float8_e4m3fn)}, TypeError, ("q:", "float8_e4m3fn", "float32")),
    ({"scale": "1"}, TypeError, ("scale:", "str", "number or None")),
    ({"scale": float("inf")}, ValueError, ("scale:", "inf", "finite")),
    ({"backend": ["chunkwise"]}, ValueError, ("backend:", "['chunkwise']", "None")),
    ({"in_place": []}, TypeError, ("in_place:", "[]", "True or False")),
    ({"input_gate": "tanh"}, ValueError, ("input_gate:", "'tanh'", "'exp', 'sigmoid'")),
]


@pytest.mark.parametrize(("change", "error", "parts"), STEPS, ids=label)
def test_mlstm_step(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    text = message(error, tfla.mlstm_step, **one_step() | change)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(("change", "error", "parts"), STEPS[:-1], ids=label)
def test_linear_attention_step(change: dict[str, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    text = message(error, tfla.linear_attention_step, **as_log_gates(one_step() | change), normalize=True)
    assert all(part.replace("i:", "log_i:").replace("f:", "log_f:") in text for part in parts), text


@pytest.mark.parametrize(
    ("kind", "words"),
    [("nested", "a nested tensor"), ("jagged", "a nested tensor"), ("sparse", "layout torch.sparse_coo")],
)
@pytest.mark.parametrize("name", ["q", "v", "beta", "log_f", "C"])
@pytest.mark.parametrize("warm", [False, True])
def test_tensors_without_strides_are_named(kind: str, words: str, name: str, warm: bool) -> None:
    """They were an internal error of PyTorch, before and after a call that is right."""
    p = delta_problem("kda", dtype=torch.float32, T=3, B=2, K=5, V=7)
    given = {each: x.detach() for each, x in p.leaves.items()}
    call = {each: given[each] for each in ("q", "k", "v", "beta", "log_f")}
    if warm:
        tfla.delta_rule(**call, initial_state=tfla.State(given["C"]))
    x = given[name]
    made = {
        "nested": lambda: torch.nested.nested_tensor(list(x)),
        "jagged": lambda: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        "sparse": lambda: x.to_sparse(),
    }[kind]()
    call, C = (call, made) if name == "C" else (call | {name: made}, given["C"])
    with pytest.raises(TypeError, match=f"^{'initial_state.C' if name == 'C' else name}: got {re.escape(words)}"):
        tfla.delta_rule(**call, initial_state=tfla.State(C))
