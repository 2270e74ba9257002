"""The tests of mamba_ssm's function of a whole layer, against its equations in float64 and in transformers' Mamba-2."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import TOLERANCE, error
from hypothesis import given
from hypothesis import strategies as st
from mamba_truth import by_formula, draw
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tfla.integrations.mamba import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    selective_state_update,
)

HALF = ("zxbcdt", "outproj_weight", "outproj_bias")  # in the dtype of the layer; the others are in float32


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Compute the causal convolution step by step; terms from before the last change of ids are left out."""
    width = weight.shape[1]
    rows = []
    for row in range(x.shape[0]):
        steps = []
        for t in range(x.shape[1]):
            total = torch.zeros_like(x[row, t]) if bias is None else bias
            for back in range(width):
                if back > t or (back and ids[row, t - back] != ids[row, t - back + 1]):
                    break
                total = total + weight[:, width - 1 - back] * x[row, t - back]
            steps.append(total)
        rows.append(torch.stack(steps))
    return torch.stack(rows)


def normalized(y: Tensor, groups: int, eps: float) -> Tensor:
    """Return RMSNorm(y) of each group of channels."""
    each = y.reshape(*y.shape[:2], groups, -1)
    return (each / (each.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(y.shape)


def layer_by_formula(p: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Compute the output and the last state of the layer by its equations."""
    D, groups = p["D"], options["ngroups"]
    heads, headdim = D.shape if D.dim() == 2 else (D.shape[0], options["headdim"])
    dim, channels = heads * headdim, p["conv1d_weight"].shape[0]
    zxbcdt = p["zxbcdt"]
    batch, steps, _ = zxbcdt.shape
    dstate = (channels - dim) // (2 * groups)
    d_mlp = (zxbcdt.shape[-1] - dim - channels - heads) // 2
    gate, value, z, xBC, dt = zxbcdt.split([d_mlp, d_mlp, dim, channels, heads], -1)
    ids = options.get("seq_idx", torch.zeros(batch, steps))
    xBC = convolved(xBC, p["conv1d_weight"], p.get("conv1d_bias"), ids)
    xBC = xBC if options["activation"] is None else xBC * torch.sigmoid(xBC)
    x, B, C = xBC.split([dim, groups * dstate, groups * dstate], -1)
    q = {
        "x": x.reshape(batch, steps, heads, headdim), "B": B.reshape(batch, steps, groups, dstate),
        "C": C.reshape(batch, steps, groups, dstate), "dt": dt, "log_f": torch.zeros_like(dt),
        "log_i": torch.zeros_like(dt),
    }  # fmt: skip
    q |= {name: p[name].expand(batch, steps, *p[name].shape) for name in ("A", "D", "dt_bias")}
    q |= {name: p[name] for name in ("initial_states",) if name in p}
    starts = []
    for row in range(batch):
        changes = [t for t in range(1, steps) if ids[row, t] != ids[row, t - 1]]
        starts.append([(0, row if ids[row, 0] == 0 else None), *((t, None) for t in changes)])
    y, states, _ = by_formula(q, starts, options["dt_limit"], True)
    y, z = y.reshape(batch, steps, dim), F.silu(z)
    weight = p.get("rmsnorm_weight")
    if weight is None:
        y = y * z
    elif options["norm_before_gate"]:
        y = normalized(y, groups, options["rmsnorm_eps"]) * weight * z
    else:
        y = normalized(y * z, groups, options["rmsnorm_eps"]) * weight
    y = torch.cat([F.silu(gate) * value, y], -1)
    if "outproj_weight" in p:
        y = y @ p["outproj_weight"].T + p.get("outproj_bias", 0.0)
    return y, states[torch.tensor([len(begins) for begins in starts]).cumsum(0) - 1]


def layer(
    sizes: tuple[int, ...],
    optional: tuple[str, ...] = ("conv1d_bias", "rmsnorm_weight", "outproj_weight", "outproj_bias", "initial_states"),
    d_has_hdim: bool = False,
) -> dict[str, Tensor]:
    """Return the inputs of a layer in float64."""
    batch, steps, groups, group, headdim, dstate, width, d_mlp = sizes
    heads = groups * group
    dim = heads * headdim
    channels = dim + 2 * groups * dstate
    p = {
        "zxbcdt": draw(batch, steps, 2 * d_mlp + dim + channels + heads), "conv1d_weight": draw(channels, width) / 2,
        "conv1d_bias": draw(channels) / 2, "dt_bias": draw(heads) - 1, "A": -torch.rand(heads).double() - 0.1,
        "D": draw(heads, headdim) if d_has_hdim else draw(heads), "initial_states": draw(batch, heads, headdim, dstate),
        "rmsnorm_weight": draw(dim), "outproj_weight": draw(7, d_mlp + dim) / 4, "outproj_bias": draw(7),
    }  # fmt: skip
    needed = ("zxbcdt", "conv1d_weight", "dt_bias", "A", "D")
    return {name: t for name, t in p.items() if name in (*needed, *optional)}


OPTIONS: dict[str, Any] = {
    "ngroups": 2, "headdim": 5, "activation": "silu", "dt_limit": (0.0, float("inf")), "norm_before_gate": False,
    "rmsnorm_eps": 1e-5,
}  # fmt: skip
SIZES = (2, 19, 2, 2, 5, 6, 4, 0)


def run(p: dict[str, Tensor], options: dict[str, Any]) -> Any:
    return mamba_split_conv1d_scan_combined(
        **{"conv1d_bias": None, **p}, chunk_size=16, return_final_states=True, **options
    )  # type: ignore[arg-type]


def compare(p: dict[str, Tensor], options: dict[str, Any], allowed: float) -> None:
    """Compare the output, the state and all gradients with the equations for the same rounded inputs."""
    exact = {name: t.detach().cpu().double().requires_grad_() for name, t in p.items()}
    there = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    truth, found = layer_by_formula(exact, there), run(p, options)
    assert found[0].dtype == p["zxbcdt"].dtype
    for ours, theirs in zip(found, truth, strict=True):
        assert error(ours.detach().cpu(), theirs.detach()) <= allowed
    cotangents = [torch.randn_like(t) for t in truth]
    # Initial states are unused where all rows start with a sequence whose id is not 0.
    true = torch.autograd.grad(truth, list(exact.values()), cotangents, allow_unused=True, materialize_grads=True)
    given = [c.to(f) for c, f in zip(cotangents, found, strict=True)]
    grads = torch.autograd.grad(found, list(p.values()), given, allow_unused=True, materialize_grads=True)
    for name, ours, theirs in zip(p, grads, true, strict=True):
        assert error(ours.cpu(), theirs) <= allowed, name


def convert(p: dict[str, Tensor], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: t.to(device, dtype if name in HALF else wide).requires_grad_() for name, t in p.items()}


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_is_the_layer(device: str, dtype: torch.dtype, norm_before_gate: bool) -> None:
    torch.manual_seed(0)
    p = convert(layer(SIZES), device, dtype)
    roundings = 3 if dtype.itemsize == 2 else 1  # the convolution, the scan and the norm round one after the other
    compare(p, OPTIONS | {"norm_before_gate": norm_before_gate}, roundings * TOLERANCE[dtype])


@given(st.data())
def test_any_call_is_the_layer(data: st.DataObject) -> None:
    def pick(*choices: Any) -> Any:
        return data.draw(st.sampled_from(choices))

    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    sizes = *(data.draw(st.integers(1, n)) for n in (2, 12, 3, 2, 4, 5, 5)), pick(0, 3)
    optional = [n for n in ("conv1d_bias", "rmsnorm_weight", "outproj_weight", "initial_states") if pick(True, False)]
    optional += ["outproj_bias"] if "outproj_weight" in optional and pick(True, False) else []
    d_has_hdim = pick(True, False)
    p = convert(layer(sizes, tuple(optional), d_has_hdim), "cpu", torch.float64)
    options = {
        "ngroups": sizes[2], "headdim": None if d_has_hdim else sizes[4], "activation": pick("silu", "swish", None),
        "dt_limit": pick((0.0, float("inf")), (0.2, 0.4), (-1.0, -0.1)), "norm_before_gate": pick(True, False),
        "rmsnorm_eps": pick(1e-6, 1e-2),
    }  # fmt: skip
    if pick(True, False):
        options["seq_idx"] = (torch.rand(sizes[0], sizes[1]) < 0.3).cumsum(1) % 2
    compare(p, options, 1e-8)


def test_sequences_apart_are_those_one_by_one(device: str) -> None:
    """With seq_idx the convolution sums the same numbers as without, but rounds differently in 16 bits."""
    torch.manual_seed(0)
    p = convert(layer((1, 24, 2, 2, 5, 6, 4, 0), ("conv1d_bias",)), device, torch.bfloat16)
    seq_idx = torch.tensor([0] * 9 + [1] * 15, device=device)[None].int()
    packed = run(p, OPTIONS | {"seq_idx": seq_idx})[0]
    apart = [run(p | {"zxbcdt": part}, OPTIONS)[0] for part in p["zxbcdt"].split([9, 15], 1)]
    assert error(packed.detach().cpu(), torch.cat(apart, 1).detach().cpu().double()) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["layer", "scan"])
def test_keeps_what_the_scan_and_the_projection_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations, gates and norms are not stored in float32, and recomputing them gives the same bits."""
    torch.manual_seed(0)
    batch, steps, heads, headdim, dstate = 1, 512, 2, 32, 16
    optional = ("conv1d_bias", "rmsnorm_weight", "outproj_weight") if name == "layer" else ("conv1d_bias",)
    p = layer((batch, steps, 1, heads, headdim, dstate, 4, 0), optional)
    p = convert(p, "cpu", torch.bfloat16)
    options = OPTIONS | {"ngroups": 1, "headdim": headdim}

    def forward() -> Tensor:
        y = mamba_split_conv1d_scan_combined(chunk_size=16, **p, **options)
        assert isinstance(y, Tensor)
        return y

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward().float().square().sum(), list(p.values()))

    forward()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        out = forward()
    stored_bytes = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    dim = heads * headdim
    # x, B, C; y before and after the skip connection, and after the norm; the result. Gates and states are float32.
    expected_bytes = 2 * (dim + 2 * dstate + (3 if name == "layer" else 1) * dim + out.shape[-1])
    assert stored_bytes / (batch * steps) <= 1.3 * expected_bytes
    recomputed = gradients()
    for module in ("layer", "terms"):
        monkeypatch.setattr(f"tfla.integrations.mamba.{module}.recomputed", lambda function, *inputs: function(*inputs))
    assert all(torch.equal(a, b) for a, b in zip(recomputed, gradients(), strict=True))


def test_autocast_casts_the_projection(device: str) -> None:
    torch.manual_seed(0)
    p = convert(layer(SIZES), device, torch.float32)
    plain = run(p, OPTIONS)[0]
    with torch.autocast(device, torch.bfloat16):
        cast = run(p, OPTIONS)[0]
        mixed = run(p | {"zxbcdt": p["zxbcdt"].bfloat16()}, OPTIONS)[0]
    assert cast.dtype == mixed.dtype == torch.bfloat16
    for out in (cast, mixed):
        assert error(out.detach().cpu(), plain.detach().cpu().double()) <= 2 * TOLERANCE[torch.bfloat16]


def test_forward_mode_is_the_transpose_of_the_backward() -> None:
    torch.manual_seed(0)
    p = layer(SIZES)
    seq_idx = (torch.rand(SIZES[0], SIZES[1]) < 0.3).cumsum(1)

    def forward(*inputs: Tensor) -> Tensor:
        return run(dict(zip(p, inputs, strict=True)), OPTIONS | {"seq_idx": seq_idx, "dt_limit": (-1.0, 9.0)})[0]

    tangents = tuple(torch.randn_like(t) for t in p.values())
    out, tangent = torch.func.jvp(forward, tuple(p.values()), tangents)
    _, vjp = torch.func.vjp(forward, *p.values())
    cotangent = torch.randn_like(out)
    backward = sum((a * b).sum() for a, b in zip(vjp(cotangent), tangents, strict=True))
    assert torch.allclose((cotangent * tangent).sum(), backward, rtol=1e-9)


def test_shapes_without_numbers() -> None:
    p = layer(SIZES)
    for name in ("meta", "fake"):
        mode = FakeTensorMode() if name == "fake" else contextlib.nullcontext()
        with mode:
            given = {n: t.to("meta") if name == "meta" else mode.from_tensor(t) for n, t in p.items()}
            out, state = run(given, OPTIONS)
        assert out.shape == (*p["zxbcdt"].shape[:2], 7)
        assert state.shape == p["initial_states"].shape


def test_an_empty_batch() -> None:
    p = layer((0, *SIZES[1:]))
    out, state = run(p, OPTIONS)
    assert out.shape == (0, SIZES[1], 7)
    assert state.shape == p["initial_states"].shape


def test_refuses_what_does_not_fit() -> None:
    p = layer(SIZES)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("zxbcdt", {"zxbcdt": p["zxbcdt"][0]}), ("zxbcdt", {"zxbcdt": p["zxbcdt"][..., 1:]}),
        ("zxbcdt", {"zxbcdt": p["zxbcdt"][:, :0]}), ("zxbcdt", {"zxbcdt": F.pad(p["zxbcdt"], (0, 1))}),
        ("conv1d_weight", {"conv1d_weight": p["conv1d_weight"][1:]}),
        ("conv1d_weight", {"conv1d_weight": p["conv1d_weight"][:, None]}),
        ("conv1d_bias", {"conv1d_bias": p["conv1d_bias"][1:]}), ("dt_bias", {"dt_bias": p["dt_bias"][1:]}),
        ("A", {"A": p["A"][:, None]}), ("D", {"D": p["D"][0]}), ("D", {"D": p["D"][:, None]}),
        ("headdim", {"headdim": None}), ("ngroups", {"ngroups": 3}), ("activation", {"activation": "relu"}),
        ("seq_idx", {"seq_idx": torch.zeros(2, 3, dtype=torch.int32)}), ("dt_limit", {"dt_limit": (2.0, 1.0)}),
        ("initial_states", {"initial_states": p["initial_states"][:, 1:]}),
        ("rmsnorm_weight", {"rmsnorm_weight": p["rmsnorm_weight"][1:]}),
        ("outproj_weight", {"outproj_weight": p["outproj_weight"].T}),
        ("outproj_bias", {"outproj_bias": p["outproj_bias"][1:]}), ("outproj_bias", {"outproj_weight": None}),
        ("chunk_size", {"chunk_size": 0}), ("headdim", {"headdim": None}), ("D", {"D": p["D"][:0]}),
        ("D", {"D": p["D"][:, None].expand(-1, 4)}), ("ngroups", {"ngroups": 0}),
        ("rmsnorm_eps", {"rmsnorm_eps": "1e-5"}), ("rmsnorm_eps", {"rmsnorm_eps": -1.0}),
        ("rmsnorm_eps", {"rmsnorm_eps": float("nan")}),
        *((name, {name: t.to("meta")}) for name, t in p.items() if name != "zxbcdt"),
        ("seq_idx", {"seq_idx": torch.zeros(2, 19, dtype=torch.int32, device="meta")}),
    ]  # fmt: skip
    for name, change in bad:
        with pytest.raises(ValueError, match=f"^{name}: got"):
            mamba_split_conv1d_scan_combined(**{**p, "chunk_size": 16, **OPTIONS, **change})
    for name, change in [
        ("outproj_weight", {"outproj_weight": p["outproj_weight"].float()}), ("A", {"A": None}),
        ("dt_bias", {"dt_bias": 0.0}), ("zxbcdt", {"zxbcdt": p["zxbcdt"].int()}), ("headdim", {"headdim": "5"}),
        ("ngroups", {"ngroups": 2.0}), ("seq_idx", {"seq_idx": [0]}),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=f"^{name}: got"):
            mamba_split_conv1d_scan_combined(**{**p, "chunk_size": 16, **OPTIONS, **change})


THEIRS = {  # names in transformers' module -> ours
    "mamba2_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
    "mamba2_selective_state_update": selective_state_update,
}


@pytest.mark.parametrize("n_groups", [1, 2])
def test_transformers_mamba2_on_these_functions(monkeypatch: pytest.MonkeyPatch, n_groups: int) -> None:
    """Gradients, prefill and decoding are those of transformers' own PyTorch functions."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2 import modeling_mamba2

    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, state_size=16, n_groups=n_groups, num_hidden_layers=2, vocab_size=50,
        chunk_size=8,
    )  # fmt: skip
    model = transformers.Mamba2ForCausalLM(config)
    ids = torch.randint(50, (2, 21))

    def everything() -> list[Tensor]:
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.eval()
        with torch.no_grad():
            out = model(ids[:, :-2], use_cache=True)
            found.append(out.logits)
            for t in (-2, -1):
                out = model(ids[:, t, None], cache_params=out.cache_params, use_cache=True)
                found.append(out.logits)
        return found

    assert {getattr(modeling_mamba2, name).__module__ for name in THEIRS} == {modeling_mamba2.__name__}
    theirs = everything()
    calls = dict.fromkeys(THEIRS, 0)
    for name, function in THEIRS.items():

        def counted(*args: Any, _name: str = name, _run: Any = function, **options: Any) -> Any:
            calls[_name] += 1
            return _run(*args, **options)

        monkeypatch.setattr(modeling_mamba2, name, counted)
    ours = everything()
    assert calls == {name: n * config.num_hidden_layers for name, n in zip(THEIRS, (1, 1, 2), strict=True)}
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert error(a, b.double()) <= TOLERANCE[torch.float32]
