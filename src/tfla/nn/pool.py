"""The states of a model in a pool, whose rows belong to sequences. A call reads and overwrites some of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tfla.nn.mixer_state import MixerState
from tfla.nn.mixers.key_values import KeyValues, reads_values
from tfla.ops.checks import check_state_indices
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows, checked

if TYPE_CHECKING:
    from tfla.nn.model import ModelState

BlockState = State | MixerState | KeyValues


def find_rows(pool: ModelState | None, indices: Tensor, sequences: int) -> PoolRows:
    """Return the rows of a model's pool that belong to the sequences of a call.

    Args:
        pool: the state of a model with a row for each sequence that it can hold.
        indices: (sequences,) int32 or int64, the rows; -1 is padding, which has no row.
        sequences: the number of sequences of the call.

    Raises:
        TypeError, ValueError: the indices do not fit, there is no pool, or the state of a block is no pool.
    """
    if pool is None:
        raise ValueError("state_indices: got rows without a state, expected the pool that has these rows as state")
    first = check_pool(pool)
    check_state_indices(indices, sequences, first)
    return PoolRows(checked(indices, first), first.C.shape[0])


def check_pool(pool: ModelState) -> State:
    """Check that all blocks have the same number of rows, and return the recurrent state of the first block.

    Raises:
        TypeError, ValueError: a block has a state that is no pool, or another number of rows.
    """
    first = None
    for number, each in enumerate(pool):
        if not isinstance(each, State | MixerState | KeyValues):
            raise TypeError(f"state[{number}]: got {type(each).__name__}, expected a state of a model in a pool")
        if isinstance(each, KeyValues) and each.length is None:
            raise TypeError(
                f"state[{number}]: got a cache that grows in a pool, expected one with room for tokens, from "
                "initial_state with a capacity"
            )
        recurrence = _recurrence(each)
        first = recurrence if first is None else first
        if recurrence.C.shape[0] != first.C.shape[0]:
            raise ValueError(
                f"state[{number}]: got {recurrence.C.shape[0]} rows, expected {first.C.shape[0]} as in state[0]"
            )
    assert first is not None
    return first


def check_room_for_steps(state: ModelState, rows: PoolRows | None, count: int) -> None:
    """Check that caches of a fixed capacity have room for ``count`` more tokens of each sequence of a call.

    Recurrences overwrite their states in place, so that a cache without room must be found before the first block runs.
    Caches on a GPU are not checked, because the host would wait for their lengths.

    Raises:
        ValueError: a cache has no room.
    """
    for each in state:
        if isinstance(each, KeyValues) and each.length is not None:
            cache = each if rows is None else each._replace(length=rows.read(each.length))
            if reads_values(each.length):
                cache.has_room(count)


def check_room_for_prompts(
    state: ModelState, rows: PoolRows, windows: Sequence[int | None], ids: Tensor, document_start: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    """Check that all caches have room for the prompts of a call, before any block overwrites its rows.

    Args:
        state: the pool.
        rows: the rows of the sequences.
        windows: the attention window of each block; None for blocks without one.
        ids: (B, T), the tokens.
        document_start: (B, T) bool, True at the first token of each document, or None. A cache keeps the last document.
        cu_seqlens: (B + 1,) int, the offsets of packed sequences, whose caches must be empty; or None.

    Raises:
        ValueError: a sequence has more tokens than a cache has places, or packed sequences continue caches.
    """
    caches = [(each, window) for each, window in zip(state, windows, strict=True) if isinstance(each, KeyValues)]
    if not caches or not len(rows.indices) or torch.compiler.is_compiling():
        return
    device = rows.indices.device
    new = torch.full(rows.indices.shape, ids.shape[1], device=device)  # (B,), the tokens of this call that stay
    continues = torch.ones_like(new)  # 0 where a document starts, so that the cache keeps nothing from before
    if cu_seqlens is not None:
        new = cu_seqlens.to(device).diff()
    if document_start is not None:
        starts = document_start.to(device)
        new = torch.where(starts.any(1), starts.flip(1).to(torch.int8).argmax(1) + 1, new)
        continues = (~starts.any(1)).to(new.dtype)
    needed, held = [], []  # tokens after the call, and before it, for each cache
    for each, window in caches:
        held.append(rows.read(each.visible()))
        tokens = new + continues * held[-1]
        tokens = tokens if window is None else tokens.clamp(max=window - 1)
        needed.append(torch.where(rows.indices >= 0, tokens, 0).max())
    most, before = torch.stack([torch.stack(needed), torch.stack(held).amax(1)]).tolist()
    if cu_seqlens is not None and any(before):
        raise ValueError("cu_seqlens, state: got both, expected at most one of them in attention")
    for (each, _), tokens in zip(caches, most, strict=True):
        each.check_room(tokens)


def with_room(state: BlockState, capacity: int) -> BlockState:
    """Return the state of a block; a cache of attention gets room for ``capacity`` tokens."""
    return state.reserve(capacity) if isinstance(state, KeyValues) else state


def read(pool: BlockState, rows: PoolRows) -> BlockState | None:
    """Return rows of a block's pool as states (B, ...), for a mixer that does not read the rows itself.

    Those of recurrences are in float32 or float64. For an empty cache of attention the result is None.
    """
    if isinstance(pool, KeyValues):
        return pool.read(rows)

    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(torch.promote_types(t.dtype, torch.float32))

    recurrence = State(*map(wide, rows.read_state(_recurrence(pool))))  # type: ignore[arg-type]
    return pool.read(rows)._replace(recurrence=recurrence) if isinstance(pool, MixerState) else recurrence


def write(pool: BlockState, rows: PoolRows, states: BlockState) -> None:
    """Overwrite rows of a block's pool with states (B, ...)."""
    if isinstance(pool, KeyValues):
        assert isinstance(states, KeyValues)
        pool.write(rows, states)
        return
    rows.write_state(_recurrence(pool), _recurrence(states))
    if isinstance(pool, MixerState) and isinstance(states, MixerState):
        pool.write(rows, states)


def _recurrence(state: BlockState) -> State:
    """Return the state of the recurrence. The keys of attention stand for its C: they have the same number of rows."""
    if isinstance(state, KeyValues):
        return State(state.k)
    return state.recurrence if isinstance(state, MixerState) else state
