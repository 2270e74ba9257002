"""The contract between the operator and the ways to compute it.

A backend is a module of this package with an object ``BACKEND``. It computes, for every head (docs/mathematics.md),

    C_t = exp(log_f_t) C_{t-1} + exp(log_i_t) k_t v_t^T        n_t = exp(log_f_t) n_{t-1} + exp(log_i_t) k_t
    h_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)          without normaliser: h_t = scale C_t^T q_t

with states stabilised by ``m_t = max(log_f_t + m_{t-1}, log_i_t)`` where there is a normaliser, by ``m = 0`` where not.
It sees log-gates, finite ones, or with `takes_gates` what a model has (`Spec.gates`), and then does the same as
:func:`tfla.ops.gates.log_gates`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

TILE = 64  # steps that every backend but the reference takes together, whatever chunk_size is


def static(*tensors: Tensor | None) -> Hashable:
    """All that tensors are but for their values and where exactly they lie."""
    # At once, since a call of a function for each takes half as long again.
    return tuple([None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device) for x in tensors])


Again = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]  # a call on other tensors of equal `static`


class Inputs(NamedTuple):
    """q, k (B, T, Hq, dqk); v (B, T, H, dhv), Hq divides H; state as in :class:`tfla.State`; log-gates (B, T, H), or
    what `Spec.gates` says."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_i: Tensor | None  # None: all zero
    log_f: Tensor
    C: Tensor | None  # initial state, None: all zero
    n: Tensor | None
    m: Tensor | None
    cu_seqlens: Tensor | None  # (sequences + 1,) int; then B = 1 and states have one row a sequence

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of states and accumulators."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


Gates = Literal["exp", "sigmoid", "log"]


class Spec(NamedTuple):
    """What to compute, apart from the tensors."""

    scale: float
    normalize: bool
    normalizer_grad: bool  # False: the paper's convention, no gradient through the denominator
    chunk_size: int  # distance between stored states
    kernel: str
    save: bool  # keep what the backward needs
    final_state: bool
    store_dtype: torch.dtype | None = None  # of chunk_C; None: that of accumulators
    gates: Gates = "log"  # pre-activations of mLSTMexp, of mLSTMsig, or log-gates; not clamped yet


class Outputs(NamedTuple):
    """What a forward returns; parts that were not asked for have shape (0,), and may be one tensor."""

    h: Tensor  # like v
    C: Tensor  # final states
    n: Tensor
    m: Tensor
    d: Tensor  # stabilised denominators exp(-m_t) d_t, (B, T, H)
    chunk_C: Tensor  # states at the starts of chunks, (stored_states, H, dqk, dhv)
    chunk_n: Tensor


