"""The values of the claims about training, from the small experiments of `tfla experiment`."""

from __future__ import annotations

import math
import statistics

from tfla.paper.claims_template import Value, Values, fill
from tfla.paper.experiments.plans import BIASES, EPSILONS, EXPERIMENTS, LONGER, MIXERS, MLSTMS, Variant
from tfla.paper.report_types import Claim, Table
from tfla.paper.training_runs import (
    NAMES,
    SETTLED,
    SPIKE,
    Config,
    TrainingRuns,
    load,
    mean_text,
    seeds,
    spikes,
    spread,
    table_of,
)

SMOKE = "training_smoke.json"  # the same experiments at the smoke size, where the reference can train
BOUNDS = (3, SPIKE, 8)  # a spike is above the running median by such a factor


def _number(value: float | None, digits: str = ".3f") -> str:
    """Return a number as text, a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:{digits}}"


def _mean(values: list[float]) -> float:
    """Return the mean, NaN of no values."""
    return statistics.mean(values) if values else math.nan


def _equal_gates(found: TrainingRuns) -> Values:
    """Compare mLSTMexp with mLSTMsig, with two and with four heads."""
    exp, sig = (found.all_of(seeds(Variant(m))) for m in MLSTMS)
    exp_4, sig_4 = (found.all_of([Variant(m, heads=4)]) for m in MLSTMS)
    return {
        "holds": bool(exp and sig) and abs(_mean(exp) - _mean(sig)) < 2 * max(spread(found), 1e-9),
        "exp": mean_text(exp),
        "sig": mean_text(sig),
        "seeds": str(len(exp)),
        "exp_4": mean_text(exp_4),
        "sig_4": mean_text(sig_4),
        "where": found.where,
    }


def _attention_model(found: TrainingRuns) -> Values:
    """Compare the mLSTM with attention."""
    values: dict[str, Value] = {"table": table_of(found)}
    for name, mixer in (("attention", "attention"), ("exp", "mlstm_exp")):
        for heads in (2, 4):
            values[f"{name}_{heads}"] = mean_text(found.all_of(seeds(Variant(mixer, heads=heads))))  # type: ignore[arg-type]
    return values


def _learnable_gate(found: TrainingRuns) -> Values:
    """Compare learnable with fixed input gates."""
    bits = {
        f"{name}_{kind}": found.last(Variant(mixer, trainable=kind == "learnable"), "bits_per_byte")
        for name, mixer in zip(("exp", "sig"), MLSTMS, strict=True)
        for kind in ("learnable", "fixed")
    }
    pairs = [(bits[f"{name}_learnable"], bits[f"{name}_fixed"]) for name in ("exp", "sig")]
    return {
        "holds": all(a is not None and b is not None and a < b for a, b in pairs),
        "spread": _number(spread(found)),
        **{name: _number(value) for name, value in bits.items()},
    }


def _gate_bias(found: TrainingRuns) -> Values:
    """Count the spikes of the gradient norm by the bias of the input gate."""
    rows, fewest, failed = [], dict.fromkeys(BOUNDS, 0), False
    for mixer in MLSTMS:
        for trainable in (True, False):
            variants = [Variant(mixer, bias=bias, trainable=trainable) for bias in BIASES]
            failed |= any("failed" in found.runs.get(v, {}) for v in variants)
            norms = [row["grad_norm"] if (row := found.trained(v)) is not None else [] for v in variants]
            for bound in BOUNDS:
                counts = [len(spikes(line, bound)) for line in norms]
                fewest[bound] += counts[-1] == min(counts)
            bits = [found.last(v, "bits_per_byte") for v in variants]
            cells = [
                "-" if bit is None else
                f"{len(spikes(line))} spikes, norm up to {max(line[SETTLED:], default=math.nan):.0f}; {bit:.3f}"
                for line, bit in zip(norms, bits, strict=True)
            ]  # fmt: skip
            rows.append([f"{NAMES[mixer]}, {'learnable' if trainable else 'fixed'}", *cells])
    return {
        "holds": fewest[SPIKE] == len(rows),
        "none_failed": not failed,
        "settled": str(SETTLED),
        "spike": str(SPIKE),
        **{f"fewest_{bound}": str(fewest[bound]) for bound in BOUNDS},
        "rows": str(len(rows)),
        "table": Table(["input gate", *(f"bias {bias:g}" for bias in BIASES)], rows),
    }


def _epsilon_and_bias(found: TrainingRuns) -> Values:
    """Return the best bias of the input gate for each epsilon of the norm."""
    at = {
        (eps, bias): found.last(Variant("mlstm_exp", eps=eps, bias=bias), "bits_per_byte")
        for eps in EPSILONS for bias in BIASES
    }  # fmt: skip

    def bits(eps: float, bias: float) -> float:
        value = at[eps, bias]
        return math.inf if value is None else value

    best = {eps: min(BIASES, key=lambda bias: bits(eps, bias)) for eps in sorted(EPSILONS)}
    rising = list(best.values())
    rows = [[f"{eps:g}", *(_number(at[eps, bias]) for bias in BIASES), f"{best[eps]:g}"] for eps in best]
    return {
        "holds": rising == sorted(rising) and rising[0] < rising[-1],
        "spread": _number(spread(found)),
        "table": Table(["ε", *(f"bias {bias:g}" for bias in BIASES), "best bias"], rows),
    }


def _below_zero(found: TrainingRuns) -> Values:
    """Return the largest pre-activation of the input gates over training."""
    trained = [row for v in EXPERIMENTS["fig11"].variants if (row := found.trained(v)) is not None]
    curves = [[x for x in row["max_input_gate"] if x is not None] for row in trained]
    curves = [curve for curve in curves if curve]
    if not curves:
        return {"missing": "This was not measured: no run of this experiment went to its end."}
    largest, ends = max(map(max, curves)), [curve[-1] for curve in curves]
    return {
        "holds": largest < 0,
        "runs": str(len(curves)),
        "largest": f"{largest:.1f}",
        "end_low": f"{min(ends):.1f}",
        "end_high": f"{max(ends):.1f}",
    }


def _bits_so_far(found: TrainingRuns, name: str) -> tuple[int, dict[Variant, float]]:
    """Return the step at which the runs of an experiment are compared, and their bits per byte there."""
    variants = EXPERIMENTS[name].variants
    step = found.reached(variants)
    bits = {v: x for v in variants if step and (x := found.at(v, "bits_per_byte", step)) is not None}
    return step, bits


def _settled(found: TrainingRuns, step: int, holds: bool, settled: bool) -> dict[str, Value]:
    """Return the values that say whether runs settle a claim, and where they were stopped."""
    return {
        "settled": settled,
        "settled_holds": settled and holds,
        "settled_fails": settled and not holds,
        "stopped": None if step == found.steps else str(step),
        "steps": str(found.steps),
    }


def _kernels(found: TrainingRuns, smoke: TrainingRuns | None) -> Values:
    """Compare the backends, which should train equally well."""
    step, bits = _bits_so_far(found, "table3")
    small = _bits_so_far(smoke, "table3")[1] if smoke is not None else {}
    backends = list(dict.fromkeys(str(v.backend) for v in (*bits, *small)))
    rows = [
        [NAMES[mixer], size, *(_number(next((x for v, x in of.items() if (v.mixer, v.backend) == (mixer, b)), None))
                               for b in backends)]
        for size, of in (("small", bits), ("smoke", small)) if of for mixer in MLSTMS
    ]  # fmt: skip
    gates = [[x for v, x in bits.items() if v.mixer == mixer] for mixer in MLSTMS]
    apart = max((max(of) - min(of) for of in gates if of), default=math.nan)
    settled = step == found.steps and all(len(of) > 1 for of in gates)
    return {
        **_settled(found, step, apart < 2 * spread(found), settled),
        "apart": _number(apart),
        "spread": _number(spread(found)),
        "smoke": smoke.where if smoke is not None else None,
        "table": Table(["model", "size", *backends], rows),
    }


def _contexts(found: TrainingRuns) -> Values:
    """Compare the models at a longer context."""
    step, bits = _bits_so_far(found, "table5")
    long = {v.mixer: x for v, x in bits.items()}
    short = {mixer: found.all_of(seeds(Variant(mixer))) for mixer in MIXERS}
    exp, sig, attention = (long.get(mixer, math.nan) for mixer in MIXERS)
    attention_is_worse = _mean(short["attention"]) > _mean(short["mlstm_exp"])
    holds = abs(exp - sig) < 2 * spread(found) and (attention > exp) == attention_is_worse
    rows = [[NAMES[mixer], mean_text(short[mixer]), _number(long.get(mixer))] for mixer in MIXERS]
    return {
        **_settled(found, step, holds, step == found.steps),
        "longer": str(LONGER),
        "table": Table(["model", "context", f"{LONGER} times the context"], rows),
    }


def claims(config: Config) -> list[Claim]:
    """Return the claims about training with the numbers of the stored runs; none where there are no runs."""
    found = load(Config(out=config.out, results=config.results))
    if found is None:
        return []
    path = config.results / SMOKE
    smoke = load(Config(training=path)) if path.exists() else None
    return fill(
        {
            "equal_gates": _equal_gates(found),
            "attention_model": _attention_model(found),
            "learnable_gate": _learnable_gate(found),
            "gate_bias": _gate_bias(found),
            "epsilon_and_bias": _epsilon_and_bias(found),
            "below_zero": _below_zero(found),
            "kernels": _kernels(found, smoke),
            "contexts": _contexts(found),
        }
    )
