"""A model of Python's own standard library, trained in minutes on two cores."""

from __future__ import annotations

import sysconfig
import time
from itertools import chain, count
from pathlib import Path

from tfla.train.batches import heldout_windows
from tfla.train.config import FREE, Data, DemoConfig, GenerateConfig, Model, Optim, TrainConfig, differences
from tfla.train.evaluate import Evaluation, summarize
from tfla.train.loop import Trained, train
from tfla.train.metrics import FILE, read
from tfla.train.ngram import ByteTrigram
from tfla.train.run_directory import CHECKPOINTS, CURVES, read_config
from tfla.train.sample import continue_text
from tfla.train.tokens import Tokens

PROMPT = "def read("


def demo_config(config: DemoConfig) -> TrainConfig:
    """What the demo trains: an mLSTMexp of 0.5 million parameters on bytes, short sequences, a high learning rate."""
    return TrainConfig(
        run=config.run,
        data=Data(
            paths=(Path(sysconfig.get_path("stdlib")),),
            suffixes=(".py",),
            exclude=("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
        ),
        model=Model(d_model=128, num_blocks=2, num_heads=4),
        optim=Optim(lr=4e-3),
        steps=config.steps,
        batch_size=8,
        context=256,
        eval_every=max(1, config.steps // 10),
        checkpoint_every=max(1, config.steps // 4),
        threads=config.threads,
        device="cpu",
    )


def demo(config: DemoConfig) -> Trained:
    """Train, compare with counting, show a sample; see :class:`DemoConfig`. Prints what it finds.

    Raises:
        UserError: as :func:`tfla.train.loop.train`.
    """
    started = time.perf_counter()
    settings = demo_config(DemoConfig(_free(config), config.steps, config.threads))
    print(f"The source of Python's standard library, {settings.data.paths[0]}, byte by byte.", flush=True)
    counted: dict[str, float] = {}

    def baselines(tokens: Tokens) -> dict[str, float]:
        counted["order-2 byte model"] = order_2(tokens, settings).bits_per_byte
        return {"uniform": 8.0, **counted}

    trained = train(settings, baselines)
    if trained.step < settings.steps:
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


def _free(config: DemoConfig) -> Path:
    """The first of demo, demo-2, … that is new, or holds this very run, broken off."""
    first = config.run
    names = chain([first], (first.with_name(f"{first.name}-{number}") for number in count(2)))
    return next(run for run in names if not run.exists() or _broken_off(run, demo_config(config)))


def _broken_off(run: Path, wanted: TrainConfig) -> bool:
    old = read_config(run)
    if old is None or not differences(old, wanted).keys() <= FREE:
        return False
    return not (run / CHECKPOINTS / f"step-{old.steps:08d}").exists()
