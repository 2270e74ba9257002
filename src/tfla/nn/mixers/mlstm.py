"""The mLSTM layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tfla.nn import batch_invariance
from tfla.nn.config import ModelConfig, check_config
from tfla.nn.layers import (
    Accept,
    GatePreactivation,
    HeadNorm,
    Projection,
    SequenceMixer,
    Sharding,
    input_std,
    output_std,
    reset_forget_gate,
)
from tfla.nn.mixer_state import StatesEvery
from tfla.nn.mixers.norms import gated_head_norm
from tfla.ops.api import mlstm
from tfla.ops.gates import InputGate
from tfla.ops.state import State
from tfla.ops.state_pool import PoolRows
from tfla.ops.states_every import unstacked
from tfla.ops.steps import mlstm_step, mlstm_steps


class MLSTM(SequenceMixer):
    """The mLSTM layer: projections, the mLSTM operator, a norm over each head, and an output gate.

    The operator is mLSTMexp, equations (1)-(8), or mLSTMsig, (22)-(24). Its output h~ is normalized and gated,
    h_t = sigmoid(o~_t) * NORM(h~_t), equation (8). The modules ``input_gate`` and ``forget_gate`` give the
    pre-activations (5), soft-capped by (110), as (B, T, heads) in float32 or float64. Queries, keys, values and the
    output gate have no bias. The state is a :class:`tfla.State`. See :class:`SequenceMixer` for shapes.
    :class:`tfla.nn.MLSTMStack` takes the place of :class:`torch.nn.LSTM`.

    Args:
        config: a config with mixer "mlstm_exp" or "mlstm_sig".
        args, options: none; they let the error for the arguments of :class:`torch.nn.LSTM` name its replacement.

    Raises:
        TypeError, ValueError: config is not a ModelConfig, has another mixer, or is not the only argument.
    """

    tensor_parallel: ClassVar[dict[str, Sharding]] = {
        "q_proj": "columns", "k_proj": "columns", "v_proj": "columns", "output_gate": "columns",
        "input_gate": "columns", "forget_gate": "columns", "out_proj": "rows",
    }  # fmt: skip

    def __init__(self, config: ModelConfig, *args: object, **options: object) -> None:
        if args or options or isinstance(config, int):
            given = [*map(repr, (config, *args)), *(f"{name}={value!r}" for name, value in options.items())]
            raise TypeError(
                f"config: got {', '.join(given)}, expected a ModelConfig alone; "
                "tfla.nn.MLSTMStack(input_size, hidden_size, ...) takes the place of nn.LSTM"
            )
        check_config(config, "mlstm_exp", "mlstm_sig")
        super().__init__()
        d, heads = config.d_model, config.num_heads
        self.num_heads, self.qk_head_dim, self.head_dim = heads, config.qk_head_dim, config.head_dim
        self.input_gate_kind: InputGate = "exp" if config.mixer == "mlstm_exp" else "sigmoid"
        self.chunk_size, self.backend = config.chunk_size, config.backend
        self.context_parallel: Any = None  # the processes that share the steps, as `tfla.mlstm` takes them
        std = input_std(d)
        self.q_proj = Projection(d, heads * self.qk_head_dim, std)
        self.k_proj = Projection(d, heads * self.qk_head_dim, std)
        self.v_proj = Projection(d, d, std)
        self.output_gate = Projection(d, d, std)
        bias = config.input_gate_bias
        self.input_gate = GatePreactivation(d, heads, (bias, bias), config.gate_soft_cap)
        self.input_gate.requires_grad_(config.input_gate_trainable)
        self.forget_gate = GatePreactivation(d, heads, config.forget_gate_bias, config.gate_soft_cap)
        self.head_norm = HeadNorm(heads, self.head_dim, config.head_norm_eps, config.head_norm)
        self.out_proj = Projection(d, d, output_std(d, config.num_blocks))

    @property
    def reads_rows(self) -> bool:
        """Return whether :meth:`forward` takes ``rows``: the operator does unless processes share the steps."""
        return self.context_parallel is None

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        states_every: StatesEvery | None = None,
        rows: PoolRows | None = None,
    ) -> tuple[Tensor, State | None]:
        """Run :meth:`SequenceMixer.forward`; with cu_seqlens, a state has a row per packed sequence."""
        q, k, v, i, f = self._inputs(x)
        if document_start is not None:
            f = reset_forget_gate(f, document_start)
        options: dict[str, Any] = {
            "input_gate": self.input_gate_kind,
            "initial_state": state,
            "cu_seqlens": cu_seqlens,
            "chunk_size": self.chunk_size,
            "backend": self.backend,
            "context_parallel": self.context_parallel,
        }
        if states_every is not None:
            options["states_every"] = states_every.every
        if rows is not None:
            options["state_indices"] = rows.indices
        if self.batch_invariant:
            del options["context_parallel"]
            tensors = {"q": q, "k": k, "v": v, "i": i, "f": f}
            h, new, *between = batch_invariance.sequence_by_sequence(
                mlstm, tensors, return_state=return_state, **options
            )
            self._append(states_every, between)
            return self._output(x, h), new if return_state else None
        if not return_state:
            return self._output(x, mlstm(q, k, v, i, f, **options)), None
        h, new, *between = mlstm(q, k, v, i, f, return_state=True, **options)
        self._append(states_every, between)
        return self._output(x, h), new

    def _append(self, states_every: StatesEvery | None, between: Sequence[State]) -> None:
        """Append the states in between, (B, T // n, ...), to those that were requested."""
        if states_every is not None:
            states_every.states += unstacked(between[0])

    def step(
        self, x: Tensor, state: State, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, State]:
        """Run :meth:`SequenceMixer.step`."""
        h, new = self._recur(mlstm_step, x, state, rows)(in_place=in_place and rows is None)
        return self._output(x, h), new

    def steps(
        self, x: Tensor, state: State, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, Accept]:
        """Run :meth:`SequenceMixer.steps`."""
        call, in_place = self._recur(mlstm_steps, x, state, rows), in_place and rows is None
        h: Any = call(return_state=False)
        return self._output(x, h), lambda lengths: call(lengths=lengths, in_place=in_place)[1]

    def initial_state(self, batch_size: int, device: torch.device) -> State:
        """Return a state of zeros: float64 if the weights are float64, else float32."""
        dtype = torch.float64 if self.q_proj.weight.dtype == torch.float64 else torch.float32
        return State.zeros(
            batch_size, self.num_heads, self.qk_head_dim, self.head_dim,
            normalize=self.input_gate_kind == "exp", dtype=dtype, device=device,
        )  # fmt: skip

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v (..., heads, dim) and the gate pre-activations i, f (..., heads), equation (5)."""
        # Under tensor parallelism a projection returns this process's heads, so their number is read from its output.
        q, k = (p(x).unflatten(-1, (-1, self.qk_head_dim)) for p in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return q, k, v, self.input_gate(x), self.forget_gate(x)

    def _recur(
        self, operator: Callable[..., Any], x: Tensor, state: State, rows: PoolRows | None
    ) -> Callable[..., Any]:
        """Return a function of further options that computes an operator for steps."""
        tensors = dict(zip("qkvif", self._inputs(x), strict=True))
        if self.batch_invariant:
            call = functools.partial(batch_invariance.step_by_sequence, operator, tensors)
        else:
            call = functools.partial(operator, **tensors)
        options: dict[str, Any] = {} if rows is None else {"state_indices": rows.indices}
        return functools.partial(call, state=state, input_gate=self.input_gate_kind, **options)

    def _output(self, x: Tensor, h: Tensor) -> Tensor:
        """Apply equation (8) and the output projection: x (..., d_model), h (..., heads, dhv) -> (..., d_model)."""
        return self.out_proj(gated_head_norm(self.head_norm, h, self.output_gate(x), self.batch_invariant))
