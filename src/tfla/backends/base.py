"""The interface between the operator and its backends.

A backend is a module of this package with an object ``BACKEND``. It computes, for every head (docs/mathematics.md),

    C_t = exp(log_f_t) C_{t-1} + exp(log_i_t) k_t v_t^T        n_t = exp(log_f_t) n_{t-1} + exp(log_i_t) k_t
    h_t = scale C_t^T q_t / max(|scale n_t^T q_t|, 1)          without normalizer: h_t = scale C_t^T q_t

With a normalizer, states are stabilized by ``m_t = max(log_f_t + m_{t-1}, log_i_t)``, without one by ``m = 0``. A
backend gets finite log-gates. One with `takes_gates` gets the gates of the model (`Spec.gates`) and turns them into
log-gates as :func:`tfla.ops.gates.log_gates` does.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

TILE = 64  # steps of one tile in every backend but the reference, whatever chunk_size is


def static(tensors: Sequence[Tensor | None]) -> Hashable:
    """Return the dtype, shape, strides, alignment to 16 bytes and device of each tensor, None for None."""
    # One comprehension, because a function call for each tensor takes half as much host time again.
    return tuple([None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device) for x in tensors])


# Replays a recorded call on other tensors of equal `static`.
Replay = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]


class Sequences(Protocol):
    """The tensors of a call of any operator that tell where its sequences are."""

    @property
    def q(self) -> Tensor:
        """The queries, (B, T, Hq, dqk)."""

    @property
    def v(self) -> Tensor:
        """The values, (B, T, H, dhv)."""

    @property
    def cu_seqlens(self) -> Tensor | None:
        """The offsets of packed sequences, (N + 1,), or None."""

    @property
    def sequences(self) -> int:
        """The number of sequences."""

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of states and accumulators."""


class Inputs(NamedTuple):
    """The tensors of one call; Hq divides H, and N is the number of sequences."""

    q: Tensor  # (B, T, Hq, dqk)
    k: Tensor  # (B, T, Hq, dqk)
    v: Tensor  # (B, T, H, dhv)
    log_i: Tensor | None  # (B, T, H), log-gate, or as `Spec.gates` says; None: all zero
    log_f: Tensor  # (B, T, H), the same
    C: Tensor | None  # (N, H, dqk, dhv), initial state as in tfla.State; None: all zero
    n: Tensor | None  # (N, H, dqk)
    m: Tensor | None  # (N, H)
    cu_seqlens: Tensor | None  # (N + 1,) int, of packed sequences, where B = 1; None: N = B

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of states and accumulators."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


Gates = Literal["exp", "sigmoid", "log"]


class Spec(NamedTuple):
    """The options of one call."""

    scale: float  # factor of the queries
    normalize: bool  # with n, m and the denominator
    normalizer_grad: bool  # False: no gradient through the denominator, as in the paper
    chunk_size: int  # distance in steps between stored states
    kernel: str  # one of `Backend.kernels`
    save: bool  # store what the backward needs
    final_state: bool  # return the final state
    store_dtype: torch.dtype | None = None  # of chunk_C; None: that of accumulators
    gates: Gates = "log"  # what the gates are: pre-activations of mLSTMexp or mLSTMsig, or log-gates; not clamped yet


# The dtypes of a pool of states whose rows kernels read and overwrite; C, n and m may have different ones.
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FinalRows(NamedTuple):
    """The pool that gets the final states where it is not the one of the initial states, and its rows."""

    C: Tensor  # (rows of the pool, H, dqk, dhv)
    rows: Tensor  # (N,) int
    n: Tensor | None = None  # (rows of the pool, H, dqk)
    m: Tensor | None = None  # (rows of the pool, H)


class Outputs(NamedTuple):
    """The results of a forward. Parts that the options do not ask for have shape (0,), and may be the same tensor."""

    h: Tensor  # (B, T, H, dhv), dtype of v
    C: Tensor  # (N, H, dqk, dhv), final states
    n: Tensor  # (N, H, dqk)
    m: Tensor  # (N, H)
    d: Tensor  # (B, T, H), stabilized denominators exp(-m_t) d_t
    chunk_C: Tensor  # (stored_states, H, dqk, dhv), states at the starts of chunks
    chunk_n: Tensor  # (stored_states, H, dqk)


