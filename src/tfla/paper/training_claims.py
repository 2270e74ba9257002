"""What the paper's training experiments say, beside the small ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from tfla.paper.experiments.plans import BIASES, EPSILONS, EXPERIMENTS, LONGER, MIXERS, MLSTMS, Variant
from tfla.paper.report_types import Claim, Table
from tfla.paper.training_runs import (
    MEASURE,
    NAMES,
    SETTLED,
    SPIKE,
    Config,
    Found,
    load,
    seeds,
    spikes,
    spread,
    table_of,
    text,
)

END = "at the end"
SMOKE = "training_smoke.json"  # the same experiments at the smoke size, where the reference can train


def verdict(holds: bool) -> str:
    return "it reproduces" if holds else "it does not reproduce at this size"


def numbers(values: Iterable[float], digits: str = ".3f") -> str:
    """Several of them with commas, what is not there as a dash."""
    return ", ".join("-" if math.isnan(x) else f"{x:{digits}}" for x in values)


def claims(config: Config) -> list[Claim]:
    """What the paper's training experiments say, beside the small ones."""
    found = load(Config(out=config.out, results=config.results))
    if found is None:
        return []
    path = config.results / SMOKE
    smoke = load(Config(training=path)) if path.exists() else None
    return [_equal_gates(found), _attention(found), _learnable(found), _biases(found), _grid(found), _below_zero(found),
            _kernels(found, smoke), _contexts(found)]  # fmt: skip


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _equal_gates(found: Found) -> Claim:
    exp, sig = (found.all_of(seeds(Variant(m))) for m in MLSTMS)
    four = [found.all_of([Variant(m, heads=4)]) for m in MLSTMS]
    close = bool(exp and sig) and abs(statistics.mean(exp) - statistics.mean(sig)) < 2 * max(spread(found), 1e-9)
    return Claim(
        "mLSTMsig learns as well as mLSTMexp",
        "that mLSTMsig performs equally well: perplexity 21.03 and 21.03 at 160M parameters with 6 heads (Table 2).",
        f"{verdict(close)}: {text(exp)} and {text(sig)} held-out bits per byte for mLSTMexp and mLSTMsig with 2 heads, "
        f"{len(exp)} seeds; {text(four[0])} and {text(four[1])} with 4 heads, one seed. {found.where}.",
        MEASURE,
    )


def _attention(found: Found) -> Claim:
    at = {heads: [text(found.all_of(seeds(Variant(m, heads=heads)))) for m in ("attention", "mlstm_exp")]
          for heads in (2, 4)}  # fmt: skip
    return Claim(
        "mLSTM and Llama at equal size",
        "that both are about equal: 20.89 for Llama, 21.03 to 21.18 for the mLSTMs at 160M (Table 2).",
        f"not comparable at this size: attention in the same block has {at[2][0]} bits per byte beside mLSTMexp's "
        f"{at[2][1]} with 2 heads, {at[4][0]} beside {at[4][1]} with 4. So short a training on bytes favours "
        "the recurrent model; it says nothing on trained ones. All runs, with the standard deviation over seeds:",
        MEASURE,
        table_of(found),
    )


def _learnable(found: Found) -> Claim:
    pairs = [[_nan(found.last(Variant(m, trainable=t), "bits_per_byte")) for t in (True, False)] for m in MLSTMS]
    return Claim(
        "A learnable input gate",
        "that learning the input gate improves perplexity: 20.95 against 21.23 for mLSTMexp, 21.04 against 21.24 for "
        "mLSTMsig (Table 6).",
        f"{verdict(all(learnt < fixed for learnt, fixed in pairs))}: {numbers(pairs[0])} bits per byte learnable and "
        f"fixed for mLSTMexp, {numbers(pairs[1])} for mLSTMsig, one seed each; the standard deviation over seeds is "
        f"{spread(found):.3f}.",
        "tfla experiment table6 --size small",
    )


def _biases(found: Found) -> Claim:
    rows, least = [], dict.fromkeys((3, SPIKE, 8), 0)
    for mixer in MLSTMS:
        for trainable in (True, False):
            variants = [Variant(mixer, bias=bias, trainable=trainable) for bias in BIASES]
            norms = [row["grad_norm"] if (row := found.trained(v)) is not None else [] for v in variants]
            counts = [len(spikes(line)) for line in norms]
            largest = [max(line[SETTLED:], default=math.nan) for line in norms]
            for above in least:
                few = [len(spikes(line, above)) for line in norms]
                least[above] += few[-1] == min(few)
            bits = [found.last(v, "bits_per_byte") for v in variants]
            cells = [
                "-" if bit is None else f"{count}, up to {norm:.0f}; {bit:.3f}"
                for count, norm, bit in zip(counts, largest, bits, strict=True)
            ]
            rows.append([f"{NAMES[mixer]}, {'trainable' if trainable else 'fixed'}", *cells])
    return Claim(
        "The input gate's bias at the start",
        "that a bias of -10 prevents the gradient norm's spikes and high variance that biases of 0, -2 and -5 have "
        "(Figures 8 and 9).",
        f"{verdict(least[SPIKE] == len(rows))}, in that spikes are fewest with -10, though there are some. One seed "
        f"each, and no run diverged. A spike is a step, of those after the first {SETTLED}, with more than {SPIKE} "
        f"times the running median of the norm, a bound chosen with the curves in view; "
        f"by {' or '.join(f'{x} times' for x in least if x != SPIKE)} they are "
        f"fewest in {' and '.join(str(n) for x, n in least.items() if x != SPIKE)} of {len(rows)} lines. Spikes, the "
        "largest norm, held-out bits per byte:",
        "tfla experiment fig8 --size small",
        Table(["input gate", *(f"bias {bias:g}" for bias in BIASES)], rows),
    )


