"""The commands of training, whose options are made from the dataclasses of :mod:`tfla.train.config`."""

from __future__ import annotations

import argparse
import dataclasses
import io
import re
import sys
import time
from collections.abc import Sequence

from tfla._util.errors import UserError
from tfla._util.parsing import check_paths, parse, path_option
from tfla.train.config import Data, DemoConfig, GenerateConfig, Model, TrainConfig


def _with_values(args: Sequence[str]) -> list[str]:
    """Return arguments in which ``--parallel.[no-]reshard-after-forward`` has a value, which tyro expects of it."""
    found: list[str] = []
    for at, word in enumerate(args):
        flag = re.fullmatch(r"--parallel\.(no[-_])?reshard[-_]after[-_]forward", word)
        if flag is None or (flag[1] is None and at + 1 < len(args) and not args[at + 1].startswith("-")):
            found.append(word)
        else:
            found += ["--parallel.reshard-after-forward", str(flag[1] is None)]
    return found


def _given_layout(args: Sequence[str]) -> set[str]:
    """Return the names of the options of the layout that are among the arguments."""
    words = (re.match(r"--parallel\.(?:no[-_])?([a-z_-]+)(=|$)", word) for word in args)
    return {word[1].replace("-", "_") for word in words if word is not None}


def train(args: Sequence[str]) -> int:
    """Run ``tfla train``; the defaults are the options of the run, or of the model that a new run starts from."""
    from tfla.train.initial import saved_options
    from tfla.train.logging import read_metrics
    from tfla.train.loop import train as train_run
    from tfla.train.ranks import end_process_of_group, number_of_processes
    from tfla.train.run_folder import CURVES_FILE, read_run_config

    args = _with_values([re.sub(r"^--run[-_]folder(?==|$)", "--run", word) for word in args])
    run_options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    run_options.add_argument("--run", type=path_option, default=TrainConfig.run)
    run_options.add_argument("--init-from", "--init_from", type=path_option)
    given = run_options.parse_known_args(args)[0]
    check_paths(given)
    saved = read_run_config(given.run)
    if saved is not None:
        defaults = saved
    else:
        model, data = (Model(), Data()) if given.init_from is None else saved_options(given.init_from)
        defaults = TrainConfig(model=model, data=data)
    defaults = dataclasses.replace(defaults, run=given.run)
    config = parse(TrainConfig, args, "tfla train", default=defaults)
    if saved is not None:
        layout = config.parallel.resumed(number_of_processes(), _given_layout(args))
        config = dataclasses.replace(config, parallel=layout)
    try:
        trained = train_run(config)
    except (UserError, SystemExit) as error:
        end_process_of_group(error)
        raise
    if trained.rank:
        return trained.exit_code
    if trained.signal is not None:  # the last evaluation is of an earlier step
        return trained.exit_code
    last = next((r for r in reversed(read_metrics(trained.run)) if r["kind"] == "eval"), None)
    if last is not None:
        print(
            f"step {last['step']}, held out: loss {last['loss']:.4f} nats per token, "
            f"perplexity {last['perplexity']:.3f}, {last['bits_per_byte']:.4f} bits per byte"
        )
    print(f"saved in {trained.run}: checkpoints, metrics.jsonl, {CURVES_FILE}")
    return 0


def generate(args: Sequence[str]) -> int:
    """Run ``tfla generate``: print the prompt and its continuation to stdout, tokens per second to stderr."""
    from tfla.train.sample import sample

    config = parse(GenerateConfig, args, "tfla generate")
    parts = sample(config)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not be able to show all characters
    times: list[float] = []
    for part in parts:
        if not times:  # a model whose weights are not finite fails before its first token
            sys.stdout.write(config.prompt)
        times.append(time.perf_counter())
        sys.stdout.write(part)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if len(times) > 1:  # the first token comes from the prompt
        rate = (len(times) - 1) / (times[-1] - times[0])
        print(f"{len(times)} tokens, {rate:,.1f} tokens/s after the first", file=sys.stderr)
    return 0


def demo(args: Sequence[str]) -> int:
    """Run ``tfla demo``."""
    from tfla.train.demo import demo as run_demo

    return run_demo(parse(DemoConfig, args, "tfla demo")).exit_code
