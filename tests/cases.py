"""The problems of the operator's tests: random inputs, their float64 truth, and one table of tolerances.

A problem is everything one call reads, with a random cotangent for everything it returns. `truth` solves it by the
paper's recurrence in float64 with autograd through the loop; `solve` by an implementation (backend, kernel, device)
through the public functions. Both give the same named quantities, which `check` compares.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tfla
from tfla.backends import BACKENDS, Inputs
from tfla.backends.reference import bounded_denominator, step
from tfla.ops.gates import LOG_GATE_MAX, LOG_GATE_MIN

# ||out - truth|| / ||truth||, the truth starting from the inputs as rounded to that dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1.25e-3, torch.bfloat16: 1e-2}
DTYPES = tuple(TOLERANCE)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels run on the CPU, in Triton's interpreter
PER_STEP = ("h", "dq", "dk", "dv", "di", "df")  # quantities with a row for every step; of others sequences have one
FORMS = ("exp", "sigmoid", "plain", "normalized")  # mlstm with either input gate; linear_attention without, with n


@dataclass(frozen=True)
class Implementation:
    """One implementation of the operator: a backend, one of its kernels, and a device."""

    backend: str
    kernel: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.kernel}-{self.device}"

    @property
    def options(self) -> dict[str, Any]:
        return {"backend": self.backend, "kernel": self.kernel}

    @property
    def interpreted(self) -> bool:
        return INTERPRETED and self.device == "cpu" and self.backend == "triton"

    @property
    def small_only(self) -> bool:
        """Loops step by step, or simulates a GPU: no long sequences."""
        return self.backend == "reference" or self.interpreted

    def refusal(self, dtype: torch.dtype) -> str | None:
        """Why it takes no tensors of this dtype, or None."""
        x = torch.zeros(1, 1, 1, 16, dtype=dtype, device=self.device)
        gate = torch.zeros(1, 1, 1, device=self.device)
        return BACKENDS[self.backend].unsupported(Inputs(x, x, x, gate, gate, None, None, None, None))

    @property
    def widest(self) -> torch.dtype:
        """The most precise dtype it takes."""
        return next(dtype for dtype in DTYPES if self.refusal(dtype) is None)


Layout = Callable[[Tensor], Tensor]


def as_it_is(x: Tensor) -> Tensor:
    return x


def params(values: Mapping[str, Any], interpreted: Collection[str]) -> list[Any]:
    """Parameters by name, some of them for Triton's interpreter in CI too."""
    marks = {name: [pytest.mark.interpreter] if name in interpreted else [] for name in values}
    return [pytest.param(value, id=name, marks=marks[name]) for name, value in values.items()]


DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def implementations() -> list[Implementation]:
    """Every registered backend with every kernel on every device where it can run."""
    every = [
        Implementation(b.name, kernel, device) for device in DEVICES for b in BACKENDS.values() for kernel in b.kernels
    ]
    return [
        implementation for implementation in every if any(implementation.refusal(dtype) is None for dtype in DTYPES)
    ]


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs of one call on the CPU, and cotangents of h and of the final state, which is compared as exp(m) C."""

    form: str
    q: Tensor
    k: Tensor
    v: Tensor
    i: Tensor | None  # pre-activations of mlstm, log-gates of linear_attention
    f: Tensor
    state: tfla.State | None
    cu_seqlens: Tensor | None
    dh: Tensor
    dstate: tfla.State
    scale: float | None = None
    normalizer_grad: bool = True

    @property
    def normalize(self) -> bool:
        return self.form in ("exp", "normalized")

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Everything that has a gradient, by name."""
        given = {"q": self.q, "k": self.k, "v": self.v, "i": self.i, "f": self.f}
        if self.state is not None:
            given |= {"C0": self.state.C, "n0": self.state.n, "m0": self.state.m}
        return {name: x for name, x in given.items() if x is not None}

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)


