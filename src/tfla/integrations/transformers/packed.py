"""The functions that keep packed sequences apart in layers of transformers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfla.integrations.mamba.layer import convolve


def keep_sequences_apart(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function for transformers' ``causal_conv1d_fn`` that also takes packed sequences.

    Calls without packed sequences go to the original. Without the package causal_conv1d the original refuses them.
    """

    @functools.wraps(original)
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Convolve hidden_states (batch, channels, seqlen) with weight (channels, width) along time.

        Args:
            hidden_states: (batch, channels, seqlen).
            weight: (channels, width).
            bias: (channels,) or None.
            activation: the name that transformers has for the activation, or None.
            seq_idx: (batch, seqlen) int, the index of the sequence to which a step belongs, or None.
            cu_seq_lens_q: (sequences + 1,) int, for batch 1: the first step of each packed sequence and, last, the
                number of new steps; read where seq_idx is None. Steps before the new ones, of a cache or of padding,
                belong to the first sequence.
            kwargs: arguments of the original.

        Returns:
            (batch, channels, seqlen) in the dtype of hidden_states.
        """
        if seq_idx is None and cu_seq_lens_q is None:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        if seq_idx is None:
            seq_idx = _sequence_index(cu_seq_lens_q, hidden_states.shape[-1])
        if seq_idx.shape[-1] != hidden_states.shape[-1]:
            raise ValueError(
                f"seq_idx: got {seq_idx.shape[-1]} steps for {hidden_states.shape[-1]} steps with those of the cache,"
                " expected packed sequences in the first call of a cache only"
            )
        y = convolve(hidden_states.transpose(1, 2), weight, bias, seq_idx)
        return _activate(y, activation).to(hidden_states.dtype).transpose(1, 2)

    return causal_conv1d_fn


def forget_at_starts(log_f: Tensor, seq_idx: Tensor) -> Tensor:
    """Return log-decays (batch, seqlen, heads) or (batch, seqlen, heads, K), -inf where another sequence starts.

    Args:
        log_f: the log-decays.
        seq_idx: (batch, seqlen) int, the index of the sequence to which a step belongs.
    """
    starts = torch.diff(seq_idx, dim=1, prepend=seq_idx[:, :1]) != 0
    return log_f.masked_fill(starts.reshape(*starts.shape, *[1] * (log_f.dim() - 2)), -math.inf)


def _sequence_index(cu_seqlens: Any, steps: int) -> Tensor:
    """Return the index (1, steps) of the packed sequence to which each step belongs.

    The offsets count the last steps alone: a layer with a cache has the steps of the cache, or padding, before them.
    """
    step = torch.arange(steps, device=cu_seqlens.device) - (steps - cu_seqlens[-1])
    return torch.bucketize(step, cu_seqlens[1:], right=True)[None]


def _activate(x: Tensor, activation: str | None) -> Tensor:
    """Return transformers' activation of this name."""
    from transformers.activations import ACT2FN

    return x if activation is None else ACT2FN[activation](x)
