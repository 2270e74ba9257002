"""The state of a recurrent mixer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla.ops.state import State, check_rows_of, overwrite_rows, register_state
from tfla.ops.state_pool import PoolRows


@dataclass
class StatesEvery:
    """A request for the states of a layer after every ``every`` tokens, to which the layer appends them."""

    every: int
    states: list[Any] = field(default_factory=list)

    def ends(self, tokens: int) -> range:
        """Return the numbers of tokens after which a call of `tokens` tokens keeps a state."""
        return range(self.every, tokens + 1, self.every)


class MixerState(NamedTuple):
    """The tensors that a recurrent mixer carries from one call into the next.

    Attributes:
        recurrence: the state of the operator.
        convolution: (B, conv_size - 1, channels) for each short convolution: its last inputs within the document, and
            zeros before them.
        position: (B,) int64, the number of tokens of the document so far, for mixers with a rotary embedding.
    """

    recurrence: State
    convolution: tuple[Tensor, ...] = ()
    position: Tensor | None = None

    def detach(self) -> MixerState:
        """Return the same state, detached from the autograd graph."""
        return self._each(Tensor.detach)

    def clone(self) -> MixerState:
        """Return a copy."""
        return self._each(Tensor.clone)

    def to(self, device: torch.device | str) -> MixerState:
        """Return the same state on the given device."""
        return self._each(lambda t: t.to(device))

    def gather(self, rows: Tensor | Sequence[int]) -> MixerState:
        """Return a copy of the states of some sequences; see :meth:`tfla.State.gather`."""
        recurrence, index = self.recurrence.gather(rows), self._index(rows)
        return self._each(lambda t: t.index_select(0, index))._replace(recurrence=recurrence)

    def scatter(self, rows: Tensor | Sequence[int], states: MixerState) -> None:
        """Overwrite the states of some sequences in place; see :meth:`tfla.State.scatter`."""
        if not isinstance(states, MixerState):
            raise TypeError(f"states: got {type(states).__name__}, expected MixerState")
        index = self.recurrence._index(rows, once=True)
        if len(states.convolution) != len(self.convolution):
            given, held = len(states.convolution), len(self.convolution)
            raise ValueError(f"states.convolution: got {given} tensors, expected {held}")
        if (states.position is None) != (self.position is None):
            got, wanted = ("None", "a tensor") if states.position is None else ("a tensor", "None")
            raise ValueError(f"states.position: got {got}, expected {wanted}")
        pairs = list(zip(self._others(), states._others(), strict=True))
        names = [*(f"convolution[{number}]" for number in range(len(self.convolution))), "position"]
        for name, (own, new) in zip(names, pairs, strict=False):
            check_rows_of(f"states.{name}", new, own, index)
        self.recurrence.scatter(rows, states.recurrence)
        for own, new in pairs:
            overwrite_rows(own, index, new)

    def reset(self, rows: Tensor | Sequence[int]) -> None:
        """Reset some sequences in place to the state before the first token."""
        self.recurrence.reset(rows)
        index = self._index(rows)
        for own in self._others():
            own.index_fill_(0, index, 0)

    def read(self, rows: PoolRows) -> MixerState:
        """Return the state of the sequences of a call, from this pool.

        The operators find the rows of the recurrence's pool themselves, so that the whole pool of the recurrence is
        returned, beside copies of the rows of everything else, such as convolutions and positions.

        Args:
            rows: the rows of this pool, one for each of the B sequences.

        Returns:
            the state, whose parts have batch B except for the recurrence.
        """
        position = None if self.position is None else rows.read(self.position)
        return MixerState(self.recurrence, tuple(map(rows.read, self.convolution)), position)

    def write(self, rows: PoolRows, states: MixerState) -> MixerState:
        """Overwrite the rows of this pool except for the recurrence, whose operators write its rows themselves.

        Args:
            rows: the rows of this pool, one for each of the B sequences.
            states: the states of the sequences, whose parts have batch B except for the recurrence.

        Returns:
            this pool.
        """
        for own, given in zip(self._others(), states._others(), strict=True):
            rows.write(own, given)
        return self

    def _index(self, rows: Tensor | Sequence[int]) -> Tensor:
        """Return rows that the recurrence's state has checked as a tensor."""
        return torch.as_tensor(rows, dtype=torch.int64, device=self.recurrence.C.device)

    def _others(self) -> list[Tensor]:
        """Return the tensors beside the recurrence's."""
        return [*self.convolution, *([] if self.position is None else [self.position])]

    def _each(self, fn: Callable[[Tensor], Tensor]) -> MixerState:
        """Return a state whose tensors are fn of the tensors of this one."""
        recurrence = State(*(None if t is None else fn(t) for t in self.recurrence))  # type: ignore[arg-type]
        position = None if self.position is None else fn(self.position)
        return MixerState(recurrence, tuple(map(fn, self.convolution)), position)


register_state(MixerState, "tfla.nn.MixerState")
