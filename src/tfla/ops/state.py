"""The recurrent state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """The state of gated linear attention, stabilised: the true state is ``exp(m) C`` and ``exp(m) n``.

    C: (B, H, dqk, dhv), n: (B, H, dqk), m: (B, H); float32, or float64 where q is. n and m are None without a
    normaliser. With ``cu_seqlens``, B is the number of sequences.

    m is a number the computation is free to choose and cancels out of every result. Gradients reach the true state
    through C and n; a returned m carries none.
    """

    C: Tensor
    n: Tensor | None = None
    m: Tensor | None = None

    @staticmethod
    def zeros(
        batch: int,
        heads: int,
        dqk: int,
        dhv: int,
        *,
        normalize: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """The state before the first step."""
        C = torch.zeros(batch, heads, dqk, dhv, dtype=dtype, device=device)
        return State(C, C.new_zeros(batch, heads, dqk), C.new_zeros(batch, heads)) if normalize else State(C)

    def detach(self) -> State:
        """The same state, cut from the graph."""
        return State(*(None if t is None else t.detach() for t in self))  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> State:
        """The same state on another device."""
        return State(*(None if t is None else t.to(device) for t in self))  # type: ignore[arg-type]