class Grads(NamedTuple):
    """Gradients with respect to :class:`Inputs`, in any float dtype; those of missing inputs are ignored."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_i: Tensor
    log_f: Tensor
    C: Tensor
    n: Tensor


class StepInputs(NamedTuple):
    """A few steps of every sequence: q, k (B, T, Hq, dqk); v (B, T, H, dhv), Hq divides H; gates (B, T, H) of any float
    dtype, as :class:`StepSpec` says; a state of any float dtype, without a normaliser C alone."""

    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor | None  # None: log-gates that are all zero
    f: Tensor
    C: Tensor
    n: Tensor | None
    m: Tensor | None
    lengths: Tensor | None  # (B,) int: steps of each sequence that the returned state has behind it; None: all

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic and of a new m."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def kept_dtype(self, given: Tensor) -> torch.dtype:
        """Of a new C or n: what is kept in 16 bits stays so."""
        return given.dtype if given.dtype.itemsize == 2 else self.acc_dtype


class StepSpec(NamedTuple):
    """What to compute, apart from the tensors."""

    scale: float
    gates: Gates  # of what i and f are: pre-activations of mLSTMexp, of mLSTMsig, or log-gates; not clamped yet
    final_state: bool
    eps: float = 0.0  # added to the stabilised denominator, max(exp(-m) |d|, exp(-m))


class StepOutputs(NamedTuple):
    """h like v, dense, and the new state; parts that were not asked for have shape (0,), and may be one tensor."""

    h: Tensor
    C: Tensor
    n: Tensor
    m: Tensor


class Backend(ABC):
    """One way to compute the operator."""

    name: str
    priority: int  # `backend=None` takes the highest that can run
    kernels: tuple[str, ...]
    takes_gates = False  # as a model has them, of any float dtype

    @abstractmethod
    def unsupported(self, x: Inputs) -> str | None:
        """Why these inputs cannot run here, or None."""

    def default_kernel(self, x: Inputs, chunk_size: int | None) -> str:
        """What `kernel=None` takes, chunk_size being None where that is left open too."""
        return self.kernels[0]

    def kernel_unsupported(self, x: Inputs, kernel: str) -> str | None:
        """Why this kernel cannot run these inputs where another one of this backend can, or None."""
        return None

    @abstractmethod
    def default_chunk_size(self, x: Inputs, kernel: str) -> int: ...

    @abstractmethod
    def forward(self, x: Inputs, spec: Spec) -> Outputs: ...

    def again(self, x: Inputs, spec: Spec) -> Again | None:
        """After `forward`: what does the same at once for others like x, whatever PyTorch's settings are, or None."""
        return None

    @abstractmethod
    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        """From the cotangents of h and of the final state; ``out`` holds h, d and the chunk states of the forward."""

    def steps_unsupported(self, x: StepInputs) -> str | None:
        """Why these steps cannot run here, or None."""
        return "it has no kernel for single steps"

    def steps(self, x: StepInputs, spec: StepSpec, into: Tensor | None) -> StepOutputs:
        """A few steps without gradients; the new C goes to ``into``, which may be that of x, or to a new tensor."""
        raise NotImplementedError

    def steps_again(self, x: StepInputs, spec: StepSpec, into: Tensor | None) -> Again | None:
        """After `steps`: what does the same at once for others like x and into, or None."""
        return None

    def tile_steps(self, T: int, chunk_size: int, kernel: str) -> int:
        """Steps of a tile, whose inner products are quadratic in them, for sequences of T steps."""
        return min(TILE, chunk_size, T)

    def details(self, x: Inputs, chunk_size: int, kernel: str) -> dict[str, object]:
        """What else it decides for these inputs, by name; shown by :func:`tfla.explain`."""
        return {}

    def stored_states(self, x: Inputs, chunk_size: int, kernel: str) -> int:
        """Rows of `Outputs.chunk_C`; for packed sequences an upper bound known without reading their lengths."""
        B, T = x.v.shape[:2]
        if x.cu_seqlens is None:
            return B * ((T + chunk_size - 1) // chunk_size)
        return T // chunk_size + x.sequences


def stored_dtype(x: Inputs, spec: Spec) -> torch.dtype:
    """Of `Outputs.chunk_C`."""
    return x.acc_dtype if spec.store_dtype is None else spec.store_dtype


def sequence_slot(x: Inputs, chunk_size: int, s: int, start: int) -> int:
    """The row of the first chunk of sequence s, which starts at token ``start``; its other chunks follow."""
    if x.cu_seqlens is None:
        return s * ((x.v.shape[1] + chunk_size - 1) // chunk_size)
    return start // chunk_size + s


def packed_bounds(cu_seqlens: Tensor, T: int) -> list[int]:
    """Read the offsets of packed sequences, which makes the host wait for their device.

    Raises:
        ValueError: they do not go from 0 to T, or they fall.
    """
    at: list[int] = cu_seqlens.tolist()
    if at[0] != 0 or at[-1] != T:
        raise ValueError(f"cu_seqlens: goes from {at[0]} to {at[-1]}, expected from 0 to T = {T}")
    if any(a > b for a, b in itertools.pairwise(at)):
        raise ValueError(f"cu_seqlens: got {at}, expected values that never fall")
    return at


def sequence_bounds(x: Inputs) -> list[tuple[int, int, int]]:
    """(batch row, first token, one past the last token) of every sequence. Reads cu_seqlens: host backends only."""
    if x.cu_seqlens is None:
        return [(b, 0, x.v.shape[1]) for b in range(x.v.shape[0])]
    return [(0, a, b) for a, b in itertools.pairwise(packed_bounds(x.cu_seqlens, x.v.shape[1]))]


def own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy that may be written."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def initial_state(x: Inputs, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The initial state as fresh tensors of the accumulator's dtype; zeros where none was given."""
    N, H, K, V = x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3]

    def start(given: Tensor | None, *shape: int) -> Tensor:
        if given is not None:
            return own(given, x.acc_dtype)
        return torch.zeros(shape, device=x.q.device, dtype=x.acc_dtype)

    if not spec.normalize:
        return start(x.C, N, H, K, V), start(None, 0), start(None, 0)
    return start(x.C, N, H, K, V), start(x.n, N, H, K), start(x.m, N, H)


def input_gate(x: Inputs) -> Tensor:
    """log_i, or the zeros it stands for."""
    return torch.zeros_like(x.log_f) if x.log_i is None else x.log_i
