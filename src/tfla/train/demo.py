"""A model of Python's own standard library, trained in minutes on two cores."""

from __future__ import annotations

import statistics
import sysconfig
import time
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import torch

from tfla.nn import LanguageModel
from tfla.train.batches import heldout_windows
from tfla.train.config import FREE, Data, DemoConfig, GenerateConfig, Model, Optim, TrainConfig, differences
from tfla.train.evaluate import Evaluation, summarize
from tfla.train.loop import Trained, train
from tfla.train.metrics import FILE, read
from tfla.train.ngram import ByteTrigram
from tfla.train.objective import token_losses
from tfla.train.recipe import optimizer
from tfla.train.run_directory import CHECKPOINTS, CURVES, read_config
from tfla.train.sample import continue_text
from tfla.train.tokenizer import ByteTokenizer
from tfla.train.tokens import Tokens

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
