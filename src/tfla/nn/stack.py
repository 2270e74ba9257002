"""The mLSTM with the interface of :class:`torch.nn.LSTM`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tfla._util.device import check_device
from tfla._util.shapes import check_shape, state_parts
from tfla.nn.layers import GatePreactivation, HeadNorm, Projection, at_least_float32, input_std, reset_forget_gate
from tfla.nn.mixers.norms import gated_head_norm
from tfla.nn.sequences import Sequences, check_lengths, packed_places
from tfla.nn.validation import check_int, check_number, check_weights_dtype, describe
from tfla.ops.api import mlstm
from tfla.ops.autocast import autocast_dtype
from tfla.ops.checks import check_input_gate
from tfla.ops.gates import InputGate
from tfla.ops.state import State
from tfla.ops.steps import mlstm_step

GATE_SOFT_CAP = 15.0  # c of equation (110), which bounds the pre-activations of the gates
NORM_EPS = 1e-6

# One entry for each layer and direction: layer 0 forward, layer 0 backward, layer 1 forward, ...
StackState = tuple[State, ...]


class StackLayer(nn.Module):
    """One layer of :class:`MLSTMStack` in one direction: y = sigmoid(o) * NORM(h), equation (8), without out_proj.

    Args:
        input_size: features of the input.
        num_heads, qk_head_dim, head_dim: number of heads, and sizes of a head of q and k, and of v.
        bias: whether the projections to q, k, v and the output gate have a bias.
        input_gate: "exp" or "sigmoid".
        input_gate_bias, forget_gate_bias: initial biases of the gates of the first and the last head.
        device, dtype: those of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        num_heads: int,
        qk_head_dim: int,
        head_dim: int,
        bias: bool,
        input_gate: InputGate,
        input_gate_bias: float,
        forget_gate_bias: tuple[float, float],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.num_heads, self.qk_head_dim, self.head_dim, self.input_gate_kind = (
            num_heads,
            qk_head_dim,
            head_dim,
            input_gate,
        )
        std, keys, values = input_std(input_size), num_heads * qk_head_dim, num_heads * head_dim
        self.q_proj = Projection(input_size, keys, std, bias, device, dtype)
        self.k_proj = Projection(input_size, keys, std, bias, device, dtype)
        self.v_proj = Projection(input_size, values, std, bias, device, dtype)
        self.output_gate = Projection(input_size, values, std, bias, device, dtype)
        biases = (input_gate_bias, input_gate_bias)
        self.input_gate = GatePreactivation(input_size, num_heads, biases, GATE_SOFT_CAP, device, dtype)
        self.forget_gate = GatePreactivation(input_size, num_heads, forget_gate_bias, GATE_SOFT_CAP, device, dtype)
        self.head_norm = HeadNorm(num_heads, head_dim, NORM_EPS, "layer", device, dtype)

    def forward(self, x: Tensor, sequences: Sequences, state: State | None) -> tuple[Tensor, State]:
        """Return the outputs (B, T, heads * head_dim) of x (B, T, input_size), and the state after each sequence."""
        q, k = (p(x).unflatten(-1, (-1, self.qk_head_dim)) for p in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        i, f = self.input_gate(x), self.forget_gate(x)
        if sequences.document_start is not None:
            f = reset_forget_gate(f, sequences.document_start)
        padding = sequences.padding(x)
        if padding is not None:  # a padded step leaves the state as it is
            i, f = i.masked_fill(padding, -torch.inf), f.masked_fill(padding, torch.inf)
        if state is not None and x.shape[1] == 1 and sequences.cu_seqlens is None:
            h, new = mlstm_step(q[:, 0], k[:, 0], v[:, 0], i[:, 0], f[:, 0], state, input_gate=self.input_gate_kind)
            h = h[:, None]
        else:
            h, new = mlstm(
                q, k, v, i, f, input_gate=self.input_gate_kind, initial_state=state, return_state=True,
                cu_seqlens=sequences.cu_seqlens,
            )  # fmt: skip
        return gated_head_norm(self.head_norm, h, self.output_gate(x)), new


class MLSTMStack(nn.Module):
    """Layers of mLSTM with the constructor and the call of :class:`torch.nn.LSTM`.

    Each layer computes, for every head and step t of its input x,

        q_t, k_t, v_t = W_q x_t, W_k x_t, W_v x_t        y_t = sigmoid(W_o x_t) * NORM(h_t)

    with biases if requested, where h is :func:`tfla.mlstm` of q, k, v and of the gates' pre-activations
    15 tanh((W x_t + b) / 15). The next layer reads y. A backward direction reads each sequence in reverse, and its
    outputs are appended to those of the forward direction.

    Args:
        input_size: features of the input.
        hidden_size: features of the output of a direction, those of all heads together.
        num_layers: number of layers.
        bias: whether the projections to q, k, v and the output gate have a bias. The other two gates always have.
        batch_first: whether inputs and outputs are (B, T, features), not (T, B, features). It has no effect on inputs
            without a batch, on a PackedSequence, and on states.
        dropout: the probability of dropout on the outputs of every layer but the last, in training.
        bidirectional: whether every layer also reads the sequences in reverse.
        proj_size: 0. There is no projection of the outputs, which hidden_size makes narrower.
        num_heads: number of heads, which divides hidden_size.
        qk_factor: size of a head of q and k relative to that of v; the product is rounded.
        input_gate: "exp" (mLSTMexp) or "sigmoid" (mLSTMsig), as in :func:`tfla.mlstm`.
        input_gate_bias: the initial bias of the input gates.
        forget_gate_bias: the initial biases of the forget gates of the first and the last head; those between are
            equally spaced.
        device, dtype: those of the parameters; None is PyTorch's default.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; the message names it.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        num_heads: int = 4,
        qk_factor: float = 0.5,
        input_gate: InputGate = "exp",
        input_gate_bias: float = 0.0,
        forget_gate_bias: tuple[float, float] = (3.0, 6.0),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads}
        for name, size in sizes.items():
            check_int(name, size, 1)
        for name, flag in {"bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name}: got {type(flag).__name__}, expected a bool")
        if proj_size != 0 or not isinstance(proj_size, int) or isinstance(proj_size, bool):
            raise ValueError(f"proj_size: got {proj_size!r}, expected 0: outputs are not projected, see hidden_size")
        if hidden_size % num_heads:
            raise ValueError(f"num_heads: got {num_heads}, expected a divisor of hidden_size, {hidden_size}")
        check_number("dropout", dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: got {dropout}, expected from 0 to 1")
        check_number("qk_factor", qk_factor, 0)
        check_input_gate(input_gate)
        check_number("input_gate_bias", input_gate_bias)
        if not isinstance(forget_gate_bias, tuple | list) or len(forget_gate_bias) != 2:
            raise TypeError(f"forget_gate_bias: got {forget_gate_bias!r}, expected two numbers")
        for end in forget_gate_bias:
            check_number("forget_gate_bias", end)
        device = None if device is None else check_device(device)
        check_weights_dtype(dtype)
        self.input_size, self.hidden_size, self.num_layers, self.num_heads = (
            input_size,
            hidden_size,
            num_layers,
            num_heads,
        )
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional
        self.input_gate = input_gate
        head_dim = hidden_size // num_heads
        directions = 2 if bidirectional else 1
        self.layers = nn.ModuleList(
            StackLayer(
                hidden_size * directions if layer else input_size, num_heads, max(1, round(qk_factor * head_dim)),
                head_dim, bias, input_gate, input_gate_bias, forget_gate_bias, device, dtype,
            )
            for layer in range(num_layers)
            for _ in range(directions)
        )  # fmt: skip

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: StackState | None = None,
        *,
        lengths: Tensor | None = None,
        document_start: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, StackState]:
        """Compute the outputs of all steps of a batch of sequences.

        Args:
            input: (T, B, input_size), or (B, T, input_size) with batch_first; (T, input_size) for one sequence; or a
                PackedSequence.
            hx: the state that an earlier call returned, or :meth:`initial_state`; None is the start of all
                sequences. In a backward direction it is the state before the last step.
            lengths: (B,) int: how many steps each sequence of a padded tensor has before its padding. Padding is not
                read, and the outputs there are 0. None is T for all of them.
            document_start: bool, in the shape of the input, or of the data of a PackedSequence, without features: True
                where a sequence begins again, independent of its past. A backward direction begins again before it.

        Returns:
            the outputs, of the kind of the input, with hidden_size features for each direction; and the state after the
            last step of each sequence: a :class:`tfla.State` for each layer and direction, those of layer 0 first and
            the forward direction before the backward one. Its rows are the sequences, in the order before they were
            packed; a single sequence is one row.

        Raises:
            TypeError, ValueError: an argument does not fit; the message names it.
        """
        data = input.data if isinstance(input, PackedSequence) else input
        self._check(input, data, hx, lengths, document_start)
        if isinstance(input, PackedSequence):
            place, offsets = packed_places(input)
            order = torch.empty_like(place).index_copy_(0, place, torch.arange(len(place), device=place.device))
            start = None if document_start is None else document_start[order][None]
            x, new = self._layers(data.index_select(0, order)[None], Sequences(None, offsets, start), hx)
            return PackedSequence(
                x[0].index_select(0, place), input.batch_sizes, input.sorted_indices, input.unsorted_indices
            ), new
        if data.dim() == 2:
            start = None if document_start is None else document_start[None]
            x, new = self._layers(data[None], Sequences(lengths, None, start), hx)
            return x[0], new
        if not self.batch_first:
            data = data.transpose(0, 1)
            document_start = None if document_start is None else document_start.transpose(0, 1)
        lengths = None if lengths is None else check_lengths(lengths, data)
        x, new = self._layers(data, Sequences(lengths, None, document_start), hx)
        return x if self.batch_first else x.transpose(0, 1).contiguous(), new

    def initial_state(self, batch_size: int = 1, device: torch.device | str | None = None) -> StackState:
        """Return the state before the first step.

        Args:
            batch_size: number of sequences.
            device: the device; None is that of the parameters.

        Returns:
            a state of zeros for each layer and direction, float64 if the parameters are float64, else float32.
        """
        return tuple(
            State.zeros(
                batch_size, layer.num_heads, layer.qk_head_dim, layer.head_dim, normalize=self.input_gate == "exp",
                dtype=at_least_float32(layer.q_proj.weight[:0]).dtype,
                device=layer.q_proj.weight.device if device is None else device,
            )
            for layer in self._stack()
        )  # fmt: skip

    def reset_parameters(self) -> None:
        """Draw all parameters from torch's global generator, as the constructor does."""
        for layer in self._stack():
            for module in layer.children():
                module.reset_parameters()  # type: ignore[operator]

    def flatten_parameters(self) -> None:
        """Do nothing: programs call it on a :class:`torch.nn.LSTM`, whose kernels read weights from one tensor."""

    def extra_repr(self) -> str:
        """Return the arguments of the constructor, which the representation of the module shows."""
        given = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, num_heads={self.num_heads}"
        return f"{given}, batch_first={self.batch_first}, bidirectional={self.bidirectional}"

    def _stack(self) -> list[StackLayer]:
        """Return the layers, with both directions of each."""
        return [layer for layer in self.layers if isinstance(layer, StackLayer)]

    def _layers(self, x: Tensor, sequences: Sequences, state: StackState | None) -> tuple[Tensor, StackState]:
        """Return the outputs (B, T, directions * hidden_size) of x (B, T, input_size), and the new state."""
        padding = sequences.padding(x)
        backwards = sequences.reversed() if self.bidirectional else sequences
        new: list[State] = []
        x = x if padding is None else x.masked_fill(padding, 0.0)  # padding may hold NaN
        for number in range(self.num_layers):
            outputs = []
            for backward in (False, True)[: 1 + self.bidirectional]:
                index = len(new)
                given = sequences.reverse(x) if backward else x
                before = None if state is None else state[index]
                y, after = self.layers[index](given, backwards if backward else sequences, before)
                outputs.append(sequences.reverse(y) if backward else y)
                new.append(after)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            x = x if padding is None else x.masked_fill(padding, 0.0)
            if number < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, tuple(new)

    def _check(self, input: object, data: object, state: object, lengths: object, document_start: object) -> None:
        """Raise unless the arguments of :meth:`forward` fit, apart from values and from the tensor of lengths."""
        if not isinstance(data, Tensor):
            raise TypeError(f"input: got {describe(data)}, expected a tensor or a PackedSequence")
        if data.is_nested:
            raise TypeError("input: got a nested tensor, expected a tensor or a PackedSequence")
        weight = next(self.parameters())
        if data.dtype != weight.dtype and autocast_dtype(data.device.type) is None:
            raise TypeError(f"input: got dtype {data.dtype}, expected that of the parameters, {weight.dtype}")
        if data.device != weight.device:
            raise ValueError(f"input: got device {data.device}, expected that of the parameters, {weight.device}")
        packed = isinstance(input, PackedSequence)
        if not (packed or 2 <= data.dim() <= 3) or data.shape[-1] != self.input_size or 0 in data.shape:
            layout = "(B, T, " if self.batch_first else "(T, B, "
            raise ValueError(
                f"input: got shape {tuple(data.shape)}, expected {layout}{self.input_size}) or (T, {self.input_size})"
                + (", all from 1" if 0 in data.shape else "")
            )
        if state is not None:
            if not isinstance(state, tuple | list) or not all(isinstance(entry, State) for entry in state):
                raise TypeError(f"hx: got {type(state).__name__}, expected a tuple of tfla.State")
            if len(state) != len(self.layers):
                raise ValueError(
                    f"hx: got {len(state)} entries, expected {len(self.layers)}, one for each layer and direction"
                )
            self._check_states(state, self._num_sequences(input, data), data)
        if lengths is not None and (packed or data.dim() == 2):
            raise ValueError("lengths: got a tensor, expected None for a single sequence and for a PackedSequence")
        if document_start is not None:
            if not isinstance(document_start, Tensor) or document_start.dtype != torch.bool:
                raise TypeError(f"document_start: got {describe(document_start)}, expected a bool tensor")
            if document_start.shape != data.shape[:-1]:
                raise ValueError(
                    f"document_start: got shape {tuple(document_start.shape)}, expected {tuple(data.shape[:-1])}"
                )
            _check_device("document_start", document_start, data)

    def _num_sequences(self, input: object, data: Tensor) -> int:
        """Return the number of sequences of an input, whose tensor is data."""
        if not isinstance(input, PackedSequence):
            return 1 if data.dim() == 2 else data.shape[0 if self.batch_first else 1]
        order = input.sorted_indices
        return int(input.batch_sizes[0]) if order is None else len(order)

    def _check_states(self, state: Sequence[State], sequences: int, data: Tensor) -> None:
        """Raise unless the tensors of a state fit the layers, the number of sequences and the device of the input."""
        for index, (entry, layer) in enumerate(zip(state, self._stack(), strict=True)):
            q, v = (data.new_empty(0, layer.num_heads, size) for size in (layer.qk_head_dim, layer.head_dim))
            name = f"hx[{index}]"
            for part, x, shape in state_parts(entry, sequences, q, v, self.input_gate == "exp", name, "a tensor"):
                if not isinstance(x, Tensor) or not x.is_floating_point():
                    raise TypeError(f"{part}: got {describe(x)}, expected a float tensor")
                check_shape(part, x, shape)
                _check_device(part, x, data)


def _check_device(name: str, x: Tensor, data: Tensor) -> None:
    """Raise unless x is on the device of the input, whose tensor is data."""
    if x.device != data.device:
        raise ValueError(f"{name}: got device {x.device}, expected that of input, {data.device}")