def random_state(draw: Any, shape: tuple[int, int, int, int], normalize: bool, dtype: torch.dtype) -> tfla.State:
    N, H, K, V = shape
    C = draw(N, H, K, V).to(dtype)
    return tfla.State(C, draw(N, H, K).to(dtype), draw(N, H).to(dtype)) if normalize else tfla.State(C)


@lru_cache(maxsize=256)
def problem(
    form: str = "exp",
    *,
    B: int = 2,
    T: int = 37,
    Hq: int = 2,
    H: int = 2,
    K: int = 5,
    V: int = 7,
    lengths: tuple[int, ...] | None = None,
    carried: bool = True,
    dtype: torch.dtype = torch.float64,
    i_dtype: torch.dtype | None = None,
    f_dtype: torch.dtype | None = None,
    i_mean: float = 0.0,
    f_mean: float = 2.0,
    positive_qk: bool = False,
    seed: int = 0,
) -> Problem:
    """Normal q, k, v, gates and cotangents; `lengths`: of packed sequences; `carried`: from a random initial state.

    Gate means are those of pre-activations. Gates are float32 unless said otherwise, float64 with float64.
    `positive_qk` is for large input gates: exp(-m) no longer bounds the denominator, whose terms must not cancel.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cu_seqlens = None
    if lengths is not None:
        B, T = 1, sum(lengths)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    i, f = draw(B, T, H) + i_mean, draw(B, T, H) + f_mean
    if form in ("plain", "normalized"):
        i, f = i / 2, F.logsigmoid(f)
    states = (B if lengths is None else len(lengths), H, K, V)
    normalize = form in ("exp", "normalized")
    q, k, v = draw(B, T, Hq, K), draw(B, T, Hq, K), draw(B, T, H, V)
    if positive_qk:
        q, k = q.abs(), k.abs()
    return Problem(
        form, q.to(dtype), k.to(dtype), v.to(dtype), i.to(i_dtype or wide), f.to(f_dtype or wide),
        random_state(draw, states, normalize, wide) if carried else None, cu_seqlens,
        draw(B, T, H, V).to(dtype), random_state(draw, states, normalize, wide),
    )  # fmt: skip


def call(p: Problem, leaves: Mapping[str, Tensor], **options: Any) -> tuple[Tensor, tfla.State]:
    """The public function on these leaves in place of the problem's own."""
    state = tfla.State(leaves["C0"], leaves.get("n0"), leaves.get("m0")) if "C0" in leaves else None
    cu_seqlens = None if p.cu_seqlens is None else p.cu_seqlens.to(leaves["q"].device)
    qkv = leaves["q"], leaves["k"], leaves["v"]
    options |= {"initial_state": state, "return_state": True, "cu_seqlens": cu_seqlens, "scale": p.scale}
    options |= {"normalizer_grad": p.normalizer_grad}
    if p.form in ("plain", "normalized"):
        return tfla.linear_attention(*qkv, leaves["f"], leaves.get("i"), normalize=p.normalize, **options)
    return tfla.mlstm(*qkv, leaves["i"], leaves["f"], input_gate=p.form, **options)


def gradients(
    p: Problem, leaves: Mapping[str, Tensor], h: Tensor, state: tfla.State, m: Tensor | None, layout: Layout = as_it_is
) -> dict[str, Tensor]:
    """All quantities of a solved problem: outputs, and gradients of all leaves as "d...".

    States are put on the scale m: exp(-m) times the true state, m a constant.
    """
    shift = h.new_zeros(()) if m is None or state.m is None else torch.exp(state.m.detach().double() - m.to(h.device))
    outputs, cotangents = [h], [layout(p.dh.to(h))]
    for name in ("C", "n"):
        if (x := getattr(state, name)) is not None:
            weight = shift.reshape(*shift.shape, *[1] * (x.dim() - 2)) if state.m is not None else 1.0
            outputs.append(x.double() * weight)
            cotangents.append(getattr(p.dstate, name).to(outputs[-1]))
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True)
    found = dict(zip(("h", "C", "n"), outputs, strict=False))
    found |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: x.detach().cpu() for name, x in found.items()}


