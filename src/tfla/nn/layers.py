"""Layers and functions that the blocks of the language model share.

Equation numbers are those of the paper.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tfla.nn import batch_invariance, gate_product
from tfla.nn.mixer_state import StatesEvery
from tfla.nn.soft_cap import soft_cap
from tfla.nn.validation import check_int, check_number
from tfla.ops.autocast import autocast_dtype, without_autocast
from tfla.ops.state_pool import PoolRows
from tfla.ops.transforms import PLAIN, needs_dispatcher

# The forget gate's pre-activation at the first token of a document; its sigmoid is 0 in every dtype.
CLOSED_GATE = -1e4

# How processes share a module of a mixer under tensor parallelism over heads:
# "columns": a linear layer whose outputs belong to heads; each process computes those of its heads.
# "rows": a linear layer that reads all heads; the outputs of the processes are added up.
# "whole": a module that every process computes in the same way.
# "repeated": a linear layer that every process computes in the same way and whose outputs the heads of each read, so
# that its gradient is the sum of theirs.
# "heads": parameters whose first dimension belongs to heads; read through :func:`local`.
# "shared": parameters that all heads read; read through :func:`local`.
Sharding = Literal["columns", "rows", "whole", "repeated", "heads", "shared"]

# A function of how many of the proposed tokens are accepted, (B,) int: it returns the state of a mixer after them.
Accept = Callable[[Tensor], Any]


class SequenceMixer(nn.Module, ABC):
    """A layer that mixes tokens along time, with a state that carries a sequence from one call into the next.

    The state is a NamedTuple whose fields only the layer itself reads.

    Attributes:
        num_heads: number of heads.
        first_head: the first of this process's heads under tensor parallelism.
        tensor_parallel: how the processes share the modules of the layer under tensor parallelism, by their names;
            empty where they cannot.
        batch_invariant: whether each sequence is computed as if it were alone in the batch.
    """

    num_heads: int
    first_head: int = 0
    tensor_parallel: ClassVar[dict[str, Sharding]] = {}
    batch_invariant: bool = False

    @property
    def reads_rows(self) -> bool:
        """Return whether :meth:`forward` has the argument ``rows`` of :meth:`step`, with which ``state`` is a pool.

        With return_state the layer then overwrites these rows, and returns the pool. For other layers the model gathers
        the rows before the call, and scatters the states after it.
        """
        return False

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        document_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = False,
        states_every: StatesEvery | None = None,
    ) -> tuple[Tensor, Any]:
        """Mix whole sequences.

        Args:
            x: (B, T, d_model), any float dtype.
            state: the state before the first token; None is the start of a document.
            document_start: (B, T) bool, True at the first token of each document. A document does not depend on the
                tokens before it.
            cu_seqlens: (num_sequences + 1,) int, for B = 1: the offsets of the packed sequences, from 0 to T.
            return_state: whether to return the state after the last token.
            states_every: a request for states in between, with return_state and without cu_seqlens.

        Returns:
            the mixed sequences (B, T, d_model), and the state after the last token, or None without return_state.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """

    @abstractmethod
    def step(self, x: Tensor, state: Any, in_place: bool = False, rows: PoolRows | None = None) -> tuple[Tensor, Any]:
        """Mix one token of each sequence.

        Args:
            x: (B, d_model), any float dtype.
            state: the state before the token.
            in_place: whether the layer may overwrite the tensors of ``state``.
            rows: the row of each sequence in ``state``, which is then a pool. The layer overwrites these rows.

        Returns:
            the mixed token (B, d_model) and the state after it, or the pool.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """

    @abstractmethod
    def steps(
        self, x: Tensor, state: Any, in_place: bool = False, rows: PoolRows | None = None
    ) -> tuple[Tensor, Accept]:
        """Mix a few proposed tokens of each sequence, of which some are accepted later.

        Args:
            x: (B, T, d_model), any float dtype, T from 1 to 32.
            state: the state before the tokens.
            in_place: whether the layer may overwrite the tensors of ``state`` when tokens are accepted, and unused
                places of its caches before.
            rows: the row of each sequence in ``state``, which is then a pool. The layer overwrites these rows when
                tokens are accepted.

        Returns:
            the mixed tokens (B, T, d_model), and a function that may be called once: from ``lengths`` (B,) int, how
            many tokens of each sequence are accepted, to the state after these tokens.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what was given and what is allowed.
        """

    @abstractmethod
    def initial_state(self, batch_size: int, device: torch.device) -> Any:
        """Return the state before the first token of batch_size sequences, in the dtype in which the layer keeps it."""


class Projection(nn.Linear):
    """A linear layer whose weight (out_features, in_features) is drawn from N(0, std^2), and a bias 0 if requested."""

    batch_invariant = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        std: float,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.std = std  # set first: nn.Linear's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the weight from torch's global generator."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (..., out_features) for x (..., in_features)."""
        product = batch_invariance.linear if self.batch_invariant else F.linear
        return product(x, self.weight, self.bias)


