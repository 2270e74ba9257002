"""The module `mLSTMBackend`, which calls kernels by mode, and its options, where `mlstm_kernels.torch` has them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tfla.integrations.arguments import check_epsilon, check_flags
from tfla.integrations.mlstm_kernels.kernels import (
    get_mlstm_kernel,
    get_mlstm_sequence_kernel,
    get_mlstm_step_kernel,
    recurrent_step_siging,
)
from tfla.integrations.mlstm_kernels.torch.kernel_wrappers import (
    wrap_chunkwise__arbitrary_sequence_length_with_padding,
)
from tfla.integrations.mlstm_kernels.variants import Result

ChunkwiseKernelType = Literal[
    "chunkwise--native_autograd",
    "chunkwise--native_custbw",
    "chunkwise--triton_limit_chunk",
    "chunkwise--triton_xl_chunk",
    "chunkwise--triton_xl_chunk_siging",
    "parallel--native_autograd",
    "parallel--native_custbw",
    "parallel--native_stablef_autograd",
    "parallel--native_stablef_custbw",
    "parallel--native_siging_autograd",
    "parallel--native_siging_custbw",
    "parallel--triton_limit_headdim",
]
SequenceKernelType = Literal["native_sequence__native", "native_sequence__triton"]
StepKernelType = Literal["native", "triton"]
DtypeType = Literal["float32", "bfloat16", "float16"]
BackendModeType = Literal["train", "train_with_padding", "inference"]
__all__ = [
    "BackendModeType",
    "ChunkwiseKernelType",
    "DtypeType",
    "SequenceKernelType",
    "StepKernelType",
    "mLSTMBackend",
    "mLSTMBackendConfig",
]
OPTIONS: dict[str, tuple[str, ...]] = {
    "chunkwise_kernel": get_args(ChunkwiseKernelType),
    "sequence_kernel": get_args(SequenceKernelType),
    "step_kernel": get_args(StepKernelType),
    "mode": get_args(BackendModeType),
    "autocast_kernel_dtype": get_args(DtypeType),
    "inference_state_dtype": get_args(DtypeType),
}


def _check_option(name: str, value: object) -> None:
    """Raise a ValueError where `value` is not allowed for the option `name`."""
    if value not in OPTIONS[name]:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(repr, OPTIONS[name]))}")


@dataclass
class mLSTMBackendConfig:
    """The options of :class:`mLSTMBackend`, with mlstm_kernels' names and defaults.

    Args:
        chunkwise_kernel, sequence_kernel, step_kernel: names of kernels.
        mode: "train", "train_with_padding" or "inference"; :class:`mLSTMBackend` says what they do.
        chunk_size: accepted without effect.
        return_last_states: whether a call returns the last states, where the call itself does not say it.
        autocast_kernel_dtype: the dtype that q, k and v take under autocast.
        eps: the number that is added to the denominator.
        inference_state_dtype: the dtype of the last states in mode "inference".
        normalize_siging: whether the kernels with a sigmoid input gate divide by the normalizer.

    Raises:
        ValueError, TypeError: a value is not allowed, or `return_last_states` is set with parallel kernels or with mode
            "train_with_padding", which have no last states.
    """

    chunkwise_kernel: ChunkwiseKernelType = "chunkwise--native_autograd"
    sequence_kernel: SequenceKernelType = "native_sequence__native"
    step_kernel: StepKernelType = "native"
    mode: BackendModeType = "train"
    chunk_size: int = 64
    return_last_states: bool = True
    autocast_kernel_dtype: DtypeType = "bfloat16"
    eps: float = 1e-6
    inference_state_dtype: DtypeType = "float32"
    normalize_siging: bool = True

    def __post_init__(self) -> None:
        for name in OPTIONS:
            _check_option(name, getattr(self, name))
        check_flags(return_last_states=self.return_last_states, normalize_siging=self.normalize_siging)
        check_epsilon("eps", self.eps)
        if self.return_last_states and (self.parallel or self.mode == "train_with_padding"):
            where = "parallel kernels" if self.parallel else "mode 'train_with_padding'"
            raise ValueError(f"return_last_states: got True, expected False with {where}")

    @property
    def parallel(self) -> bool:
        """True for a kernel that computes all steps at once, without states."""
        return self.chunkwise_kernel.startswith("parallel--")


class mLSTMBackend(nn.Module):
    """A module that calls the kernels which its configuration names.

    The mode decides which kernel is called and what is returned:

    - "train" calls the chunkwise kernel. It returns the last states where the configuration or the call asks for them.
    - "train_with_padding" calls the chunkwise kernel and never returns last states.
    - "inference" calls the step kernel for a sequence of one step, else the chunkwise kernel. It always returns the
      last states, in `inference_state_dtype`.

    Sequences have any length in every mode.

    The kernels are the attributes `chunkwise_kernel_fn`, `step_kernel_fn` and `sequence_kernel_fn`, and may be
    replaced. No mode needs the last one, because the chunkwise kernels take any length.

    Args:
        config: the options; a configuration of mlstm_kernels itself has the same fields.
    """

    config_class = mLSTMBackendConfig

    def __init__(self, config: mLSTMBackendConfig) -> None:
        super().__init__()
        self.config = config
        self.chunkwise_kernel_fn = get_mlstm_kernel(config.chunkwise_kernel)
        self.sequence_kernel_fn = get_mlstm_sequence_kernel(config.sequence_kernel)
        self.step_kernel_fn = get_mlstm_step_kernel(config.step_kernel)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        i: Tensor,
        f: Tensor,
        c_initial: Tensor | None = None,
        n_initial: Tensor | None = None,
        m_initial: Tensor | None = None,
        return_last_states: bool | None = None,
        mode: BackendModeType | None = None,
    ) -> Result:
        """Compute the outputs of a batch of sequences and, where asked for, their last states.

        Args:
            q, k: (B, NH, S, DHQK).
            v: (B, NH, S, DHHV).
            i, f: (B, NH, S), pre-activations of the gates.
            c_initial, n_initial, m_initial: (B, NH, DHQK, DHHV), (B, NH, DHQK) and (B, NH, 1); zeros if None.
            return_last_states, mode: options of this call; None takes those of the configuration.

        Returns:
            h (B, NH, S, DHHV), or (h, (c, n, m)). In training, kernels with a sigmoid input gate return (h, (c, n)).

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it, what it is and what is allowed.
        """
        mode = self.config.mode if mode is None else mode
        _check_option("mode", mode)
        with_states = self.config.return_last_states if return_last_states is None else return_last_states
        check_flags(return_last_states=with_states)
        if mode == "train_with_padding" and with_states:
            raise ValueError("return_last_states: got True, expected False with mode 'train_with_padding'")
        config = self.config
        dtype = getattr(torch, config.autocast_kernel_dtype)
        sigmoid = "siging" in config.chunkwise_kernel
        options: dict[str, Any] = {"normalize": config.normalize_siging} if sigmoid else {}
        if mode != "inference":
            return self.chunkwise_kernel_fn(
                q, k, v, i, f, c_initial, n_initial, m_initial, with_states, config.eps,
                chunk_size=config.chunk_size, autocast_kernel_dtype=dtype, **options,
            )  # fmt: skip
        state_dtype = getattr(torch, config.inference_state_dtype)
        step_kernel = recurrent_step_siging if sigmoid else self.step_kernel_fn
        return wrap_chunkwise__arbitrary_sequence_length_with_padding(
            functools.partial(self.chunkwise_kernel_fn, **options), self.sequence_kernel_fn,
            functools.partial(step_kernel, dtype_state=state_dtype, **options), q, k, v, f, i,
            c_initial, n_initial, m_initial, True, config.eps, dtype, config.chunk_size, state_dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the configuration, which the representation of the module shows."""
        return str(self.config)
