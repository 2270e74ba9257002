"""The problem that an implementation is measured on, and the call that it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FORWARD, BOTH, STEP = "forward", "forward + backward", "training step"
Call = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """The sizes, dtype and device of one configuration."""

    B: int
    T: int
    H: int
    dqk: int
    dhv: int
    chunk_size: int | None = None
    dtype: str = "bfloat16"
    device: str = "cuda"

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element of q, k and v."""
        return int(getattr(torch, self.dtype).itemsize)

    def randn(self, *shape: int, dtype: str | None = None) -> Tensor:
        """Draw normal numbers on the device, in the problem's dtype or the given one."""
        return torch.randn(*shape, device=self.device, dtype=getattr(torch, dtype or self.dtype))

    def qkv(self) -> list[Tensor]:
        """Draw q, k and v, each (B, T, H, D)."""
        return [self.randn(self.B, self.T, self.H, d) for d in (self.dqk, self.dqk, self.dhv)]

    def gates(self) -> tuple[Tensor, Tensor]:
        """Draw pre-activations i and f (B, T, H) as of a model early in training, in float32."""
        i, f = (self.randn(self.B, self.T, self.H, dtype="float32") for _ in range(2))
        return i - 2, f + 4.5

    def packed(self, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the same tokens as B packed sequences of mean length T, (1, B T, ...), and cu_seqlens (B + 1,), int64.

        The lengths are exponentially distributed and the same in every process.
        """
        lengths = torch.empty(self.B, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0))
        ends = (lengths.cumsum(0) / lengths.sum() * (self.B * self.T)).round().long()
        return [x.flatten(0, 1)[None] for x in inputs], torch.cat([ends.new_zeros(1), ends]).to(self.device)

    def log_forget(self) -> Tensor:
        """Draw the log-gates (B, T, H) of the forget gate."""
        return torch.nn.functional.logsigmoid(self.gates()[1])

    def ssd(self, groups: int) -> list[Tensor]:
        """Draw x, dt, A, B, C of a Mamba-2 layer early in training; dqk is its state dim, dhv its head dim."""
        x = self.randn(self.B, self.T, self.H, self.dhv)
        dt = torch.nn.functional.softplus(self.randn(self.B, self.T, self.H, dtype="float32") - 4)
        A = -torch.rand(self.H, device=self.device) - 0.5
        B, C = (self.randn(self.B, self.T, groups, self.dqk) for _ in range(2))
        return [x, dt.to(x.dtype), A, B, C]


@dataclass
class Work:
    """The call of one implementation: a function of inputs that all get a gradient."""

    run: Callable[..., Any]
    inputs: list[Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    """Entries of the result's row, such as the backend that runs and the bytes of stored states."""


def call_of(work: Work, direction: str) -> Call:
    """Return the call of the forward, of forward and backward from a random cotangent, or of a training step."""
    if direction == STEP:
        return lambda: work.run(*work.inputs)
    if direction == FORWARD:

        def forward() -> Any:
            with torch.no_grad():
                return work.run(*work.inputs)

        return forward
    for x in work.inputs:
        x.requires_grad_()
    cotangent = torch.randn_like(work.run(*work.inputs))
    return lambda: torch.autograd.grad(work.run(*work.inputs), work.inputs, cotangent)
