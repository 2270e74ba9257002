"""Kernels for the activations of the delta rule's inputs: values and gradients equal those of the plain operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tfla
from tfla.backends.delta import DeltaInputs
from tfla.backends.gpu.runtime import INTERPRETED
from tfla.ops import delta_activations, fused_activations
from tfla.ops.gates import LOG_GATE_MIN

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]
NAMES = ("q", "k", "beta", "log_f", "read_key", "A_log", "dt_bias")  # the last two are parameters of gates


def device() -> str:
    """Return the device of the tests."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def inputs(
    seed: int, B: int, T: int, heads: tuple[int, int], D: int, by_channel: bool, bias: str, rate: bool, read: bool
) -> DeltaInputs:
    """Return random inputs: q is a part of a wider tensor, and k the transpose of (B, Hq, T, D).

    Args:
        seed: the seed of the random numbers.
        B, T: the batch size and the number of steps.
        heads: the heads of q and k, and the heads of v for each of them.
        D: dqk.
        by_channel: whether gates are by channel.
        bias: the shape of dt_bias: "none", (H,) with "heads", that of a step's gates with "channels".
        rate: whether A_log is given.
        read: whether read keys are given.
    """
    g = torch.Generator().manual_seed(seed)
    Hq, H = heads[0], heads[0] * heads[1]

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device())

    channels = (H, D) if by_channel else (H,)
    dt_bias = {"none": None, "heads": new(H), "channels": new(*channels)}[bias]
    return DeltaInputs(
        new(B, T, Hq, 2 * D)[..., D:], new(B, Hq, T, D).transpose(1, 2), new(B, T, H, 3), new(B, T, H),
        3 * new(B, T, *channels), new(B, T, Hq, D) if read else None, new(H) if rate else None, dt_bias, None, None,
    )  # fmt: skip


def leaves(x: DeltaInputs, dtype: torch.dtype) -> DeltaInputs:
    """Return the inputs in a dtype, with their strides, as leaves that require gradients."""
    return x._replace(**{
        name: t.to(dtype).detach().requires_grad_() for name in NAMES if (t := getattr(x, name)) is not None
    })  # fmt: skip


def error(x: Tensor, y: Tensor, terms: float = 0.0) -> float:
    """Return the norm of x - y relative to that of y or to `terms`, whichever is larger, or as it is if both are 0."""
    x, y = x.detach().double(), y.detach().double()
    return float((x - y).norm() / (max(y.norm().item(), terms) or 1.0))


def size_of_terms(x: Tensor, cotangent: Tensor) -> float:
    """Return the norm of cotangent / |x|, the larger of the two terms whose difference is the gradient of x / |x|.

    The second term is the part of the first one along x. Where x has one channel, both are equal and cancel.
    """
    squares = x.detach().double().square().sum(-1, keepdim=True)
    return float((cotangent.double() * torch.rsqrt(squares + delta_activations.EPS)).norm())


def compare(x: DeltaInputs, options: tuple[Any, ...], dtype: torch.dtype, bound: float) -> None:
    """Compare values and gradients with those of the plain operations in float64 on the same rounded inputs."""
    ours, theirs = leaves(x, dtype), leaves(leaves(x, dtype), torch.float64)
    found, expected = fused_activations.activated(ours, *options), delta_activations.activated(theirs, *options)
    outputs = [name for name in NAMES[:5] if getattr(found, name) is not None]
    leaf_names = [name for name in NAMES if getattr(ours, name) is not None]
    values, true_values = ([getattr(result, name) for name in outputs] for result in (found, expected))
    cotangents = [torch.randn_like(y).to(z.dtype) for y, z in zip(true_values, values, strict=True)]
    grads = torch.autograd.grad(values, [getattr(ours, name) for name in leaf_names], cotangents, allow_unused=True)
    true_grads = torch.autograd.grad(
        true_values, [getattr(theirs, name) for name in leaf_names], [c.double() for c in cotangents], allow_unused=True
    )
    errors = {name: error(y, true) for name, y, true in zip(outputs, values, true_values, strict=True)}
    for name, dx, true in zip(leaf_names, grads, true_grads, strict=True):
        assert (dx is None) == (true is None), name
        if dx is not None and true is not None:
            cancels = options[0] and name in ("q", "k", "read_key")
            terms = size_of_terms(getattr(theirs, name), cotangents[outputs.index(name)]) if cancels else 0.0
            errors["d" + name] = error(dx, true, terms)
    assert {name: e for name, e in errors.items() if not e < bound} == {}