def _grid(found: Found) -> Claim:
    at = {(eps, bias): _nan(found.last(Variant("mlstm_exp", eps=eps, bias=bias), "bits_per_byte"))
          for eps in EPSILONS for bias in BIASES}  # fmt: skip
    best = {eps: min(BIASES, key=lambda bias: at[eps, bias] if at[eps, bias] == at[eps, bias] else 99.0)
            for eps in EPSILONS}  # fmt: skip
    rising = [best[eps] for eps in sorted(EPSILONS)]
    lines = "; ".join(f"ε = {eps:g}: {numbers(at[eps, bias] for bias in BIASES)}" for eps in sorted(EPSILONS))
    return Claim(
        "Norm epsilon and bias belong together",
        "that the best of the grid lie on a diagonal from (1e-6, -10) to (1e-4, -5): a larger epsilon wants a larger "
        "bias (Figure 10).",
        f"{verdict(rising == sorted(rising) and rising[0] < rising[-1])}: the best bias is "
        + ", ".join(f"{best[eps]:g} for ε = {eps:g}" for eps in sorted(EPSILONS))
        + f". Bits per byte for biases 0, -2, -5, -10: {lines}. One seed each, standard deviation {spread(found):.3f}.",
        "tfla experiment fig10 --size small",
    )


def _below_zero(found: Found) -> Claim:
    trained = [row for v in EXPERIMENTS["fig11"].variants if (row := found.trained(v)) is not None]
    curves = [[x for x in row["max_input_gate"] if x is not None] for row in trained]
    rows = [curve for curve in curves if curve]
    largest, ends = [max(curve) for curve in rows], [curve[-1] for curve in rows]
    return Claim(
        "Input gates stay below zero",
        "that pre-activations grow slowly from the bias of -10 and mostly stay below 0 (Figure 11).",
        f"{verdict(bool(largest) and max(largest) < 0)}: the largest of {len(rows)} runs is "
        f"{max(largest, default=0):.1f}, and runs end between {min(ends, default=0):.1f} and "
        f"{max(ends, default=0):.1f}.",
        "tfla experiment fig11 --size small",
    )


def _so_far(found: Found, name: str) -> tuple[str, dict[str, float]]:
    """At which step the runs of an experiment are compared, and bits per byte there by what tells them apart."""
    variants = EXPERIMENTS[name].variants
    step = found.reached(variants)
    bits = {
        f"{NAMES[v.mixer]}{f' by {v.backend}' if v.backend else ''}": x
        for v in variants if step and (x := found.at(v, "bits_per_byte", step)) is not None
    }  # fmt: skip
    when = END if step == found.steps else f"after {step} of {found.steps} steps, where the runs were stopped"
    return when, bits


def _listed(bits: dict[str, float]) -> str:
    return ", ".join(f"{name} {x:.3f}" for name, x in bits.items()) or "none"


def _kernels(found: Found, smoke: Found | None) -> Claim:
    when, bits = _so_far(found, "table3")
    tiny = ""
    if smoke is not None:
        end, also = _so_far(smoke, "table3")
        tiny = f" At the smoke size ({smoke.where}) {end}: {_listed(also)}."
    gates = [[x for name, x in bits.items() if name.startswith(NAMES[mixer])] for mixer in MLSTMS]
    apart = max((max(of) - min(of) for of in gates if of), default=math.nan)
    settled = when == END and all(len(of) > 1 for of in gates)
    said = verdict(apart < 2 * spread(found)) if settled else "not settled at this size"
    return Claim(
        "Kernels and the parallel form",
        "that its kernels reach the loss of a parallel form in JAX, of one head (Table 3).",
        f"{said}: held-out bits per byte {when}: {_listed(bits)}; one seed each. Backends are up to {apart:.3f} apart, "
        f"the standard deviation over seeds is {spread(found):.3f}.{tiny} What backends compute is compared on every "
        "gradient too (Numerics).",
        "tfla experiment table3 --size small",
    )


def _contexts(found: Found) -> Claim:
    when, bits = _so_far(found, "table5")
    short = {NAMES[mixer]: text(found.all_of(seeds(Variant(mixer)))) for mixer in MIXERS}
    exp, sig, llama = (bits.get(NAMES[mixer], math.nan) for mixer in MIXERS)
    behind = [
        statistics.mean(found.all_of(seeds(Variant(mixer))) or [math.nan]) for mixer in ("attention", "mlstm_exp")
    ]
    same = abs(exp - sig) < 2 * spread(found) and (llama > exp) == (behind[0] > behind[1])
    said = f"in their order {verdict(same)}" if when == END else "not settled at this size"
    return Claim(
        "Longer contexts",
        "that mLSTMsig, mLSTMexp and Llama stand to each other at twice the context as they do at 4,096 (Table 5).",
        f"{said}: held-out bits per byte at {LONGER} times the context {when}: {_listed(bits)}; one seed each. At the "
        f"context itself: {', '.join(f'{name} {x}' for name, x in short.items())}.",
        "tfla experiment table5 --size small",
    )
