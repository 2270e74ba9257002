"""Causal attention with rotary position embeddings, the baseline of the mLSTM."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import Projection, SequenceMixer, at_least_float32, input_std, output_std
from tfla.ops.checks import check_cu_seqlens

ROTARY_BASE = 10_000.0


class KeyValues(NamedTuple):
    """The state of :class:`Attention`: keys and values of all S tokens so far."""

    k: Tensor
    """(B, S, heads, head_dim), rotated."""
    v: Tensor
    """(B, S, heads, head_dim)."""
    start: Tensor | None = None
    """(B,) int64, the index in S of the first token of the current document; None is 0 everywhere."""

    def detach(self) -> KeyValues:
        """Return the same state, detached from the autograd graph."""
        return KeyValues(self.k.detach(), self.v.detach(), self.start)


class Attention(SequenceMixer):
    """Causal attention within documents, softmax(q k^T / sqrt(d)) v, through torch's SDPA; no biases.

    The state is :class:`KeyValues`, which grows with every token. See :class:`SequenceMixer` for shapes. Documents and
    states need a boolean mask (B, T, S + T), for S cached tokens.

    Args:
        config: a config with mixer "attention"; head_dim must be even.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, or has another mixer.
    """

    def __init__(self, config: ModelConfig) -> None:
        check_config(config, "attention")
        super().__init__()
        d = config.d_model
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        std = input_std(d)
        self.q_proj = Projection(d, d, std)
        self.k_proj = Projection(d, d, std)
        self.v_proj = Projection(d, d, std)
        self.out_proj = Projection(d, d, output_std(d, config.num_blocks))

    def forward(
        self,
        x: Tensor,
        state: KeyValues | None = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, KeyValues | None]:
        """Run :meth:`SequenceMixer.forward`.

        Raises:
            ValueError: a state is given or requested together with cu_seqlens: the sequences' caches would differ in
                length.
        """
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, q)
            if state is not None or return_state:
                raise ValueError(
                    "cu_seqlens: got it with a state, expected neither state nor return_state in attention"
                )
            edges = torch.zeros(x.shape[1] + 1, dtype=torch.bool, device=x.device)
            document_start = edges.index_fill(0, cu_seqlens.long(), True)[None, :-1]
        if state is not None:
            check_state(state, k)
        past, start = (0, None) if state is None else (state.k.shape[1], state.start)
        position = torch.arange(past, past + x.shape[1], device=x.device)
        first = first_in_document(position, document_start, start)
        # Positions count from the document's start, so that its place in a batch changes no digit.
        relative = position if first is None else position - first
        table = cos_sin(relative, self.head_dim // 2, torch.promote_types(q.dtype, torch.float32))
        q, k = rotate(q, table), rotate(k, table)
        if state is not None:
            k, v = (torch.cat([old.to(new.dtype), new], 1) for old, new in ((state.k, k), (state.v, v)))
        plain = first is None and past == 0
        mask = None if plain else attention_mask(position, first, k.shape[1])
        h = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=plain
        )
        y = self.out_proj(h.transpose(1, 2).flatten(-2))
        if not return_state:
            return y, None
        return y, KeyValues(k, v, None if first is None else first[:, -1])

    def step(self, x: Tensor, state: KeyValues, in_place: bool = False) -> tuple[Tensor, KeyValues]:
        """Run :meth:`SequenceMixer.step`; the cache grows and is never overwritten, whatever in_place says."""
        y, new = self(x[:, None], state, return_state=True)
        return y[:, 0], new

    def initial_state(self, batch_size: int, device: torch.device) -> KeyValues:
        """Return an empty cache in the weights' dtype."""
        empty = torch.empty(batch_size, 0, self.num_heads, self.head_dim, dtype=self.q_proj.weight.dtype, device=device)
        return KeyValues(empty, empty)


# A registered operator, since torch.compile would otherwise recompute the cosines for every head and in the backward.
@torch.library.custom_op("tfla::turns", mutates_args=())
def cos_sin(position: Tensor, half: int, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of the rotary embedding at token positions (...): (2, ..., 1, half)."""
    frequency = ROTARY_BASE ** -(torch.arange(half, device=position.device, dtype=dtype) / half)
    angle = (position[..., None] * frequency)[..., None, :]
    return torch.stack([angle.cos(), angle.sin()])


@cos_sin.register_fake
def _(position: Tensor, half: int, dtype: torch.dtype) -> Tensor:
    return position.new_empty((2, *position.shape, 1, half), dtype=dtype)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply the rotary embedding (Su et al., 2021).

    Args:
        x: (B, T, heads, d), d even.
        table: what :func:`cos_sin` returns for positions (T,) or (B, T).
    """
    half = x.shape[-1] // 2
    wide = at_least_float32(x)
    cos, sin = table.unbind()
    a, b = wide[..., :half], wide[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def first_in_document(position: Tensor, document_start: Tensor | None, start: Tensor | None) -> Tensor | None:
    """Return, for every position (T,), the position of the first token of its document.

    Args:
        position: (T,) int64, counted from the first cached token.
        document_start: (B, T) bool, or None.
        start: (B,) int64, the first token of the document that a state carries on, or None.

    Returns:
        (B, T) or (B, 1) int64; None where all are 0.
    """
    if document_start is None:
        return None if start is None else start[:, None]
    first = torch.where(document_start, position, 0).cummax(1).values
    return first if start is None else torch.maximum(first, start[:, None])


def attention_mask(position: Tensor, first: Tensor | None, keys: int) -> Tensor | None:
    """Return which of the keys each query may attend to: bool (T, keys) or (B, 1, T, keys); None for all of them."""
    if first is None and position.shape[0] == 1:
        return None
    key = torch.arange(keys, device=position.device)
    causal = key <= position[:, None]
    return causal if first is None else (causal & (key >= first[..., None]))[:, None]


def check_state(state: object, k: Tensor) -> None:
    """Raise unless state is a cache to which keys k (B, T, heads, head_dim) can be appended."""
    if not isinstance(state, KeyValues):
        raise TypeError(f"state: got {type(state).__name__}, expected KeyValues")
    expected = (k.shape[0], state.k.shape[1], *k.shape[2:])
    for name in ("k", "v"):
        shape = tuple(getattr(state, name).shape)
        if shape != expected:
            raise ValueError(f"state.{name}: got shape {shape}, expected {expected}")
