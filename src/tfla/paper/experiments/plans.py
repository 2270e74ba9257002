"""The experiments as data: their models and sizes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from tfla.backends import BACKENDS
from tfla.train.config import Data, Model, Optim, TrainConfig

Mixer = Literal["mlstm_exp", "mlstm_sig", "attention"]
MIXERS: tuple[Mixer, ...] = get_args(Mixer)
MLSTMS: tuple[Mixer, ...] = ("mlstm_exp", "mlstm_sig")
BIASES = (0.0, -2.0, -5.0, -10.0)  # Figures 8 and 9
EPSILONS = (1e-6, 1e-4, 1e-2)
SEEDS = (0, 1, 2)
LONGER = 4  # times the context in Table 5; the paper doubles it


@dataclass(frozen=True)
class Size:
    """The sizes that all runs of an experiment share; the recipe is that of the paper's appendix E.2."""

    d_model: int
    num_blocks: int
    context: int
    batch_size: int
    steps: int
    lr: float
    eval_windows: int
    references: bool
    """Whether Table 3 includes the step-by-step reference, which takes hours at larger sizes."""


SIZES = {
    "smoke": Size(
        d_model=64, num_blocks=1, context=64, batch_size=8, steps=40, lr=4e-3, eval_windows=32, references=True
    ),
    "small": Size(
        d_model=256, num_blocks=4, context=512, batch_size=32, steps=450, lr=3e-3, eval_windows=512, references=False
    ),
}
HEADS = 2  # where an experiment does not vary them


@dataclass(frozen=True)
class Variant:
    """A model, by its differences from the paper's default at the same size."""

    mixer: Mixer
    heads: int = HEADS
    bias: float = -10.0
    trainable: bool = True
    eps: float = 1e-6
    longer: int = 1
    """The factor of the context, at the same number of tokens in a step."""
    backend: str | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """Return the name of the run's folder; a model of two experiments has one run."""
        parts = [self.mixer, f"heads{self.heads}"]
        if self.mixer != "attention":
            parts += [f"bias{self.bias:g}", "trainable" if self.trainable else "fixed", f"eps{self.eps:g}"]
        parts += [f"context{self.longer}x"] if self.longer > 1 else []
        parts += [self.backend] if self.backend else []
        return "-".join([*parts, f"seed{self.seed}"])

    def config(self, size: Size, folder: Path, device: str) -> TrainConfig:
        """Return the training run; its text is the source of Python's standard library, tokenized into bytes."""
        if size.batch_size % self.longer:
            raise ValueError(f"longer: got {self.longer}, expected a divisor of the batch size, {size.batch_size}")
        return TrainConfig(
            run=folder / self.name,
            data=Data(
                paths=(Path(sysconfig.get_path("stdlib")),), suffixes=(".py",),
                exclude=("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
            ),
            model=Model(
                d_model=size.d_model, num_blocks=size.num_blocks, num_heads=self.heads, mixer=self.mixer,
                input_gate_bias=self.bias, input_gate_trainable=self.trainable, head_norm_eps=self.eps,
                backend=self.backend,
            ),
            optim=Optim(lr=size.lr), steps=size.steps, batch_size=size.batch_size // self.longer,
            context=size.context * self.longer, seed=self.seed, device=device, threads=1,
            eval_every=max(1, size.steps // 6), eval_windows=size.eval_windows // self.longer,
            checkpoint_every=size.steps, keep_last=1, tensorboard=False,
        )  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """A small version of a figure or table of the paper."""

    title: str
    variants: tuple[Variant, ...]

    def at(self, size: Size) -> tuple[Variant, ...]:
        """Return the variants that are trained at that size."""
        return tuple(v for v in self.variants if size.references or v.backend != "reference")


def _gates(mixer: Mixer) -> Iterable[Variant]:
    """Return a mixer with each bias of its input gate, trainable and fixed."""
    return (Variant(mixer, bias=bias, trainable=trainable) for trainable, bias in product((True, False), BIASES))


EXPERIMENTS = {
    "table2": Experiment(
        "Table 2: perplexity of mLSTMexp, mLSTMsig and attention, by heads and seed",
        (
            *(Variant(mixer, seed=seed) for seed, mixer in product(SEEDS, MIXERS)),
            *(Variant(mixer, heads=4) for mixer in MIXERS),
        ),
    ),
    "fig8": Experiment("Figure 8: mLSTMexp by input gate bias, trainable and fixed", tuple(_gates("mlstm_exp"))),
    "fig9": Experiment("Figure 9: mLSTMsig by input gate bias, trainable and fixed", tuple(_gates("mlstm_sig"))),
    "table6": Experiment(
        "Table 6: input gate fixed and learnable, bias -10",
        tuple(Variant(mixer, trainable=trainable) for mixer, trainable in product(MLSTMS, (True, False))),
    ),
    "fig11": Experiment(
        "Figure 11: largest input gate pre-activation over training",
        tuple(Variant(mixer, seed=seed) for mixer, seed in product(MLSTMS, SEEDS)),
    ),
    "fig10": Experiment(
        "Figure 10: mLSTMexp by norm epsilon and input gate bias",
        tuple(Variant("mlstm_exp", eps=eps, bias=bias) for eps, bias in product(EPSILONS, BIASES)),
    ),
    "table5": Experiment(
        f"Table 5: the same at {LONGER} times the context",
        tuple(Variant(mixer, longer=LONGER) for mixer in MIXERS),
    ),
    "table3": Experiment(
        "Table 3: native PyTorch against kernels, one head",
        tuple(Variant(mixer, heads=1, backend=backend) for mixer, backend in product(MLSTMS, sorted(BACKENDS))),
    ),
}


def unique(variants: Iterable[Variant]) -> list[Variant]:
    """Return each variant once, in the order of first appearance."""
    return list(dict.fromkeys(variants))
