"""The checks of the arguments of the delta rule.

Each raises ValueError or TypeError, whose message names the argument, what was given and what is allowed.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tfla.ops import checks
from tfla.ops.delta_activations import BETA_ACTIVATIONS, GATE_ACTIVATIONS


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None,
    read_key: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    time: bool = True,
) -> None:
    """Check shapes, dtypes and devices of one call; tensors have the dimension T with ``time``."""
    checks.check_inputs(q, k, v, {} if beta is None else {"beta": beta}, time=time)
    check_further_arrays(checks, q, k, v, log_f, read_key, A_log, dt_bias)
    if read_key is not None:
        checks.check_dtype_of_q("read_key", read_key, q)
    for name, x in {"log_f": log_f, "read_key": read_key, "A_log": A_log, "dt_bias": dt_bias}.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: got device {x.device}, expected that of q, {q.device}")


def check_further_arrays(
    checks: Any, q: Any, k: Any, v: Any, log_f: Any, read_key: Any, A_log: Any, dt_bias: Any
) -> None:
    """Check shapes and float dtypes of the arguments that the mLSTM does not have, for PyTorch and for JAX.

    Args:
        checks: the module with `check_float` and `check_shape`, :mod:`tfla.ops.checks` or :mod:`tfla.jax.checks`.
        q, k, v, log_f, read_key, A_log, dt_bias: as in :func:`tfla.delta_rule`, of which q, k and v are checked.
    """
    heads, dqk = v.shape[-2], q.shape[-1]
    if log_f is not None:
        checks.check_float("log_f", log_f)
        check_gates_shape(log_f, tuple(v.shape[:-1]), dqk)
    if read_key is not None:
        checks.check_float("read_key", read_key)
        checks.check_shape("read_key", read_key, tuple(k.shape))
    if A_log is not None:
        checks.check_float("A_log", A_log)
        checks.check_shape("A_log", A_log, (heads,))
    if dt_bias is not None:
        checks.check_float("dt_bias", dt_bias)
        by_channel = log_f is not None and log_f.ndim == v.ndim
        if dt_bias.shape != (heads,) and not (by_channel and dt_bias.shape == (heads, dqk)):
            allowed = f"({heads},)" + f" or ({heads}, {dqk})" * by_channel
            raise ValueError(f"dt_bias: got shape {tuple(dt_bias.shape)}, expected {allowed}")


def check_gates_shape(log_f: Any, gates: tuple[int, ...], dqk: int) -> None:
    """Check that log-gates have the shape of gates by step, or one that has dqk channels more."""
    if tuple(log_f.shape) not in (gates, (*gates, dqk)):
        raise ValueError(f"log_f: got shape {tuple(log_f.shape)}, expected {gates} or {(*gates, dqk)}")


def check_activations(
    beta: Any,
    log_f: Any,
    A_log: Any,
    dt_bias: Any,
    beta_activation: object,
    gate_activation: object,
    lower_bound: object,
    array: str = "a tensor",
) -> None:
    """Check the names of activations, and that their parameters are given where they are read.

    ``array`` is the word for tensors in messages, since JAX has other ones.
    """
    for name, given, allowed in (
        ("beta_activation", beta_activation, BETA_ACTIVATIONS),
        ("gate_activation", gate_activation, GATE_ACTIVATIONS),
    ):
        if not isinstance(given, str) or given not in allowed:
            raise ValueError(f"{name}: got {given!r}, allowed are {', '.join(map(repr, allowed))}")
    if beta is None and beta_activation != "none":
        raise ValueError(f"beta: got None with beta_activation={beta_activation!r}, expected {array}")
    if log_f is None and gate_activation != "none":
        raise ValueError(f"log_f: got None with gate_activation={gate_activation!r}, expected {array}")
    for name, x in {"A_log": A_log, "dt_bias": dt_bias}.items():
        if x is not None and gate_activation == "none":
            raise ValueError(f"{name}: got {array} with gate_activation='none', expected None")
    if gate_activation == "softplus" and A_log is None:
        raise ValueError(f"A_log: got None with gate_activation='softplus', expected {array}")
    if (lower_bound is None) != (gate_activation != "sigmoid"):
        expected = "a number" if gate_activation == "sigmoid" else "None"
        raise ValueError(
            f"lower_bound: got {lower_bound!r} with gate_activation={gate_activation!r}, expected {expected}"
        )
    if lower_bound is not None:
        if isinstance(lower_bound, bool) or not isinstance(lower_bound, int | float):
            raise TypeError(f"lower_bound: got {type(lower_bound).__name__}, expected a number")
        if not -math.inf < lower_bound < 0:
            raise ValueError(f"lower_bound: got {lower_bound}, expected a finite number below 0")