def leaves_on(implementation: Implementation, p: Problem, layout: Layout = as_it_is) -> dict[str, Tensor]:
    """Fresh leaves of the autograd graph; skips the test if the implementation does not take their dtype."""
    if why := implementation.refusal(p.dtype):
        pytest.skip(why)
    return {name: layout(x.detach().to(implementation.device)).requires_grad_() for name, x in p.leaves.items()}


def solve(
    p: Problem, implementation: Implementation, *, layout: Layout = as_it_is, **options: Any
) -> dict[str, Tensor]:
    """All quantities of `gradients`, computed by that implementation; `layout` gives tensors other strides."""
    leaves = leaves_on(implementation, p, layout)
    h, state = call(p, leaves, **implementation.options, **options)
    return gradients(p, leaves, h, state, truth_m(p), layout)


@lru_cache(maxsize=256)
def _truth(p: Problem) -> tuple[dict[str, Tensor], Tensor | None]:
    leaves = {name: x.detach().double().requires_grad_() for name, x in p.leaves.items()}
    h, final = recurrence(p, leaves)
    m = None if final.m is None else final.m.detach()
    return gradients(p, leaves, h, final._replace(m=m), m), m


def recurrence(p: Problem, leaves: Mapping[str, Tensor]) -> tuple[Tensor, tfla.State]:
    """h and the final state, step by step, as a differentiable function of leaves in float64."""
    group = p.v.shape[2] // p.q.shape[2]
    q, k = (leaves[name].repeat_interleave(group, 2) for name in "qk")
    v, f = leaves["v"], leaves["f"]
    i = leaves.get("i", torch.zeros_like(f))
    log_i = F.logsigmoid(i) if p.form == "sigmoid" else i
    log_f = f if p.form in ("plain", "normalized") else F.logsigmoid(f)
    steps = [q, k, v, log_i.clamp(LOG_GATE_MIN, LOG_GATE_MAX), log_f.clamp(LOG_GATE_MIN, LOG_GATE_MAX)]
    C, n, m = start_state(p, leaves)
    scale = p.q.shape[3] ** -0.5 if p.scale is None else p.scale
    ends = [0, p.v.shape[1]] if p.cu_seqlens is None else p.cu_seqlens.tolist()
    hs, states = [], []
    for s, (a, b) in enumerate(itertools.pairwise(ends)):
        rows = slice(None) if p.cu_seqlens is None else slice(s, s + 1)
        state = (C[rows], n[rows], m[rows])
        if a == b:  # the true state exp(m) C passes through, m as a constant
            weight = torch.exp(state[2] - state[2].detach())
            state = (state[0] * weight[..., None, None], state[1] * weight[..., None], state[2])
        for now in zip(*(x[:, a:b].unbind(1) for x in steps), strict=True):
            h, d, state = step(*now, *state, scale, p.normalize)
            if not p.normalizer_grad:
                num = torch.einsum("bhkv,bhk->bhv", state[0], now[0]) * scale
                h = num / bounded_denominator(d, state[2]).detach()[..., None]
            hs.append(h)
        states.append(state)
    C, n, m = (torch.cat(parts) for parts in zip(*states, strict=True))
    return torch.stack(hs, 1), tfla.State(C, n, m.detach()) if p.normalize else tfla.State(C)


