"""The layers equal their equations, evaluated token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tfla.integrations.transformers import save_xlstm
from tfla.nn import MLSTM, Attention, GatePreactivation, HeadNorm, LanguageModel, ModelConfig, SwiGLU
from tfla.ops.state import State

Make = Callable[..., LanguageModel]
CONFIG = {m: ModelConfig(d_model=8, num_blocks=1, num_heads=2, mixer=m) for m in ("mlstm_exp", "attention")}
Close = Callable[[Tensor, Tensor], None]
X = torch.randn(9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def mlstm_by_equations(layer: MLSTM, x: Tensor, exponential: bool, kind: str) -> Tensor:
    """Return the layer's output for x (T, d_model) by (5), (110) and (1)-(8) or (22)-(24), without stabilization."""
    w = {name: p.detach() for name, p in layer.named_parameters()}
    heads = layer.num_heads
    q, k, v = (x @ w[f"{n}_proj.weight"].T for n in "qkv")
    i, f = (15 * torch.tanh((x @ w[f"{n}_gate.weight"].T + w[f"{n}_gate.bias"]) / 15) for n in ("input", "forget"))
    dqk, dhv = q.shape[1] // heads, v.shape[1] // heads
    out = torch.zeros_like(v)
    for head in range(heads):
        a, b = slice(head * dqk, (head + 1) * dqk), slice(head * dhv, (head + 1) * dhv)
        C, n = torch.zeros(dqk, dhv, dtype=x.dtype), torch.zeros(dqk, dtype=x.dtype)
        for t in range(len(x)):
            forget = torch.sigmoid(f[t, head])
            write = i[t, head].exp() if exponential else torch.sigmoid(i[t, head])
            C = forget * C + write * torch.outer(k[t, a], v[t, b])
            n = forget * n + write * k[t, a]
            query = q[t, a] / math.sqrt(dqk)
            h = C.T @ query
            if exponential:
                h = h / max(abs(n @ query), 1.0)
            h = h - h.mean() if kind == "layer" else h
            h = h / torch.sqrt((h * h).mean() + 1e-6)
            out[t, b] = h
    out = out * w["head_norm.weight"] * torch.sigmoid(x @ w["output_gate.weight"].T)
    return out @ w["out_proj.weight"].T


