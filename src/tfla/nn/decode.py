"""Decoding of a batch whose state stays at fixed addresses, as CUDA graphs need, for generation and for serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tfla._util.garbage_collection import paused_collection
from tfla.nn import fused_step
from tfla.nn.mixer_state import MixerState
from tfla.nn.mixers.key_values import KeyValues
from tfla.nn.model import LanguageModel, ModelState
from tfla.nn.pool import check_pool, find_rows
from tfla.nn.validation import check_ids, check_int, check_model, check_model_state, is_sharded
from tfla.ops.state import State


class Decoder:
    """A batch of sequences that advance together by one token per step, on an NVIDIA GPU by replaying a CUDA graph.

    Between steps, :meth:`gather`, :meth:`scatter` and :meth:`reset` read, replace and restart single sequences of the
    batch. With ``batches`` the state is a pool with a row for each sequence that a server can hold, and each step
    advances the sequences of some of its rows. No gradients are recorded.

    Args:
        model: the model. A graph reads its weights at the addresses that they have now.
        state: the state of the batch, from :meth:`LanguageModel.initial_state` or from a prompt. It is copied, unless
            it is a pool: steps overwrite a pool in place, as :meth:`LanguageModel.hidden` with state_indices does.
        capacity: for models with attention, the number of tokens of a sequence for which its caches have room from the
            start. With None the caches keep the capacity that those of ``state`` have. If these have none, they grow,
            without a CUDA graph, and single sequences cannot be replaced. A pool has a capacity of its own.
        cuda_graph: whether to capture a CUDA graph; None captures one where possible, for recurrent mixers on a
            GPU.
        batches: for a pool, the numbers of sequences for each of which a step is captured in a CUDA graph. A step of
            another number is padded to the next larger one; more sequences than the largest one are an error. With None
            the state is no pool.

    Raises:
        TypeError, ValueError: the state does not fit the model; the message names the block and what is expected.
        ValueError: a graph is requested where none can be captured, or capacity is given with batches.
    """

    def __init__(
        self,
        model: LanguageModel,
        state: ModelState,
        *,
        cuda_graph: bool | None = None,
        capacity: int | None = None,
        batches: Sequence[int] | None = None,
    ) -> None:
        check_model(model)
        self.model = model
        device = model.embedding.weight.device
        self.batch = check_model_state(model, state)
        self.batches = None if batches is None else _check_batches(batches, state)
        # The number of tokens of each sequence in caches; empty without attention, and for pools, whose numbers stay on
        # the GPU. With a capacity the caches are copied, and the copies begin with the current document.
        self._used = _cached_tokens(state, moved=capacity is not None) if batches is None else []
        if capacity is not None:
            if batches is not None:
                raise ValueError(
                    f"capacity: got {capacity} with batches, expected None: a pool has the capacity of its "
                    "initial_state"
                )
            check_int("capacity", capacity, max(self._used, default=0) + 1)
        self.capacity = (_common_capacity(state) if capacity is None else capacity) if self._used else None
        constant = not self._used or self.capacity is not None  # whether no step changes the size of the state
        check_cuda_graph(cuda_graph, constant, device)
        if is_sharded(model):  # a step gathers parameters, which no graph captures
            if cuda_graph:
                raise ValueError("cuda_graph: got True with parameters that FSDP2 shards, expected None or False")
            cuda_graph = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pooled: dict[int, PooledGraph] = {}
        if self.batches is not None:
            self.state: ModelState = state
            if device.type == "cuda" and cuda_graph is not False:
                for size in reversed(self.batches):  # all graphs use the memory pool of the largest one
                    self._pooled[size] = PooledGraph(self, size, next(iter(self._pooled.values()), None))
            return
        self.state = copy_state(state, capacity)
        if device.type == "cuda" and constant and cuda_graph is not False:
            # Capturing runs a step, whose changes are undone: the first step overwrites what it adds to a cache.
            before = [(t, t.clone()) for t in stepped_tensors(self.state)]
            self._capture(device)
            for target, source in before:
                target.copy_(source)

    @torch.no_grad()
    def step(self, ids: Tensor, state_indices: Tensor | None = None) -> Tensor:
        """Advance every sequence by one token.

        Args:
            ids: (B,) int64 tokens.
            state_indices: (B,) int32 or int64, for a pool: the row of each sequence, at most once each; -1 is padding.
                On a GPU their values are not read by the host.

        Returns:
            logits (B, vocab_size) of the next token. With a CUDA graph, the next step overwrites them.

        Raises:
            ValueError, TypeError: ids do not fit; the message says what was given and what is allowed.
        """
        check_ids(ids, "(B,)", 1)
        if self.batches is not None:
            return self._step_rows(ids, state_indices, self.batches)
        if state_indices is not None:
            raise ValueError(
                "state_indices: got rows of a pool, expected None for a Decoder without batches, which has no pool"
            )
        if len(ids) != self.batch:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected ({self.batch},): one for each sequence")
        if self.capacity is not None and max(self._used) >= self.capacity:
            raise ValueError(
                f"ids: got token number {self.capacity + 1} of a sequence, expected at most {self.capacity}, "
                "the capacity of this Decoder"
            )
        if self._graph is None:
            logits, self.state = self.model.step(ids, self.state)
        else:
            self._ids.copy_(ids)
            self._graph.replay()
            logits = self._logits
        if self.capacity is not None:  # counted last, since a step that is refused adds no token
            self._used = [used + 1 for used in self._used]
        return logits

    def _step_rows(self, ids: Tensor, indices: Tensor | None, batches: Sequence[int]) -> Tensor:
        """Advance the sequences with these rows of the pool, and return their logits."""
        if indices is None:
            raise ValueError("state_indices: got None, expected the rows (B,) of the pool that the sequences have")
        size = next((size for size in batches if size >= len(ids)), None)
        if size is None:
            raise ValueError(f"ids: got {len(ids)} sequences, expected at most {batches[-1]}, the largest of batches")
        if not self._pooled:
            return self.model.step(ids, self.state, state_indices=indices)[0]
        find_rows(self.state, indices, len(ids))
        return self._pooled[size].replay(ids, indices)

    def gather(self, rows: Tensor | Sequence[int]) -> ModelState:
        """Return a copy of the states of the sequences ``rows``; see :meth:`tfla.State.gather`."""
        return tuple(block_state.gather(rows) for block_state in self._states_by_row())

    def scatter(self, rows: Tensor | Sequence[int], state: ModelState) -> None:
        """Replace the states of the sequences ``rows``; see :meth:`tfla.State.scatter`."""
        states = self._states_by_row()
        check_model_state(self.model, state)
        tokens = [] if self.capacity is None else _cached_tokens(state, moved=True)
        if self.capacity is not None:
            check_int("capacity", self.capacity, max(tokens, default=0))
        for own, given in zip(states, state, strict=True):
            if isinstance(own, KeyValues) and isinstance(given, KeyValues):
                own.check_fits(given)  # before a block's row is overwritten
        for own, given in zip(states, state, strict=True):
            own.scatter(rows, given)  # type: ignore[arg-type]
        if self.capacity is not None:
            for row, used in zip(_rows(rows), tokens, strict=True):
                self._used[row] = used

    def reset(self, rows: Tensor | Sequence[int]) -> None:
        """Reset the sequences ``rows`` to the state before the first token; see :meth:`tfla.State.reset`."""
        for block_state in self._states_by_row():
            block_state.reset(rows)
        if self.capacity is not None:
            for row in _rows(rows):
                self._used[row] = 0

    def _states_by_row(self) -> list[State | MixerState | KeyValues]:
        """Return the states of the blocks.

        Raises:
            TypeError: a block is attention with a cache that grows, which has no rows that could be replaced.
        """
        if self._used and self.capacity is None:
            raise TypeError(
                "state: got attention's cache, whose sequences have one length; expected a Decoder with a capacity"
            )
        return list(self.state)

    def _advance(self) -> Tensor:
        """Run one step that updates all of the state in place, and return the logits."""
        if self._fused is None:
            logits, new = self.model.step(self._ids, self.state, in_place=True)
        else:
            logits, new = self._fused(self._ids, self.state)
        copy_into(self.state, new)
        return logits

    @torch.no_grad()
    def _capture(self, device: torch.device) -> None:
        """Capture one step of the batch in a CUDA graph."""
        self._ids = torch.zeros(self.batch, dtype=torch.int64, device=device)
        fusable = fused_step.unsupported(self.model, self.state) is None
        self._fused = fused_step.FusedStep(self.model, self.batch) if fusable else None
        self._graph, self._logits = capture_graph(self._advance, device)


class PooledGraph:
    """A CUDA graph of a step of ``size`` sequences of a pool.

    Args:
        decoder: the decoder that has the pool.
        size: the number of sequences.
        other: another graph, whose memory this one shares for intermediate results, or None.
    """

    def __init__(self, decoder: Decoder, size: int, other: PooledGraph | None) -> None:
        device = decoder.model.embedding.weight.device
        self.ids = torch.zeros(size, dtype=torch.int64, device=device)
        self.indices = torch.full((size,), -1, dtype=torch.int64, device=device)  # a step of padding writes nothing
        model, state = decoder.model, decoder.state
        fusable = fused_step.unsupported(model, state, size) is None
        # The fused step owns buffers that the graph reads and writes, so that it must live as long as the graph.
        self.step: Any = fused_step.FusedStep(model, size) if fusable else model.step
        memory = None if other is None else other.graph.pool()
        self.graph: torch.cuda.CUDAGraph
        self.graph, self.logits = capture_graph(
            lambda: self.step(self.ids, state, state_indices=self.indices)[0], device, memory
        )

    def replay(self, ids: Tensor, indices: Tensor) -> Tensor:
        """Advance sequences and return their logits, which the next step overwrites."""
        count = len(ids)
        self.ids[:count].copy_(ids)
        self.indices[:count].copy_(indices)
        self.indices[count:].fill_(-1)
        self.graph.replay()
        return self.logits[:count]


@torch.no_grad()
def capture_graph(
    call: Callable[[], Tensor], device: torch.device, pool: Any = None, generator: torch.Generator | None = None
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Run a call, capture it in a CUDA graph, and return the graph and the result that its replays overwrite.

    The first replay draws the random numbers that the call would have drawn without a graph.

    Args:
        call: the call.
        device: the GPU.
        pool: the memory pool of another graph, or None.
        generator: the generator of the call's random numbers; None is torch's global one.
    """
    draws = torch.cuda.default_generators[device.index] if generator is None else generator
    before = draws.get_state()
    # Autocast's cache of cast weights would be filled during the capture and freed before the replay.
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with torch.cuda.device(device), torch.autocast("cuda", dtype, enabled, cache_enabled=False):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compilation and allocations must not be captured
        torch.cuda.current_stream().wait_stream(stream)
        draws.set_state(before)
        graph = torch.cuda.CUDAGraph()
        if generator is not None:  # a capture registers the global one itself
            graph.register_generator_state(generator)
        with paused_collection(), torch.cuda.graph(graph, pool=pool):
            result = call()
    return graph, result


