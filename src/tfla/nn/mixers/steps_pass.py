"""The third way in which a recurrent mixer runs: a few proposed tokens, of which some are accepted later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tfla.backends.delta import BetaActivation
from tfla.nn import batch_invariance
from tfla.nn.mixer_state import MixerState
from tfla.nn.mixers.passes import Pass
from tfla.nn.mixers.short_convolution import ShortConvolution, inputs_after
from tfla.ops.delta_steps import delta_rule_steps
from tfla.ops.state_pool import PoolRows
from tfla.ops.steps import linear_attention_steps

if TYPE_CHECKING:
    from tfla.nn.mixers.recurrent import RecurrentMixer


class StepsPass(Pass):
    """A call for a few tokens of each sequence; arguments are those of :meth:`SequenceMixer.steps`.

    Args:
        mixer: the layer.
        state: the state before the tokens.
        count: the number of tokens, T.
        in_place: whether :meth:`accept` overwrites the C of the recurrence.
        rows: the row of each sequence in ``state``, which is then a pool, whose rows :meth:`accept` overwrites.
    """

    def __init__(
        self, mixer: RecurrentMixer, state: MixerState, count: int, in_place: bool, rows: PoolRows | None = None
    ) -> None:
        self.mixer, self.pool, self.rows = mixer, state, rows
        self.state = state if rows is None else state.read(rows)
        self.count, self.in_place = count, in_place and rows is None
        self.inputs: tuple[Tensor, ...] = ()  # of each convolution, (B, size - 1 + T, channels)
        self.recur: Callable[..., Any] | None = None  # the recurrence of all tokens, to be accepted by a second call

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
        tensors = {"q": q, "k": k, "v": v, "log_f": log_f, "log_i": log_i}
        return self._verify(linear_attention_steps, tensors, scale=scale)

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
        if decay is not None:  # copies, since FSDP2 frees gathered parameters before tokens are accepted
            gates |= {"gate_activation": "softplus", "A_log": decay[0].clone(), "dt_bias": decay[1].clone()}
        return self._verify(delta_rule_steps, {"q": q, "k": k, "v": v, "beta": beta, "log_f": f}, **gates)

    def accept(self, lengths: Tensor) -> MixerState:
        """Return the state after the first lengths (B,) of the tokens."""
        assert self.recur is not None
        _, recurrence = self.recur(lengths=lengths, in_place=self.in_place)
        convolution = tuple(inputs_after(x, lengths, self.count) for x in self.inputs)
        position = self.state.position
        new = MixerState(recurrence, convolution, None if position is None else position + lengths)
        return new if self.rows is None else self.pool.write(self.rows, new)

    def _verify(self, operator: Callable[..., Any], tensors: dict[str, Tensor | None], **options: Any) -> Tensor:
        """Return h of all tokens and keep the call."""
        options["state"] = self.state.recurrence
        if self.rows is not None:
            options["state_indices"] = self.rows.indices
        if self.mixer.batch_invariant:
            self.recur = functools.partial(batch_invariance.step_by_sequence, operator, tensors, **options)
        else:
            self.recur = functools.partial(operator, **tensors, **options)
        h: Tensor = self.recur(return_state=False)
        return h
