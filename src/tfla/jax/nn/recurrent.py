"""The base class of the mixers on linear attention and the delta rule, as modules of `flax.nnx`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tfla._util.shapes import check_mixer_state
from tfla.jax import kernels
from tfla.jax.api import linear_attention
from tfla.jax.checks import check_context_parallel, check_cu_seqlens
from tfla.jax.choice import DELTA_KERNELS, KERNELS, Offsets
from tfla.jax.delta.activations import log_gate
from tfla.jax.delta.api import delta_rule
from tfla.jax.delta.steps import delta_rule_step
from tfla.jax.nn.layers import projection
from tfla.jax.nn.short_convolution import BEFORE_ALL, Documents, ShortConvolution
from tfla.jax.packed_parts import Parts
from tfla.jax.spans import PackedSteps, of_last_device
from tfla.jax.state import State
from tfla.jax.steps import linear_attention_step
from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import CLOSED_GATE, input_std, output_std

Operator = Callable[..., Any]
Decay = tuple[Array, Array]  # A_log and dt_bias
Options = tuple[Any, Any, nnx.Rngs]  # dtype, param_dtype and rngs


class MixerState(NamedTuple):
    """The state of a recurrent mixer.

    Attributes:
        recurrence: the state of the operator.
        convolution: (B, conv_size - 1, channels) for each short convolution: its last inputs.
        position: (B,) int32, the number of tokens of the document so far, for mixers with a rotary embedding.
    """

    recurrence: State
    convolution: tuple[Array, ...] = ()
    position: Array | None = None


jax.export.register_namedtuple_serialization(MixerState, serialized_name="tfla.jax.nn.MixerState")


class Run:
    """One call of a mixer. Shapes are (B, T, ...) over whole sequences, and (B, ...) for one token.

    Args:
        mixer: the mixer.
        state: the state before the call.
    """

    documents: Documents | None = None

    def __init__(self, mixer: RecurrentMixer, state: MixerState | None) -> None:
        self.mixer, self.state = mixer, state
        self.recurrence: State | None = None
        self.convolution: tuple[Array, ...] = ()
        self.tokens: Array | None = None  # of the document so far, after the call

    def convolve(self, convolutions: Sequence[ShortConvolution], inputs: Sequence[Array]) -> list[Array]:
        """Apply each convolution to its input (..., channels), as the next token of each sequence."""
        assert self.state is not None
        found, kept = [], []
        for convolution, x, before in zip(convolutions, inputs, self.state.convolution, strict=True):
            one = Documents.of(1, None, None)
            found.append(convolution(x[:, None], before, one)[:, 0])
            kept.append(convolution.last_inputs(x[:, None], before, one))
        self.convolution = tuple(kept)
        return found

    def position(self) -> Array:
        """Return the positions of the tokens within their documents: (B,), or (B, T) or (1, T) of whole sequences."""
        assert self.state is not None
        assert self.state.position is not None
        self.tokens = self.state.position + 1
        return self.state.position

    def linear_attention(self, q: Array, k: Array, v: Array, log_f: Array, **options: Any) -> Array:
        """Compute :func:`tfla.jax.linear_attention`."""
        names = KERNELS if log_f.ndim == v.ndim - 1 else DELTA_KERNELS
        return self.compute(linear_attention, linear_attention_step, (q, k, v, log_f), names, options)

    def delta_rule(
        self, q: Array, k: Array, v: Array, beta: Array, f: Array | None = None, decay: Decay | None = None
    ) -> Array:
        """Compute :func:`tfla.jax.delta_rule` with normalized q and k.

        Args:
            q, k, v: its arguments.
            beta: the write strengths before their activation.
            f: the gates before their activation "softplus"; None is no decay.
            decay: A_log and dt_bias of that activation.
        """
        options: dict[str, Any] = {"normalize_qk": True, "beta_activation": self.mixer.beta_activation, "log_f": f}
        if f is not None and decay is not None:
            options |= {"gate_activation": "softplus", "A_log": decay[0], "dt_bias": decay[1]}
        return self.compute(delta_rule, delta_rule_step, (q, k, v, beta), DELTA_KERNELS, options)

    def compute(
        self, whole: Operator, step: Operator, arrays: tuple[Array, ...], names: dict[str, Any], options: dict[str, Any]
    ) -> Array:
        """Return h of an operator and keep its state.

        Args:
            whole, step: the operator over whole sequences, and of one step.
            arrays: its first arguments.
            names: the backends that it has.
            options: its other options.
        """
        assert self.state is not None
        h: Array
        h, self.recurrence = step(
            *arrays, state=self.state.recurrence, backend=self.mixer.backend_of(names), **options
        )  # fmt: skip
        return h

    def new_state(self) -> MixerState | None:
        """Return the state after the call."""
        return None if self.recurrence is None else MixerState(self.recurrence, self.convolution, self.tokens)


class SequenceRun(Run):
    """A call over whole sequences; arguments are those of :meth:`RecurrentMixer.__call__`."""

    def __init__(
        self, mixer: RecurrentMixer, x: Array, state: MixerState | None, document_start: Array | None,
        cu_seqlens: Offsets | None, return_state: bool, context_parallel: str | None,
    ) -> None:  # fmt: skip
        super().__init__(mixer, state)
        if document_start is not None and cu_seqlens is not None:
            raise ValueError("document_start: got it together with cu_seqlens, expected at most one of them")
        check_context_parallel(context_parallel)
        T = x.shape[1]
        self.parts: Parts | None = None  # of packed sequences with states
        if cu_seqlens is not None and context_parallel is not None:
            check_cu_seqlens(cu_seqlens, x, context_parallel)
            if state is not None or return_state:
                self.parts = Parts.of(T, cu_seqlens, context_parallel)
            else:
                document_start, cu_seqlens = PackedSteps(T, cu_seqlens, context_parallel).starts[None], None
        self.documents = Documents.of(T, document_start, cu_seqlens if self.parts is None else self.parts.offsets)
        self.document_start, self.return_state, self.axis = document_start, return_state, context_parallel
        self.batch = x.shape[0]
        self.options = {
            "initial_state": None if state is None else state.recurrence,
            "cu_seqlens": cu_seqlens,
            "chunk_size": mixer.chunk_size,
            "return_state": return_state,
            "context_parallel": context_parallel,
        }

    def convolve(self, convolutions: Sequence[ShortConvolution], inputs: Sequence[Array]) -> list[Array]:
        """Apply each convolution to its input (B, T, channels)."""
        assert self.documents is not None
        found, kept = [], []
        for n, (convolution, x) in enumerate(zip(convolutions, inputs, strict=True)):
            before = None if self.state is None else self.state.convolution[n]
            if self.axis is not None:
                before = self._from_previous(convolution, x, before)
            found.append(convolution(x, before, self.documents))
            if self.return_state:
                kept.append(self._after_all(convolution.last_inputs(x, before, self.documents)))
        self.convolution = tuple(kept)
        return found

    def position(self) -> Array:
        """Return the positions of the tokens within their documents."""
        assert self.documents is not None
        before = None if self.state is None else self.state.position
        if self.parts is not None:
            earlier = self.parts.earlier_steps
            before = earlier if before is None else before + earlier
        elif self.axis is not None:
            before = self._carried_tokens(self.axis, before)
        if self.return_state:
            self.tokens = self._after_all(self.documents.lengths(before, self.batch).astype(jnp.int32))
        return self.documents.token - self.documents.first_tokens(before)

    def linear_attention(self, q: Array, k: Array, v: Array, log_f: Array, **options: Any) -> Array:
        """Compute :func:`tfla.jax.linear_attention`; no state reaches the first token of a document."""
        return super().linear_attention(q, k, v, self._reset(log_f), **options)

    def delta_rule(
        self, q: Array, k: Array, v: Array, beta: Array, f: Array | None = None, decay: Decay | None = None
    ) -> Array:
        """Compute :func:`tfla.jax.delta_rule`; no state reaches the first token of a document."""
        if self.document_start is not None:  # a gate is closed after its activation
            log_f = jnp.zeros(beta.shape, jnp.float32) if f is None else f
            if f is not None and decay is not None:
                log_f = log_gate(f, "softplus", *decay, 0.0)
            f, decay = self._reset(log_f), None
        return super().delta_rule(q, k, v, beta, f, decay)

    def compute(
        self, whole: Operator, step: Operator, arrays: tuple[Array, ...], names: dict[str, Any], options: dict[str, Any]
    ) -> Array:
        """Return h of an operator and keep its state."""
        found = whole(*arrays, backend=self.mixer.backend_of(names), **self.options, **options)
        h: Array
        h, self.recurrence = found if self.return_state else (found, None)
        return h

    def _reset(self, log_f: Array) -> Array:
        """Close gates (B, T, heads) or (B, T, heads, dqk) where a document starts."""
        if self.document_start is None:
            return log_f
        starts = self.document_start.reshape(*self.document_start.shape, *[1] * (log_f.ndim - 2))
        return jnp.where(starts, CLOSED_GATE, log_f)

    def _after_all(self, x: Array) -> Array:
        """Return what comes after all steps of each sequence (B, ...), from what comes after those of this device."""
        if self.parts is not None:
            return self.parts.of_last_device(x)
        return x if self.axis is None else of_last_device(x, self.axis)

    def _carried_tokens(self, axis: str, before: Array | None) -> Array:
        """Return how many tokens before those of this device belong to the document that goes on there: (B,)."""
        assert self.documents is not None
        T, me = len(self.documents.token), jax.lax.axis_index(axis)
        start = jnp.zeros(self.batch, jnp.int32) if before is None else -before
        if self.documents.first is not None:  # of a document that starts on a device before
            own = self.documents.first[:, -1]
            every = jax.lax.all_gather(jnp.where(own < 0, BEFORE_ALL, own + me * T), axis)
            earlier = jnp.arange(len(every))[:, None] < me
            start = jnp.maximum(start, jnp.where(earlier, every, BEFORE_ALL).max(0))
        return me * T - start

    def _from_previous(self, convolution: ShortConvolution, x: Array, before: Array | None) -> Array:
        """Return the inputs before the first token of each sequence on this device, from those before whole sequences.

        Where a sequence goes on from the device before they are the last ones there.
        """
        assert self.axis is not None
        assert self.documents is not None
        if x.shape[1] < convolution.size - 1:
            raise ValueError(
                f"x: got {x.shape[1]} steps with context parallelism, expected at least {convolution.size - 1}"
            )
        size = jax.lax.axis_size(self.axis)
        last = convolution.last_inputs(x, None if self.parts is None else before, self.documents)
        if self.parts is not None:
            last = last[self.parts.last(self.parts.here)[0]]
        halo = jax.lax.ppermute(last, self.axis, [(n, n + 1) for n in range(size - 1)])
        if self.parts is not None:
            return jnp.where(self.parts.goes_on[:, None, None], halo, 0 if before is None else before.astype(x.dtype))
        if before is None:
            return halo
        return jnp.where(jax.lax.axis_index(self.axis) == 0, before.astype(halo.dtype), halo)


class RecurrentMixer(nnx.Module):
    """A mixer of projections, short convolutions, a recurrence, a norm with an output gate, and an output projection.

    The weights are those of the mixer of :mod:`tfla.nn` with the same name. The backends of GPUs count as None where
    JAX has no GPU or no such backend of the operator.

    Args:
        config: a config whose mixer is ``name``.
        rngs: the source of the initial weights.
        dtype: dtype of activations and of products with weights; None is that of x and the weights.
        param_dtype: dtype of the weights.
        num_heads, num_qk_heads: the numbers of heads of v, and of q and k; None is that of the config.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, or has another mixer.
    """

    name: ClassVar[str]
    has_convolution: ClassVar[bool] = True
    convolution_bias: ClassVar[bool] = False
    has_position: ClassVar[bool] = False

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32,
        num_heads: int | None = None, num_qk_heads: int | None = None,
    ) -> None:  # fmt: skip
        check_config(config, self.name)
        self.num_heads = config.num_heads if num_heads is None else num_heads
        self.qk_head_dim, self.head_dim = config.qk_head_dim, config.head_dim
        self.chunk_size, self.configured_backend = config.chunk_size, config.backend
        self.beta_activation = "2sigmoid" if config.negative_eigenvalues else "sigmoid"
        self.param_dtype = param_dtype
        options = dtype, param_dtype, rngs
        d, values = config.d_model, self.num_heads * self.head_dim
        keys = (self.num_heads if num_qk_heads is None else num_qk_heads) * self.qk_head_dim
        self.q_proj, self.k_proj, self.v_proj = (input_projection(d, n, options) for n in (keys, keys, values))
        if self.has_convolution:
            self.q_conv, self.k_conv, self.v_conv = (
                ShortConvolution(n, config.conv_size, self.convolution_bias, param_dtype, rngs)
                for n in (keys, keys, values)
            )
        self.out_proj = projection(values, d, output_std(d, config.num_blocks), *options)
        self.add_weights(config, options)

    @abstractmethod
    def add_weights(self, config: ModelConfig, options: Options) -> None:
        """Add the weights that other mixers do not have."""

    @abstractmethod
    def mix(self, x: Array, run: Run) -> Array:
        """Return the mixed x (..., d_model)."""

    def __call__(
        self,
        x: Array,
        state: MixerState | None = None,
        *,
        document_start: Array | None = None,
        cu_seqlens: Offsets | None = None,
        return_state: bool = False,
        context_parallel: str | None = None,
    ) -> tuple[Array, MixerState | None]:
        """Mix whole sequences; arguments and results are those of :meth:`tfla.jax.nn.MLSTM.__call__`."""
        self._check_state(state, len(x) if cu_seqlens is None and context_parallel is None else None)
        run = SequenceRun(self, x, state, document_start, cu_seqlens, return_state, context_parallel)
        return self.mix(x, run), run.new_state()

    def step(self, x: Array, state: MixerState) -> tuple[Array, MixerState]:
        """Mix one token of each sequence: x (B, d_model), and return the result and the state after it."""
        self._check_state(state, len(x))
        run = Run(self, state)
        mixed, new = self.mix(x, run), run.new_state()
        assert new is not None
        return mixed, new

    def initial_state(self, batch_size: int) -> MixerState:
        """Return a state of zeros: float64 if the weights are float64, else float32; convolutions in their dtype."""
        dtype = jnp.float64 if self.param_dtype == jnp.float64 else jnp.float32
        recurrence = State.zeros(
            batch_size, self.num_heads, self.qk_head_dim, self.head_dim, normalize=False, dtype=dtype
        )  # fmt: skip
        convolution = tuple(
            jnp.zeros((batch_size, conv.size - 1, conv.weight.shape[0]), self.param_dtype)
            for conv in self._convolutions()
        )
        position = jnp.zeros(batch_size, jnp.int32) if self.has_position else None
        return MixerState(recurrence, convolution, position)

    def backend_of(self, names: dict[str, Any]) -> str | None:
        """Return the backend of the config where an operator has it and JAX a GPU for it, else None."""
        name = self.configured_backend
        if name not in names or (name in kernels.BACKENDS and kernels.present_gpu() is None):
            return None
        return name

    def queries_keys_values(self, x: Array, run: Run) -> tuple[Array, ...]:
        """Return q, k (..., q/k heads, dqk) and v (..., heads, dhv), after the short convolutions."""
        found = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if self.has_convolution:
            found = run.convolve(self._convolutions(), found)
        dims = self.qk_head_dim, self.qk_head_dim, self.head_dim
        return tuple(by_heads(t, dim) for t, dim in zip(found, dims, strict=True))

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        """Return the short convolutions."""
        return (self.q_conv, self.k_conv, self.v_conv) if self.has_convolution else ()

    def _check_state(self, state: object, sequences: int | None) -> None:
        """Raise unless state is None or one of a mixer like this, apart from what the operator checks.

        Args:
            state: the state.
            sequences: how many it has, (B,); None where its rows are not those of a batch.
        """
        if state is None:
            return
        if not isinstance(state, MixerState):
            raise TypeError(f"state: got {type(state).__name__}, expected MixerState")
        sizes = [(conv.size - 1, conv.weight.shape[0]) for conv in self._convolutions()]
        check_mixer_state(state, sizes, self.has_position, sequences)


def input_projection(in_features: int, out_features: int, options: Options) -> nnx.Linear:
    """Return a linear layer with the initial weights of one that reads the residual stream."""
    return projection(in_features, out_features, input_std(in_features), *options)


def by_heads(x: Array, dim: int) -> Array:
    """Return (..., heads dim) as (..., heads, dim)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // dim, dim)
