"""The command `tfla bench invariance`: the cost and the effect of `ModelConfig.batch_invariant` on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from tfla._util.options import check_count, require
from tfla.measure.timing import Sampling, clock_of, measure
from tfla.nn import LanguageModel, ModelConfig
from tfla.nn.config import Mixer

HEAD_DIM = 64


@dataclass
class InvarianceBench:
    """Options of `tfla bench invariance`."""

    mixer: str = "mlstm_exp"
    """Sequence mixer of all blocks."""
    d_model: int = 512
    """Width of the model, a multiple of 64."""
    num_blocks: int = 4
    """Blocks."""
    vocab_size: int = 8192
    """Tokens of the vocabulary."""
    length: int = 512
    """Tokens of the sequences of a prefill and of training."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Sequences of a step of decoding; a prefill and training have at most 8."""
    repeats: int = 10
    """Samples of a call."""
    device: str = "cpu"
    """Device: cpu, or cuda, where the model is bfloat16."""

    def check(self) -> None:
        """Raise UserError where a value is out of range."""
        require(self.mixer in get_args(Mixer), "mixer", self.mixer, f"one of {', '.join(get_args(Mixer))}")
        require(self.device in ("cpu", "cuda"), "device", self.device, "cpu or cuda")
        require(bool(self.batches), "batches", self.batches, "one or more")
        require(self.d_model > 0 and self.d_model % HEAD_DIM == 0, "d_model", self.d_model, f"a multiple of {HEAD_DIM}")
        for name in ("num_blocks", "vocab_size", "length", "repeats"):
            check_count(name, getattr(self, name), 1, 1 << 20)
        for batch in self.batches:
            check_count("batches", batch, 1, 1 << 16)


def models(config: InvarianceBench) -> tuple[LanguageModel, LanguageModel]:
    """Return a model without the option and one with it, which have the same weights."""
    fields: dict[str, Any] = {
        "d_model": config.d_model, "num_blocks": config.num_blocks, "num_heads": config.d_model // HEAD_DIM,
        "mixer": config.mixer, "vocab_size": config.vocab_size,
    }  # fmt: skip
    plain = ModelConfig(**fields)
    both = [LanguageModel(c) for c in (plain, dataclasses.replace(plain, batch_invariant=True))]
    both[1].load_state_dict(both[0].state_dict())
    dtype = torch.float32 if config.device == "cpu" else torch.bfloat16
    return both[0].to(config.device, dtype), both[1].to(config.device, dtype)


@torch.no_grad()
def forward(model: LanguageModel, ids: Tensor) -> Tensor:
    """Return the logits of a prefill."""
    return model(ids)


@torch.no_grad()
def step(model: LanguageModel, ids: Tensor) -> Tensor:
    """Return the logits of one step of decoding from the initial state, ids (B, 1)."""
    state = model.initial_state(len(ids))
    if model.config.mixer == "attention":
        state = tuple(own.reserve(64) for own in state)  # type: ignore[union-attr]
    return model.step(ids[:, 0], state)[0]


def train(model: LanguageModel, ids: Tensor) -> Tensor:
    """Return the losses of a batch after their backward."""
    model.zero_grad()
    losses = model.losses(ids, ids)
    losses.mean().backward()
    return losses.detach()


def changed(call: Callable[[LanguageModel, Tensor], Tensor], model: LanguageModel, ids: Tensor) -> int:
    """Return how many sequences of a batch have outputs that differ in any bit from those of the sequence alone."""
    together = call(model, ids)
    return sum(not torch.equal(together[n], call(model, ids[n : n + 1])[0]) for n in range(len(ids)))


def run(config: InvarianceBench) -> list[dict[str, Any]]:
    """Time both models in turn, print each row when it is measured, and return the rows."""
    config.check()
    torch.manual_seed(0)
    pair = models(config)
    clock, sampling = clock_of(config.device), Sampling(repeats=config.repeats, warmup=2, pause=0.0, sustained=0.0)
    few = sorted({min(batch, 8) for batch in config.batches})
    work: list[tuple[str, Callable[[LanguageModel, Tensor], Tensor], int, int]] = [
        *(("prefill", forward, batch, config.length) for batch in few),
        *(("decoding", step, batch, 1) for batch in config.batches),
        *(("training", train, batch, config.length) for batch in few),
    ]
    rows = []
    for name, call, batch, length in work:
        ids = torch.randint(0, config.vocab_size, (batch, length), device=config.device)
        seconds, differ = [], []
        for model in pair:
            differ.append(changed(call, model, ids))
            seconds.append(measure(lambda m=model, f=call, x=ids: f(m, x), clock, sampling)["seconds"])  # type: ignore[misc]
        row = {"name": name, "B": batch, "T": length, "plain": seconds[0], "invariant": seconds[1], "changed": differ}
        rows.append(row)
        print(
            f"{name:<9} B {batch:>3}  T {length:>5}  {seconds[0] * 1e3:>9.2f} ms  with the option "
            f"{seconds[1] * 1e3:>9.2f} ms, {seconds[1] / seconds[0]:>5.2f} times; other bits than alone: "
            f"{differ[0]} of {batch}, with the option {differ[1]}",
            flush=True,
        )
    return rows