def _check_batches(batches: object, state: ModelState) -> tuple[int, ...]:
    """Check the argument ``batches`` and the pool, and return the sorted numbers of sequences."""
    if not isinstance(batches, Sequence) or isinstance(batches, str) or not batches:
        raise TypeError(f"batches: got {batches!r}, expected None or a sequence of ints")
    for size in batches:
        check_int("batches", size, 1)
    check_pool(state)
    return tuple(sorted(set(batches)))


def _tensors(state: ModelState) -> list[Tensor]:
    """Return the tensors of a state."""
    return [t for t in tree_leaves(state) if t is not None]


def stepped_tensors(state: ModelState) -> list[Tensor]:
    """Return the tensors that a step changes; of a cache only the numbers of tokens: places after them are unused."""
    return [
        t for own in state for t in ((own.length,) if isinstance(own, KeyValues) else tree_leaves(own)) if t is not None
    ]


def copy_into(state: ModelState, new: ModelState) -> None:
    """Copy the tensors of a new state into those of the state, except for tensors that were updated in place."""
    pairs = [
        (old, now) for old, now in zip(_tensors(state), _tensors(new), strict=True) if old.data_ptr() != now.data_ptr()
    ]
    if pairs:
        torch._foreach_copy_([old for old, _ in pairs], [now for _, now in pairs])


