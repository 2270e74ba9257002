"""The explanation of a call of the delta rule: what it would run, and why no other backend does."""

from __future__ import annotations

from torch import Tensor

from tfla.backends import DELTA_BACKENDS
from tfla.backends.delta import BetaActivation, GateActivation
from tfla.ops import delta_dispatch
from tfla.ops.checks import check_scale
from tfla.ops.explain import Explanation, why_not
from tfla.ops.state import State


def explain_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_f: Tensor | None = None,
    *,
    read_key: Tensor | None = None,
    read_before_decay: bool = False,
    normalize_qk: bool = False,
    beta_activation: BetaActivation = "none",
    gate_activation: GateActivation = "none",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Explanation:
    """Return what :func:`tfla.delta_rule` would run for the same arguments, without running it.

    Args:
        q, k, v, beta, log_f, read_key: as in :func:`tfla.delta_rule`; only their shapes, dtypes, strides and devices
            matter.
        read_before_decay, normalize_qk, beta_activation, gate_activation, A_log, dt_bias, lower_bound: as in
            :func:`tfla.delta_rule`.
        scale, initial_state, return_state, cu_seqlens, chunk_size, backend, kernel: as in :func:`tfla.delta_rule`.

    Returns:
        the chosen backend, kernel and chunk size, the further choices of that backend, and for each other backend why
        it does not run the call.

    Raises:
        ValueError, TypeError: as :func:`tfla.delta_rule`.
    """
    x = delta_dispatch.check(
        delta_dispatch.DeltaRequest(
            q=q, k=k, v=v, beta=beta, log_f=log_f, read_key=read_key, A_log=A_log, dt_bias=dt_bias,
            state=initial_state, cu_seqlens=cu_seqlens, correct=True, read_before_decay=read_before_decay,
            normalize_qk=normalize_qk, beta_activation=beta_activation, gate_activation=gate_activation,
            lower_bound=lower_bound, return_state=return_state, scale=check_scale(scale), chunk_size=chunk_size,
            backend=backend, kernel=kernel,
        )
    )  # fmt: skip
    chosen, chosen_kernel, steps = delta_dispatch.choose(x, bool(read_before_decay), backend, kernel, chunk_size)
    others = {
        b.name: delta_dispatch.READS_AFTER
        if read_before_decay and not b.reads_before_decay
        else why_not(b, chosen, backend is not None, x)
        for b in DELTA_BACKENDS.values()
        if b is not chosen
    }
    rows = chosen.saved(x, True, steps, chosen_kernel).chunk_C[0][0]
    details = chosen.details(x, steps, chosen_kernel)
    return Explanation(chosen.name, chosen_kernel, steps, rows, details, others)