class Grads(NamedTuple):
    """The gradients with respect to :class:`Inputs`, in any float dtype; those of inputs that are None are ignored."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_i: Tensor
    log_f: Tensor
    C: Tensor
    n: Tensor


class StepInputs(NamedTuple):
    """The tensors of a few decoding steps of every sequence; Hq divides H."""

    q: Tensor  # (B, T, Hq, dqk)
    k: Tensor  # (B, T, Hq, dqk)
    v: Tensor  # (B, T, H, dhv)
    i: Tensor | None  # (B, T, H), any float dtype, as `StepSpec.gates` says; None: log-gates that are all zero
    f: Tensor  # (B, T, H), the same
    C: Tensor  # (B, H, dqk, dhv), any float dtype; with `indices` (rows, H, dqk, dhv), and n and m likewise
    n: Tensor | None  # (B, H, dqk); None without a normalizer
    m: Tensor | None  # (B, H); None without a normalizer
    lengths: Tensor | None  # (B,) int: the new state is the one after this many steps; None: after all
    indices: Tensor | None = None  # (B,) int: the rows of C, n and m that are read and overwritten; -1: none, h is 0

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic and of a new m."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def kept_dtype(self, given: Tensor) -> torch.dtype:
        """Return the dtype of a new C or n: that of the old one if it has 16 bits, else that of the arithmetic."""
        return given.dtype if given.dtype.itemsize == 2 else self.acc_dtype


class StepSpec(NamedTuple):
    """The options of a call of a few decoding steps."""

    scale: float  # factor of the queries
    gates: Gates  # what i and f are: pre-activations of mLSTMexp or mLSTMsig, or log-gates; not clamped yet
    final_state: bool  # return the new state
    eps: float = 0.0  # added to the stabilized denominator, max(exp(-m) |d|, exp(-m))


class StepOutputs(NamedTuple):
    """The results of a few steps: h, dense and of the dtype of v, and the new state.

    Parts that the options do not ask for have shape (0,), and may be the same tensor.
    """

    h: Tensor
    C: Tensor
    n: Tensor
    m: Tensor


class Starts(NamedTuple):
    """The states before this process's spans, and what else follows from those of all processes.

    Parts that do not exist have shape (0,).
    """

    C: Tensor  # (B S, H, dqk, dhv)
    n: Tensor  # (B S, H, dqk)
    m: Tensor  # (B S, H)
    log_decays: Tensor  # (R S, B, H), float64, the sums of log-gates over all spans in the order of time
    final_C: Tensor  # (B, H, dqk, dhv), the final states of whole sequences
    final_n: Tensor  # (B, H, dqk)
    final_m: Tensor  # (B, H)


class Exchange(Protocol):
    """The exchange of states among processes that share the steps of all sequences.

    A backend that computes what segments add to the state anyway makes the rows of its spans from these, and reads the
    rows of all processes, between that pass and its scans. It is hashable: equal ones act alike.
    """

    @property
    def positions(self) -> tuple[int, ...]:
        """The places in time of this process's spans among those of all: the rank, and with two 2 R - 1 - rank."""

    @property
    def processes(self) -> int:
        """The number of processes, R."""

    @property
    def final(self) -> bool:
        """True if there are final states, and cotangents of them."""

    def places(self, like: Tensor) -> Tensor:
        """Return `positions` as a tensor (S,) int32 on the device of a tensor, which nothing may overwrite."""

    def start(self, rows: Tensor) -> Tensor:
        """Start the collective and return its result, which only :meth:`finish` may read."""

    def finish(self, gathered: Tensor) -> Tensor:
        """Return the rows of all processes, in the order of ranks."""


