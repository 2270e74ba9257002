"""The ways in which a recurrent mixer runs: over whole sequences, and by one token; `steps_pass.py` has the third one.

A mixer says once what it computes (:meth:`.RecurrentMixer.mix`), by the methods of a :class:`Pass`: the convolution,
the positions and the recurrence. Each kind of pass runs these in its own way, from the state before the call, and keeps
what the state after it consists of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tfla.backends.delta import BetaActivation
from tfla.nn import batch_invariance
from tfla.nn.layers import CLOSED_GATE
from tfla.nn.mixer_state import MixerState, StatesEvery
from tfla.nn.mixers.context import ContextPart
from tfla.nn.mixers.documents import Documents
from tfla.nn.mixers.shared_convolution import SharedConvolution
from tfla.nn.mixers.short_convolution import ShortConvolution
from tfla.ops.api import linear_attention
from tfla.ops.checks import check_cu_seqlens, is_empty_batch
from tfla.ops.delta import delta_rule
from tfla.ops.delta_activations import log_gate
from tfla.ops.delta_steps import delta_rule_step
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows
from tfla.ops.states_every import unstacked
from tfla.ops.steps import linear_attention_step

if TYPE_CHECKING:
    from tfla.nn.mixers.recurrent import RecurrentMixer


class Pass(ABC):
    """One call of a mixer. Shapes are (B, T, ...) over whole sequences, and (B, ...) for one token."""

    @abstractmethod
    def convolve(self, convolutions: Sequence[ShortConvolution], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Apply each convolution to its input (..., channels). A mixer calls this at most once."""

    @abstractmethod
    def position(self) -> Tensor:
        """Return the positions (...) of the tokens within their documents, int64."""

    @abstractmethod
    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Compute :func:`tfla.linear_attention`."""

    @abstractmethod
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
        """Compute :func:`tfla.delta_rule` with normalized q and k.

        Args:
            q, k, v, beta, beta_activation: its arguments.
            f: gates before their activation, of step or channel; None is no decay.
            decay: A_log and dt_bias of the activation "softplus" of the gates.
        """


class SequencePass(Pass):
    """A call over whole sequences; arguments are those of :meth:`SequenceMixer.forward`."""

    def __init__(
        self,
        mixer: RecurrentMixer,
        x: Tensor,
        state: MixerState | None,
        document_start: Tensor | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
        states_every: StatesEvery | None = None,
        rows: PoolRows | None = None,
    ) -> None:
        group = None if is_empty_batch(x, cu_seqlens) else mixer.context_parallel
        self.part = None if group is None else ContextPart(group, x.shape[1])
        self.sequences: Documents | None = None  # where processes share the steps, those of states
        if self.part is not None and cu_seqlens is not None:
            self.part.check_offsets(cu_seqlens, x)
            document_start = self.part.document_start(cu_seqlens, x.device)
            if state is None and not return_state:
                # Closed gates do the same but for NaN and infinities, and the exchange of a dense batch is faster.
                cu_seqlens = None
            else:
                self.sequences = self.part.sequences(cu_seqlens, x)
        elif cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x)
        self.mixer, self.batch, self.return_state = mixer, x.shape[0], return_state
        self.pool, self.rows = state, rows
        self.state = state if state is None or rows is None else state.read(rows)
        self.documents = Documents(x, document_start, None if self.part is not None else cu_seqlens)
        self.closed = None if self.sequences is not None else document_start  # the steps whose gates are closed
        self.options: dict[str, Any] = {
            "initial_state": None if self.state is None else self.state.recurrence,
            "cu_seqlens": cu_seqlens,
            "chunk_size": mixer.chunk_size,
            "backend": mixer.backend,
        }
        if group is not None:
            self.options["context_parallel"] = group
        if rows is not None:
            self.options["state_indices"] = rows.indices
        self.ends: Sequence[int] = () if states_every is None else states_every.ends(x.shape[1])
        if states_every is not None:
            self.options["states_every"] = states_every.every
        # The parts of the states at `ends`, and of the state after the last token.
        self.between: list[State] = []
        self.convolution_between: list[tuple[Tensor, ...]] = []
        self.recurrence: State | None = None
        self.convolution: tuple[Tensor, ...] = ()
        self.length: Tensor | None = None  # of the last document, where processes share the steps

    def convolve(self, convolutions: Sequence[ShortConvolution], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run :meth:`Pass.convolve`."""
        if self.part is not None:
            old = None if self.state is None else self.state.convolution
            shared = SharedConvolution(self.part, convolutions, self.documents, self.sequences, old)
            found, self.convolution = shared.run(inputs, self.return_state)
            return found
        before: Sequence[Tensor | None] = [None] * len(inputs) if self.state is None else self.state.convolution
        triples = list(zip(convolutions, inputs, before, strict=True))
        if self.return_state:
            self.convolution = tuple(conv.last_inputs(x, old, self.documents) for conv, x, old in triples)
        for end in self.ends:
            documents = self.documents.within(slice(end))
            kept = [conv.last_inputs(x[:, :end], old, documents) for conv, x, old in triples]
            self.convolution_between.append(tuple(kept))
        return tuple(conv(x, old, self.documents) for conv, x, old in triples)

    def position(self) -> Tensor:
        """Run :meth:`Pass.position`."""
        before = None if self.state is None else self.state.position
        if self.part is None or self.sequences is not None:
            return (self.sequences or self.documents).position(before)
        position, self.length = self.part.position(self.documents, self.batch, before)
        return position

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Run :meth:`Pass.linear_attention`."""
        tensors = {"q": q, "k": k, "v": v, "log_f": self._reset(log_f), "log_i": log_i}
        return self._compute(linear_attention, tensors, scale=scale)

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
        options: dict[str, Any] = {"normalize_qk": True, "beta_activation": beta_activation}
        if self.closed is not None:
            # Only an activated gate can be closed, so that the activation is applied here, not by the operator.
            log_f = beta.new_zeros(beta.shape, dtype=torch.float32) if f is None else f
            if f is not None and decay is not None:
                log_f = log_gate(f, "softplus", *decay, 0.0)
            f = self._reset(log_f)
        elif f is not None and decay is not None:
            options |= {"gate_activation": "softplus", "A_log": decay[0], "dt_bias": decay[1]}
        return self._compute(delta_rule, {"q": q, "k": k, "v": v, "beta": beta, "log_f": f}, **options)

    def new_state(self) -> MixerState | None:
        """Return the state after the last token, None where none is requested."""
        if not self.return_state:
            return None
        assert self.recurrence is not None
        position = self.length
        if self.mixer.has_position and position is None:
            before = None if self.state is None else self.state.position
            position = (self.sequences or self.documents).length(before, self.batch)
        new = MixerState(self.recurrence, self.convolution, position)
        return new if self.pool is None or self.rows is None else self.pool.write(self.rows, new)

    def states_between(self) -> list[MixerState]:
        """Return the states that were requested, at the `ends` of the call."""
        found = []
        before = None if self.state is None else self.state.position
        for j, end in enumerate(self.ends):
            position = self.documents.within(slice(end)).length(before, self.batch) if self.mixer.has_position else None
            convolution = self.convolution_between[j] if self.convolution_between else ()
            found.append(MixerState(self.between[j], convolution, position))
        return found

    def _reset(self, log_f: Tensor) -> Tensor:
        """Close gates (B, T, heads) or (B, T, heads, dqk) where a document starts."""
        starts = self.closed
        if starts is None:
            return log_f
        return log_f.masked_fill(starts.reshape(*starts.shape, *[1] * (log_f.dim() - 2)), CLOSED_GATE)

    def _compute(self, operator: Callable[..., Any], tensors: dict[str, Tensor | None], **options: Any) -> Tensor:
        """Return h of an operator and keep the state."""
        h: Tensor
        if self.mixer.batch_invariant:
            found = batch_invariance.sequence_by_sequence(
                operator, tensors, return_state=self.return_state, **self.options, **options
            )
        elif self.return_state:
            found = operator(**tensors, return_state=True, **self.options, **options)
        else:
            found = operator(**tensors, **self.options, **options), None
        h, self.recurrence, *between = found
        self.between = [each for states in between for each in unstacked(states)]
        return h


class StepPass(Pass):
    """A call for one token of each sequence; arguments are those of :meth:`SequenceMixer.step`."""

    def __init__(self, mixer: RecurrentMixer, state: MixerState, in_place: bool, rows: PoolRows | None = None) -> None:
        self.mixer, self.pool, self.rows = mixer, state, rows
        self.state = state if rows is None else state.read(rows)
        self.options: dict[str, Any] = {"in_place": in_place} if rows is None else {"state_indices": rows.indices}

    def convolve(self, convolutions: Sequence[ShortConvolution], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run :meth:`Pass.convolve`."""
        found = [conv.step(x, old) for conv, x, old in zip(convolutions, inputs, self.state.convolution, strict=True)]
        self.state = self.state._replace(convolution=tuple(new for _, new in found))
        return tuple(y for y, _ in found)

    def position(self) -> Tensor:
        """Run :meth:`Pass.position`."""
        position = self.state.position
        assert position is not None
        self.state = self.state._replace(position=position + 1)
        return position

    def linear_attention(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, log_i: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """Run :meth:`Pass.linear_attention`."""
        tensors = {"q": q, "k": k, "v": v, "log_f": log_f, "log_i": log_i}
        return self._compute(linear_attention_step, tensors, scale=scale)

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
        gates = {} if decay is None else {"gate_activation": "softplus", "A_log": decay[0], "dt_bias": decay[1]}
        tensors = {"q": q, "k": k, "v": v, "beta": beta, "log_f": f}
        return self._compute(delta_rule_step, tensors, normalize_qk=True, beta_activation=beta_activation, **gates)

    def new_state(self) -> MixerState:
        """Return the state after the token, or the pool with it."""
        return self.state if self.rows is None else self.pool.write(self.rows, self.state)

    def _compute(self, operator: Callable[..., Any], tensors: dict[str, Tensor | None], **options: Any) -> Tensor:
        """Return h of an operator and keep the state."""
        options |= {"state": self.state.recurrence, **self.options}
        h: Tensor
        if self.mixer.batch_invariant:
            h, recurrence = batch_invariance.step_by_sequence(operator, tensors, **options)
        else:
            h, recurrence = operator(**tensors, **options)
        self.state = self.state._replace(recurrence=recurrence)
        return h
