"""The transfer behavior of the mLSTM (Section 4.2, Appendix D.2): Figures 3, 6 and 7, and the start of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tfla._util.options import check_range, is_number, require
from tfla.nn.soft_cap import soft_cap
from tfla.ops.gates import INPUT_GATES, InputGate
from tfla.paper.claims_template import Values, fill
from tfla.paper.gain import EPSILONS, NORMALIZERS, VARIANTS, Gains, Normalizer, gains, transition
from tfla.paper.report_types import Claim, Figure, Missing, Options, write
from tfla.paper.style import panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "tfla analyze transfer"
EPS = 1e-6
NAMES: dict[InputGate, str] = {"exp": "mLSTMexp", "sigmoid": "mLSTMsig"}
I_RANGE, F_RANGE = (-12.0, 8.0), (-5.0, 12.0)
SMALLEST_STEP = 0.01  # maps of 3.4 million gains, each the result of a sequence
LOWEST, HIGHEST = 1e-4, 1e2  # of the colors before the norm, where gains span many decades


@dataclass
class Config(Options):
    """The options of `tfla analyze transfer`; the defaults of the last three are those of the paper's model."""

    step: float = 1.0
    """Distance between the pre-activations of the grid."""
    eps: float = EPS
    """Epsilon of the norm over the outputs of a head, for the map that shows where a model starts."""
    input_gate_bias: float = -10.0
    """Bias of its input gates at the start."""
    forget_gate_bias: tuple[float, float] = (3.0, 6.0)
    """Biases of its forget gates at the start, of the first and the last head."""
    gate_soft_cap: float = 15.0
    """Soft cap of the pre-activations of its gates (110): a bias of -10 is a pre-activation of -8.7."""

    @property
    def start(self) -> tuple[float, tuple[float, float]]:
        """Return the pre-activations at the start, which are the soft-capped biases, because the weights are 0."""
        i, *f = (
            soft_cap(torch.tensor(x), self.gate_soft_cap).item() for x in (self.input_gate_bias, *self.forget_gate_bias)
        )
        return i, (f[0], f[1])

    def check(self) -> None:
        """Raise UserError where a value is out of range."""
        super().check()
        check_range("step", self.step, SMALLEST_STEP, I_RANGE[1] - I_RANGE[0])
        check_range("eps", self.eps, 0, with_low=False)
        check_range("gate-soft-cap", self.gate_soft_cap, 0, with_low=False)
        require(is_number(self.input_gate_bias), "input-gate-bias", self.input_gate_bias, "a finite number")
        ends = self.forget_gate_bias
        require(all(map(is_number, ends)), "forget-gate-bias", ends, "finite numbers")


def axis(ends: tuple[float, float], step: float) -> tuple[float, ...]:
    """Return the points from one end to the other."""
    low, high = ends
    return tuple(low + n * step for n in range(round((high - low) / step) + 1))


def rows_of(found: Gains, gate: InputGate, normalizer: Normalizer) -> list[dict[str, Any]]:
    """Return the rows of the CSV file for one gate and normalizer."""
    return [
        {
            "input_gate": NAMES[gate], "normalizer": NORMALIZERS[normalizer], "i": i, "f": f,
            "gain_before": found.before[a, b].item(),
            **{f"gain_after_eps_{eps:g}": after[a, b].item() for eps, after in found.after.items()},
        }
        for a, i in enumerate(found.i) for b, f in enumerate(found.f)
    ]  # fmt: skip


def heat(axes: Axes, found: Gains, values: Any, *, logarithmic: bool) -> Any:
    """Draw one map: the forget gate on x, the input gate on y, the gain as color."""
    from matplotlib.colors import LogNorm, Normalize

    norm = LogNorm(LOWEST, HIGHEST) if logarithmic else Normalize(0, 1)
    drawn = axes.pcolormesh(found.f, found.i, values.numpy(), norm=norm, shading="nearest", rasterized=True)
    axes.grid(False)
    return drawn


def label(axes: Sequence[Sequence[Axes]]) -> None:
    """Label the outer axes of the maps."""
    for one in axes[-1]:
        one.set_xlabel("forget gate f̃")
    for row in axes:
        row[0].set_ylabel("input gate ĩ")


