"""The schemas of the registered operators, on which exported programs and callers of `torch.ops.tfla` depend."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from tfla.backends import Inputs
from tfla.backends.base import Spec
from tfla.ops.operators import attend
from tfla.ops.schema import Schema

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_i, Tensor log_f, Tensor? C, Tensor? n, Tensor? m, Tensor? cu_seqlens, "
)
OPTIONS = "float scale, bool normalize, bool normalizer_grad, SymInt chunk_size, str backend, str kernel, "
STEP_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? i, Tensor f, {}, Tensor? lengths, Tensor? indices, "
STEP_OPTIONS = "float scale, str gates, str backend, "
DELTA_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_f, Tensor? read_key, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? C, Tensor? cu_seqlens, "
)
DELTA_OPTIONS = "float scale, bool correct, bool read_before_decay, SymInt chunk_size, str backend, str kernel, "
ACTIVATIONS = (
    'bool normalize_qk=False, str beta_activation="none", str gate_activation="none", float lower_bound=0.) -> '
)
POOL_INPUTS = INPUTS.replace("Tensor? C, Tensor? n, Tensor? m", "Tensor(a!)? C, Tensor(b!)? n, Tensor(c!)? m")
DELTA_POOL_INPUTS = DELTA_INPUTS.replace("Tensor? C", "Tensor(a!)? C")
SCHEMAS = {
    "delta": DELTA_INPUTS
    + DELTA_OPTIONS
    + "bool save, bool final_state, "
    + ACTIVATIONS
    + "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    "delta_backward": DELTA_INPUTS
    + "Tensor E, Tensor X, Tensor chunk_C, Tensor dh, Tensor? dC, "
    + DELTA_OPTIONS
    + ACTIVATIONS
    + "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attend": INPUTS
    + OPTIONS
    + 'bool save, bool final_state, ScalarType? store_dtype=None, str gates="log"'
    + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "attend_backward": INPUTS
    + "Tensor h, Tensor d, Tensor chunk_C, Tensor chunk_n, Tensor dh, Tensor? dC, Tensor? dn, "
    + OPTIONS
    + 'ScalarType? store_dtype=None, str gates="log"'
    + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "steps": STEP_INPUTS.format("Tensor C, Tensor? n, Tensor? m")
    + STEP_OPTIONS
    + "bool final_state, float eps=0.) -> (Tensor, Tensor, Tensor, Tensor)",
    "steps_": STEP_INPUTS.format("Tensor(a!) C, Tensor? n, Tensor? m")
    + STEP_OPTIONS
    + "float eps=0.) -> (Tensor, Tensor, Tensor)",
    "steps_pool_": STEP_INPUTS.format("Tensor(a!) C, Tensor(b!)? n, Tensor(c!)? m")
    + STEP_OPTIONS
    + "float eps=0.) -> Tensor",
    "attend_rows": INPUTS + "Tensor indices, " + OPTIONS + 'ScalarType? store_dtype=None, str gates="log") -> Tensor',
    "attend_rows_": POOL_INPUTS
    + "Tensor indices, "
    + OPTIONS
    + 'ScalarType? store_dtype=None, str gates="log") -> Tensor',
    "delta_rows": DELTA_INPUTS + "Tensor indices, " + DELTA_OPTIONS + ACTIVATIONS + "Tensor",
    "delta_rows_": DELTA_POOL_INPUTS + "Tensor indices, " + DELTA_OPTIONS + ACTIVATIONS + "Tensor",
    "checked_lengths": "Tensor lengths, SymInt T) -> Tensor",
    "checked_indices": "Tensor indices, SymInt rows) -> Tensor",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_stay(name: str) -> None:
    assert str(getattr(torch.ops.tfla, name).default._schema) == f"tfla::{name}({SCHEMAS[name]}"


class Tensors(NamedTuple):
    a: Tensor
    b: Tensor | None


class Options(NamedTuple):
    count: int
    save: bool
    kind: Literal["one", "two"] = "one"
    dtype: torch.dtype | None = None


def test_a_schema_is_made_of_fields() -> None:
    schema = Schema(
        Tensors, Options, backend_before="save", results=2, further={"c": False, "d": True}, overwritten=("a",)
    )
    assert schema.text == (
        "(Tensor(a!) a, Tensor? b, Tensor c, Tensor? d, SymInt count, str backend, bool save, "
        'str kind="one", ScalarType? dtype=None) -> (Tensor, Tensor)'
    )


def test_packed_arguments_are_unpacked() -> None:
    schema = Schema(Tensors, Options, backend_before="save", results=2, further={"c": False}, fixed={"save": True})
    x, c = Tensors(torch.zeros(1), None), torch.zeros(2)
    spec = Options(3, True, "two")
    args = schema.pack(x, (c,), "mine", spec)
    assert args[3:] == (3, "mine", "two", None)
    assert schema.unpack(args) == (x, (c,), "mine", spec)
    assert schema.unpack(args[:-2]).spec == Options(3, True)  # the dispatcher leaves out defaults


def test_the_operator_s_arguments_are_unpacked() -> None:
    x = Inputs(*(torch.zeros(1) for _ in range(5)), None, None, None, None)
    spec = Spec(0.5, True, False, 64, "kernel", False, True, torch.bfloat16, "exp")
    args = attend.forward_schema.pack(x, (), "mine", spec)
    assert len(args) == len(attend.forward._schema.arguments)
    assert attend.forward_schema.unpack(args) == (x, (), "mine", spec)
    changed = attend.forward_schema.replace(args, "save", True)
    assert attend.forward_schema.unpack(changed).spec == spec._replace(save=True)
