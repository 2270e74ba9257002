"""The base class of the mixers on :func:`tfla.linear_attention` and :func:`tfla.delta_rule`."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tfla._util.shapes import check_mixer_state
from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import Accept, Projection, SequenceMixer, Sharding, input_std, output_std
from tfla.nn.mixer_state import MixerState, StatesEvery
from tfla.nn.mixers.gather_steps import start_shared
from tfla.nn.mixers.passes import Pass, SequencePass, StepPass
from tfla.nn.mixers.short_convolution import ShortConvolution
from tfla.nn.mixers.steps_pass import StepsPass
from tfla.ops.checks import is_empty_batch
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows


class RecurrentMixer(SequenceMixer):
    """A mixer of projections, short convolutions, a recurrence, a norm with an output gate, and an output projection.

    A subclass says in :meth:`mix` what it computes, once for whole sequences, single tokens and a few proposed tokens:
    a :class:`~tfla.nn.mixers.passes.Pass` runs the convolutions and the recurrence in each way, and keeps their states.

    Args:
        config: a config whose mixer is ``name``.
        num_heads: the number of heads of v; None is that of the config.
        num_qk_heads: the number of heads of q and k, which divides it; None is as many.

    Attributes:
        name: the name of the mixer in configs.
        has_convolution: whether q, k and v come from short convolutions.
        convolution_bias: whether these have a bias.
        has_position: whether the mixer reads the positions of tokens, so that its state has the next one.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, or has another mixer.
    """

    name: ClassVar[str]
    has_convolution: ClassVar[bool] = False
    convolution_bias: ClassVar[bool] = False
    has_position: ClassVar[bool] = False
    tensor_parallel: ClassVar[dict[str, Sharding]] = {
        "q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "out_proj": "rows",
        "q_conv": "heads", "k_conv": "heads", "v_conv": "heads",
    }  # fmt: skip

    def __init__(self, config: ModelConfig, num_heads: int | None = None, num_qk_heads: int | None = None) -> None:
        check_config(config, self.name)
        super().__init__()
        self.num_heads = config.num_heads if num_heads is None else num_heads
        self.num_qk_heads = self.num_heads if num_qk_heads is None else num_qk_heads
        self.qk_head_dim, self.head_dim = config.qk_head_dim, config.head_dim
        self.chunk_size, self.backend = config.chunk_size, config.backend
        self.context_parallel: Any = None  # the processes that share the steps, as `tfla.linear_attention` takes them
        d, keys, values = config.d_model, self.num_qk_heads * self.qk_head_dim, self.num_heads * self.head_dim
        std = input_std(d)
        self.q_proj = Projection(d, keys, std)
        self.k_proj = Projection(d, keys, std)
        self.v_proj = Projection(d, values, std)
        if self.has_convolution:
            size, bias = config.conv_size, self.convolution_bias
            self.q_conv = ShortConvolution(keys, size, bias)
            self.k_conv = ShortConvolution(keys, size, bias)
            self.v_conv = ShortConvolution(values, size, bias)
        self.out_proj: nn.Linear = Projection(values, d, output_std(d, config.num_blocks))

    @property
    def reads_rows(self) -> bool:
        """Return whether :meth:`forward` takes ``rows``: the operators do unless processes share the steps."""
        return self.context_parallel is None

    @abstractmethod
    def mix(self, x: Tensor, run: Pass) -> Tensor:
        """Return the mixed x (..., d_model).

        Args:
            x: (B, T, d_model), or (B, d_model) for one token.
            run: the way in which the convolutions and the recurrence run.
        """

    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        states_every: StatesEvery | None = None,
        rows: PoolRows | None = None,
    ) -> tuple[Tensor, MixerState | None]:
        """Run :meth:`SequenceMixer.forward`; with cu_seqlens, a state has a row per packed sequence.

        Where documents begin at ``document_start``, gates close, and NaN or infinities of a document reach those after
        it. With ``cu_seqlens`` they reach no other sequence, but with ``context_parallel`` this holds only where states
        are given or returned: other calls close gates, since the exchange is faster.
        """
        sequences = x.shape[0] if cu_seqlens is None and rows is None else None
        check = functools.partial(self._check_state, state, sequences)
        start = functools.partial(
            SequencePass, self, x, state, document_start, cu_seqlens, return_state, states_every, rows
        )
        run: SequencePass | None
        if self.context_parallel is None or is_empty_batch(x, cu_seqlens):
            check()
            run = start()
        else:
            x, run = start_shared(
                self.context_parallel, x, x, cu_seqlens, check=check, start=start, equal=cu_seqlens is not None
            )
        if run is None:  # refused, with an error that the graph raises
            return x, None
        mixed = self.mix(x, run)
        if states_every is not None:
            states_every.states += run.states_between()
        return mixed, run.new_state()

    def step(
        self, x: Tensor, state: MixerState, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, MixerState]:
        """Run :meth:`SequenceMixer.step`."""
        self._check_state(state, None if rows is not None else x.shape[0])
        run = StepPass(self, state, in_place, rows)
        return self.mix(x, run), run.new_state()

    def steps(
        self, x: Tensor, state: MixerState, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, Accept]:
        """Run :meth:`SequenceMixer.steps`."""
        self._check_state(state, None if rows is not None else x.shape[0])
        run = StepsPass(self, state, x.shape[1], in_place, rows)
        return self.mix(x, run), run.accept

    def initial_state(self, batch_size: int, device: torch.device) -> MixerState:
        """Return a state of zeros: float64 if the weights are float64, else float32; convolutions in their dtype."""
        weight = self.q_proj.weight
        recurrence = State.zeros(
            batch_size, self.num_heads, self.qk_head_dim, self.head_dim, normalize=False,
            dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32, device=device,
        )  # fmt: skip
        convolution = tuple(
            torch.zeros(batch_size, conv.size - 1, conv.weight.shape[0], dtype=weight.dtype, device=device)
            for conv in self._convolutions()
        )
        position = torch.zeros(batch_size, dtype=torch.int64, device=device) if self.has_position else None
        return MixerState(recurrence, convolution, position)

    def _convolutions(self) -> tuple[ShortConvolution, ...]:
        """Return the short convolutions."""
        return (self.q_conv, self.k_conv, self.v_conv) if self.has_convolution else ()

    def _queries_keys_values(self, x: Tensor, run: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k (..., q/k heads, dqk) and v (..., heads, dhv), after the short convolutions."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.has_convolution:
            q, k, v = run.convolve(self._convolutions(), (q, k, v))
        # Under tensor parallelism a projection returns this process's heads, so their number is read from its output.
        q, k = (t.unflatten(-1, (-1, self.qk_head_dim)) for t in (q, k))
        return q, k, v.unflatten(-1, (-1, self.head_dim))

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
        if self.context_parallel is not None:  # processes that share steps raise together
            sequences = None
        # Under tensor parallelism a process holds the channels of its heads.
        sizes = [
            (conv.size - 1, None if hasattr(conv.weight, "device_mesh") else conv.weight.shape[0])
            for conv in self._convolutions()
        ]
        check_mixer_state(state, sizes, self.has_position, sequences)


def strengths(config: ModelConfig) -> Any:
    """Return the activation of the write strengths of the delta rule."""
    return "2sigmoid" if config.negative_eigenvalues else "sigmoid"
