"""Causal attention with rotary position embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import Accept, Projection, SequenceMixer, Sharding, input_std, local, output_std
from tfla.nn.mixer_state import StatesEvery
from tfla.nn.mixers.attend import attend, attend_alone, attend_masked, attend_packed
from tfla.nn.mixers.context import ContextPart
from tfla.nn.mixers.documents import Documents
from tfla.nn.mixers.gather_steps import SharedSteps, start_shared
from tfla.nn.mixers.key_values import KeyValues, check_state, reads_values
from tfla.nn.mixers.ring import ring_attention
from tfla.nn.mixers.rotary import rotate_both
from tfla.ops.checks import check_cu_seqlens
from tfla.ops.state_pool import PoolRows

GATHERED = 2**22  # numbers of the keys of all steps, up to which processes that share the steps gather them


class Attention(SequenceMixer):
    """Causal attention within documents, softmax(q k^T / sqrt(d)) v, through torch's SDPA; no biases.

    Queries and keys are rotated by their positions within documents. With ``num_kv_heads`` several heads share keys and
    values (grouped-query attention), with ``window`` a token sees only the last tokens, and with ``attention_sinks``
    every head h has a learned logit s_h: exp(s_h) is added to the denominator of the softmax. The state is
    :class:`KeyValues`, which grows with every token up to the window. See :class:`SequenceMixer` for shapes.

    Args:
        config: a config with mixer "attention"; head_dim must be even.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, or has another mixer.
    """

    tensor_parallel: ClassVar[dict[str, Sharding]] = {
        "q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "out_proj": "rows", "sinks": "heads",
    }  # fmt: skip

    def __init__(self, config: ModelConfig) -> None:
        check_config(config, "attention")
        super().__init__()
        d = config.d_model
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.num_kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
        self.window, self.rope_base = config.window, config.rope_base
        self.context_parallel: Any = None  # the processes that share the steps, as `tfla.mlstm` takes them
        std, kv_width = input_std(d), self.num_kv_heads * self.head_dim
        self.q_proj = Projection(d, d, std)
        self.k_proj = Projection(d, kv_width, std)
        self.v_proj = Projection(d, kv_width, std)
        self.sinks = Sinks(self.num_heads) if config.attention_sinks else None
        self.out_proj = Projection(d, d, output_std(d, config.num_blocks))

    def forward(
        self,
        x: Tensor,
        state: KeyValues | None = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        states_every: StatesEvery | None = None,
    ) -> tuple[Tensor, KeyValues | None]:
        """Run :meth:`SequenceMixer.forward`.

        Raises:
            ValueError: a state is given together with cu_seqlens, or states_every with context parallelism.
        """
        if self.context_parallel is not None:
            return self._forward_part(x, state, document_start, cu_seqlens, return_state, states_every)
        return self._forward_whole(x, state, document_start, cu_seqlens, return_state, states_every)

    def _forward_whole(
        self,
        x: Tensor,
        state: KeyValues | None,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        states_every: StatesEvery | None = None,
    ) -> tuple[Tensor, KeyValues | None]:
        """Run :meth:`forward` on all steps of the sequences."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, q)
        _check_whole(state, cu_seqlens, k)
        documents = Documents(x, document_start, cu_seqlens)
        before = None if state is None else state.tokens()
        # Positions count from the document's start, so that its place in a batch changes no digit.
        q, k = rotate_both(q, k, documents.position(before), self.rope_base)
        past = 0 if state is None else state.k.shape[1]
        k, v, first = _after_state(state, k, v, documents)
        sinks = None if self.sinks is None else self.sinks()
        if not self.batch_invariant:
            h = attend(q, k, v, first, self.window, sinks)
        elif cu_seqlens is None:
            h = attend_alone(q, k, v, first, self.window, sinks)
        else:
            h = attend_packed(q, k, v, cu_seqlens, self.window, sinks)
        y = self.out_proj(h.flatten(-2))
        if states_every is not None:
            for end in states_every.ends(x.shape[1]):
                begin = first if first is None or first.shape[1] == 1 else first[:, :end]
                states_every.states.append(self._new_state(k[:, : past + end], v[:, : past + end], begin))
        if not return_state:
            return y, None
        return y, self._new_state(k, v, first) if cu_seqlens is None else self._packed_state(k, v, cu_seqlens)

    def _forward_part(
        self,
        x: Tensor,
        state: KeyValues | None,
        document_start: Tensor | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
        states_every: StatesEvery | None,
    ) -> tuple[Tensor, KeyValues | None]:
        """Return the output of this process's steps (B, T, d_model), which attend to all steps up to them.

        Keys and values go from process to process, or are gathered where those of all steps are few, or where a state
        holds them anyway. Documents are those of the whole sequence: a process has its part of document_start, and all
        of cu_seqlens on the CPU. States are the same on all processes.
        """
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))

        def check() -> None:
            """Check the states."""
            if states_every is not None:
                raise ValueError("states_every: got it with context_parallel, expected None in attention")
            _check_whole(state, cu_seqlens, k)

        def start() -> SharedSteps:
            """Return the steps of all processes."""
            shared = SharedSteps(self.context_parallel, x.shape[1])
            if cu_seqlens is not None:
                check_cu_seqlens(cu_seqlens, torch.empty(x.shape[0], shared.total, 0))
            return shared

        q, shared = start_shared(self.context_parallel, x, q, cu_seqlens, check=check, start=start)
        if shared is None:  # refused, with an error that the graph raises
            return q, None
        sinks = None if self.sinks is None else self.sinks()
        if state is None and not return_state and k[:, :1].numel() * shared.total > GATHERED:
            h = self._attend_in_rounds(q, k, v, document_start, cu_seqlens, sinks, shared)
            return self.out_proj(h.flatten(-2)), None
        h, k, v, first = self._attend_gathered(q, k, v, state, document_start, cu_seqlens, sinks, shared)
        y = self.out_proj(h.flatten(-2))
        if not return_state:
            return y, None
        return y, self._new_state(k, v, first) if cu_seqlens is None else self._packed_state(k, v, cu_seqlens)

    def _attend_in_rounds(
        self, q: Tensor, k: Tensor, v: Tensor, document_start: Tensor | None, cu_seqlens: Tensor | None,
        sinks: Tensor | None, shared: SharedSteps,
    ) -> Tensor:  # fmt: skip
        """Attend to the keys and values of one process after the other, see :mod:`tfla.nn.mixers.ring`."""
        part = ContextPart(self.context_parallel, q.shape[1])
        token = part.tokens(q.device)[None]
        if cu_seqlens is not None:
            document_start = part.document_start(cu_seqlens, q.device)
        position, first = token, None
        if document_start is not None:
            position, _ = part.position(Documents(q, document_start, None), q.shape[0])
            first = token - position
        q, k = rotate_both(q, k, position, self.rope_base)
        return ring_attention(q, k, v, first, sinks, cu_seqlens, shared.spans, self.window)

    def _attend_gathered(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValues | None, document_start: Tensor | None,
        cu_seqlens: Tensor | None, sinks: Tensor | None, shared: SharedSteps,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Attend to the keys and values of a state and of all processes, which are gathered.

        Returns:
            the attended values of this process's steps, all keys and values, and where the documents of all steps
            begin among them, None for one document.
        """
        if document_start is not None:
            document_start = shared.gather(document_start)
        documents = Documents(q.new_empty(q.shape[0], shared.total, 0), document_start, cu_seqlens)
        position = documents.position(None if state is None else state.tokens())
        q, k = rotate_both(q, k, shared.of_whole(position), self.rope_base)
        k, v, first = _after_state(state, shared.gather(k), shared.gather(v), documents)
        past = k.shape[1] - shared.total
        attended = []
        for here, own in zip(shared.here, shared.own, strict=True):
            begins = first if first is None or first.shape[1] == 1 else first[:, own]
            end = past + own.stop
            attended.append(attend(q[:, here], k[:, :end], v[:, :end], begins, self.window, sinks))
        return torch.cat(attended, 1), k, v, first

    def step(
        self, x: Tensor, state: KeyValues, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, KeyValues]:
        """Run :meth:`SequenceMixer.step`; a cache without room for more tokens grows, whatever in_place says."""
        if rows is not None or (isinstance(state, KeyValues) and state.length is not None):
            y, accept = self.steps(x[:, None], state, in_place, rows)
            return y[:, 0], accept(torch.ones(len(x), dtype=torch.int64, device=x.device))
        y, new = self._forward_whole(x[:, None], state, return_state=True)
        assert new is not None
        return y[:, 0], new

    def steps(
        self, x: Tensor, state: KeyValues, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, Accept]:
        """Run :meth:`SequenceMixer.steps` on a cache with room for the tokens, into which their keys and values go.

        Raises:
            ValueError: the cache has no room, see :meth:`KeyValues.reserve`. A sequence on a GPU that has no room for
                the tokens yields NaN instead, and its cache stays as it is.
        """
        pool = state
        if rows is not None:
            state, in_place = pool.of_rows(rows), True
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        check_state(state, k)
        if state.length is None:
            raise ValueError("state: got a cache without room for more tokens, expected one from KeyValues.reserve")
        start, length, ahead = state.start, state.length, torch.arange(x.shape[1], device=x.device)
        q, k = rotate_both(q, k, state.tokens()[:, None] + ahead, self.rope_base)
        place = length[:, None] + ahead
        has_room, is_checked = state.has_room(x.shape[1]), reads_values(x)
        if not is_checked:
            place = place.clamp(max=state.k.shape[1] - 1)
        new_k, new_v, places = k, v, place

        def accept(lengths: Tensor) -> KeyValues:
            """Return the cache after some of the tokens."""
            after = length + (lengths if is_checked else torch.where(has_room, lengths, 0))
            if rows is None:
                return KeyValues(k, v, start, after)
            pool.append(rows, new_k, new_v, places, after, has_room)
            return pool

        at = place[..., None, None].expand_as(k)
        written = [(cache, new.to(cache.dtype)) for cache, new in ((state.k, k), (state.v, v))]
        if not is_checked:  # the last token of a full cache is overwritten by itself
            kept = has_room[:, None, None, None]
            written = [(cache, torch.where(kept, new, cache.gather(1, at))) for cache, new in written]
        k, v = ((cache if in_place else cache.clone()).scatter_(1, at, new) for cache, new in written)
        sinks = None if self.sinks is None else self.sinks()
        if self.batch_invariant and x.device.type == "cpu" and len(x):
            found = []
            for row, held in enumerate((length + x.shape[1]).tolist()):
                own = slice(row, row + 1)
                first = None if state.start is None else state.start[own, None]
                keys, values = (t[own, :held].to(q.dtype) for t in (k, v))
                found.append(attend_alone(q[own], keys, values, first, self.window, sinks))
            y = self.out_proj(torch.cat(found).flatten(-2))
            return y, accept
        token, place = torch.arange(k.shape[1], device=x.device), place[..., None]
        visible = token <= place
        if state.start is not None:
            visible = visible & (token >= state.start[:, None, None])
        if self.window is not None:
            visible = visible & (token > place - self.window)
        q, keys, values = (t.transpose(1, 2).to(q.dtype) for t in (q, k, v))
        parts = [slice(row, row + 1) for row in range(len(q))] if self.batch_invariant and len(q) else [slice(None)]
        masked = [attend_masked(q[own], keys[own], values[own], visible[own, None], sinks) for own in parts]
        h = torch.cat(masked)
        y = self.out_proj(h.transpose(1, 2).flatten(-2))
        return (y if is_checked else torch.where(has_room[:, None, None], y, torch.nan)), accept

    def initial_state(self, batch_size: int, device: torch.device) -> KeyValues:
        """Return the cache of `batch_size` sequences without tokens, in the weights' dtype."""
        dtype = self.q_proj.weight.dtype
        empty = torch.empty(batch_size, 0, self.num_kv_heads, self.head_dim, dtype=dtype, device=device)
        return KeyValues(empty, empty)

    def _packed_state(self, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> KeyValues:
        """Return a cache with a row for each packed sequence, whose last tokens are in the last places of the row."""
        offsets = cu_seqlens.to(k.device, torch.int64)
        lengths = offsets[1:] - offsets[:-1]
        places = k.shape[1] if torch.compiler.is_compiling() else int(lengths.max())
        if self.window is not None:
            places = min(places, self.window - 1)
        token = (offsets[1:, None] - places + torch.arange(places, device=k.device)).clamp(0)
        return KeyValues(k[0, token], v[0, token], places - lengths)

    def _new_state(self, k: Tensor, v: Tensor, first: Tensor | None) -> KeyValues:
        """Return the cache of keys and values (B, S, kv heads, head_dim), without those that no later token sees."""
        start = None if first is None else first[:, -1].expand(k.shape[0])
        dropped = 0 if self.window is None else k.shape[1] - self.window + 1
        if dropped <= 0:
            return KeyValues(k, v, start)
        start = k.new_zeros(k.shape[0], dtype=torch.int64) if start is None else start
        return KeyValues(k[:, dropped:], v[:, dropped:], start - dropped)


def _check_whole(state: KeyValues | None, cu_seqlens: Tensor | None, k: Tensor) -> None:
    """Raise unless a call over sequences with keys k (B, T, kv heads, head_dim) can continue from a state."""
    if state is None:
        return
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens, state: got both, expected at most one of them in attention")
    check_state(state, k)
    if state.length is not None:
        raise ValueError("state: got a cache with room for more tokens, expected one that forward has returned")


def _after_state(
    state: KeyValues | None, k: Tensor, v: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the keys and values of a state before those of a call, and where the documents of its tokens begin.

    Returns:
        k, v: (B, S + T, kv heads, head_dim).
        first: (B, T), (1, T) or (B, 1) int64, an index of these; None for one document from the first one on.
    """
    before = None if state is None else state.tokens()
    past = 0 if state is None else state.k.shape[1]
    first = None
    if not documents.single or (state is not None and state.start is not None):
        first = documents.first(before) + past
    if state is not None:
        k, v = (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
    return k, v, first


class Sinks(nn.Module):
    """The logits of the attention sinks, one for each head, which start at 0."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_heads))

    def reset_parameters(self) -> None:
        """Set the logits to 0."""
        nn.init.zeros_(self.logits)

    def forward(self) -> Tensor:
        """Return the logits (heads,) of this process's heads."""
        return local(self.logits)