def start_state(p: Problem, leaves: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    zeros = [torch.zeros_like(x, dtype=torch.float64) for x in (p.dstate.C, p.dstate.C[..., 0], p.dstate.C[..., 0, 0])]
    C, n, m = (leaves.get(name, zero) for name, zero in zip(("C0", "n0", "m0"), zeros, strict=True))
    return C, n, m.clamp(LOG_GATE_MIN, LOG_GATE_MAX)


def truth(p: Problem) -> dict[str, Tensor]:
    """All quantities of `gradients`, by the recurrence in float64 and autograd."""
    return _truth(p)[0]


def truth_m(p: Problem) -> Tensor | None:
    """The final max state of the truth."""
    return _truth(p)[1]


def error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref||, absolute where ref is zero."""
    out, ref = out.double(), ref.double()
    return ((out - ref).norm() / (ref.norm() or 1.0)).item()


def alike(a: Iterable[Tensor | None], b: Iterable[Tensor | None]) -> bool:
    """Whether the parts of two states differ by rounding at most, as those of kernels that are compiled apart."""
    return all(x is y is None or error(x, y) <= 1e-6 for x, y in zip(a, b, strict=True))  # type: ignore[arg-type]


def errors(out: Mapping[str, Tensor], ref: Mapping[str, Tensor]) -> dict[str, float]:
    assert out.keys() == ref.keys()
    for name, x in out.items():
        assert x.shape == ref[name].shape, name
    return {name: error(x, ref[name]) for name, x in out.items()}


def size_of_terms(p: Problem) -> dict[str, float]:
    """Norms of the largest terms of each quantity, whose rounding stays where they cancel.

    After one dominant step h hardly depends on q, k and the gates: the normalizer's gradient cancels the numerator's.
    The gradient of the forget gate is a sum of differences of the size of the input gate's.
    """
    exact = truth(p)
    numerator = truth(p.but(normalizer_grad=False)) if p.normalize else exact
    sizes = {name: max(x.norm().item(), numerator[name].norm().item()) for name, x in exact.items()}
    if "di" in sizes:
        sizes["df"] = max(sizes["df"], sizes["di"])
    if p.state is not None and "dm0" in sizes:  # <C, dC>
        sizes["dm0"] = max(sizes["dm0"], (p.state.C * exact["dC0"]).norm().item())
    return sizes


def check_beside_terms(found: Mapping[str, Tensor], p: Problem, tolerance: float) -> None:
    """Every quantity is within the tolerance of the terms it is made of, absolute where those are zero."""
    exact, sizes = truth(p), size_of_terms(p)
    found_errors = {
        name: ((x.double() - exact[name]).norm() / (sizes[name] or 1.0)).item() for name, x in found.items()
    }
    assert all(e <= tolerance for e in found_errors.values()), {name: f"{e:.1e}" for name, e in found_errors.items()}


def check(out: Mapping[str, Tensor], ref: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Every quantity is within the tolerance of the dtype of q, k, v, or of its own where that is coarser."""
    found = errors(out, ref)
    allowed = {name: max(TOLERANCE[dtype], TOLERANCE[x.dtype]) for name, x in out.items()}
    wrong = [name for name, e in found.items() if not e <= allowed[name]]
    assert not wrong, {name: f"{e:.1e}" for name, e in found.items()}


def check_nothing_leaks(p: Problem, implementation: Implementation, changed: int, value: float, **options: Any) -> None:
    """Check that no bit of other sequences' results changes when the inputs of `changed` are multiplied by `value`."""
    assert p.cu_seqlens is not None
    a, b = p.cu_seqlens[changed : changed + 2].tolist()
    steps = {name: getattr(p, name).clone() for name in ("q", "k", "v", "i", "f", "dh")}
    states = {
        name: tfla.State(*(None if x is None else x.clone() for x in getattr(p, name))) for name in ("state", "dstate")
    }
    for x in steps.values():
        x[:, a:b] *= value
    for state in states.values():
        for x in state:
            if x is not None:
                x[changed] *= value
    before, after = solve(p, implementation, **options), solve(p.but(**steps, **states), implementation, **options)
    own = torch.zeros(p.v.shape[1], dtype=torch.bool)
    own[a:b] = True
    others = torch.arange(p.cu_seqlens.numel() - 1) != changed
    for name, x in before.items():
        kept = (x[:, ~own], after[name][:, ~own]) if name in PER_STEP else (x[others], after[name][others])
        assert torch.equal(*kept), name
        ours = (x[:, own], after[name][:, own]) if name in PER_STEP else (x[changed], after[name][changed])
        assert not torch.equal(*ours), name