class Unembedding(Projection):
    """The linear layer to the logits of a vocabulary of any size.

    Matrix products of 16-bit numbers run at a fraction of a GPU's rate where the rows of a matrix do not start at
    multiples of 16 bytes. Rows of logits do not if the vocabulary has 50,257 tokens. For many tokens the weight is
    therefore padded with rows of zeros, and the logits are the first columns of the wider result.
    """

    alignment = 8  # 16-bit numbers in 16 bytes; a vocabulary that is no multiple of it is padded
    multiple = 64  # of the padded vocabulary: 128 bytes, so that rows of logits start at cache lines
    fewest = 512  # tokens from which on the padding saves more than the copy of the weight takes

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (..., vocabulary) of x (..., d_model); they are not contiguous if the weight is padded."""
        if not self._pads(x):
            return super().forward(x)
        weight = F.pad(cast_for_autocast(self.weight), (0, 0, 0, -self.out_features % self.multiple))
        return F.linear(x, weight)[..., : self.out_features]

    def _pads(self, x: Tensor) -> bool:
        """Return whether the weight is padded for x: for many tokens on a GPU, in 16 bits, in a plain eager call."""
        if not x.is_cuda or not self.out_features % self.alignment or x.numel() < self.fewest * self.in_features:
            return False
        if self.batch_invariant or self.bias is not None or needs_dispatcher((x, self.weight.data)):
            return False
        return (autocast_dtype(x.device.type) or self.weight.dtype) in (torch.bfloat16, torch.float16)


class LowRankProjection(nn.Module):
    """A linear layer whose weight is a product of two: W_up W_down x, plus a bias if requested."""

    def __init__(self, in_features: int, rank: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.down = Projection(in_features, rank, input_std(in_features))
        self.up = Projection(rank, out_features, input_std(rank), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output (..., out_features) for x (..., in_features)."""
        y: Tensor = self.up(self.down(x))
        return y


def input_std(d_model: int) -> float:
    """Return sqrt(2 / (5 d_model)), the initial standard deviation of all weights that read the residual stream.

    The embedding and the unembedding are drawn with the same deviation.
    """
    return math.sqrt(2 / (5 * d_model))


def output_std(d_model: int, num_blocks: int) -> float:
    """Return 2 / (num_blocks sqrt(d_model)), the initial standard deviation of projections into the residual stream."""
    return 2 / (num_blocks * math.sqrt(d_model))


