"""The demo: a small model of the source of Python's standard library, trained within minutes on a CPU."""

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
from tfla.train.config import RESUMABLE_FIELDS, Data, DemoConfig, GenerateConfig, Model, Optim, TrainConfig, differences
from tfla.train.data import Tokens, heldout_windows
from tfla.train.evaluation import Evaluation, summarize, token_losses
from tfla.train.logging import METRICS_FILE, read_metrics
from tfla.train.loop import Trained, train
from tfla.train.recipe import optimizer
from tfla.train.run_folder import CHECKPOINTS_FOLDER, CURVES_FILE, read_run_config
from tfla.train.sample import continue_text
from tfla.train.tokenizer import ByteTokenizer

PROMPT = "def read("
MIN_STEPS, MAX_STEPS = 400, 1200  # enough to clearly beat the trigram model; more adds little
TRAINING_SHARE = 0.85  # of the time; the rest is evaluation


def demo_config(config: DemoConfig) -> TrainConfig:
    """Return the options of the demo's run: mLSTMexp with 0.5 million parameters, on short sequences of bytes."""
    steps = MAX_STEPS if config.steps is None else config.steps
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
    """Train a model, compare it with a trigram model, and print the results and a sample.

    Raises:
        UserError: errors of :func:`tfla.train.loop.train`.
    """
    started = time.perf_counter()
    config.check()
    config = _choose_folder(config)
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
    evaluations = [r["bits_per_byte"] for r in read_metrics(trained.run) if r["kind"] == "eval"]
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
    for part in chain([PROMPT], continue_text(trained.model, trained.tokens.tokenizer, options)):
        print(part, end="", flush=True)
    print("\n")
    print(f"Loss curve:   {trained.run / CURVES_FILE}")
    print(f"Checkpoints:  {trained.run / CHECKPOINTS_FOLDER}")
    print(f"Metrics:      {trained.run / METRICS_FILE}")
    print(f"More text:    tfla generate --checkpoint {trained.run} --prompt 'class '")
    print(f"All of it took {time.perf_counter() - started:.0f} s.")
    return trained


def order_2(tokens: Tokens, config: TrainConfig) -> Evaluation:
    """Return the evaluation of the order-2 byte model, counted on the training text, on the held-out windows."""
    nats = ByteTrigram(tokens.train).nats(tokens.heldout)
    windows = heldout_windows(tokens, config.context, config.eval_windows)
    total = sum(float(nats[w.start : w.stop - 1].sum()) for w in windows)
    size = sum(int(tokens.heldout_bytes[w][1:].sum()) for w in windows)
    return summarize(total, sum(w.stop - w.start - 1 for w in windows), size)


def affordable_steps(config: TrainConfig, seconds: float) -> int:
    """Return how many steps of a training fit into some seconds on this machine, from MIN_STEPS to MAX_STEPS."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tokenizer = ByteTokenizer()
    model = LanguageModel(config.model.build(tokenizer.vocab_size))
    adamw = optimizer(model, config.optim)
    windows = torch.randint(256, (config.batch_size, config.context + 1))
    seconds_of_steps = []
    for _ in range(13):
        started = time.perf_counter()
        adamw.zero_grad()
        token_losses(model, windows, tokenizer.bos, config.reset).mean().backward()
        adamw.step()
        seconds_of_steps.append(time.perf_counter() - started)
    step = statistics.median(seconds_of_steps[3:])  # without the first ones, which warm up
    return max(MIN_STEPS, int(min(MAX_STEPS, TRAINING_SHARE * seconds / step)))


def _choose_folder(config: DemoConfig) -> DemoConfig:
    """Return the config with the first folder of demo, demo-2, … that is new or holds an unfinished run of this demo.

    An unfinished run keeps its number of steps.
    """
    first = config.run.resolve() if config.run.name in ("", "..") else config.run  # a name that can be numbered
    names = chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2)))
    run = next(run for run in names if not run.exists() or _is_unfinished(run, config))
    old = read_run_config(run)
    return replace(config, run=run, steps=config.steps if old is None else old.steps)


def _is_unfinished(run: Path, config: DemoConfig) -> bool:
    """Return whether a folder holds an unfinished run with the options of this demo."""
    old = read_run_config(run)
    if old is None:
        return False
    expected = demo_config(replace(config, steps=old.steps if config.steps is None else config.steps))
    return (
        differences(old, expected).keys() <= RESUMABLE_FIELDS
        and not (run / CHECKPOINTS_FOLDER / f"step-{old.steps:08d}").exists()
    )


VOCAB_SIZE, BOS = ByteTokenizer.vocab_size, ByteTokenizer.bos


class ByteTrigram:
    """The order-2 byte model p(c | a b), with Witten-Bell backoff to p(c | b), p(c) and the uniform distribution.

    p(c | a b) = (N(a b c) + K(a b) p(c | b)) / (N(a b) + K(a b)), where N counts occurrences and K(a b) the different
    bytes that follow a b. Contexts do not cross the start of a document.

    Args:
        tokens: (N,) token stream of the byte tokenizer on which to count.
    """

    def __init__(self, tokens: NDArray[np.integer]) -> None:
        a, b, c = _triples(tokens)
        self.triples = np.bincount((a * VOCAB_SIZE + b) * VOCAB_SIZE + c, minlength=VOCAB_SIZE**3).astype(np.uint32)
        self.pairs = np.bincount(b * VOCAB_SIZE + c, minlength=VOCAB_SIZE**2)
        self.singles = np.bincount(c, minlength=VOCAB_SIZE)
        grid = self.triples.reshape(-1, VOCAB_SIZE)
        self.after_pair = grid.sum(1, dtype=np.int64), np.count_nonzero(grid, 1)
        rows = self.pairs.reshape(-1, VOCAB_SIZE)
        self.after_single = rows.sum(1), np.count_nonzero(rows, 1)

    def nats(self, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return -log p of every token of a stream but the first, given the tokens before it: (N,) -> (N - 1,)."""
        a, b, c = _triples(tokens)
        p = (self.singles[c] + np.count_nonzero(self.singles) / VOCAB_SIZE) / (
            self.singles.sum() + np.count_nonzero(self.singles)
        )
        p = _back_off(self.pairs[b * VOCAB_SIZE + c], self.after_single, b, p)
        p = _back_off(self.triples[(a * VOCAB_SIZE + b) * VOCAB_SIZE + c], self.after_pair, a * VOCAB_SIZE + b, p)
        return -np.log(p)


def _back_off(
    count: NDArray[np.integer],
    after: tuple[NDArray[np.integer], NDArray[np.integer]],
    context: NDArray[np.int64],
    shorter: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return (N + K p) / (N' + K): counts N of a token after a context, its probability p after the shorter context.

    ``after`` holds for every context the number N' of its followers and the number K of different ones.
    """
    total, different = after[0][context], after[1][context]
    weight = total + different
    return np.where(weight > 0, (count + different * shorter) / np.maximum(weight, 1), shorter)


def _triples(tokens: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return each token c but the first, and the two tokens a, b before it; bos before the start of a document."""
    stream = np.asarray(tokens, np.int64)
    b, c = stream[:-1], stream[1:]
    a = np.concatenate([[BOS], stream[:-2]])
    return np.where(b == BOS, BOS, a), b, c
