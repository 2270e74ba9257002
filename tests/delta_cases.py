"""The problems of the tests of the delta rule and of gates by channel: random inputs and their float64 truth.

As in `cases`, a problem is everything one call reads, with a random cotangent for everything it returns. `truth` solves
it step by step in float64 with autograd through the loop. The tolerances are those of `cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from torch import Tensor

import tfla
from tfla.backends.base import sequence_bounds
from tfla.backends.delta import DeltaInputs, DeltaSpec
from tfla.backends.reference_delta import step

# Whether the rule subtracts its prediction, has gates by channel (None: no gates), a read key, reads before the decay.
MODELS: dict[str, tuple[bool, bool | None, bool, bool]] = {
    "deltanet": (True, None, False, False),
    "gdn": (True, False, False, False),
    "kda": (True, True, False, False),
    "gla": (False, True, False, False),
    "simple": (False, False, False, False),
    "comba": (True, False, True, True),
    "gdn2": (True, True, True, False),
    "before": (True, True, False, True),
    "read": (True, False, True, False),
}
GATES = ("long", "medium", "short", "closed", "half", "resets")
GATES_WITH_MEMORY = ("long", "medium", "short", "half", "resets")


@dataclass(frozen=True, eq=False)
class DeltaProblem:
    """Inputs of one call on the CPU, and cotangents of h and of the final state."""

    model: str
    x: DeltaInputs
    dh: Tensor
    dC: Tensor
    scale: float

    @property
    def correct(self) -> bool:
        return MODELS[self.model][0]

    @property
    def read_before_decay(self) -> bool:
        return MODELS[self.model][3]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Everything that has a gradient, by name."""
        return {n: t for n, t in zip(self.x._fields[:9], self.x, strict=False) if t is not None}

    def spec(self, kernel: str, chunk_size: int = 1024) -> DeltaSpec:
        return DeltaSpec(self.scale, self.correct, self.read_before_decay, chunk_size, kernel, True, True)

    def with_leaves(self, leaves: Mapping[str, Tensor]) -> DeltaInputs:
        return self.x._replace(**leaves)

    def to(self, dtype: torch.dtype) -> DeltaProblem:
        """The same problem in another dtype; gates, beta and states are at least float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = {n: t.to(dtype if n in ("q", "k", "v", "read_key") else wide) for n, t in self.leaves.items()}
        return replace(self, x=self.x._replace(**leaves), dh=self.dh.to(dtype), dC=self.dC.to(wide))


def with_short_gates(p: DeltaProblem) -> DeltaProblem:
    """The problem with gates in the dtype of q."""
    assert p.x.log_f is not None
    return replace(p, x=p.x._replace(log_f=p.x.log_f.to(p.x.q.dtype)))


def draw_gates(how: str, x: Tensor, uniform: Tensor) -> Tensor:
    """Log-gates from normal and from uniform numbers: long, medium and short memory, all closed, half, now and then."""
    if how in ("long", "medium", "short"):
        return F.logsigmoid(x + {"long": 6.0, "medium": 3.0, "short": 0.0}[how])
    if how == "closed":
        return torch.full_like(x, -20.0)
    if how == "half":
        return torch.where(uniform < 0.5, torch.full_like(x, -20.0), F.logsigmoid(x + 3))
    assert how == "resets"
    return torch.where(uniform < 0.03, torch.full_like(x, -1e5), F.logsigmoid(x + 6))


@lru_cache(maxsize=128)
def delta_problem(
    model: str = "gdn",
    *,
    B: int = 2,
    T: int = 37,
    Hq: int = 2,
    H: int = 2,
    K: int = 8,
    V: int = 6,
    lengths: tuple[int, ...] | None = None,
    carried: bool = True,
    gates: str = "medium",
    alike: float = 0.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> DeltaProblem:
    """Normal q, v and cotangents, keys of norm 1, beta in (0, 2); `alike`: the cosine of keys with each other."""
    _, by_channel, reads, _ = MODELS[model]
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = None
    if lengths is not None:
        B, T = 1, sum(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    q, v = draw(B, T, Hq, K), draw(B, T, H, V)
    k = F.normalize(draw(B, T, Hq, K), dim=-1)
    if alike:
        k = F.normalize(alike**0.5 * F.normalize(draw(B, 1, Hq, K), dim=-1) + (1 - alike) ** 0.5 * k, dim=-1)
    log_f = None
    if by_channel is not None:
        shape = (B, T, H, K) if by_channel else (B, T, H)
        log_f = draw_gates(gates, draw(*shape), uniform(*shape))
    read_key = k * uniform(B, T, Hq, K) if reads else None
    N = B if lengths is None else len(lengths)
    C = draw(N, H, K, V) if carried else None
    x = DeltaInputs(
        q, k, v, 2 * uniform(B, T, H) if model != "gla" else None, log_f, read_key, None, None, C, cu_seqlens
    )
    return DeltaProblem(model, x, draw(B, T, H, V), draw(N, H, K, V), K**-0.5).to(dtype)


def recurrence(
    p: DeltaProblem, leaves: Mapping[str, Tensor], writes: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """h and the final state, step by step, as a differentiable function of leaves; `writes` gets those to the state."""
    x = p.with_leaves(leaves)
    group = x.v.shape[2] // x.q.shape[2]
    q, k = (t.repeat_interleave(group, 2) for t in (x.q, x.k))
    r = k if x.read_key is None else x.read_key.repeat_interleave(group, 2)
    beta = torch.ones_like(x.v[..., 0]) if x.beta is None else x.beta
    log_f = torch.zeros_like(beta) if x.log_f is None else x.log_f
    log_f = log_f if log_f.dim() == 4 else log_f.unsqueeze(-1)
    C0 = torch.zeros_like(p.dC, dtype=q.dtype) if x.C is None else x.C
    every = (q, k, x.v, beta, log_f, r)
    spans = [(slice(None), 0, x.v.shape[1], slice(None))]
    if x.cu_seqlens is not None:
        spans = [(slice(0, 1), a, b, slice(s, s + 1)) for s, (_, a, b) in enumerate(sequence_bounds(x))]
    hs, states = [], []
    for rows, start, stop, own in spans:
        C = C0[own]
        for t in range(start, stop):
            now = [each[rows, t] for each in every]
            h, new = step(*now, C, p.scale, p.correct, p.read_before_decay)
            if writes is not None:
                writes.append(new - now[4].exp()[..., None] * C)
            C = new
            hs.append(h)
        states.append(C)
    return torch.stack(hs, 1), torch.cat(states)


@lru_cache(maxsize=128)
def truth_and_terms(p: DeltaProblem) -> tuple[dict[str, Tensor], dict[str, float]]:
    """`truth`, and the norms of the terms that dk and the gradient of gates by step are sums of.

    Where keys also read, dk has one term for what a key writes and one for what it reads. A gate by step is a gate for
    each channel, all the same; its gradient is the sum of theirs.
    """
    leaves = {name: t.detach().double() for name, t in p.leaves.items()}
    reads = p.correct and "read_key" not in leaves
    if reads:
        leaves["read_key"] = leaves["k"].clone()
    by_step = "log_f" in leaves and leaves["log_f"].dim() == 3
    if by_step:
        leaves["log_f"] = leaves["log_f"].unsqueeze(-1).repeat(1, 1, 1, p.x.q.shape[3])
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    found = gradients(p, leaves, *recurrence(p, leaves))
    terms = {}
    if reads:
        read = found.pop("dread_key")
        terms["dk"] = max(found["dk"].norm().item(), read.norm().item())
        found["dk"] = found["dk"] + read
    if by_step:
        terms["dlog_f"] = found["dlog_f"].norm().item()
        found["dlog_f"] = found["dlog_f"].sum(-1)
    return found, terms


def truth(p: DeltaProblem) -> dict[str, Tensor]:
    """h, C and the gradients of all leaves as "d...", by the recurrence in float64 and autograd."""
    return truth_and_terms(p)[0]


def gradients(p: Any, leaves: Mapping[str, Tensor], h: Tensor, C: Tensor) -> dict[str, Tensor]:
    """All quantities of a solved problem."""
    found = torch.autograd.grad((h, C), list(leaves.values()), (p.dh.to(h), p.dC.to(C)))
    return {"h": h.detach(), "C": C.detach()} | {f"d{n}": g for n, g in zip(leaves, found, strict=True)}


def sizes_of_terms(p: DeltaProblem) -> dict[str, float]:
    """The norm of every quantity of `truth`, or of the terms it is made of where these are larger.

    The final state is a sum of what all steps write, the gradient of the initial one a sum of what they read, that of
    keys has two terms (`truth_and_terms`), and that of gates is a sum of products q dq, k dk and r dr, and over
    channels: all can cancel.
    """
    (exact, parts), writes = truth_and_terms(p), list[Tensor]()
    recurrence(p, {name: t.double() for name, t in p.leaves.items()}, writes)
    sizes = {name: max(x.norm().item(), parts.get(name, 0.0)) for name, x in exact.items()}
    sizes["C"] = max(sizes["C"], torch.stack(writes).norm().item())
    if "dC" in sizes and p.correct:
        r = p.leaves.get("read_key", p.leaves["k"]).double()
        r = r.repeat_interleave(p.x.v.shape[2] // r.shape[2], 2)
        sizes["dC"] = max(sizes["dC"], (r.norm(dim=-1) * exact["dv"].norm(dim=-1)).norm().item())
    if "dlog_f" in sizes:
        terms = [(p.leaves[n].double() * exact[f"d{n}"]).norm().item() for n in ("q", "k", "read_key") if n in p.leaves]
        sizes["dlog_f"] = max(sizes["dlog_f"], *terms)
    return sizes


def check_beside_terms(p: DeltaProblem, found: Mapping[str, Tensor]) -> None:
    """Every quantity is within the tolerance of the terms it is made of (`sizes_of_terms`)."""
    exact, sizes = truth(p), sizes_of_terms(p)
    assert found.keys() == exact.keys()
    errors = {name: ((x.double() - exact[name]).norm() / (sizes[name] or 1.0)).item() for name, x in found.items()}
    limit = TOLERANCE[p.x.q.dtype]
    assert all(e <= limit for e in errors.values()), {n: f"{e:.1e}" for n, e in errors.items()}


def rounding_of_inputs(p: DeltaProblem, dtype: torch.dtype) -> dict[str, float]:
    """The relative change of each quantity when inputs, cotangents and outputs alone are rounded to a dtype."""
    exact = truth(p)
    rounded = truth(p.to(dtype).to(torch.float64))
    kinds = {"h", "dq", "dk", "dv", "dread_key"}
    return {n: error(t.to(dtype).double() if n in kinds else t, exact[n]) for n, t in rounded.items()}


def check_beside_rounding(
    p: DeltaProblem, gates: str, solve: Callable[[DeltaProblem], Mapping[str, Tensor]], dtype: torch.dtype,
    other: Callable[[DeltaProblem], Mapping[str, Tensor]] | None = None,
) -> None:  # fmt: skip
    """Errors are at most 1.5 times what rounding inputs and outputs costs, dlog_f of long gates 2.5 times.

    Args:
        p: The problem before rounding.
        gates: What gates it has.
        solve: Computes the quantities of `truth` of the rounded problem.
        dtype: The dtype that it is rounded to.
        other: Another implementation, of which errors may be 1.1 times those, or None.
    """
    exact, costs, rounded = truth(p), rounding_of_inputs(p, dtype), p.to(dtype)
    factors = {name: 2.5 if name == "dlog_f" and gates == "long" else 1.5 for name in costs}
    limits = {name: factors[name] * cost for name, cost in costs.items()}
    if other is not None:
        limits = {name: max(limits[name], 1.1 * error(x, exact[name])) for name, x in other(rounded).items()}
    errors = {name: error(x, exact[name]) for name, x in solve(rounded).items()}
    assert errors.keys() == costs.keys()
    assert all(e <= limits[n] for n, e in errors.items()), {n: e / costs[n] for n, e in errors.items()}


def options(**given: Any) -> dict[str, Any]:
    """Keyword arguments without those that are None."""
    return {n: x for n, x in given.items() if x is not None}


def call(p: DeltaProblem, leaves: dict[str, Tensor], **given: Any) -> tuple[Tensor, tfla.State]:
    """The public function of the problem's model on these leaves."""
    state = tfla.State(leaves["C"]) if "C" in leaves else None
    given |= {"initial_state": state, "return_state": True, "cu_seqlens": p.x.cu_seqlens, "scale": p.scale}
    q, k, v = (leaves[name] for name in "qkv")
    if not p.correct:
        log_i = leaves["beta"].log() if "beta" in leaves else None
        return tfla.linear_attention(q, k, v, leaves["log_f"], log_i, **given)
    given |= options(read_key=leaves.get("read_key"))
    return tfla.delta_rule(
        q, k, v, leaves.get("beta"), leaves.get("log_f"), read_before_decay=p.read_before_decay, **given
    )