class GatePreactivation(nn.Linear):
    """The pre-activations of a gate: x (..., d_model) -> softcap(W x + b) (..., heads), equations (5) and (110).

    Runs in float32 or float64, also under autocast, and returns that dtype. It is a module so that a forward hook sees
    the pre-activations that the operator receives.

    Args:
        d_model: width of x.
        num_heads: number of heads.
        bias_range: initial bias of the first and of the last head; the biases between are equally spaced. Weights
            start at 0.
        cap: c of equation (110).
        device, dtype: those of the parameters; None is PyTorch's default.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; the message names it.
    """

    batch_invariant = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        bias_range: tuple[float, float],
        cap: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("d_model", d_model, 1)
        check_int("num_heads", num_heads, 1)
        if not isinstance(bias_range, tuple | list) or len(bias_range) != 2:
            raise TypeError(f"bias_range: got {bias_range!r}, expected two numbers")
        for bias in bias_range:
            check_number("bias_range", bias)
        check_number("cap", cap, 0)
        self.bias_range, self.cap = bias_range, cap  # set first: nn.Linear's constructor calls reset_parameters
        super().__init__(d_model, num_heads, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set the weights to 0 and the biases to their equally spaced values."""
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(torch.linspace(*self.bias_range, self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return the pre-activations (..., heads) of x (..., d_model)."""
        # Gates are exponentiated, or summed over the whole sequence: bfloat16 is too coarse for that.
        with without_autocast(x.device.type):
            if not self.batch_invariant and gate_product.unsupported(x, self.weight, self.bias) is None:
                return gate_product.preactivations(x, self.weight, self.bias, self.cap)
            return recomputed(self._float32_gate, x) if x.element_size() == 2 else self._float32_gate(x)

    def _float32_gate(self, x: Tensor) -> Tensor:
        """Return softcap(W x + b) in at least float32."""
        x, weight, bias = map(at_least_float32, (x, self.weight, self.bias))
        product = batch_invariance.linear if self.batch_invariant else F.linear
        return soft_cap(product(x, weight, bias), self.cap)


def reset_forget_gate(f: Tensor, document_start: Tensor) -> Tensor:
    """Close the forget gate f (B, T, heads) where document_start (B, T) is True, so that no state reaches the token."""
    return f.masked_fill(document_start[..., None], CLOSED_GATE)


class HeadNorm(nn.Module):
    """NORM of equation (8): h (..., heads, head_dim) normalized per head, times a weight per channel; no bias.

    Runs in float32 or float64 and returns that dtype.

    Args:
        num_heads: number of heads.
        head_dim: channels of a head.
        eps: epsilon of the norm.
        kind: "layer" for LayerNorm, "rms" for RMSNorm.
        device, dtype: those of the weight; None is PyTorch's default.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; the message names it.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        kind: Literal["layer", "rms"],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("num_heads", num_heads, 1)
        check_int("head_dim", head_dim, 1)
        check_number("eps", eps, 0)
        if kind not in ("layer", "rms"):
            raise ValueError(f"kind: got {kind!r}, expected 'layer' or 'rms'")
        self.eps, self.kind = eps, kind
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the weights to 1."""
        nn.init.ones_(self.weight)

    def forward(self, h: Tensor) -> Tensor:
        """Return the normalized h (..., heads, head_dim)."""
        norm = F.layer_norm if self.kind == "layer" else F.rms_norm
        return norm(at_least_float32(h), h.shape[-1:], eps=self.eps) * self.weight.view(h.shape[-2:])


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float64 if it is float64, else in float32."""
    return x if x.dtype == torch.float64 else x.float()


def cast_for_autocast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype; x itself without autocast or in float64.

    Several projections read the same normalized x. Without this cast, autocast would save a copy per projection for the
    backward.
    """
    dtype = autocast_dtype(x.device.type)
    return x if dtype is None or x.dtype == torch.float64 else x.to(dtype)


def recomputed(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Return function(*inputs); the backward saves only the inputs and recomputes the intermediates.

    This is activation checkpointing for elementwise functions and norms, whose float32 intermediates take more memory
    than their 16-bit inputs. Under torch.compile, torch.func and tracers the function is called without it: a compiler
    decides by itself what to recompute, and torch.func does not support the hooks of a checkpoint.
    """
    if not torch.is_grad_enabled() or needs_dispatcher(inputs):
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def local(parameter: Tensor) -> Tensor:
    """Return this process's part of a parameter, for a computation on the heads of this process.

    A parameter without shards is read by the heads of every process, so that its gradient is the sum of theirs.
    """
    if not _is_distributed(parameter):
        return parameter
    from torch.distributed.tensor import Partial

    distributed: Any = parameter
    part: Tensor = distributed.to_local(
        grad_placements=[Partial() if place.is_replicate() else place for place in distributed.placements]
    )
    return part


def _is_distributed(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor, by its type, since torch.compile does not see the attributes of one."""
    if type(parameter) in PLAIN:  # first, since the import below takes a second
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def sharding_mesh(parameter: Tensor) -> Any:
    """Return the mesh of tensor parallelism whose processes share the elements of a parameter, else None."""
    distributed: Any = parameter
    if not _is_distributed(parameter) or all(place.is_replicate() for place in distributed.placements):
        return None
    return distributed.device_mesh


def summed(x: Tensor, mesh: Any) -> Tensor:
    """Return the sum of the x of all processes of a mesh, on each of them; gradients are summed as well."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    total = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    found: Tensor = total.to_local(grad_placements=[Partial()])
    return found


def _with_own_code(forward: Any, block: nn.Module) -> Callable[..., Any]:
    """Return the forward of a block as a function of its own for each type of mixer.

    torch.compile takes numbers that differ between two calls of a function for variables. In a model of several mixers
    these would be the head dimensions, of which kernels need the values.
    """
    bound = isinstance(forward, MethodType)
    function = forward.__func__ if bound else forward
    if not isinstance(function, FunctionType) or not hasattr(block, "mixer"):
        found: Callable[..., Any] = forward
        return found
    code = function.__code__.replace(co_name=f"{function.__name__}_{type(block.mixer).__name__}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return MethodType(own, block) if bound else own


def wrap_forward(
    block: nn.Module, checkpointing: bool, compile: bool | str, compile_recomputation: bool = True
) -> None:
    """Checkpoint and compile the forward of a block, below its hooks, so that names of parameters stay as they are.

    Args:
        block: the block.
        checkpointing: whether its backward computes it again.
        compile: whether it is compiled; a string is the backend of torch.compile.
        compile_recomputation: whether the compiler sees the checkpoint, and puts what is computed again into the graph
            of the backward. Otherwise the checkpoint is around the compiled forward, which runs twice as it is.
    """
    backend = compile if isinstance(compile, str) else "inductor"
    own: Any = block

    def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward as torch.compile makes it, if it does."""
        return torch.compile(_with_own_code(forward, block), backend=backend) if compile else forward

    inner: Callable[..., Any] = block.forward if compile_recomputation and checkpointing else compiled(block.forward)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        """Run the forward; with gradients, the backward runs it again."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return own.checkpoint_fn(inner, *args, **kwargs)

    if checkpointing:
        # The attribute has the name that it has in PyTorch's checkpoint_wrapper, so that others find and replace it.
        own.checkpoint_fn = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        block.forward = compiled(checkpointed) if compile_recomputation else checkpointed
    elif compile:
        block.forward = inner
