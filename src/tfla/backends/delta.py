"""The interface between the operator of the delta rule and its backends (:mod:`tfla.backends.base` has the mLSTM's).

A backend is a module of this package with an object ``DELTA_BACKEND``. It computes, for each head
(docs/delta-rule.md),

    C'_t = diag(exp(log_f_t)) C_{t-1}            log_f_t: one number, one per key channel, or none
    E_t  = v_t - C'_t^T r_t                      r_t the read key; read before the decay: v_t - C_{t-1}^T r_t
    C_t  = C'_t + beta_t k_t E_t^T               without correction: E_t = v_t, gated linear attention (GLA)
    h_t  = scale C_t^T q_t

Every backend but the reference divides sequences into tiles of `TILE` steps. The backward reads two tensors of the
forward: the prediction errors E, and for each tile the matrix X = M (I + B M)^-1, where M_ij is what step i reads of
the write of step j < i with the decays between them, and B = diag(beta). With X, E = R - X B R for the errors
R = V - (r decayed) C of the state before the tile.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tfla.backends.base import AnyBackend, FinalRows

BetaActivation = Literal["none", "sigmoid", "2sigmoid"]
GateActivation = Literal["none", "softplus", "sigmoid"]
ActivationsBy = Literal["operator", "kernels", "backend"]


class DeltaInputs(NamedTuple):
    """The tensors of one call; Hq divides H, and N is the number of sequences."""

    q: Tensor  # (B, T, Hq, dqk)
    k: Tensor  # (B, T, Hq, dqk), the write keys
    v: Tensor  # (B, T, H, dhv)
    beta: Tensor | None  # (B, T, H), any float dtype; None: all 1
    log_f: Tensor | None  # (B, T, H) or (B, T, H, dqk), any float dtype; None: no decay
    read_key: Tensor | None  # (B, T, Hq, dqk); None: k
    A_log: Tensor | None  # (H,), of the gates' activation
    dt_bias: Tensor | None  # (H,) or (H, dqk), of the gates' activation
    C: Tensor | None  # (N, H, dqk, dhv), initial state; None: all zero
    cu_seqlens: Tensor | None  # (N + 1,) int, of packed sequences, where B = 1; None: N = B

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of states and accumulators."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def channel_gates(self) -> bool:
        """True if each key channel has its own gate."""
        return self.log_f is not None and self.log_f.dim() == 4


class DeltaSpec(NamedTuple):
    """The options of one call.

    The last four differ from their defaults only if `DeltaBackend.activations_by` is "backend", `normalize_qk` also
    where `DeltaBackend.normalizes` is true, and those of the gates where `DeltaBackend.activates` is: else the operator
    applies the activations before the call.
    """

    scale: float  # factor of the queries
    correct: bool  # subtract what the state predicts; False: E = v, without read_key
    read_before_decay: bool  # E_t reads C_{t-1} instead of its decayed form
    chunk_size: int  # distance in steps between stored states
    kernel: str  # one of `DeltaBackend.kernels`
    save: bool  # store what the backward needs
    final_state: bool  # return the final state
    normalize_qk: bool = False  # divide q and k by sqrt(their squared norm + 1e-6)
    beta_activation: BetaActivation = "none"  # "2sigmoid": 2 sigmoid(beta)
    gate_activation: GateActivation = "none"  # see tfla.ops.delta_activations
    lower_bound: float = 0.0  # of gate_activation "sigmoid"


class DeltaOutputs(NamedTuple):
    """The results of a forward. Parts that the options do not ask for have shape (0,), and may be the same tensor."""

    h: Tensor  # (B, T, H, dhv), dtype of v
    C: Tensor  # (N, H, dqk, dhv), final states
    E: Tensor  # (B, T, H, dhv), prediction errors
    X: Tensor  # (B, T, H, TILE), the rows of X of every tile; columns beyond the tile's steps are not read
    # (rows, H, dqk, dhv), states at the starts of chunks; or, where kernels with at most one gate a step normalize q
    # and k (`DeltaBackend.normalizes`), (2, B, T, H) float32, 1 / |q| and 1 / |k|; or both, flat, of segments.
    chunk_C: Tensor


class DeltaGrads(NamedTuple):
    """The gradients with respect to :class:`DeltaInputs`, in any float dtype; None where the input is None."""

    q: Tensor
    k: Tensor  # without read_key also what reads by k contribute
    v: Tensor
    beta: Tensor | None
    log_f: Tensor | None
    read_key: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    C: Tensor | None


class DeltaStepInputs(NamedTuple):
    """The tensors of a few decoding steps of every sequence; Hq divides H."""

    q: Tensor  # (B, T, Hq, dqk)
    k: Tensor  # (B, T, Hq, dqk)
    v: Tensor  # (B, T, H, dhv)
    beta: Tensor | None  # (B, T, H)
    log_f: Tensor | None  # (B, T, H) or (B, T, H, dqk)
    read_key: Tensor | None  # (B, T, Hq, dqk)
    A_log: Tensor | None  # (H,)
    dt_bias: Tensor | None  # (H,) or (H, dqk)
    C: Tensor  # (B, H, dqk, dhv), any float dtype; with `indices` (rows, H, dqk, dhv)
    lengths: Tensor | None  # (B,) int: the new state is the one after this many steps; None: after all
    indices: Tensor | None = None  # (B,) int: the rows of C that are read and overwritten; -1: none, h is 0

    @property
    def acc_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def kept_dtype(self) -> torch.dtype:
        """The dtype of a new C: that of the old one if it has 16 bits, else that of the arithmetic."""
        return self.C.dtype if self.C.dtype.itemsize == 2 else self.acc_dtype


class DeltaStepSpec(NamedTuple):
    """The options of a call of a few decoding steps; the kernel of a backend applies the activations itself."""

    scale: float  # factor of the queries
    correct: bool  # subtract what the state predicts; False: E = v, without read_key
    read_before_decay: bool  # E_t reads C_{t-1} instead of its decayed form
    final_state: bool  # return the new state
    normalize_qk: bool = False  # divide q, k and read_key by sqrt(their squared norm + 1e-6)
    beta_activation: BetaActivation = "none"  # "2sigmoid": 2 sigmoid(beta)
    gate_activation: GateActivation = "none"  # see tfla.ops.delta_activations
    lower_bound: float = 0.0  # of gate_activation "sigmoid"


class Saved(NamedTuple):
    """The shapes and dtypes of what a forward stores for the backward, for `DeltaOutputs.E`, `X` and `chunk_C`."""

    E: tuple[tuple[int, ...], torch.dtype]
    X: tuple[tuple[int, ...], torch.dtype]
    chunk_C: tuple[tuple[int, ...], torch.dtype]


class DeltaBackend(AnyBackend[DeltaInputs, DeltaSpec, DeltaStepInputs, DeltaStepSpec]):
    """An implementation of the operator of the delta rule."""

    # What applies the activations of q, k, beta and the gates: the operator, in plain operations; or in eager calls the
    # kernels of `activation_kernels`, which the operator launches; or the backend itself, with their gradients.
    activations_by: ActivationsBy = "operator"
    clamps_gates = False  # reads log-gates as the caller gives them; for the others the operator clamps them before
    reads_before_decay = True  # can compute `DeltaSpec.read_before_decay`
    read_after_decay: tuple[str, ...] = ()  # the kernels that cannot
    row_kernels: tuple[str, ...] = ()  # the kernels that `forward_by_rows` runs
    batch_kernels: tuple[str, ...] = ()  # those of them that take batches; the others take packed sequences

    def default_kernel(self, x: DeltaInputs, chunk_size: int | None) -> str:
        """Return the kernel for `kernel=None`; `chunk_size` is what the caller gives."""
        return self.kernels[0]

    def normalizes(self, x: DeltaInputs, spec: DeltaSpec) -> bool:
        """Return whether the kernels of an eager or compiled call, or of one from JAX, divide q and k by their norms.

        With at most one gate a step, a forward with `save` then returns 1 / |q| and 1 / |k| in the place of the states
        of chunks.
        """
        return False

    def activates(self, x: DeltaInputs, spec: DeltaSpec) -> bool:
        """Return whether the kernels of an eager or compiled call, or of one from JAX, apply the gates' activation."""
        return False

    @abstractmethod
    def saved(self, x: DeltaInputs, correct: bool, chunk_size: int, kernel: str) -> Saved:
        """Return what a forward with `save` stores, from the shapes and dtypes of x alone."""

    def stored(self, x: DeltaInputs, spec: DeltaSpec) -> Saved:
        """Return what a forward with `save` stores: :meth:`saved`, or norms in the place of the states of chunks."""
        found = self.saved(x, spec.correct, spec.chunk_size, spec.kernel)
        if not spec.normalize_qk or x.channel_gates or self.activations_by == "backend":
            return found
        return found._replace(chunk_C=((2, *x.v.shape[:3]), torch.float32))

    def stores_whole_batch(self, spec: DeltaSpec) -> bool:
        """Return whether `DeltaOutputs.chunk_C` of a forward with `save` cannot be divided by batch rows."""
        return False

    @abstractmethod
    def forward(self, x: DeltaInputs, spec: DeltaSpec) -> DeltaOutputs:
        """Compute h, and what the options ask for."""

    def forward_by_rows(
        self, x: DeltaInputs, rows: Tensor, spec: DeltaSpec, final_rows: FinalRows | None = None
    ) -> Tensor | None:
        """Compute h where the states are rows of a pool, which is read and overwritten in place, without gradients.

        Args:
            x: the inputs of packed sequences, for `batch_kernels` of a batch; x.C is the pool, (rows of the pool, H,
                dqk, dhv).
            rows: (N,) int32 or int64: the row of each sequence, or -1 for a state of zeros that is not stored.
            spec: the options. With `final_state` the rows are overwritten.
            final_rows: the pool whose rows are overwritten instead, and the rows; None: those that are read.

        Returns:
            h; or None, before anything is written, where the backend does not do it: the caller then gathers the rows.
        """
        return None

    @abstractmethod
    def backward(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, dC: Tensor | None, spec: DeltaSpec) -> DeltaGrads:
        """Compute the gradients from the cotangents of h and of the final state.

        Args:
            x: the inputs of the forward.
            out: what the forward stored, E, X and chunk_C; its other parts are not read.
            dh: (B, T, H, dhv), the cotangent of h.
            dC: (N, H, dqk, dhv), the cotangent of the final state; None is zero.
            spec: the options of the forward.
        """

    def initial_cotangent(self, x: DeltaInputs, out: DeltaOutputs, dh: Tensor, spec: DeltaSpec) -> Tensor:
        """Return the cotangents of the initial states, (N, H, dqk, dhv), from those of h alone.

        With context parallelism processes exchange them before the backward. The arguments are those of `backward`, and
        x.C is given.
        """
        dC = self.backward(x, out, dh, None, spec).C
        assert dC is not None
        return dC

    def action(self, x: DeltaInputs, spec: DeltaSpec) -> tuple[Tensor, Tensor] | None:
        """Return the transitions A (N, H, dqk, dqk) of sequences and what these add, S (N, H, dqk, dhv), or None.

        The state after a sequence is A C + S for the state C before it. Processes exchange both with context
        parallelism. None: they are those of a forward from the state [0 | I] with the values [v | 0].
        """
        return None

    def steps(self, x: DeltaStepInputs, spec: DeltaStepSpec, into: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute a few steps without gradients: h and the new C.

        The new C goes to ``into``, which may be x.C, or to a new tensor; without `spec.final_state` it has shape (0,).
        With `x.indices` and `spec.final_state`, ``into`` is x.C.
        """
        raise NotImplementedError


def stored_rows(x: DeltaInputs, chunk_size: int) -> int:
    """Return the rows of `DeltaOutputs.chunk_C`; for packed sequences an upper bound, which does not read lengths."""
    B, T = x.v.shape[:2]
    if x.cu_seqlens is None:
        return B * ((T + chunk_size - 1) // chunk_size)
    return T // chunk_size + x.sequences
