"""The inputs on which errors are measured, and the float64 truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import tfla
from tfla.ops.gates import InputGate

Regime = Literal["gaussian", "model", "resets", "extreme"]
REGIMES: dict[Regime, str] = {
    "gaussian": "pre-activations i, f ~ N(0, 1), as in the paper's measurement",
    "model": "i ~ N(-2, 1), f ~ N(4.5, 1), a model early in training",
    "resets": "the same with f = -1e4 at one step in 512, where documents start",
    "extreme": "the same with a sixth of i and of f at 1e4, -1e4, inf or -inf; q and k positive",
}
DOCUMENT = 512
EXTREMES = (1e4, -1e4, float("inf"), -float("inf"))
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """A problem of batch size 1: the input gate, the regime of the gates, the sizes and the seed."""

    gate: InputGate
    regime: Regime
    T: int
    heads: int
    dqk: int
    dhv: int
    seed: int = 0

    @property
    def carried(self) -> bool:
        """Return whether there is an initial state; the paper's measurement has none."""
        return self.regime != "gaussian"


def draw(setting: Setting) -> Tensors:
    """Draw q, k, v, i, f, the initial state where there is one, and the cotangent dh, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(setting.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    T, H, dqk, dhv = setting.T, setting.heads, setting.dqk, setting.dhv
    x = {"q": normal(1, T, H, dqk), "k": normal(1, T, H, dqk), "v": normal(1, T, H, dhv)}
    x |= {"i": normal(1, T, H), "f": normal(1, T, H), "dh": normal(1, T, H, dhv)}
    if setting.regime != "gaussian":
        x["i"], x["f"] = x["i"] - 2, x["f"] + 4.5
    if setting.regime == "resets":
        x["f"] = torch.where(torch.rand(1, T, H, generator=generator) < 1 / DOCUMENT, -1e4, x["f"])
    if setting.regime == "extreme":
        for name in "if":
            values = torch.tensor(EXTREMES, dtype=torch.float64)[torch.randint(4, (1, T, H), generator=generator)]
            x[name] = torch.where(torch.rand(1, T, H, generator=generator) < 1 / 6, values, x[name])
        x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    if setting.carried:
        x["C"] = normal(1, H, dqk, dhv)
        if setting.gate == "exp":
            x |= {"n": normal(1, H, dqk).abs(), "m": normal(1, H)}
    return x


def rounded(x: Tensors, dtype: torch.dtype) -> Tensors:
    """Round q, k, v and dh to the dtype, gates and states to float32 (to float64 where the dtype is float64)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.to(dtype if name in ("q", "k", "v", "dh") else wide) for name, t in x.items()}


def solve(
    x: Tensors, gate: InputGate, backend: str | None, kernel: str | None = None, chunk_size: int | None = None
) -> Tensors:
    """Compute h and the gradients of all inputs, "dq" and so on, with this backend, kernel and chunk size."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items() if name != "dh"}
    state = tfla.State(leaves["C"], leaves.get("n"), leaves.get("m")) if "C" in leaves else None
    h = tfla.mlstm(
        *(leaves[name] for name in "qkvif"),
        input_gate=gate, initial_state=state, backend=backend, kernel=kernel, chunk_size=chunk_size,
    )  # fmt: skip
    grads = torch.autograd.grad(h, list(leaves.values()), x["dh"])
    return {"h": h.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}


def relative_errors(out: Tensors, truth: Tensors) -> dict[str, float]:
    """Return ||out - truth|| / ||truth|| of each quantity."""
    return {n: ((out[n].double() - t).norm() / t.norm()).item() for n, t in truth.items()}
