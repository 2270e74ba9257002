"""The cases of the suite of PyTorch's operator on JAX: the same tests, with the same tables and tolerances.

They run the chunkwise form on the CPU, and on a GPU the kernels. The names that are imported here are tests of
tests/ops, in which the operators of JAX stand for those of PyTorch. Where each case is a function to compile, the rows
of a table take turns with the forms and the dtypes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import cases
import jax
import pytest
import torch
from cases import DTYPES, FORMS, Implementation, implementations
from jax_bridge import JaxOperators
from jax_plans import ON_GPU
from ops import (
    test_dtypes,
    test_extreme_gates,
    test_gate_gradients,
    test_gradients,
    test_growing_gates,
    test_long_sequences,
    test_packed,
    test_shapes,
    test_special_cases,
)
from ops.test_dtypes import (  # noqa: F401
    test_gates_are_not_rounded_to_the_dtype_of_q,
    test_states_are_kept_in_at_least_float32,
    test_stored_states_of_lower_precision,
)
from ops.test_extreme_gates import (  # noqa: F401
    test_every_gate_extreme,
    test_extreme_gate,
    test_infinite_gates_act_like_finite_ones,
    test_input_gates_that_jump,
    test_moderate_decays_behind_huge_input_gates,
    test_nan_is_not_hidden,
    test_nan_of_a_gate_does_not_reach_earlier_steps,
    test_nan_stays_in_its_batch_row_and_head,
    test_state_behind_extreme_gates,
    test_zero_queries_and_keys_under_a_huge_input_gate,
)
from ops.test_gate_gradients import (  # noqa: F401
    test_closed_gates_hide_nothing,
    test_rounding_does_not_pass_closed_gates,
)
from ops.test_gradients import (  # noqa: F401
    test_input_gate_left_out,
    test_normalizer_grad_changes_nothing_without_a_normalizer,
)
from ops.test_growing_gates import test_growth, test_growth_of_a_state_that_was_tiny  # noqa: F401
from ops.test_packed import (  # noqa: F401
    test_many_short_sequences,
    test_nothing_leaks_into_neighbours,
)
from ops.test_shapes import test_no_batch_rows, test_scale, test_without_initial_state  # noqa: F401
from ops.test_special_cases import (  # noqa: F401
    draw,
    test_mamba2_ssd,
    test_mlstm_exp_is_parallel_attention_with_gates,
    test_mlstm_sigmoid_is_linear_attention_with_sigmoid_gates,
    test_plain_linear_attention,
    test_retnet,
    test_simple_gla,
)

MODULES = (
    cases, test_dtypes, test_extreme_gates, test_gate_gradients, test_gradients, test_growing_gates,
    test_long_sequences, test_packed, test_shapes, test_special_cases,
)  # fmt: skip


KERNELS = [
    pytest.param(each, id=str(each), marks=pytest.mark.gpu)
    for each in implementations()
    if each.device == "cuda" and each.kernel == "fused" and ON_GPU
]


@pytest.fixture(params=[Implementation("chunkwise", "segmented", "cpu"), *KERNELS], ids=str)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Implementation]:
    """Yield the chunkwise form of JAX, or kernels from JAX."""
    for module in MODULES:
        monkeypatch.setattr(module, "tfla", JaxOperators(), raising=False)
    where = "cpu" if request.param.device == "cpu" else "gpu"
    with jax.default_device(jax.devices(where)[0]), jax.default_matmul_precision("highest"):
        yield request.param


def turns(rows: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """Return the rows of a table, each with the next value of each of the others."""
    return list(zip(rows, *map(itertools.cycle, others), strict=False))


@pytest.mark.parametrize(("shape", "form"), turns(test_shapes.SHAPES, FORMS))
def test_shape(implementation: Implementation, shape: str, form: str) -> None:
    test_shapes.test_shape(implementation, form, test_shapes.SHAPES[shape])


@pytest.mark.parametrize(("lengths", "form"), turns(test_packed.LENGTHS, FORMS))
def test_lengths(implementation: Implementation, lengths: str, form: str) -> None:
    test_packed.test_lengths(implementation, form, test_packed.LENGTHS[lengths])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype(implementation: Implementation, form: str, dtype: torch.dtype) -> None:
    test_dtypes.test_dtype(implementation, form, dtype)


@pytest.mark.parametrize(
    ("gates", "form", "dtype"),
    turns(test_dtypes.GATE_DTYPES, ("exp", "plain"), (torch.float32, torch.bfloat16, torch.bfloat16)),
    ids=str,
)
def test_gate_dtypes(
    implementation: Implementation, gates: tuple[torch.dtype, torch.dtype], form: str, dtype: torch.dtype
) -> None:
    test_dtypes.test_gate_dtypes(implementation, form, dtype, *gates)


EXTREMES = [
    *itertools.product(FORMS, (torch.float32,), (None,)),
    *turns(FORMS, (torch.float64, torch.bfloat16), (None,)),
    *turns(FORMS, (torch.float32, torch.float64, torch.bfloat16), ((40, 0, 60),)),
]


@pytest.mark.parametrize(("form", "dtype", "lengths"), EXTREMES, ids=str)
def test_all_extremes_at_once(
    implementation: Implementation, form: str, dtype: torch.dtype, lengths: tuple[int, ...] | None
) -> None:
    test_extreme_gates.test_all_extremes_at_once(implementation, form, dtype, lengths)


@pytest.mark.parametrize("f_mean", test_gate_gradients.MEMORIES.values(), ids=test_gate_gradients.MEMORIES)
@pytest.mark.parametrize(("T", "form", "carried"), [(100, "exp", False), (100, "sigmoid", True), (1024, "exp", True)])
def test_gradients_of_gates_cost_what_rounding_costs(
    implementation: Implementation, form: str, f_mean: float, T: int, carried: bool
) -> None:
    test_gate_gradients.test_errors_are_those_of_rounding(implementation, form, f_mean, T, carried)


@pytest.mark.parametrize(("form", "lengths"), [("exp", None), ("sigmoid", (1, 40, 0, 29))])
def test_first_forget_gate(implementation: Implementation, form: str, lengths: tuple[int, ...] | None) -> None:
    test_gate_gradients.test_first_forget_gate_has_no_gradient_without_a_state(implementation, form, lengths)


@pytest.mark.parametrize(("form", "lengths"), [("exp", None), ("normalized", (20, 0, 17))])
def test_paper_convention(implementation: Implementation, form: str, lengths: tuple[int, ...] | None) -> None:
    test_gradients.test_paper_convention(implementation, form, lengths)


@pytest.mark.parametrize(("form", "reset"), [*itertools.product(("exp", "sigmoid"), (-1e4, -1e5))])
def test_resets_every_few_steps(implementation: Implementation, form: str, reset: float) -> None:
    test_long_sequences.test_resets_every_few_steps(implementation, form, reset)


def test_nothing_is_forgotten(implementation: Implementation) -> None:
    test_long_sequences.test_nothing_is_forgotten(implementation, "exp")


@pytest.mark.parametrize(("form", "dtype"), [("exp", torch.float32), ("sigmoid", torch.bfloat16)], ids=str)
def test_two_thousand_steps(implementation: Implementation, form: str, dtype: torch.dtype) -> None:
    test_long_sequences.test_two_thousand_steps(implementation, form, dtype)
