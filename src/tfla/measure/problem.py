"""What a contender is given and what it hands back."""

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
    """Sizes of one configuration."""

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
        return int(getattr(torch, self.dtype).itemsize)

    def randn(self, *shape: int, dtype: str | None = None) -> Tensor:
        """Fresh normal numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=getattr(torch, dtype or self.dtype))

    def qkv(self) -> list[Tensor]:
        """q, k, v as (B, T, H, D)."""
        return [self.randn(self.B, self.T, self.H, d) for d in (self.dqk, self.dqk, self.dhv)]

    def gates(self) -> tuple[Tensor, Tensor]:
        """Pre-activations i and f (B, T, H) of a model early in training, in float32."""
        i, f = (self.randn(self.B, self.T, self.H, dtype="float32") for _ in range(2))
        return i - 2, f + 4.5

    def packed(self, inputs: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The same tokens as B packed sequences with a mean of T, (1, B T, ...), and where they end, (B + 1,) int64.

        Lengths are exponentially distributed, the same ones in every process.
        """
        lengths = torch.empty(self.B, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0))
        ends = (lengths.cumsum(0) / lengths.sum() * (self.B * self.T)).round().long()
        return [x.flatten(0, 1)[None] for x in inputs], torch.cat([ends.new_zeros(1), ends]).to(self.device)

    def log_forget(self) -> Tensor:
        """The log-gates (B, T, H) that the same f stands for."""
        return torch.nn.functional.logsigmoid(self.gates()[1])

    def ssd(self, groups: int) -> list[Tensor]:
        """x, dt, A, B, C of Mamba-2 as its layer has them early in training; dqk is its state, dhv its head dim."""
        x = self.randn(self.B, self.T, self.H, self.dhv)
        dt = torch.nn.functional.softplus(self.randn(self.B, self.T, self.H, dtype="float32") - 4)
        A = -torch.rand(self.H, device=self.device) - 0.5
        B, C = (self.randn(self.B, self.T, groups, self.dqk) for _ in range(2))
        return [x, dt.to(x.dtype), A, B, C]


@dataclass
class Work:
    """A contender at one configuration: an output from inputs, all of which get a gradient."""

    run: Callable[..., Any]
    inputs: list[Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    """Goes into the row: which backend ran, bytes of stored states."""


def call_of(work: Work, direction: str) -> Call:
    """The work's forward, its forward and backward from a random cotangent, or, for a training step, all it does."""
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
