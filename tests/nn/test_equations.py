"""The recurrent mixers equal the equations of docs/models.md, evaluated token by token in float64 for each document."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.nn import LanguageModel

Make = Callable[..., LanguageModel]
Close = Callable[[Tensor, Tensor], None]
WIDTH, HEADS = 32, 2
X = torch.randn(2, 23, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
STARTS = 7, 8, 15  # of documents, after the first
CASES: dict[str, dict[str, Any]] = {
    "mamba2": {"mixer": "mamba2", "mamba_head_dim": 16, "mamba_state_dim": 8},
    "retnet": {"mixer": "retnet"},
    "gla": {"mixer": "gla"},
    "delta_net": {"mixer": "delta_net"},
    "delta_net, strengths to 2": {"mixer": "delta_net", "negative_eigenvalues": True},
    "gated_delta_net": {"mixer": "gated_delta_net"},
    "gated_delta_net, strengths to 2": {"mixer": "gated_delta_net", "negative_eigenvalues": True, "conv_size": 3},
    "kda": {"mixer": "kda"},
    "kda, strengths to 2": {"mixer": "kda", "negative_eigenvalues": True, "key_width": 0.5},
}


class Equations:
    """The equations of a mixer for one document.

    Args:
        weights: the parameters of the layer by name.
        mixer: the name of the mixer.
        beta: the largest write strength.
    """

    def __init__(self, weights: dict[str, Tensor], mixer: str, beta: float) -> None:
        self.w, self.mixer, self.beta = weights, mixer, beta
        self.heads = WIDTH * 2 // 16 if mixer == "mamba2" else HEADS

    def product(self, x: Tensor, *names: str) -> Tensor:
        """Return the product of x and weights, the first of them first."""
        for name in names:
            x = x @ self.w[f"{name}.weight"].T
        return x

    def projected(self, x: Tensor, name: str) -> Tensor:
        """Return q, k or v (T, channels), after its convolution and SiLU where there is one."""
        y, kernel = self.product(x, f"{name}_proj"), self.w.get(f"{name}_conv.weight")
        if kernel is None:
            return y
        size, found = kernel.shape[1], torch.zeros_like(y)
        for t in range(len(y)):
            for j in range(min(size, t + 1)):
                found[t] += kernel[:, size - 1 - j] * y[t - j]
        return F.silu(found + self.w.get(f"{name}_conv.bias", 0))

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors (T, heads, 1 or dqk) of the state, and the write strengths (T, heads)."""
        ones = torch.ones(len(x), self.heads, dtype=x.dtype)
        if self.mixer == "mamba2":
            step = F.softplus(self.product(x, "dt_proj") + self.w["decay.dt_bias"])
            return (-self.w["decay.A_log"].exp() * step).exp()[..., None], step
        if self.mixer == "retnet":
            return ((1 - 2.0 ** (-5 - torch.arange(self.heads))) * ones)[..., None], ones
        if self.mixer == "gla":
            a = torch.sigmoid(self.product(x, "decay.down", "decay.up") + self.w["decay.up.bias"]) ** (1 / 16)
            return a.unflatten(-1, (self.heads, -1)), ones
        beta = self.beta * torch.sigmoid(self.product(x, "beta_proj"))
        if self.mixer == "delta_net":
            return ones[..., None], beta
        names = ("decay_proj",) if self.mixer == "gated_delta_net" else ("decay_proj.down", "decay_proj.up")
        f = self.product(x, *names).unflatten(-1, (self.heads, -1))
        f = F.softplus(f + self.w["decay.dt_bias"].reshape(self.heads, -1))
        return (-self.w["decay.A_log"].exp()[:, None] * f).exp(), beta

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output (T, d_model) for a document x (T, d_model)."""
        q, k, v = (self.projected(x, name) for name in ("q", "k", "v"))
        v = v.unflatten(-1, (self.heads, -1))
        # The heads of Mamba-2 share q and k.
        q, k = (
            t[:, None].expand(-1, self.heads, -1) if self.mixer == "mamba2" else t.unflatten(-1, (*v.shape[1:2], -1))
            for t in (q, k)
        )
        if self.mixer == "retnet":
            q, k = rotated(q), rotated(k)
        if "delta" in self.mixer or self.mixer == "kda":
            q, k = (t / torch.sqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        decay, write = self.gates(x)
        C, h = x.new_zeros(self.heads, q.shape[-1], v.shape[-1]), torch.empty_like(v)
        for t in range(len(x)):
            C = decay[t][..., None] * C
            old = torch.einsum("hkv,hk->hv", C, k[t]) if self.beta else 0
            C = C + write[t][:, None, None] * k[t][..., None] * (v[t] - old)[:, None]
            h[t] = torch.einsum("hkv,hk->hv", C, q[t]) * (1.0 if self.mixer == "mamba2" else q.shape[-1] ** -0.5)
        return self.product(self.output(x, h, v), "out_proj")

    def output(self, x: Tensor, h: Tensor, v: Tensor) -> Tensor:
        """Return the normalized and gated h (T, heads, dhv) as (T, channels)."""
        weight = self.w["norm.weight"]
        if self.mixer == "mamba2":
            h = (h + self.w["D"][:, None] * v).flatten(1) * F.silu(self.product(x, "gate_proj"))
            return h / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight
        h = (h / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight).flatten(1)
        if self.mixer == "delta_net":
            return h
        if self.mixer == "kda":
            return h * torch.sigmoid(self.product(x, "gate_proj.down", "gate_proj.up"))
        return h * F.silu(self.product(x, "gate_proj"))


def rotated(x: Tensor) -> Tensor:
    """Return x (T, heads, channels), where channel n and the n-th of the second half turn with the position."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x), dtype=x.dtype)[:, None] * 10_000.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_mixers_equal_their_equations(case: str, make_model: Make, close: Close) -> None:
    fields = CASES[case]
    layer = make_model(**fields).blocks[0].mixer
    beta = 0.0 if fields["mixer"] in ("mamba2", "retnet", "gla") else 2.0 if "strengths" in case else 1.0
    equations = Equations(dict(layer.named_parameters()), fields["mixer"], beta)
    edges = 0, *STARTS, X.shape[1]
    expected = torch.cat([torch.stack([equations(row[a:b]) for row in X]) for a, b in pairwise(edges)], 1)
    start = torch.zeros(X.shape[:2], dtype=torch.bool)
    start[:, list(STARTS)] = True
    close(layer(X, document_start=start)[0], expected)
    packed, offsets = X.flatten(0, 1)[None], torch.tensor([*edges[:-1], *(edge + X.shape[1] for edge in edges)])
    close(layer(packed, cu_seqlens=offsets)[0].view_as(expected), expected)