@pytest.mark.parametrize("mixer", ["mlstm_exp", "mlstm_sig"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_mlstm_equals_its_equations(mixer: str, kind: str, make_model: Make, close: Close) -> None:
    layer = make_model(mixer, head_norm=kind).blocks[0].mixer
    assert isinstance(layer, MLSTM)
    close(layer(X[None])[0][0], mlstm_by_equations(layer, X, mixer == "mlstm_exp", kind))


def test_attention_equals_its_equations(make_model: Make, close: Close) -> None:
    layer = make_model("attention").blocks[0].mixer
    assert isinstance(layer, Attention)
    heads, d = layer.num_heads, layer.head_dim
    q, k, v = (p(X).unflatten(-1, (heads, d)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    # A pair of channels is a complex number that turns with the position.
    turn = torch.polar(
        torch.ones(9, d // 2, dtype=torch.float64),
        torch.arange(9)[:, None] * 10_000.0 ** (-torch.arange(d // 2, dtype=torch.float64) / (d // 2)),
    )[:, None]
    q, k = (torch.complex(t[..., : d // 2], t[..., d // 2 :]) * turn for t in (q, k))
    scores = torch.einsum("ihd,jhd->hij", q, k.conj()).real / math.sqrt(d)
    scores = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -math.inf)
    h = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    close(layer(X[None])[0][0], layer.out_proj(h.flatten(1)))


def test_swiglu(make_model: Make, close: Close) -> None:
    layer = make_model().blocks[0].ffn
    assert isinstance(layer, SwiGLU)
    gate, up, down = (p.weight for p in (layer.gate_proj, layer.up_proj, layer.down_proj))
    close(layer(X), (F.silu(X @ gate.T) * (X @ up.T)) @ down.T)


def test_a_hook_sees_the_soft_capped_preactivations_that_the_operator_gets(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_model(gate_soft_cap=2.0).blocks[0].mixer
    assert isinstance(layer, MLSTM)
    recorded: dict[str, Tensor] = {}
    for name in ("input_gate", "forget_gate"):
        gate = getattr(layer, name)
        assert isinstance(gate, GatePreactivation)
        gate.register_forward_hook(lambda _, __, out, name=name: recorded.__setitem__(name, out))

    def operator(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, **_: object) -> Tensor:
        assert i is recorded["input_gate"]
        assert f is recorded["forget_gate"]
        return v

    monkeypatch.setattr("tfla.nn.mixers.mlstm.mlstm", operator)
    layer(10 * X[None])
    assert recorded["input_gate"].shape == (1, 9, 2)
    assert 1.9 < recorded["input_gate"].abs().max() < 2.0


def test_gates_and_norms_stay_wide_under_autocast() -> None:
    gate = GatePreactivation(32, 4, (3.0, 6.0), 15.0)
    torch.nn.init.normal_(gate.weight)
    norm = HeadNorm(4, 8, 1e-6, "layer")
    x = X.float()
    with torch.autocast("cpu", torch.bfloat16):
        out = gate(x)
        normed = norm(x.bfloat16().unflatten(-1, (4, 8)))
    assert out.dtype == normed.dtype == torch.float32
    torch.testing.assert_close(out, gate(x))
    assert gate.bfloat16()(x.bfloat16()).dtype == torch.float32
    assert gate.double()(X).dtype == torch.float64


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_initial_weights_are_those_of_the_paper(heads: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(d_model=64, num_blocks=5, num_heads=heads, vocab_size=500)
    model = LanguageModel(config)
    small, deep = math.sqrt(2 / (5 * 64)), 2 / (5 * math.sqrt(64))
    stds = {"out_proj": deep, "down_proj": deep}
    for name, p in model.named_parameters():
        if p.dim() == 2 and "gate.weight" not in name.replace("output_gate", ""):
            expected = next((s for part, s in stds.items() if part in name), small)
            assert math.isclose(p.std().item(), expected, rel_tol=0.1), name
            assert abs(p.mean().item()) < 0.1 * expected, name
        elif "norm" in name:
            assert (p == 1).all(), name
    for block in model.blocks:
        layer = block.mixer
        assert isinstance(layer, MLSTM)
        assert not layer.input_gate.weight.any()
        assert not layer.forget_gate.weight.any()
        assert (layer.input_gate.bias == -10).all()
        expected_bias = [3.0] if heads == 1 else [3 + 3 * h / (heads - 1) for h in range(heads)]
        assert layer.forget_gate.bias.tolist() == pytest.approx(expected_bias)


def test_a_fixed_input_gate_does_not_train(make_model: Make, ids: Tensor) -> None:
    model = make_model(input_gate_trainable=False)
    model(ids).square().mean().backward()
    for block in model.blocks:
        layer = block.mixer
        assert isinstance(layer, MLSTM)
        assert all(p.grad is None and not p.requires_grad for p in layer.input_gate.parameters())
    without_grad = {name for name, p in model.named_parameters() if p.grad is None}
    assert without_grad == {f"blocks.{n}.mixer.input_gate.{part}" for n in (0, 1) for part in ("weight", "bias")}


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: MLSTM(CONFIG["attention"]),
            ValueError,
            r"config\.mixer: got 'attention', expected one of",
        ),
        (
            lambda: Attention(CONFIG["mlstm_exp"]),
            ValueError,
            r"config\.mixer: got 'mlstm_exp', expected one",
        ),
        (lambda: MLSTM({"d_model": 8}), TypeError, r"config: got dict, expected a ModelConfig"),
        (
            lambda: MLSTM(16, 64, 2, batch_first=True),
            TypeError,
            r"config: got 16, 64, 2, batch_first=True, expected a ModelConfig alone; "
            r"tfla\.nn\.MLSTMStack\(input_size, hidden_size, \.\.\.\) takes",
        ),
        (lambda: MLSTM(16), TypeError, r"config: got 16, expected a ModelConfig alone; tfla\.nn\.MLSTMStack"),
        (lambda: HeadNorm(2, 8, 1e-6, "group"), ValueError, r"kind: got 'group', expected 'layer' or 'rms'"),
        (lambda: HeadNorm(0, 8, 1e-6, "rms"), ValueError, r"num_heads: got 0, expected at least 1"),
        (lambda: HeadNorm(2, 8.0, 1e-6, "rms"), TypeError, r"head_dim: got float, expected an int"),
        (lambda: HeadNorm(2, 8, -1.0, "rms"), ValueError, r"eps: got -1.0, expected a finite number above 0"),
        (lambda: GatePreactivation(8, 2, (1.0,), 15.0), TypeError, r"bias_range: got \(1.0,\), expected two numbers"),
        (lambda: GatePreactivation(8, 2, (1.0, math.nan), 15.0), ValueError, r"bias_range: got nan, expected a finite"),
        (lambda: GatePreactivation(8, 2, (1.0, 2.0), 0), ValueError, r"cap: got 0, expected a finite number above 0"),
        (lambda: GatePreactivation(8, 2, (1.0, 2.0), "15"), TypeError, r"cap: got str, expected a number"),
        (lambda: GatePreactivation(8, -2, (1.0, 2.0), 15.0), ValueError, r"num_heads: got -2, expected at least 1"),
        (lambda: State.zeros(1, 1, 4, 4).to("foo"), ValueError, r"device: got 'foo', expected 'cpu'"),
        (lambda: save_xlstm("model", "folder"), TypeError, r"model: got str, expected a LanguageModel"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        call()