AnyInputs = TypeVar("AnyInputs")
AnySpec = TypeVar("AnySpec")
AnyStepInputs = TypeVar("AnyStepInputs")
AnyStepSpec = TypeVar("AnyStepSpec")


class AnyBackend(ABC, Generic[AnyInputs, AnySpec, AnyStepInputs, AnyStepSpec]):
    """The interface that backends of all operators share; its type parameters are the inputs and options of one."""

    name: str
    priority: int  # `backend=None` takes the backend of the highest priority that supports the inputs
    kernels: tuple[str, ...]

    @abstractmethod
    def unsupported(self, x: AnyInputs) -> str | None:
        """Return why the backend cannot run these inputs, or None."""

    def kernel_unsupported(self, x: AnyInputs, kernel: str) -> str | None:
        """Return why this kernel cannot run inputs that the backend supports, or None."""
        return None

    @abstractmethod
    def default_chunk_size(self, x: AnyInputs, kernel: str) -> int:
        """Return the chunk size for `chunk_size=None`."""

    def forward_replay(self, x: AnyInputs, spec: AnySpec) -> Replay | None:
        """Return a function that replays the last `forward` on other inputs of the same signature, or None.

        It must not depend on settings of PyTorch that may have changed since.
        """
        return None

    def steps_unsupported(self, x: AnyStepInputs) -> str | None:
        """Return why the backend cannot run these steps, or None."""
        return "it has no kernel for single steps"

    def steps_replay(self, x: AnyStepInputs, spec: AnyStepSpec, into: Tensor | None, time: bool) -> Replay | None:
        """Return a function that replays the last `steps` on other inputs of the same signature, or None.

        Args:
            x, spec, into: the arguments of `steps`.
            time: whether q, k, v and gates of later calls, and h, have the dimension of time, (B, T, ...); else T is 1.
        """
        return None

    def tile_steps(self, T: int, chunk_size: int, kernel: str) -> int:
        """Return the steps of a tile for sequences of T steps; the products inside a tile are quadratic in them."""
        return min(TILE, chunk_size, T)

    def details(self, x: AnyInputs, chunk_size: int, kernel: str) -> dict[str, object]:
        """Return the further choices for these inputs, by name; :func:`tfla.explain` shows them."""
        return {}