def copy_state(state: ModelState, capacity: int | None) -> ModelState:
    """Return a copy of the state of a batch, see :func:`copy_block_state`."""
    return tuple(copy_block_state(block_state, capacity) for block_state in state)


def copy_block_state(state: State | MixerState | KeyValues, capacity: int | None) -> State | MixerState | KeyValues:
    """Return a copy of a block's state; with a capacity, a cache of attention gets room for so many tokens.

    A cache that grows is returned as it is without a capacity, since steps do not overwrite it.
    """
    if not isinstance(state, KeyValues) or (capacity is None and state.length is not None):
        return state.clone()
    return state if capacity is None else state.reserve(capacity)


def _common_capacity(state: ModelState) -> int | None:
    """Return the smallest capacity of all caches of attention, or None if one of them grows."""
    caches = [cache for cache in state if isinstance(cache, KeyValues)]
    return None if any(cache.length is None for cache in caches) else min(cache.k.shape[1] for cache in caches)


def _cached_tokens(state: ModelState, moved: bool = False) -> list[int]:
    """Return the largest number of tokens that each sequence has in a cache; an empty list without attention.

    With ``moved``, tokens before the current document are not counted, since :meth:`KeyValues.scatter` leaves them out.
    """
    found: list[int] = []
    for cache in state:
        if isinstance(cache, KeyValues):
            held = [int(n) for n in (cache if moved else cache._replace(start=None)).visible().tolist()]
            found = held if not found else [max(pair) for pair in zip(found, held, strict=True)]
    return found


def _rows(rows: Tensor | Sequence[int]) -> list[int]:
    """Return the indices of sequences as a list. If they are on a GPU, the host waits for them."""
    return [int(row) for row in (rows.tolist() if isinstance(rows, Tensor) else rows)]


def check_cuda_graph(cuda_graph: object, constant: bool, device: torch.device) -> None:
    """Check the argument ``cuda_graph``: only a state of constant size on a GPU allows True."""
    if cuda_graph is not None and not isinstance(cuda_graph, bool):
        raise TypeError(f"cuda_graph: got {cuda_graph!r}, expected None, True or False")
    if cuda_graph and not (constant and device.type == "cuda"):
        why = f"a model on {device.type}" if constant else "attention, whose cache grows"
        raise ValueError(f"cuda_graph: got True with {why}, expected recurrent mixers on a GPU")
