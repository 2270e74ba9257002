"""The state of attention: keys and values of the tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.ops.state import State, register_state
from tfla.ops.state_pool import PoolRows


class KeyValues(NamedTuple):
    """The state of attention: keys and values of all S tokens so far, or of the last ones for a window."""

    k: Tensor
    """(B, S, kv heads, head_dim), rotated."""
    v: Tensor
    """(B, S, kv heads, head_dim)."""
    start: Tensor | None = None
    """(B,) int64, the index in S of the first token of the current document, negative where a window has dropped it;
    None is 0 everywhere."""

    length: Tensor | None = None
    """(B,) int64, the number of cached tokens of each sequence, after which there is room for more; None is S."""

    def detach(self) -> KeyValues:
        """Return the same state, detached from the autograd graph."""
        return self._replace(k=self.k.detach(), v=self.v.detach())

    def clone(self) -> KeyValues:
        """Return a copy."""
        return KeyValues(*(None if t is None else t.clone() for t in self))  # type: ignore[arg-type]

    def tokens(self) -> Tensor:
        """Return the number of tokens (B,) of the current document so far."""
        cached = self.length
        if cached is None:
            cached = self.k.new_full(self.k.shape[:1], self.k.shape[1], dtype=torch.int64)
        return cached if self.start is None else cached - self.start

    def visible(self) -> Tensor:
        """Return the number of cached tokens (B,) of the current document, without those before it."""
        cached = self.k.new_full(self.k.shape[:1], self.k.shape[1], dtype=torch.int64)
        cached = cached if self.length is None else self.length
        return cached if self.start is None else cached - self.start.clamp(min=0)

    def reserve(self, capacity: int) -> KeyValues:
        """Return a copy with room for ``capacity`` tokens of each sequence, whose size no step changes.

        Each sequence has the tokens of its document from its first place on, whatever is before them in this state.

        Args:
            capacity: the number of tokens that each sequence has room for.

        Raises:
            ValueError: a document has more tokens than capacity.
        """
        start = self.k.new_zeros(self.k.shape[0], dtype=torch.int64) if self.start is None else self.start
        if capacity < self.k.shape[1] and len(self.k) and not torch.compiler.is_compiling():
            most = int(self.visible().max())
            if most > capacity:
                raise ValueError(f"capacity: got {capacity}, expected at least {most}, the tokens of a sequence")
        kept = min(capacity, self.k.shape[1])
        room = (0, 0, 0, 0, 0, capacity - kept)
        k, v = (F.pad(t, room) for t in self._documents(kept))
        return KeyValues(k, v, start.clamp(max=0), self.visible().clone())

    def gather(self, rows: Tensor | Sequence[int]) -> KeyValues:
        """Return a copy of the caches of some sequences, of a state with room for more tokens.

        Args:
            rows: (R,) integers, the indices of the sequences; an index may occur more than once.

        Returns:
            the caches, with batch R and as many places as this state.
        """
        index = self._index(rows)
        return KeyValues(*(t.index_select(0, index) for t in self if t is not None))

    def scatter(self, rows: Tensor | Sequence[int], states: KeyValues) -> None:
        """Overwrite the caches of some sequences in place, in a state with room for their tokens.

        Each row gets the tokens of its document from its first place on, whatever room is around them in ``states``,
        and no gradients.

        Args:
            rows: (R,) integers, the indices of the sequences, each at most once.
            states: the new caches, with batch R; sequence rows[j] gets the j-th one.

        Raises:
            ValueError: rows contain an index twice, the states are not as many, or this state has no room for them.
        """
        if not isinstance(states, KeyValues):
            raise TypeError(f"states: got {type(states).__name__}, expected KeyValues")
        index, device = State(self.k)._index(rows, once=True), self.k.device
        expected = (index.shape[0], states.k.shape[1], *self.k.shape[2:])
        if states.k.shape != expected:
            raise ValueError(f"states.k: got shape {tuple(states.k.shape)}, expected {expected}")
        self.check_fits(states)
        given = KeyValues(*(None if t is None else t.to(device) for t in states.detach()))  # type: ignore[arg-type]
        self.write(PoolRows(index, self.k.shape[0]), given)

    def check_fits(self, states: KeyValues) -> None:
        """Check that this state has room for the tokens of each sequence of other states.

        Raises:
            ValueError: a sequence of ``states`` has more tokens than this state has places.
        """
        if states.k.shape[1] > self.k.shape[1] and len(states.k):
            self.check_room(int(states.visible().max()))

    def reset(self, rows: Tensor | Sequence[int]) -> None:
        """Reset some sequences in place to no tokens, in a state with room for tokens.

        Args:
            rows: (R,) integers, the indices of the sequences.
        """
        index = self._index(rows)
        for own in (self.start, self.length):
            if own is not None:
                own.index_fill_(0, index, 0)

    def read(self, rows: PoolRows) -> KeyValues | None:
        """Return the caches of the sequences of a call, as :meth:`Attention.forward` takes them; this one is a pool.

        The host reads how many tokens there are.

        Args:
            rows: the rows of this pool, one for each of the B sequences.

        Returns:
            the caches, (B, tokens, kv heads, head_dim), with the last token of each sequence in the last place, or
            None where no sequence has a token.
        """
        length, start = rows.read(_given(self.length)), rows.read(_given(self.start))
        simple = False  # whether all sequences have as many tokens, of one document
        if torch.compiler.is_compiling() or not len(length):
            places = self.k.shape[1]
        else:
            lengths, starts = torch.stack([length, start]).tolist()
            places = max(lengths)
            simple = min(lengths) == places and not any(starts)
        if not places:
            return None
        token = (length[:, None] - places + torch.arange(places, device=length.device)).clamp(min=0)
        row = rows.indices.clamp(min=0)[:, None]
        return KeyValues(self.k[row, token], self.v[row, token], None if simple else places - length + start)

    def write(self, rows: PoolRows, states: KeyValues) -> None:
        """Overwrite rows of this pool by caches such as :meth:`Attention.forward` returns.

        Args:
            rows: the rows of this pool, one for each of the B sequences.
            states: the caches, (B, tokens, kv heads, head_dim).

        Raises:
            ValueError: a sequence has more tokens than the pool has places, or gradients are recorded.
        """
        check_not_recorded(states.k, states.v)
        if not len(rows.indices):
            return
        places, length = states.k.shape[1], states.visible()
        start = states.start
        if start is None:
            start = states.k.new_zeros(states.k.shape[0], dtype=torch.int64)
        if places > self.k.shape[1] and not torch.compiler.is_compiling():
            self.check_room(int(torch.where(rows.indices >= 0, length, 0).max()))
        kept = min(places, self.k.shape[1])
        if kept:
            for own, given in zip((self.k, self.v), states._documents(kept), strict=True):
                rows.write(own[:, :kept], given)
        rows.write(_given(self.length), length)
        rows.write(_given(self.start), start.clamp(max=0))

    def of_rows(self, rows: PoolRows) -> KeyValues:
        """Return a copy of the caches of rows of this pool.

        Args:
            rows: the rows, one for each of the B sequences; a sequence at -1 has no tokens.

        Returns:
            the caches, with batch B and as many places as this pool.
        """
        row = rows.indices.clamp(min=0)
        start, length = rows.read(_given(self.start)), rows.read(_given(self.length))
        return KeyValues(self.k.index_select(0, row), self.v.index_select(0, row), start, length)

    def append(self, rows: PoolRows, k: Tensor, v: Tensor, place: Tensor, length: Tensor, has_room: Tensor) -> None:
        """Write new tokens into rows of this pool.

        Args:
            rows: the rows.
            k, v: (B, T, kv heads, head_dim), the keys and values.
            place: (B, T) int64, the place of each token in its row.
            length: (B,) int64, the number of tokens of each sequence after the call.
            has_room: (B,) bool, False for sequences whose keys and values stay as they are.

        Raises:
            ValueError: gradients are recorded.
        """
        check_not_recorded(k, v)
        if not len(rows.indices):
            return
        source, target, written = rows.targets()
        at = target[:, None], place.index_select(0, source)
        written = (written & has_room.index_select(0, source))[:, None, None, None]
        for own, new in ((self.k, k), (self.v, v)):
            new = new.to(own.dtype).index_select(0, source)
            own.index_put_(at, torch.where(written, new, own[at]))
        rows.write(_given(self.length), length)

    def has_room(self, count: int) -> Tensor:
        """Return whether each sequence has room for more tokens, and on a CPU check that all have it.

        Args:
            count: the number of tokens to be added to each sequence.

        Returns:
            (B,) bool.

        Raises:
            ValueError: a sequence has no room, on a CPU; a GPU's values are not read.
        """
        capacity = self.k.shape[1]
        found = _given(self.length) + count <= capacity
        if reads_values(found) and not found.all():
            raise ValueError(
                f"state: got a sequence with room for fewer than {count} more tokens, expected a pool or a cache with "
                f"a capacity above {capacity}"
            )
        return found

    def check_room(self, tokens: int) -> None:
        """Raise unless each sequence has room for so many tokens."""
        if tokens > self.k.shape[1]:
            raise ValueError(
                f"state: got {tokens} tokens of a sequence, expected at most {self.k.shape[1]}, the capacity"
            )

    def _documents(self, places: int) -> tuple[Tensor, Tensor]:
        """Return ``places`` (at most S) keys and values of each sequence, from its document's first on."""
        if self.start is None or not self.k.shape[1]:
            return self.k[:, :places], self.v[:, :places]
        token = self.start.clamp(min=0)[:, None] + torch.arange(places, device=self.start.device)
        token = token.clamp(max=self.k.shape[1] - 1)
        row = torch.arange(len(token), device=token.device)[:, None]
        return self.k[row, token], self.v[row, token]

    def _index(self, rows: Tensor | Sequence[int]) -> Tensor:
        """Return rows as a tensor of indices, checked as those of a recurrence's state are."""
        return State(self.k)._index(rows)


register_state(KeyValues, "tfla.nn.KeyValues")


def _given(t: Tensor | None) -> Tensor:
    """Return a part of a cache with room for more tokens, which has all of them."""
    assert t is not None
    return t


def reads_values(t: Tensor) -> bool:
    """Return whether the host reads values of a tensor to check them: on a CPU, outside compiled code."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def check_not_recorded(*new: Tensor) -> None:
    """Raise if gradients of what a pool's rows are overwritten by are recorded."""
    if any(t.requires_grad for t in new):
        raise ValueError("state_indices: got them while gradients are recorded, expected torch.no_grad()")


def check_state(state: object, k: Tensor) -> None:
    """Raise unless state is a cache to which keys k (B, T, kv heads, head_dim) can be appended."""
    if not isinstance(state, KeyValues):
        raise TypeError(f"state: got {type(state).__name__}, expected KeyValues")
    expected = (k.shape[0], state.k.shape[1], *k.shape[2:])
    for name in ("k", "v"):
        shape = tuple(getattr(state, name).shape)
        if shape != expected:
            raise ValueError(f"state.{name}: got shape {shape}, expected {expected}")