def figure(
    config: Config, name: str, title: str, caption: str, lines: Sequence[tuple[InputGate, Normalizer]],
    found: dict[tuple[InputGate, Normalizer], Gains], epsilons: Sequence[float],
) -> Figure:  # fmt: skip
    """Draw a row of maps for each gate and normalizer: before the norm, then after it for each epsilon."""
    drawing, axes = panels(len(lines), 1 + len(epsilons), width=3.0, height=2.6, sharex=True, sharey=True)
    before: Any = None
    after: Any = None
    for row, (gate, normalizer) in zip(axes, lines, strict=True):
        maps = found[gate, normalizer]
        before = heat(row[0], maps, maps.before, logarithmic=True)
        row[0].set_title(f"{NAMES[gate]}, n = {NORMALIZERS[normalizer]}\nbefore the norm")
        for one, eps in zip(row[1:], epsilons, strict=True):
            after = heat(one, maps, maps.after[eps], logarithmic=False)
            one.set_title(f"after it, ε = {eps:g}")
    label(axes)
    drawing.colorbar(before, ax=[row[0] for row in axes], label="gain", location="left", extend="both", shrink=0.8)
    drawing.colorbar(after, ax=[row[-1] for row in axes], label="gain", extend="max", shrink=0.8)
    numbers = [r for line in lines for r in rows_of(found[line], *line)]
    return write(config, name, drawing, numbers, title=title, caption=caption, command=COMMAND)


def start_values(found: Gains, config: Config) -> Values:
    """Return the values of the claim `model_start`: where a model with these biases starts on the map of gains."""
    values = found.after[config.eps]
    low, high = values.min().item(), values.max().item()
    half = [x for x in transition(full_column(config, found.f), config.eps) if x is not None]
    i, f = config.start
    return {
        "eps": f"{config.eps:g}",
        "input_bias": f"{config.input_gate_bias:g}",
        "forget_low": f"{config.forget_gate_bias[0]:g}",
        "forget_high": f"{config.forget_gate_bias[1]:g}",
        "i": f"{i:.1f}",
        "f_low": f"{f[0]:.1f}",
        "f_high": f"{f[1]:.1f}",
        "gain_low": f"{low:.2g}",
        "gain_high": f"{high:.2g}",
        "suppresses": high < 0.25,
        "partly": high >= 0.25 and low <= 0.75,
        "passes": high >= 0.25 and low > 0.75,
        "half_low": f"{max(half):.1f}" if half else None,
        "half_high": f"{min(half):.1f}" if half else None,
        "off_low": f"{max(half) - i:+.1f}" if half else None,
        "off_high": f"{min(half) - i:+.1f}" if half else None,
    }


def describe_start(found: Gains, config: Config) -> str:
    """Return in words where a model with these biases starts, as the page of claims has it."""
    [claim] = fill({"model_start": start_values(found, config)})
    return claim.here


def full_column(config: Config, f: tuple[float, ...]) -> Gains:
    """Return the gains of mLSTMexp over all input gates, at these forget gates."""
    return gains("exp", "bounded", axis((-20.0, 8.0), 0.5), f, (config.eps,))


def start(config: Config) -> Gains:
    """Return the gains at the start of a model with the config's biases."""
    i, f = config.start
    return gains("exp", "bounded", (i,), f, (config.eps,))