@given(
    seed=st.integers(0, 2**16), B=st.integers(1, 2), T=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 1)]), D=st.sampled_from([1, 5, 16, 40]), by_channel=st.booleans(),
    bias=st.sampled_from(["none", "heads", "channels"]), rate=st.booleans(), read=st.booleans(),
    normalize=st.booleans(), strength=st.sampled_from(["none", "sigmoid", "2sigmoid"]),
    gate=st.sampled_from(["none", "softplus", "sigmoid"]),
)  # fmt: skip
def test_any_activation(
    seed: int, B: int, T: int, heads: tuple[int, int], D: int, by_channel: bool, bias: str, rate: bool, read: bool,
    normalize: bool, strength: str, gate: str,
) -> None:  # fmt: skip
    x = inputs(seed, B, T, heads, D, by_channel, bias, rate, read)
    compare(x, (normalize, strength, gate, -5.0), torch.float32, 1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
def test_bfloat16(by_channel: bool) -> None:
    """Errors are those of rounding results to 16 bits, since the arithmetic is in float32."""
    x = inputs(0, 2, 100, (2, 2), 64, by_channel, "channels", True, True)
    compare(x, (True, "sigmoid", "softplus", 0.0), torch.bfloat16, 4e-3)


@pytest.mark.parametrize("gate", ["softplus", "sigmoid"])
def test_extreme_gates(gate: str) -> None:
    """Gates below the smallest one are clamped and have no gradient; gates near 0 keep their digits; NaN stays NaN."""
    values = torch.tensor([-float("inf"), -80.0, -30.0, -17.0, 0.0, 30.0, 1e6, 1e30, float("nan")], device=device())
    f = values.repeat(2, 1)[:, :, None].requires_grad_()
    A_log = torch.zeros(1, device=device())
    x = DeltaInputs(*[torch.ones(2, 9, 1, 1, device=device())] * 3, None, f, None, A_log, None, None, None)
    wide = x._replace(log_f=f.detach().double().requires_grad_(), A_log=A_log.double())
    found = fused_activations.activated(x, False, "none", gate, -1e5).log_f
    expected = delta_activations.activated(wide, False, "none", gate, -1e5, False).log_f
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0.0, equal_nan=True)
    assert gate != "softplus" or found[0, 7] == LOG_GATE_MIN
    ours, truth = (torch.autograd.grad(g.sum(), t)[0] for g, t in ((found, f), (expected, wide.log_f)))
    torch.testing.assert_close(ours.double(), truth, rtol=2e-6, atol=0.0, equal_nan=True)


def test_second_derivatives() -> None:
    """Gradients of gradients equal those of the plain operations."""
    x = inputs(1, 1, 7, (2, 1), 4, True, "channels", True, False)

    def second(activated: Any, dtype: torch.dtype) -> list[Tensor]:
        own = leaves(x, dtype)
        out = activated(own, True, "2sigmoid", "softplus", 0.0)
        given = [t for t in (own.q, own.beta, own.log_f, own.A_log, own.dt_bias) if t is not None]
        results = [t for t in (out.q, out.beta, out.log_f) if t is not None]
        total = sum((t * torch.arange(t.numel(), device=device()).view_as(t).sin()).sum() for t in results)
        first = torch.autograd.grad(total, given, create_graph=True)
        return list(torch.autograd.grad(sum(t.square().sum() for t in first), given))

    found = second(fused_activations.activated, torch.float32)
    expected = second(lambda *a: delta_activations.activated(*a, False), torch.float64)
    assert [e for a, b in zip(found, expected, strict=True) if not (e := error(a, b)) < 1e-4] == []


def test_the_operator_launches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls of a backend with kernels launch them; other backends and mapped calls use plain operations."""
    g, dtype = torch.Generator().manual_seed(0), torch.float32 if INTERPRETED else torch.bfloat16
    q, k, v = (torch.randn(1, 20, 2, 16, generator=g).to(device(), dtype) for _ in range(3))
    beta, f = (torch.randn(1, 20, 2, generator=g).to(device()) for _ in range(2))
    calls: list[str] = []
    activated = fused_activations.activated
    monkeypatch.setattr(fused_activations, "activated", lambda *a: calls.append("kernels") or activated(*a))

    def run(backend: str) -> Tensor:
        return tfla.delta_rule(
            q, k, v, beta, f, normalize_qk=True, beta_activation="sigmoid", gate_activation="softplus",
            A_log=torch.zeros(2, device=device()), backend=backend,
        )  # fmt: skip

    h = run("triton")
    assert calls == ["kernels"]
    assert error(h, run("chunkwise")) < 2e-2
    assert calls == ["kernels"]
    mapped = torch.vmap(lambda b: tfla.delta_rule(q, k, v, b, f, beta_activation="sigmoid", backend="triton"))
    mapped(beta[None])
    assert calls == ["kernels"]
