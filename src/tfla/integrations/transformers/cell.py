"""The operator behind the interface that transformers' layers call."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tfla.integrations.transformers.padding import PaddingHooks
from tfla.ops.api import mlstm
from tfla.ops.state import State
from tfla.ops.steps import mlstm_step

LibraryState = tuple[Tensor, Tensor, Tensor]  # C (B, H, dqk, dhv), n (B, H, dqk), m (B, H, 1)


class Cell(nn.Module):
    """mLSTMexp, (1)-(8), called as the ``mlstm_backend`` whose place it takes, heads first.

    That of transformers and that of mlstm_kernels (with the ``xlstm`` package) differ in the names of the inputs.
    Sequences have any length in every mode. The library adds its ``eps`` to the denominator D = max(|n q|, exp(-m)),
    which is not done here: behind the layer's norm over each head, D is left in sqrt(s^2 + norm_eps D^2) alone, s being
    the numerator's standard deviation, so that ``eps`` changes a head by a part of at most eps sqrt(norm_eps) / (2 s).

    Args:
        original: the module it stands for, which :func:`tfla.integrations.transformers.restore` puts back.
        padding: that of the model.
        chunk_size, backend: of the operator.
    """

    def __init__(self, original: nn.Module, padding: PaddingHooks, chunk_size: int | None, backend: str | None) -> None:
        super().__init__()
        self.config: Any = original.config
        self.original_in_tuple = (original,)  # in a tuple it is no submodule
        self.padding, self.chunk_size, self.backend = padding, chunk_size, backend
        _, *names = inspect.signature(type(original).forward).parameters
        self.names = names[:5]

    def forward(
        self,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor, LibraryState | None]:
        """h (B, H, T, dhv) and the state behind the last token; None where the mode asks for none.

        Args:
            c_initial, n_initial, m_initial: the state, all or none; zeros if None.
            return_last_states: in a "train" mode, None takes the config's; other modes, and a state given, return one.
            mode: None takes the config's.
            inputs: queries, keys (B, H, T, dqk), values (B, H, T, dhv) and both gates' pre-activations (B, H, T), by
                the names that the original has for them.

        Raises:
            TypeError: an argument is unknown.
            ValueError: only a part of the state is given, or the mode is unknown.
        """
        for name in inputs:
            if name not in self.names:
                raise TypeError(f"{name}: got an unknown argument, expected one of {', '.join(self.names)}")
        # The layer made heads first by a transpose: this one is free.
        q, k, v, i, f = (inputs[name].transpose(1, 2) for name in self.names)
        i, f = self.padding.mask_gates(self, i, f)
        state = None
        if c_initial is not None and n_initial is not None and m_initial is not None:
            state = State(c_initial, n_initial, m_initial[..., 0])
        elif not (c_initial is None and n_initial is None and m_initial is None):
            raise ValueError("c_initial, n_initial, m_initial: got some of them, expected all or none")
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, i, f, *(state or ())))
        if state is not None and q.shape[1] == 1 and not differentiable:
            # Inside the model, which copies the new state over the old one anyway.
            in_place = self.padding.running and state.C.dtype == torch.promote_types(q.dtype, torch.float32)
            h, new = mlstm_step(q[:, 0], k[:, 0], v[:, 0], i[:, 0], f[:, 0], state, in_place=in_place)
            return h[:, :, None], _to_library_state(new, state)
        if state is not None and differentiable:
            # The model writes the new state over the tensors it gave: the backward needs them as they were.
            state = State(*(t.clone() for t in state))  # type: ignore[union-attr]
        if state is None and not self._returns_states(return_last_states, mode):
            return mlstm(q, k, v, i, f, chunk_size=self.chunk_size, backend=self.backend).transpose(1, 2), None
        h, new = mlstm(
            q, k, v, i, f, initial_state=state, return_state=True, chunk_size=self.chunk_size, backend=self.backend
        )
        return h.transpose(1, 2), _to_library_state(new, state)

    def _returns_states(self, return_last_states: bool | None, mode: str | None) -> bool:
        mode = self.config.mode if mode is None else mode
        if "inference" in mode:
            return True
        if "train" not in mode:
            raise ValueError(f"mode: got {mode!r}, expected one with 'train' or 'inference' in its name")
        return bool(self.config.return_last_states if return_last_states is None else return_last_states)


def _is_half_precision(state: State) -> bool:
    """Whether it is kept in fewer bits than it is computed in."""
    return state.C.dtype.itemsize < torch.float32.itemsize


def _to_library_state(new: State, old: State | None) -> LibraryState:
    """The state as the library keeps it: m with a last dimension, and in the dtype of the old state."""
    C, n, m = new
    assert n is not None
    assert m is not None
    if old is not None and _is_half_precision(old):
        # m is free to choose: one that its narrow dtype holds exactly costs no accuracy.
        held = m.to(old.C.dtype).to(m.dtype)
        shift = torch.exp(m - held)
        C, n, m = C * shift[..., None, None], n * shift[..., None], held
    return C, n, m[..., None]