def draw_start(config: Config, found: dict[tuple[InputGate, Normalizer], Gains]) -> Figure:
    """Draw the maps of both gates after the norm with the config's epsilon, and the line on which heads start."""
    drawing, axes = panels(1, 2, width=3.9, height=3.4, sharey=True)
    numbers: list[dict[str, Any]] = []
    at, ends = config.start
    for one, gate in zip(axes[0], INPUT_GATES, strict=True):
        kind: InputGate = "exp" if gate == "exp" else "sigmoid"
        normalizer = VARIANTS[kind][0]
        maps = found[kind, normalizer]
        drawn = heat(one, maps, maps.after[config.eps], logarithmic=False)
        one.plot(
            ends, [at] * 2, color="white", lw=5, marker="o", ms=9, label="_"
        )  # fmt: skip
        one.plot(
            ends, [at] * 2, color="#D55E00", lw=2.5, marker="o", ms=6,
            label="heads at the start",
        )  # fmt: skip
        one.legend(loc="upper left", frameon=True)
        one.set_title(f"{NAMES[kind]}, after the norm, ε = {config.eps:g}")
        numbers += rows_of(maps, kind, normalizer)
    label(axes)
    drawing.colorbar(drawn, ax=axes[0][-1], label="gain", extend="max")
    caption = describe_start(start(config), config) + (
        "\n\nAnother choice: `tfla analyze transfer --eps 1e-4 --input-gate-bias -5`."
    )
    command = COMMAND
    if config != Config(out=config.out, results=config.results, format=config.format):
        low, high = config.forget_gate_bias
        command += f" --eps {config.eps:g} --input-gate-bias {config.input_gate_bias:g}"
        command += (
            f" --forget-gate-bias {low:g} {high:g} --gate-soft-cap {config.gate_soft_cap:g} --step {config.step:g}"
        )
    return write(
        config, "transfer_start", drawing, numbers, title="Where a model starts on the map of gains", caption=caption,
        command=command,
    )  # fmt: skip


def figures(config: Config) -> list[Figure | Missing]:
    """Draw Figures 3, 6 and 7, and the start of a model."""
    config.check()
    i, f = axis(I_RANGE, config.step), axis(F_RANGE, config.step)
    epsilons = tuple(dict.fromkeys((*EPSILONS, config.eps)))
    found = {(gate, n): gains(gate, n, i, f, epsilons) for gate, normalizers in VARIANTS.items() for n in normalizers}
    defaults = [(gate, normalizers[0]) for gate, normalizers in VARIANTS.items()]
    return [
        figure(
            config, "fig3", "Figure 3: gain of mLSTMexp and mLSTMsig before and after the norm",
            "Before the norm (left, logarithmic) the two cells differ: mLSTMsig is bounded where ĩ is large. After the "
            "norm (right) the maps are equal: near ĩ = -8 they pass from suppressing (0) to passing (1) the input.",
            defaults, found, (EPS,),
        ),
        figure(
            config, "fig6", "Figure 6: gain of mLSTMexp by normalizer and epsilon",
            "Only with the normalizer that is bounded from below (first row) the input gate decides. Without the bound "
            "the gate cancels in the ratio and the cell passes everything. A larger epsilon moves the transition up.",
            [("exp", n) for n in VARIANTS["exp"]], found, EPSILONS,
        ),
        figure(
            config, "fig7", "Figure 7: gain of mLSTMsig by normalizer and epsilon",
            "No normalizer (first row, the default) and the bounded one (second) give the same map after the norm. "
            "With the two that have no bound, the input gate has no effect, as for mLSTMexp.",
            [("sigmoid", n) for n in VARIANTS["sigmoid"]], found, EPSILONS,
        ),
        draw_start(config, found),
    ]  # fmt: skip


def claims(config: Config) -> list[Claim]:
    """Return the claims of Section 4.2 and Appendix D.2 with the gains on a grid of step 1."""
    i, f = axis(I_RANGE, 1.0), (0.0, 3.0, 6.0)
    exp, sig = (gains(gate, VARIANTS[gate][0], i, f, EPSILONS) for gate in VARIANTS)
    names = dict(zip(("large", "small", "smallest"), EPSILONS, strict=True))
    apart = {name: (exp.after[eps] - sig.after[eps]).abs().max().item() for name, eps in names.items()}
    half = {name: [x for x in transition(exp, eps) if x is not None] for name, eps in names.items()}
    bounded = gains("sigmoid", "bounded", i, f, (EPS,)).after[EPS]
    unbounded = min(
        gains(gate, normalizer, i, f, (EPS,)).after[EPS].min().item()
        for gate, normalizers in VARIANTS.items() for normalizer in normalizers if normalizer in ("absolute", "plain")
    )  # fmt: skip
    return fill(
        {
            "equal_after_norm": {name: f"{x:.1g}" for name, x in apart.items()},
            "transition": {name: f"{max(x):.1f} to {min(x):.1f}" if x else None for name, x in half.items()},
            "normalizers": {
                "unbounded": f"{unbounded:.2g}",
                "bounded": f"{(bounded - sig.after[EPS]).abs().max().item():.1g}",
            },
            "model_start": start_values(start(config), config),
        }
    )
