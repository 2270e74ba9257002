"""mLSTMBackend: the module that models call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tfla.integrations.mlstm_kernels.forms import Form, Result, step
from tfla.integrations.mlstm_kernels.names import KERNELS, SEQUENCE_KERNELS, STEP_KERNELS, look_up

Mode = Literal["train", "train_with_padding", "inference"]
Dtype = Literal["float32", "bfloat16", "float16"]
MODES: tuple[Mode, ...] = ("train", "train_with_padding", "inference")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
SIGMOID = Form("sigmoid", False)


def _allowed(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(map(repr, allowed))}")


@dataclass
class mLSTMBackendConfig:
    """Options of :class:`mLSTMBackend`, with mlstm_kernels' names and defaults.

    `chunk_size` changes nothing, `autocast_kernel_dtype` is what q, k and v become under autocast.

    Raises:
        ValueError: a value is not one of those allowed, or asks for last states where there are none.
    """

    chunkwise_kernel: str = "chunkwise--native_autograd"
    sequence_kernel: str = "native_sequence__native"
    step_kernel: str = "native"
    mode: Mode = "train"
    chunk_size: int = 64
    return_last_states: bool = True
    autocast_kernel_dtype: Dtype = "bfloat16"
    eps: float = 1e-6
    inference_state_dtype: Dtype = "float32"
    normalize_siging: bool = True

    def __post_init__(self) -> None:
        look_up("chunkwise_kernel", self.chunkwise_kernel, KERNELS)
        look_up("sequence_kernel", self.sequence_kernel, SEQUENCE_KERNELS)
        look_up("step_kernel", self.step_kernel, STEP_KERNELS)
        _allowed("mode", self.mode, MODES)
        _allowed("autocast_kernel_dtype", self.autocast_kernel_dtype, DTYPES)
        _allowed("inference_state_dtype", self.inference_state_dtype, DTYPES)
        if self.return_last_states and (self.parallel or self.mode == "train_with_padding"):
            where = "parallel kernels" if self.parallel else "mode 'train_with_padding'"
            raise ValueError(f"return_last_states: got True, expected False with {where}")

    @property
    def parallel(self) -> bool:
        return self.chunkwise_kernel.startswith("parallel--")

    @property
    def sigmoid(self) -> bool:
        return "siging" in self.chunkwise_kernel


class mLSTMBackend(nn.Module):
    """The kernels of a configuration behind one call, by mode:

    - train: the chunkwise kernel; with last states where the configuration or the call asks for them.
    - train_with_padding: the same, of any length, without last states.
    - inference: of any length, one step by the step kernel; always with last states, in `inference_state_dtype`.
    """

    config_class = mLSTMBackendConfig

    def __init__(self, config: mLSTMBackendConfig) -> None:
        super().__init__()
        self.config = config

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
        mode: Mode | None = None,
    ) -> Result:
        """q, k (B, NH, S, DHQK), v (B, NH, S, DHHV), i, f (B, NH, S).

        States, initial and last, are c (B, NH, DHQK, DHHV), n (B, NH, DHQK) and m (B, NH, 1).

        `return_last_states` and `mode` stand in for those of the configuration.

        Returns:
            h (B, NH, S, DHHV), or (h, last states). In training mLSTMsig has (c, n) alone.

        Raises:
            ValueError, TypeError: an argument does not fit.
        """
        mode = self.config.mode if mode is None else mode
        _allowed("mode", mode, MODES)
        wanted = self.config.return_last_states if return_last_states is None else return_last_states
        if mode == "train_with_padding" and wanted:
            raise ValueError("return_last_states: got True, expected False with mode 'train_with_padding'")
        initial = c_initial, n_initial, m_initial
        if mode == "inference":
            return self._infer(q, k, v, i, f, *initial)
        return self._kernel(q, k, v, i, f, *initial, wanted)

    def _kernel(
        self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor | None, n: Tensor | None,
        m: Tensor | None, last_states: bool,
    ) -> Result:  # fmt: skip
        config = self.config
        options = {}
        if config.chunkwise_kernel != "chunkwise--native_autograd":
            options["autocast_kernel_dtype"] = getattr(torch, config.autocast_kernel_dtype)
        if config.sigmoid:
            options["normalize"] = config.normalize_siging
        return KERNELS[config.chunkwise_kernel](q, k, v, i, f, c, n, m, last_states, config.eps, **options)

    def _infer(
        self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor | None, n: Tensor | None,
        m: Tensor | None,
    ) -> Result:  # fmt: skip
        config = self.config
        dtype = getattr(torch, config.inference_state_dtype)
        B, H, S, K = q.shape
        if S == 1:
            zeros = q.new_zeros(B, H, 1, dtype=dtype)
            c = zeros[..., None].expand(B, H, K, v.shape[3]) if c is None else c
            n = zeros.expand(B, H, K) if n is None else n
            m = zeros if m is None else m
            now = q[:, :, 0], k[:, :, 0], v[:, :, 0], i, f, c, n, m, config.eps, dtype
            if config.sigmoid:
                h, states = step(SIGMOID, *now, normalize=config.normalize_siging)
            else:
                h, states = STEP_KERNELS[config.step_kernel](*now)
            return h[:, :, None], states
        h, states = self._kernel(q, k, v, i, f, c, n, m, True)
        if config.sigmoid:
            states = *states, states[1].new_zeros(B, H, 1)
        return h, tuple(t.to(dtype) for t in states)

    def extra_repr(self) -> str:
        return str(self.config)
