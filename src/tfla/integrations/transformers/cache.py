"""The states of a language model as a cache of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Cache

from tfla.nn.mixers.key_values import KeyValues
from tfla.nn.model import ModelState


class TflaCache(Cache):
    """The states of all blocks of one batch of sequences, which each call of the model replaces by those after it.

    Attributes:
        state: the state of each block, or None before the first call.
        num_tokens: how many positions the sequences have so far, padding included.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: ModelState | None = None
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return the number of blocks whose states are stored."""
        return 0 if self.state is None else len(self.state)

    def __bool__(self) -> bool:
        """Return True, also before the first call."""
        return True

    def __repr__(self) -> str:
        return f"TflaCache(num_tokens={self.num_tokens}, batch_size={self.batch_size})"

    def check_fits(self, batch_size: int, num_blocks: int) -> None:
        """Raise a ValueError unless the cache is empty, or has a state of each block for so many sequences."""
        if self.state is not None and (self.batch_size, len(self)) != (batch_size, num_blocks):
            raise ValueError(
                f"past_key_values: got a cache of {self.batch_size} sequences and {len(self)} blocks, expected "
                f"{batch_size} and {num_blocks}"
            )

    def advance(self, state: ModelState, steps: int) -> None:
        """Store the states after a call over ``steps`` positions."""
        self.state, self.num_tokens = state, self.num_tokens + steps

    @property
    def batch_size(self) -> int:
        """The number of sequences, -1 before the first call."""
        return -1 if self.state is None else int(tree_leaves(self.state)[0].shape[0])

    @property
    def is_initialized(self) -> bool:
        """True once there are states."""
        return self.state is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many positions the sequences have so far, the same for every block."""
        return self.num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: sequences have no greatest length."""
        return -1

    def reset(self) -> None:
        """Forget all sequences."""
        self.state, self.num_tokens = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by the ones with these indices, as beam search does after each step."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the sequences by the ones with these indices (N,) int64."""
        if self.state is not None:
            self.state = tuple(block.gather(indices) for block in self.state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each sequence by ``repeats`` copies of it."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, *_: Any, **__: Any) -> None:
        """Refuse to take tokens back, which a recurrent state cannot do.

        Raises:
            ValueError: always.
        """
        raise ValueError("cache: got crop, expected no tokens to be taken back: recurrent states cannot forget tokens")


def forget_rows(state: ModelState, rows: Tensor) -> ModelState:
    """Return a state in which some sequences are before their first token.

    Args:
        state: the states of all blocks, as a call of the model returns them.
        rows: (B,) bool, True at these sequences.
    """

    def cleared(t: Tensor) -> Tensor:
        """Return a part (B, ...) of a recurrent state with zeros in these rows."""
        return t.masked_fill(rows.to(t.device).reshape(-1, *[1] * (t.dim() - 1)), 0)

    found: list[Any] = []
    for block in state:
        if isinstance(block, KeyValues):  # a document that begins after all cached tokens
            tokens, own = block.k.shape[1], rows.to(block.k.device)
            start = own.new_zeros(own.shape, dtype=torch.int64) if block.start is None else block.start
            found.append(block._replace(start=start.masked_fill(own, tokens)))
        else:
            found.append(tree_map_only(Tensor, cleared, block))
    return tuple(found)
