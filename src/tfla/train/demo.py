"""A model of Python's own standard library, trained in minutes on two cores."""

from __future__ import annotations

import statistics
import sysconfig
import time
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tfla.nn import LanguageModel
from tfla.train.checkpoint import CHECKPOINTS, CURVES, read_config
from tfla.train.config import FREE, Data, DemoConfig, GenerateConfig, Model, Optim, TrainConfig, differences
from tfla.train.data import Tokens, heldout_windows
from tfla.train.logging import FILE, read
from tfla.train.loop import Evaluation, Trained, summarize, token_losses, train
from tfla.train.recipe import optimizer
from tfla.train.sample import continue_text
from tfla.train.tokenizer import ByteTokenizer

PROMPT = "def read("
FEWEST, MOST = 400, 1200  # steps: what beats counting with some room, and what is enough
TRAINING = 0.85  # of the time; the rest is evaluation


def demo_config(config: DemoConfig) -> TrainConfig:
    """What the demo trains: an mLSTMexp of 0.5 million parameters on bytes, short sequences, a high learning rate."""
    steps = MOST if config.steps is None else config.steps
    return TrainConfig(
        run=config.run,
        data=Data(
            paths=(Path(sysconfig.get_path("stdlib")),),
            suffixes=(".py",),
            exclude=("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
        ),
        model=Model(d_model=128, num_blocks=2, num_heads=4),
        optim=Optim(lr=4e-3),
        steps=steps,
        batch_size=8,
        context=256,
        eval_every=max(1, steps // 10),
        checkpoint_every=max(1, steps // 4),
        threads=config.threads,
        device="cpu",
    )


def demo(config: DemoConfig) -> Trained:
    """Train, compare with counting, show a sample; see :class:`DemoConfig`. Prints what it finds.

    Raises:
        UserError: as :func:`tfla.train.loop.train`.
    """
    started = time.perf_counter()
    config.check()
    config = _settle_run(config)
    if config.steps is None:
        config = replace(config, steps=affordable_steps(demo_config(config), config.seconds))
    settings = demo_config(config)
    print(f"The source of Python's standard library, {settings.data.paths[0]}, byte by byte.", flush=True)
    counted: dict[str, float] = {}

    def baselines(tokens: Tokens) -> dict[str, float]:
        counted["order-2 byte model"] = order_2(tokens, settings).bits_per_byte
        return {"uniform": 8.0, **counted}

    trained = train(settings, baselines)
    if trained.signal is not None:
        return trained
    evaluations = [r["bits_per_byte"] for r in read(trained.run) if r["kind"] == "eval"]
    rows = [
        ("uniform over bytes", 8.0),
        ("order-2 byte model, counted on the same text", counted["order-2 byte model"]),
        ("mLSTMexp before training", evaluations[0]),
        (f"mLSTMexp after {trained.step} steps", evaluations[-1]),
    ]
    print("\nHeld-out files, bits per byte:")
    for name, bits in rows:
        print(f"  {name:<46}{bits:6.3f}")

    print(f"\nA sample, continued from {PROMPT!r}:\n")
    options = GenerateConfig(trained.run, prompt=PROMPT, max_new_tokens=400, temperature=0.7, seed=0)
    for piece in chain([PROMPT], continue_text(trained.model, trained.tokens.tokenizer, options)):
        print(piece, end="", flush=True)
    print("\n")
    print(f"Loss curve:   {trained.run / CURVES}")
    print(f"Checkpoints:  {trained.run / CHECKPOINTS}")
    print(f"Metrics:      {trained.run / FILE}")
    print(f"More text:    tfla generate --checkpoint {trained.run} --prompt 'class '")
    print(f"All of it took {time.perf_counter() - started:.0f} s.")
    return trained


def order_2(tokens: Tokens, config: TrainConfig) -> Evaluation:
    """The order-2 byte model, counted on the training text, on the very bytes that the model is evaluated on."""
    nats = ByteTrigram(tokens.train).nats(tokens.heldout)
    windows = heldout_windows(tokens, config.context, config.eval_windows)
    total = sum(float(nats[w.start : w.stop - 1].sum()) for w in windows)
    size = sum(int(tokens.heldout_bytes[w][1:].sum()) for w in windows)
    return summarize(total, sum(w.stop - w.start - 1 for w in windows), size)


def affordable_steps(config: TrainConfig, seconds: float) -> int:
    """How many steps of such a training fit into that time on this machine, within FEWEST and MOST."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tokenizer = ByteTokenizer()
    model = LanguageModel(config.model.build(tokenizer.vocab_size))
    adamw = optimizer(model, config.optim)
    windows = torch.randint(256, (config.batch_size, config.context + 1))
    took = []
    for _ in range(13):
        started = time.perf_counter()
        adamw.zero_grad()
        token_losses(model, windows, tokenizer.bos, config.reset).mean().backward()
        adamw.step()
        took.append(time.perf_counter() - started)
    step = statistics.median(took[3:])  # the first ones warm up
    return max(FEWEST, int(min(MOST, TRAINING * seconds / step)))


def _settle_run(config: DemoConfig) -> DemoConfig:
    """With the first of demo, demo-2, … that is new; or that holds this very run, broken off, and then its steps."""
    first = config.run.resolve() if config.run.name in ("", "..") else config.run  # a name to put a number behind
    names = chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2)))
    run = next(run for run in names if not run.exists() or _broken_off(run, config))
    old = read_config(run)
    return replace(config, run=run, steps=config.steps if old is None else old.steps)


def _broken_off(run: Path, config: DemoConfig) -> bool:
    old = read_config(run)
    if old is None:
        return False
    wanted = demo_config(replace(config, steps=old.steps if config.steps is None else config.steps))
    return differences(old, wanted).keys() <= FREE and not (run / CHECKPOINTS / f"step-{old.steps:08d}").exists()


SYMBOLS, BOS = ByteTokenizer.vocab_size, ByteTokenizer.bos


class ByteTrigram:
    """p(c | a b) with Witten-Bell backoff to p(c | b), p(c) and uniform.

    The more different bytes followed a context, the more weight goes to the shorter one:
    p(c | a b) = (N(a b c) + K(a b) p(c | b)) / (N(a b) + K(a b)), K counting the different c. Nothing is tuned.
    Contexts do not reach over the start of a document.

    Args:
        tokens: (N,) stream of the byte tokenizer to count on.
    """

    def __init__(self, tokens: NDArray[np.integer]) -> None:
        a, b, c = _triples(tokens)
        self.triples = np.bincount((a * SYMBOLS + b) * SYMBOLS + c, minlength=SYMBOLS**3).astype(np.uint32)
        self.pairs = np.bincount(b * SYMBOLS + c, minlength=SYMBOLS**2)
        self.singles = np.bincount(c, minlength=SYMBOLS)
        grid = self.triples.reshape(-1, SYMBOLS)
        self.after_pair = grid.sum(1, dtype=np.int64), np.count_nonzero(grid, 1)
        rows = self.pairs.reshape(-1, SYMBOLS)
        self.after_single = rows.sum(1), np.count_nonzero(rows, 1)

    def nats(self, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
        """-log p of every token of a stream but the first, given those before it: (N,) -> (N - 1,)."""
        a, b, c = _triples(tokens)
        p = (self.singles[c] + np.count_nonzero(self.singles) / SYMBOLS) / (
            self.singles.sum() + np.count_nonzero(self.singles)
        )
        p = _back_off(self.pairs[b * SYMBOLS + c], self.after_single, b, p)
        p = _back_off(self.triples[(a * SYMBOLS + b) * SYMBOLS + c], self.after_pair, a * SYMBOLS + b, p)
        return -np.log(p)


def _back_off(
    count: NDArray[np.integer],
    after: tuple[NDArray[np.integer], NDArray[np.integer]],
    context: NDArray[np.int64],
    shorter: NDArray[np.float64],
) -> NDArray[np.float64]:
    total, kinds = after[0][context], after[1][context]
    seen = total + kinds
    return np.where(seen > 0, (count + kinds * shorter) / np.maximum(seen, 1), shorter)


def _triples(tokens: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Each token c but the first with the two before it, a b; bos where the document starts later than that."""
    stream = np.asarray(tokens, np.int64)
    b, c = stream[:-1], stream[1:]
    a = np.concatenate([[BOS], stream[:-2]])
    return np.where(b == BOS, BOS, a), b, c
