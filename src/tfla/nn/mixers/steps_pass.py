"""The third way in which a recurrent mixer runs: a few proposed tokens, of which some are accepted later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tfla.backends.delta import BetaActivation
from tfla.nn.mixer_state import MixerState
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.short_convolution import ShortConvolution, inputs_after
from tfla.ops.delta_steps import delta_rule_steps
from tfla.ops.steps import linear_attention_steps


class StepsPass(Pass):
    """A call for a few tokens of each sequence; arguments are those of :meth:`SequenceMixer.steps`.

    Args:
        state: the state before the tokens.
        count: the number of tokens, T.
        in_place: whether :meth:`accept` overwrites the C of the recurrence.
    """

    def __init__(self, state: MixerState, count: int, in_place: bool) -> None:
        self.state, self.count, self.in_place = state, count, in_place
        self.inputs: tuple[Tensor, ...] = ()  # of each convolution, (B, size - 1 + T, channels)
        self.recur: Callable[..., Any] | None = None

    def convolve(self, convolutions: Sequence[ShortConvolution], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run :meth:`Pass.convolve`."""
        found = [conv.steps(x, old) for conv, x, old in zip(convolutions, inputs, self.state.convolution, strict=True)]
        self.inputs = tuple(x for _, x in found)
        return tuple(y for y, _ in found)

    def position(self) -> Tensor:
        """Run :meth:`Pass.position`."""
        position = self.state.position
        assert position is not None
        return position[:, None] + torch.arange(self.count, device=position.device)

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Run :meth:`Pass.linear_attention`."""
        state = self.state.recurrence
        return self._verify(functools.partial(linear_attention_steps, q, k, v, log_f, state, log_i, scale=scale))

    def delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        beta_activation: BetaActivation,
        f: Tensor | None = None,
        decay: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run :meth:`Pass.delta_rule`."""
        gates: dict[str, Any] = {"normalize_qk": True, "beta_activation": beta_activation}
        if decay is not None:
            gates |= {"gate_activation": "softplus", "A_log": decay[0], "dt_bias": decay[1]}
        return self._verify(functools.partial(delta_rule_steps, q, k, v, beta, self.state.recurrence, f, **gates))

    def accept(self, lengths: Tensor) -> MixerState:
        """Return the state after the first lengths (B,) of the tokens."""
        assert self.recur is not None
        _, recurrence = self.recur(lengths=lengths, in_place=self.in_place)
        convolution = tuple(inputs_after(x, lengths, self.count) for x in self.inputs)
        position = self.state.position
        return MixerState(recurrence, convolution, None if position is None else position + lengths)

    def _verify(self, recur: Callable[..., Any]) -> Tensor:
        """Return h of all tokens and keep the call."""
        self.recur = recur
        h: Tensor = recur(return_state=False)
        return h
