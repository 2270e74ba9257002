"""The checks of the arguments of the delta rule on JAX, with the messages of :mod:`tfla.ops.delta_checks`."""

from __future__ import annotations

from typing import Any

from tfla.jax import checks
from tfla.jax.delta.inputs import DeltaArrays, Rule
from tfla.ops.delta_checks import check_activations, check_further_arrays


def check_arrays(x: DeltaArrays, time: bool = True) -> None:
    """Check shapes and dtypes of one call; arrays have the dim T with ``time``."""
    checks.check_inputs(x.q, x.k, x.v, {} if x.beta is None else {"beta": x.beta}, time=time)
    check_further_arrays(checks, x.q, x.k, x.v, x.log_f, x.read_key, x.A_log, x.dt_bias)
    if x.read_key is not None and not checks.same_dtype(x.read_key, x.k):
        raise TypeError(f"read_key: got dtype {x.read_key.dtype}, expected that of q, {x.q.dtype}")


def check_rule(
    x: DeltaArrays, scale: float | None, correct: bool, read_before_decay: Any, normalize_qk: Any, beta_activation: Any,
    gate_activation: Any, lower_bound: Any,
) -> Rule:  # fmt: skip
    """Check the activations of a call whose arrays have been checked, and return its options."""
    check_activations(
        x.beta, x.log_f, x.A_log, x.dt_bias, beta_activation, gate_activation, lower_bound, "an array"
    )  # fmt: skip
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    return Rule(
        scale, correct, bool(read_before_decay), bool(normalize_qk), beta_activation, gate_activation,
        float(lower_bound or 0.0),
    )  # fmt: skip
