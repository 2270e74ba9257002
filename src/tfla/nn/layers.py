"""The layers that the blocks of the language model share: norms, projections, gates and the mixer interface."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tfla.nn.arguments import check_int, check_number
from tfla.ops.signature import autocast_dtype, without_autocast
from tfla.ops.transforms import observed

# Added nowhere, set in place of f~ at a document's first token: the forget gate is then 0 in every dtype.
RESET = -1e4


class GatePreactivation(nn.Linear):
    """x (..., d_model) -> softcap(W x + b) (..., heads), equations (5) and (110).

    Runs in float32 or better, also under autocast, and returns that dtype. A module of its
    own, so that a forward hook on it sees the pre-activations that the operator gets.

    Args:
        d_model: width of x.
        num_heads: gates for each token.
        bias_range: first and last head's bias at the start; those between are equally spaced. Weights start at 0.
        cap: of the soft cap.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range; the message names it.
    """

    def __init__(self, d_model: int, num_heads: int, bias_range: tuple[float, float], cap: float) -> None:
        check_int("d_model", d_model, 1)
        check_int("num_heads", num_heads, 1)
        if not isinstance(bias_range, tuple | list) or len(bias_range) != 2:
            raise TypeError(f"bias_range: got {bias_range!r}, expected two numbers")
        for bias in bias_range:
            check_number("bias_range", bias)
        check_number("cap", cap, 0)
        self.bias_range, self.cap = bias_range, cap  # nn.Linear's own constructor sets weight and bias
        super().__init__(d_model, num_heads)

    def reset_parameters(self) -> None:
        """Set weights to 0 and biases to their equally spaced values."""
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(torch.linspace(*self.bias_range, self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        # A gate is exp'd or summed over the whole sequence: bfloat16 is too coarse for it.
        with without_autocast(x.device.type):
            return recomputed(self._float32_gate, x) if x.element_size() == 2 else self._float32_gate(x)

    def _float32_gate(self, x: Tensor) -> Tensor:
        x, weight, bias = map(at_least_float32, (x, self.weight, self.bias))
        return soft_cap(F.linear(x, weight, bias), self.cap)


def reset_forget_gate(f: Tensor, document_start: Tensor) -> Tensor:
    """f (B, T, heads), closed where document_start (B, T) bool is True: nothing is carried into those tokens."""
    return f.masked_fill(document_start[..., None], RESET)


def input_std(d_model: int) -> float:
    """Of embeddings, of the unembedding and of all projections that read the residual stream: sqrt(2 / (5 d_model))."""
    return math.sqrt(2 / (5 * d_model))


def output_std(d_model: int, num_blocks: int) -> float:
    """Of projections whose output is added to the residual stream: 2 / (num_blocks sqrt(d_model))."""
    return 2 / (num_blocks * math.sqrt(d_model))


class Projection(nn.Linear):
    """Linear layer without bias, its weight (out_features, in_features) drawn from N(0, std^2)."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std  # nn.Linear's own constructor draws the weight
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew, from torch's global generator."""
        nn.init.normal_(self.weight, std=self.std)


class SequenceMixer(nn.Module, ABC):
    """A layer that mixes tokens along time. Its state is a NamedTuple of its own kind that only it reads."""

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """Whole sequences: x (B, T, d_model) -> the same shape, and the state behind the last token or None.

        Args:
            x: (B, T, d_model), any float dtype.
            state: where the sequences start; None is the start of a document.
            document_start: (B, T) bool, True at documents' first tokens, which see nothing before them.
            cu_seqlens: (sequences + 1,) int, for B = 1: where packed sequences start and, last, T.
            return_state: whether the state is wanted.
        """

    @abstractmethod
    def step(self, x: Tensor, state: Any, in_place: bool = False) -> tuple[Tensor, Any]:
        """One token a sequence: x (B, d_model) -> the same shape, and the new state, maybe in the old one."""

    @abstractmethod
    def initial_state(self, batch_size: int, device: torch.device) -> Any:
        """The state before the first token, in the dtype in which this layer keeps it."""


class HeadNorm(nn.Module):
    """NORM of equation (8): h (..., heads, head_dim), each head by itself, times one weight a channel, no bias.

    Runs in float32 or better and returns that dtype. ``kind`` "layer": LayerNorm; "rms": RMSNorm.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range; the message names it.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, kind: Literal["layer", "rms"]) -> None:
        super().__init__()
        check_int("num_heads", num_heads, 1)
        check_int("head_dim", head_dim, 1)
        check_number("eps", eps, 0)
        if kind not in ("layer", "rms"):
            raise ValueError(f"kind: got {kind!r}, expected 'layer' or 'rms'")
        self.eps, self.kind = eps, kind
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))

    def forward(self, h: Tensor) -> Tensor:
        norm = F.layer_norm if self.kind == "layer" else F.rms_norm
        return norm(at_least_float32(h), h.shape[-1:], eps=self.eps) * self.weight.view(h.shape[-2:])


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), equation (110): x near 0, never beyond +-cap. Any shape, dtype of x."""
    return cap * torch.tanh(x / cap)


def at_least_float32(x: Tensor) -> Tensor:
    """x itself in float64, else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def autocast_once(x: Tensor) -> Tensor:
    """Return x in the dtype that autocast gives to the input of a projection; x itself without autocast or in float64.

    Several projections read the same normalized x. Without this, each of them would keep a cast copy of its own for the
    backward.
    """
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), of which the backward keeps only the inputs and recomputes the rest.

    It is meant for elementwise functions and norms: their float32 intermediates take more memory than 16-bit inputs.
    Under torch.compile, torch.func and tracers the function is called as it is: a compiler decides by itself what it
    recomputes, and torch.func does not support the hooks of a checkpoint.
    """
    if not torch.is_grad_enabled() or observed(inputs):
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
