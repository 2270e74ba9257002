"""The gains before and after the norm, for both gates and every normalizer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import tfla
from tfla._util.errors import UserError
from tfla.nn.layers import HeadNorm
from tfla.paper.gain import EPSILONS, VARIANTS, T, draw, gain, gains, outputs, transition
from tfla.paper.transfer import Config, axis, claims, describe_start, draw_start, figure, figures

GATES = list(VARIANTS)


def closed_form_transition(f: float, eps: float) -> float:
    """Return the i at which the mean square of h, exp(2 i) / (1 - sigmoid(f)^2), is a third of epsilon."""
    s = 1 / (1 + math.exp(-f))
    return 0.5 * math.log(eps / 3 * (1 - s * s))


@pytest.mark.parametrize("eps", EPSILONS[1:])
@pytest.mark.parametrize("gate", GATES)
def test_transition(gate: str, eps: float) -> None:
    """Compare with the closed form; for the paper's epsilon the transition is near -8."""
    f = (0.0, 2.0, 4.0)
    found = transition(gains(gate, VARIANTS[gate][0], axis((-12, 0), 1.0), f, (eps,)), eps)
    for at, forget in zip(found, f, strict=True):
        assert at == pytest.approx(closed_form_transition(forget, eps), abs=0.5)
        assert eps != 1e-6 or -9.5 < at < -7


def test_both_gates_are_equal_after_the_norm() -> None:
    exp, sig = (gains(gate, VARIANTS[gate][0], axis((-12, 8), 4.0), (-5.0, 3.0, 12.0), (1e-6,)) for gate in GATES)
    assert (exp.after[1e-6] - sig.after[1e-6]).abs().max() < 2e-3
    assert (sig.before / exp.before).max() > 2


@pytest.mark.parametrize("gate", GATES)
def test_only_bounded_normalizers_let_the_input_gate_decide(gate: str) -> None:
    for normalizer in VARIANTS[gate]:
        after = gains(gate, normalizer, (-12.0, 0.0), (3.0,), (1e-6,)).after[1e-6]
        assert (after[0] < 0.1 * after[1]).item() == (normalizer in ("bounded", "none"))
        assert after[1].item() == pytest.approx(1, abs=0.1)


def test_bounded_normalizer_is_that_of_mlstm_exp() -> None:
    """Compare with the unnormalized operator divided by max(|n q|, 1), which is (4)."""
    q, k, v = draw()
    i, f = torch.full((1, T, 1), -1.0), torch.full((1, T, 1), 3.0)
    log_f = torch.nn.functional.logsigmoid(f)
    ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    out = tfla.linear_attention(q, k, ones, log_f, i)
    expected = out[..., :-1] / out[..., -1:].abs().clamp(min=1)
    torch.testing.assert_close(outputs(q, k, v, i, f, "exp", "bounded"), expected, rtol=1e-4, atol=1e-5)


def test_gain_follows_its_definition() -> None:
    q, k, v = draw(3)
    i, f = torch.full((1, T, 1), -9.0), torch.full((1, T, 1), 4.0)
    h = tfla.mlstm(q, k, v, i, f, backend="reference", kernel="parallel")
    after = HeadNorm(1, 128, 1e-6, "rms")(h)
    expected = [sum((x[0, t].abs().max() / v[0, t].abs().max()).item() for t in range(T)) / T for x in (h, after)]
    found = gains("exp", "bounded", (-9.0,), (4.0,), (1e-6,), seed=3)
    assert found.before.item() == pytest.approx(expected[0], rel=1e-4)
    assert found.after[1e-6].item() == pytest.approx(expected[1], rel=1e-4)
    assert gain(h, v).shape == (1,)


def test_layer_norm_gives_the_same_map() -> None:
    """Check the paper's remark that the norms agree, because the means are zero."""
    rms, layer = (gains("exp", "bounded", (-9.0, 0.0), (3.0,), (1e-6,), kind) for kind in ("rms", "layer"))
    torch.testing.assert_close(rms.after[1e-6], layer.after[1e-6], rtol=0.02, atol=0)


def test_a_choice_of_ones_own() -> None:
    """Check that the input is suppressed far below the transition and passed far above it."""
    words = {}
    for bias in (-18.0, 0.0):
        config = Config(eps=1e-6, input_gate_bias=bias, gate_soft_cap=1e3)
        found = gains("exp", "bounded", (bias,), config.forget_gate_bias, (1e-6,))
        words[bias] = describe_start(found, config)
    assert "cell suppresses its input" in words[-18.0]
    assert "cell passes its input" in words[0.0]


def test_biases_are_soft_capped() -> None:
    i, f = Config().start
    assert i == pytest.approx(15 * math.tanh(-10 / 15), abs=1e-5)
    assert f == pytest.approx((15 * math.tanh(3 / 15), 15 * math.tanh(6 / 15)), abs=1e-5)


def test_figures(tmp_path: Path) -> None:
    """Draw one row of maps, because drawing takes long."""
    config = Config(out=tmp_path, eps=1e-4, input_gate_bias=-5.0)
    i, f = (-12.0, 8.0), (-5.0, 12.0)
    found = {(gate, VARIANTS[gate][0]): gains(gate, VARIANTS[gate][0], i, f, (1e-6, 1e-4)) for gate in GATES}
    drawn = figure(config, "fig", "Figure", "caption", [("exp", "bounded")], found, (1e-6,))
    assert len(drawn.data_path.read_text().splitlines()) == 1 + 4
    assert "--eps 0.0001 --input-gate-bias -5" in draw_start(config, found).command


def test_claims() -> None:
    assert next(c.title for c in claims(Config())) == "Both gates are equal after the norm"


@pytest.mark.parametrize(("field", "value"), [("step", 0.0), ("eps", -1.0)])
def test_bad_options(field: str, value: float) -> None:
    with pytest.raises(UserError, match=field):
        figures(Config(**{field: value}))


def test_bad_names() -> None:
    with pytest.raises(ValueError, match="normalizer: got 'max'"):
        gains("exp", "max", (0.0,), (0.0,), (1e-6,))
    with pytest.raises(ValueError, match="gate: got 'relu'"):
        gains("relu", "none", (0.0,), (0.0,), (1e-6,))