class Backend(AnyBackend[Inputs, Spec, StepInputs, StepSpec]):
    """An implementation of the operator."""

    exchanges = False  # can exchange the states of segments with other processes, see `has_segments`
    takes_gates = False  # reads the gates of the model, of any float dtype, instead of log-gates
    row_kernels: tuple[str, ...] = ()  # the kernels that `forward_by_rows` runs

    def default_kernel(self, x: Inputs, chunk_size: int | None) -> str:
        """Return the kernel for `kernel=None`; chunk_size is None where the caller leaves it open too."""
        return self.kernels[0]

    @abstractmethod
    def forward(self, x: Inputs, spec: Spec) -> Outputs:
        """Compute h, and what the options ask for."""

    def forward_by_rows(
        self, x: Inputs, rows: Tensor, spec: Spec, final_rows: FinalRows | None = None
    ) -> Tensor | None:
        """Compute h of sequences whose states are rows of a pool, which kernels read and overwrite, without gradients.

        Args:
            x: the inputs of packed sequences; x.C, x.n and x.m are the pool, (rows of the pool, H, ...).
            rows: (N,) int32 or int64, the row of each sequence; -1 stands for a state of zeros that is not stored.
            spec: the options. With `final_state` the rows are overwritten.
            final_rows: the pool whose rows are overwritten instead, and the rows; None: those that are read.

        Returns:
            h. None if the backend does not support the call; nothing is written then, and the caller gathers the rows.
        """
        return None

    @abstractmethod
    def backward(self, x: Inputs, out: Outputs, dh: Tensor, dC: Tensor | None, dn: Tensor | None, spec: Spec) -> Grads:
        """Compute the gradients from the cotangents of h and of the final state.

        Args:
            x: the inputs of the forward.
            out: h, d and the stored states of the forward; its other parts are not read.
            dh: (B, T, H, dhv), the cotangent of h.
            dC, dn: the cotangents of the stabilized final state; None is zero.
            spec: the options of the forward.
        """

    def cuts_sequences(self, x: Inputs, spec: Spec) -> bool:
        """Return whether a call makes states inside of its sequences, at distances that `spec.chunk_size` says."""
        return self.has_segments(x, spec)

    def has_segments(self, x: Inputs, spec: Spec) -> bool:
        """Return whether a call makes the states of segments, so that the two functions below take it."""
        return False

    def forward_exchanging(self, x: Inputs, spec: Spec, exchange: Exchange) -> tuple[Outputs, Starts]:
        """Compute the forward of this process's steps.

        Rows of ``x`` are those of the batch, each as many times as this process has spans. Its initial states are those
        of whole sequences, and read only where these begin.
        """
        raise NotImplementedError

    def backward_exchanging(
        self, x: Inputs, out: Outputs, dh: Tensor, saved: Sequence[Tensor], spec: Spec, exchange: Exchange
    ) -> Grads:
        """Compute the gradients; the cotangents of the states after the steps come from the exchange.

        Args:
            x, spec: as in the forward.
            out, dh: as in :meth:`backward`.
            saved: the max states after the spans, (B, S, H), the sums of log-gates over all spans, (R S, B, H), the max
                states of the final states, (B, H), and this process's cotangents of these, (B, H, dqk, dhv) and
                (B, H, dqk); what is missing has shape (0,).
            exchange: the exchange.
        """
        raise NotImplementedError

    def steps(self, x: StepInputs, spec: StepSpec, into: Tensor | None) -> StepOutputs:
        """Compute a few steps without gradients; the new C goes to ``into``, which may be x.C, or to a new tensor.

        With `x.indices` and `spec.final_state`, ``into`` is x.C, and the rows of x.n and x.m are overwritten too.
        """
        raise NotImplementedError

    def stored_states(self, x: Inputs, chunk_size: int, kernel: str) -> int:
        """Return the rows of `Outputs.chunk_C`; for packed sequences an upper bound, which does not read lengths."""
        B, T = x.v.shape[:2]
        if x.cu_seqlens is None:
            return B * ((T + chunk_size - 1) // chunk_size)
        return T // chunk_size + x.sequences


def stored_dtype(x: Inputs, spec: Spec) -> torch.dtype:
    """Return the dtype of `Outputs.chunk_C`."""
    return x.acc_dtype if spec.store_dtype is None else spec.store_dtype


def first_chunk_row(x: Sequences, chunk_size: int, s: int, start: int) -> int:
    """Return the row of `Outputs.chunk_C` of the first chunk of sequence s; ``start`` is the sequence's first token."""
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


def sequence_bounds(x: Sequences) -> list[tuple[int, int, int]]:
    """Return (row of the batch, first token, one past the last token) of every sequence.

    cu_seqlens are read on the host.
    """
    if x.cu_seqlens is None:
        return [(b, 0, x.v.shape[1]) for b in range(x.v.shape[0])]
    return [(0, a, b) for a, b in itertools.pairwise(packed_bounds(x.cu_seqlens, x.v.shape[1]))]


def own(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy that may be written."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def initial_state(x: Inputs, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """Return the initial state as new tensors of the accumulators' dtype; zeros where none is given."""
    N, H, K, V = x.sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3]

    def start(given: Tensor | None, *shape: int) -> Tensor:
        if given is not None:
            return own(given, x.acc_dtype)
        return torch.zeros(shape, device=x.q.device, dtype=x.acc_dtype)

    if not spec.normalize:
        return start(x.C, N, H, K, V), start(None, 0), start(None, 0)
    return start(x.C, N, H, K, V), start(x.n, N, H, K), start(x.m, N, H)


def input_gate(x: Inputs) -> Tensor:
    """Return log_i, or zeros where it is None."""
    return torch.zeros_like(x.log_f) if x.log_i is None else x.log_i
