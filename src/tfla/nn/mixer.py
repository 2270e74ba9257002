"""What a block needs of its sequence mix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class SequenceMixer(nn.Module, ABC):
    """A layer that mixes tokens along time. Its state is a NamedTuple of its own kind that only it reads."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """Whole sequences: x (B, T, d_model) -> the same shape, and the state behind the last token or None.

        Args:
            x: (B, T, d_model), any float dtype.
            state: where the sequences start; None is the start of a document.
            document_start: (B, T) bool, True at documents' first tokens, which see nothing before them.
            cu_seqlens: (sequences + 1,) int, for B = 1: where packed sequences start and, last, T.
            return_state: whether the state is wanted.
        """

    @abstractmethod
    def step(self, x: Tensor, state: Any, in_place: bool = False) -> tuple[Tensor, Any]:
        """One token a sequence: x (B, d_model) -> the same shape, and the new state, maybe in the old one."""

    @abstractmethod
    def initial_state(self, batch_size: int, device: torch.device) -> Any:
        """The state before the first token, in the dtype in which this layer keeps it."""
