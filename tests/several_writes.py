"""The problems of the tests of DeltaProduct and DPLR: random inputs and their float64 truth, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from delta_cases import draw_gates
from torch import Tensor

import tfla


@dataclass(frozen=True, eq=False)
class WritesProblem:
    """Inputs of one call on the CPU, and cotangents of h and of the final state.

    Tensors with several writes in each step are (B, T, writes, ...).
    """

    function: str  # "delta_product" or "dplr"
    leaves: dict[str, Tensor]  # everything that has a gradient, the initial state as "C0"
    dh: Tensor
    dC: Tensor
    cu_seqlens: Tensor | None

    def call(self, leaves: Mapping[str, Tensor], **options: Any) -> Any:
        """Call the public function on these leaves."""
        given = {name: self.flat(name, x) for name, x in leaves.items()}
        C = given.pop("C0", None)
        if self.function == "delta_product":
            options["writes"] = self.leaves["k"].shape[2]
            given.setdefault("beta", None)  # type: ignore[arg-type]
        options = {"cu_seqlens": self.cu_seqlens, "initial_state": None if C is None else tfla.State(C), **options}
        return getattr(tfla, self.function)(**given, **options)

    def flat(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor as the public function takes it: writes are steps of their own."""
        dims = {"beta": 3, "log_f": x.dim()}.get(name, 4)
        return x.flatten(1, 2) if x.dim() > dims else x

    def part(self, steps: Tensor, share: float) -> WritesProblem:
        """Return the problem of some steps, with a share of the cotangent of the final state."""
        own = {name: x if name == "C0" else x[:, steps] for name, x in self.leaves.items()}
        return replace(self, leaves=own, dh=self.dh[:, steps], dC=self.dC * share)


@lru_cache(maxsize=64)
def writes_problem(
    function: str,
    *,
    writes: int = 2,
    B: int = 2,
    T: int = 12,
    Hq: int = 2,
    H: int = 2,
    K: int = 5,
    V: int = 3,
    lengths: tuple[int, ...] | None = None,
    carried: bool = True,
    gates: str | None = "medium",
    by_channel: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> WritesProblem:
    """Normal q, v and cotangents, keys of norm 1, beta in (0, 2); `gates`: None has none."""
    generator = torch.Generator().manual_seed(seed)
    if lengths is not None:
        B, T = 1, sum(lengths)
    sequences = B if lengths is None else len(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def key(*shape: int) -> Tensor:
        return F.normalize(draw(*shape), dim=-1)

    leaves = {"q": draw(B, T, Hq, K)}
    if function == "delta_product":
        leaves |= {"k": key(B, T, writes, Hq, K), "v": draw(B, T, writes, H, V)}
        leaves["beta"] = 2 * torch.rand(B, T, writes, H, generator=generator, dtype=torch.float64)
    else:
        leaves |= {"k": draw(B, T, Hq, K), "v": draw(B, T, H, V), "a": key(B, T, Hq, K), "b": -0.7 * key(B, T, Hq, K)}
    if gates is not None:
        shape = (B, T, H, K) if by_channel else (B, T, H)
        leaves["log_f"] = draw_gates(gates, draw(*shape), torch.rand(*shape, generator=generator, dtype=torch.float64))
    if carried:
        leaves["C0"] = draw(sequences, H, K, V)
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    leaves = {name: x.to(dtype) for name, x in leaves.items()}
    return WritesProblem(function, leaves, draw(B, T, H, V).to(dtype), draw(sequences, H, K, V).to(dtype), cu_seqlens)


def recurrence(p: WritesProblem, leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return h and the final state as a differentiable function of leaves, step by step."""
    H = p.dC.shape[1]
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    one, scale = torch.ones_like(v[..., 0]), q.shape[-1] ** -0.5

    def heads(x: Tensor) -> Tensor:  # (..., Hq, K) as (..., H, K)
        return x.repeat_interleave(H // x.shape[-2], -2)

    q, k, a, b = (heads(leaves[name]) if name in leaves else q for name in ("q", "k", "a", "b"))
    beta, log_f = leaves.get("beta", one), leaves.get("log_f")
    offsets = None if p.cu_seqlens is None else p.cu_seqlens.tolist()
    rows = range(q.shape[0]) if offsets is None else [0] * (len(offsets) - 1)
    spans = [(0, q.shape[1])] * len(rows) if offsets is None else list(itertools.pairwise(offsets))
    hs, states = [], []
    for s, (row, (start, stop)) in enumerate(zip(rows, spans, strict=True)):
        C, of_row = leaves["C0"][s] if "C0" in leaves else torch.zeros_like(p.dC[s]), []
        for t in range(start, stop):
            before = C
            if log_f is not None:
                decay = log_f[row, t].exp()
                C = C * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
            if p.function == "dplr":
                C = C + torch.einsum("hk,hj,hjv->hkv", b[row, t], a[row, t], before)
                C = C + torch.einsum("hk,hv->hkv", k[row, t], v[row, t])
            else:
                for j in range(k.shape[2]):
                    E = v[row, t, j] - torch.einsum("hkv,hk->hv", C, k[row, t, j])
                    C = C + torch.einsum("h,hk,hv->hkv", beta[row, t, j], k[row, t, j], E)
            of_row.append(scale * torch.einsum("hkv,hk->hv", C, q[row, t]))
        states.append(C)
        hs += [torch.stack(of_row)] if of_row else []
    h = torch.stack(hs) if offsets is None else torch.cat(hs)[None]
    return h, torch.stack(states)
