"""The explanation of a call: what it would run, and why no other backend does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfla.backends import BACKENDS
from tfla.ops import checks, dispatch, tuned
from tfla.ops.gates import InputGate
from tfla.ops.state import State


@dataclass(frozen=True)
class Explanation:
    """The choices of one call; its string has one line for each."""

    backend: str
    kernel: str
    chunk_size: int  # as given or chosen; backends round it up to whole tiles
    stored_states: int  # of each head, stored for the backward
    details: Mapping[str, object]  # further choices of the backend, by name
    not_taken: Mapping[str, str]  # each other backend, and why it does not run the call
    tuned: bool = False  # kernel and chunk size come from `tfla tune`

    def __str__(self) -> str:
        lines = {
            "backend": self.backend,
            "kernel": self.kernel,
            "chunk_size": f"{self.chunk_size} ({self.stored_states} stored states)" + ", tuned" * self.tuned,
            **self.details,
            **{f"not {name}": why for name, why in self.not_taken.items()},
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:{width}}  {line}" for name, line in lines.items())


def why_not(other: Any, chosen: Any, asked_for: bool, x: Any) -> str:
    """Return why a backend other than the chosen one does not run the call."""
    why = other.unsupported(x)
    if why is None:
        why = f"it could, but {chosen.name!r} " + ("was asked for" if asked_for else "comes before it")
    return why


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    input_gate: InputGate = "exp",
    initial_state: State | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    scale: float | None = None,
    backend: str | None = None,
    kernel: str | None = None,
    normalizer_grad: bool = True,
    store_dtype: torch.dtype | None = None,
) -> Explanation:
    """Return what :func:`tfla.mlstm` would run for the same arguments, without running it.

    Args:
        q, k, v, i, f: as in :func:`tfla.mlstm`; only their shapes, dtypes, strides and devices matter.
        input_gate, initial_state, return_state, cu_seqlens, chunk_size, scale: as in :func:`tfla.mlstm`.
        backend, kernel, normalizer_grad, store_dtype: as in :func:`tfla.mlstm`.

    Returns:
        the chosen backend, kernel and chunk size, the further choices of that backend, and for each other backend why
        it does not run the call.

    Raises:
        ValueError, TypeError: as :func:`tfla.mlstm`.
    """
    checks.check_input_gate(input_gate)
    request = dispatch.Request(
        q=q, k=k, v=v, i=i, f=f, state=initial_state, lengths=cu_seqlens, gates=input_gate,
        normalize=input_gate == "exp", return_state=return_state, scale=checks.check_scale(scale), backend=backend,
        chunk_size=chunk_size, kernel=kernel, normalizer_grad=normalizer_grad, store_dtype=store_dtype,
    )  # fmt: skip
    x = dispatch.check(request)
    chosen, chosen_kernel, steps = dispatch.choose(x, request.normalize, backend, kernel, chunk_size)
    found = chunk_size is None and tuned.find(x, chosen.name, kernel, request.normalize) is not None
    others = {b.name: why_not(b, chosen, backend is not None, x) for b in BACKENDS.values() if b is not chosen}
    rows = chosen.stored_states(x, steps, chosen_kernel)
    return Explanation(chosen.name, chosen_kernel, steps, rows, chosen.details(x, steps, chosen_kernel), others, found)
