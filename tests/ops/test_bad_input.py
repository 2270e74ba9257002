"""What does not fit is refused: the message names the argument, says what it got and what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
    ({"initial_state": state().to("meta")}, ValueError, ("initial_state.C:", "meta", "cpu")),
    (
        {"initial_state": state(), "input_gate": "sigmoid"},
        ValueError,
        ("initial_state.n:", "tensor", "None", "normaliser"),
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


def message(error: type[Exception], function: Any, **arguments: Any) -> str:
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
