"""The commands of training: options from the dataclasses of :mod:`tfla.train.config`."""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from tfla.train.config import Data, DemoConfig, GenerateConfig, Model, TrainConfig


def train(args: Sequence[str]) -> int:
    """``tfla train``: options that are not given are those of the run, or of the model that a new run starts from."""
    from tfla.train.checkpoint import CURVES, read_config
    from tfla.train.initial import saved_options
    from tfla.train.logging import read
    from tfla.train.loop import train as train_run

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--run", type=Path, default=TrainConfig.run)
    early.add_argument("--init-from", "--init_from", type=Path)
    given = early.parse_known_args(args)[0]
    known = read_config(given.run)
    if known is None:
        model, data = (Model(), Data()) if given.init_from is None else saved_options(given.init_from)
        known = TrainConfig(model=model, data=data)
    known = dataclasses.replace(known, run=given.run)
    config = tyro.cli(TrainConfig, args=args, prog="tfla train", default=known)
    trained = train_run(config)
    if trained.signal is not None:  # its last evaluation is of an earlier step
        return trained.exit_code
    last = next((r for r in reversed(read(trained.run)) if r["kind"] == "eval"), None)
    if last is not None:
        print(
            f"step {last['step']}, held out: loss {last['loss']:.4f} nats per token, "
            f"perplexity {last['perplexity']:.3f}, {last['bits_per_byte']:.4f} bits per byte"
        )
    print(f"saved in {trained.run}: checkpoints, metrics.jsonl, {CURVES}")
    return 0


def generate(args: Sequence[str]) -> int:
    """``tfla generate``: the prompt and what follows it, to stdout; tokens per second to stderr."""
    from tfla.train.sample import sample

    config = tyro.cli(GenerateConfig, args=args, prog="tfla generate")
    pieces = sample(config)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what a terminal cannot show
    times: list[float] = []
    for piece in pieces:
        if not times:  # not before there is a token: a model whose weights are not finite has none
            sys.stdout.write(config.prompt)
        times.append(time.perf_counter())
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if len(times) > 1:  # the first comes out of reading the prompt
        rate = (len(times) - 1) / (times[-1] - times[0])
        print(f"{len(times)} tokens, {rate:,.1f} tokens/s after the first", file=sys.stderr)
    return 0


def demo(args: Sequence[str]) -> int:
    """``tfla demo``."""
    from tfla.train.demo import demo as run_demo

    return run_demo(tyro.cli(DemoConfig, args=args, prog="tfla demo")).exit_code
