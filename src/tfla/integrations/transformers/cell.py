"""The nn.Module that calls tfla's operator with the interface that the layers of transformers' xLSTM expect."""

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
    """The mLSTM with an exponential input gate, (1) to (8), with the interface of a layer's ``mlstm_backend``.

    The layer holds a ``mlstm_backend`` of transformers or, where the ``xlstm`` package is installed, of mlstm_kernels.
    The two have different names for the inputs. Sequences have any length in every mode.

    The library adds its ``eps`` to the denominator D = max(|n q|, exp(-m)); the cell does not. The layer's norm over
    each head follows, which divides the numerator by sqrt(s^2 + norm_eps D^2), where s is the numerator's standard
    deviation. So ``eps`` changes the output of a head by a relative amount of at most eps sqrt(norm_eps) / (2 s).

    Args:
        original: the ``mlstm_backend`` to replace, which :func:`tfla.integrations.transformers.restore` puts back.
        padding: the hooks of the model, which hold its attention mask.
        chunk_size, backend: the options of the operator.
    """

    def __init__(self, original: nn.Module, padding: PaddingHooks, chunk_size: int | None, backend: str | None) -> None:
        super().__init__()
        self.config: Any = original.config
        self.original_in_tuple = (original,)  # a tuple, so that it is not registered as a submodule
        self.padding, self.chunk_size, self.backend = padding, chunk_size, backend
        self.context_parallel: Any = None  # the processes that share the steps, as `tfla.mlstm` takes them
        _, *names = inspect.signature(type(original).forward).parameters
        self.input_names = names[:5]

    def forward(
        self,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: str | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor, LibraryState | None]:
        """Compute the outputs of a batch of sequences, and the state after their last tokens.

        Args:
            c_initial, n_initial, m_initial: the initial state (B, H, dqk, dhv), (B, H, dqk) and (B, H, 1), all or none;
                zeros if None.
            return_last_states: whether to return the state in a "train" mode; None takes the option of the config. It
                has no effect in other modes and with an initial state, where the state is always returned.
            mode: the mode; None takes that of the config.
            inputs: queries, keys (B, H, T, dqk), values (B, H, T, dhv), and the pre-activations of the input and the
                forget gate (B, H, T), with the names that the original has for them.

        Returns:
            h (B, H, T, dhv), and the state (C, n, m) or None.

        Raises:
            TypeError: an argument is unknown.
            ValueError: some parts of the state are given, but not all, or the mode is unknown.
        """
        for name in inputs:
            if name not in self.input_names:
                raise TypeError(f"{name}: got an unknown argument, expected one of {', '.join(self.input_names)}")
        # The layer has transposed its inputs to heads first, so that this transpose copies nothing.
        q, k, v, i, f = (inputs[name].transpose(1, 2) for name in self.input_names)
        i, f = self.padding.mask_gates(self, i, f)
        state = None
        if c_initial is not None and n_initial is not None and m_initial is not None:
            state = State(c_initial, n_initial, m_initial[..., 0])
        elif not (c_initial is None and n_initial is None and m_initial is None):
            raise ValueError("c_initial, n_initial, m_initial: got some of them, expected all or none")
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, i, f, *(state or ())))
        if state is not None and q.shape[1] == 1 and not differentiable:
            # Within a call of the model, the model copies the new state over the old one anyway.
            in_place = self.padding.in_forward and state.C.dtype == torch.promote_types(q.dtype, torch.float32)
            h, new = mlstm_step(q[:, 0], k[:, 0], v[:, 0], i[:, 0], f[:, 0], state, in_place=in_place)
            return h[:, :, None], _to_library_state(new, state)
        if state is not None and differentiable:
            # The model writes the new state over these tensors, and the backward needs the old one.
            state = State(*(t.clone() for t in state))  # type: ignore[union-attr]
        options: dict[str, Any] = {
            "chunk_size": self.chunk_size,
            "backend": self.backend,
            "context_parallel": self.context_parallel,
        }
        if state is None and not self._returns_states(return_last_states, mode):
            return mlstm(q, k, v, i, f, **options).transpose(1, 2), None
        h, new = mlstm(q, k, v, i, f, initial_state=state, return_state=True, **options)
        return h.transpose(1, 2), _to_library_state(new, state)

    def _returns_states(self, return_last_states: bool | None, mode: str | None) -> bool:
        """Return whether a call without an initial state returns the last state."""
        mode = self.config.mode if mode is None else mode
        if "inference" in mode:
            return True
        if "train" not in mode:
            raise ValueError(f"mode: got {mode!r}, expected one with 'train' or 'inference' in its name")
        return bool(self.config.return_last_states if return_last_states is None else return_last_states)


def _is_half_precision(state: State) -> bool:
    """Return whether the state is stored in fewer bits than float32, in which it is computed."""
    return state.C.dtype.itemsize < torch.float32.itemsize


def _to_library_state(new: State, old: State | None) -> LibraryState:
    """Return (C, n, m) as transformers stores them, m as (B, H, 1).

    If the old state is in half precision, the new one will be rounded to its dtype. m is rounded here already, and C
    and n are scaled to the rounded m, so that its rounding costs no accuracy.
    """
    C, n, m = new
    assert n is not None
    assert m is not None
    if old is not None and _is_half_precision(old):
        rounded_m = m.to(old.C.dtype).to(m.dtype)
        scale = torch.exp(m - rounded_m)
        C, n, m = C * scale[..., None, None], n * scale[..., None], rounded_m
    return C, n, m[..., None]
