"""The training loop."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tfla._util.errors import UserError, notice, pick_device, reason
from tfla._util.files import remove_directory
from tfla.nn import GatePreactivation, LanguageModel, ModelConfig
from tfla.train.checkpoint import (
    CHECKPOINTS,
    CURVES,
    TOKENS,
    Checkpoints,
    check_changes,
    open_run,
    read_config,
    restore,
    step_of,
    write_config,
)
from tfla.train.config import TrainConfig
from tfla.train.data import Batches, Tokens, fingerprint, heldout_windows, prepare
from tfla.train.initial import architecture, check_backend, load_weights
from tfla.train.logging import Metrics, plot_curves
from tfla.train.memory import check_memory
from tfla.train.recipe import Schedule, clipped_gradients, optimizer
from tfla.train.tokenizer import create as create_tokenizer
from tfla.train.tokenizer import load as load_tokenizer


class Trained(NamedTuple):
    """What a run left behind."""

    step: int
    """Updates done; fewer than asked for if the run was stopped."""
    model: LanguageModel
    tokens: Tokens
    run: Path
    signal: int | None = None
    """The number of the signal that stopped the run before its last step; None if it is finished."""

    @property
    def exit_code(self) -> int:
        """What a command that was stopped so returns by convention: 130 after Ctrl-C, 143 when terminated, else 0."""
        return 0 if self.signal is None else 128 + self.signal


def train(config: TrainConfig, baselines: Callable[[Tokens], dict[str, float]] | None = None) -> Trained:
    """Train as the config says, from the run's last checkpoint if it has one.

    Args:
        config: see there.
        baselines: gives horizontal lines for the plot, name -> bits per byte.

    Raises:
        UserError: something the user can mend: text, options, a full disk; checkpoints that were whole still are.
    """
    config.check()
    device = pick_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with open_run(config) as run:
        checkpoints = Checkpoints(run / CHECKPOINTS, config.keep_last, config.keep_every)
        latest = checkpoints.latest()
        tokens, model_config = _validate(config, run, latest, device)
        batches = Batches(tokens, config.context, config.batch_size, config.seed)
        schedule = Schedule(config.optim, config.steps)

        torch.manual_seed(config.seed)
        model = LanguageModel(model_config).to(device)
        if latest is None and config.init_from is not None:
            load_weights(model, config.init_from)
        adamw = optimizer(model, config.optim)
        step = 0
        progress: dict[str, Any] = {"elapsed": 0.0}
        if latest is not None:
            step, progress = restore(latest, model, adamw)
        text = fingerprint(run / TOKENS)
        if text != progress.setdefault("tokens", text):
            notice(
                f"{run / TOKENS}: not the tokens that this run was trained on up to step {step}: its text has changed"
            )
            progress["tokens"] = text
        watch = InputGateWatch(model)
        forward: Callable[..., Tensor] = compiled(model) if config.compile else model
        metrics = Metrics(run, step, config.tensorboard)
        lines = baselines(tokens) if baselines is not None else {}
        _announce(config, model, tokens, device, step)

        def losses(windows: Tensor) -> Tensor:
            with _precision(config, device):
                return token_losses(forward, windows, tokens.tokenizer.bos, config.reset)

        def measure(step: int) -> Evaluation:
            with _precision(config, device):
                found = evaluate(
                    forward, tokens, config.context,
                    batch_size=config.micro_batch_size, most=config.eval_windows, reset=config.reset, device=device,
                )  # fmt: skip
            watch.take()
            metrics.write("eval", step, **found._asdict())
            return found

        def save(step: int) -> int:
            metrics.sync()
            checkpoints.save(step, model, adamw, tokens.tokenizer, progress)
            return step

        try:
            saved = step
            heldout = measure(0).bits_per_byte if step == 0 else None
            bar = tqdm(
                total=config.steps, initial=step, unit="step", desc="train", dynamic_ncols=True,
                mininterval=0.2 if sys.stderr.isatty() else 10,
            )  # fmt: skip
            with bar, _stop_signals() as stop:
                while step < config.steps and not stop:
                    started = time.perf_counter()
                    for group in adamw.param_groups:
                        group["lr"] = schedule(step)
                    parts = batches(step).to(device).split(config.micro_batch_size)
                    loss, norm = clipped_gradients(model, losses, parts, config.optim.clip)
                    if not (abs(loss) < float("inf") and norm < float("inf")):
                        raise UserError(
                            f"step {step + 1}: loss {loss}, gradient norm {norm}: training has failed; "
                            f"try a lower optim.lr. {checkpoints.last_good()}"
                        )
                    adamw.step()
                    step += 1

                    seconds = time.perf_counter() - started
                    progress["elapsed"] += seconds
                    speed = config.batch_size * config.context / seconds
                    metrics.write(
                        "train", step, loss=loss, lr=schedule(step - 1), grad_norm=norm, max_input_gate=watch.take(),
                        tokens_per_s=speed, elapsed=progress["elapsed"],
                    )  # fmt: skip
                    if step % config.eval_every == 0 or step == config.steps:
                        heldout = measure(step).bits_per_byte
                    if step % config.checkpoint_every == 0:
                        saved = save(step)
                    shown = {"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}"}
                    if heldout is not None:
                        shown["held-out bits/byte"] = f"{heldout:.3f}"
                    bar.set_postfix(shown, refresh=False)
                    bar.update()
            if saved != step:
                saved = save(step)
        except OSError as error:
            raise UserError(f"{error.filename or run}: {error.strerror or error}; {checkpoints.last_good()}") from error
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise UserError(
                f"step {step + 1}: out of memory on {device}: {reason(error)}; a larger accumulate, a smaller "
                f"batch_size or a shorter context needs less. {checkpoints.last_good()}"
            ) from error
        finally:
            metrics.close()
        if step < config.steps:
            notice(f"stopped at step {step} of {config.steps}, which is saved; the same command continues from there")
        plot_curves(run, run / CURVES, clip=config.optim.clip, baselines=lines)
    return Trained(step, model, tokens, run, stop[0] if step < config.steps else None)


def _validate(config: TrainConfig, run: Path, latest: Path | None, device: torch.device) -> tuple[Tokens, ModelConfig]:
    """Examine all that can be wrong with a run, then write its configuration and its tokens: nothing is written before.

    Args:
        config: of the run.
        run: its folder.
        latest: its newest checkpoint, None if there is none.
        device: where it will be trained.

    Returns:
        the tokens and the architecture.

    Raises:
        UserError: something is wrong; the folder is as it was.
    """
    old = read_config(run)
    check_changes(old, config, None if latest is None else step_of(latest))
    other_text = old is not None and (old.data, old.init_from) != (config.data, config.init_from)
    made = (run / TOKENS).exists() and not other_text
    tokenizer = load_tokenizer(run / TOKENS) if made else create_tokenizer(config.data.tokenizer, config.data.bos_token)
    model = architecture(config, tokenizer, latest)
    Schedule(config.optim, config.steps)
    pass_tokens, bfloat16 = config.micro_batch_size * config.context, _is_bfloat16(config, device)
    warning = check_memory(model, pass_tokens, bfloat16, device)
    with _precision(config, device):
        check_backend(model, device, packed=config.reset == "cu_seqlens")

    def accept(tokens: Tokens) -> None:
        Batches(tokens, config.context, config.batch_size, config.seed)
        heldout_windows(tokens, config.context, config.eval_windows)
        write_config(old, config)

    if (run / TOKENS).exists() and not made:
        remove_directory(run / TOKENS)  # of a run that never got to a checkpoint
    tokens = prepare(config.data, run / TOKENS, accept, tokenizer)
    if warning is not None:
        notice(warning)
    return tokens, model


def _is_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    return config.precision == "bfloat16" or (config.precision == "auto" and device.type == "cuda")


def _precision(config: TrainConfig, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=_is_bfloat16(config, device))


def _announce(config: TrainConfig, model: LanguageModel, tokens: Tokens, device: torch.device, step: int) -> None:
    notice(
        f"{model.num_parameters():,} parameters on {device}; {len(tokens.train):,} tokens to train on, "
        f"{len(tokens.heldout):,} held out; {config.batch_size * config.context:,} tokens a step"
    )
    if step:
        notice(f"{config.run}: continues after step {step} of {config.steps}")


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that gets the number of the signal when the process is asked to end, once: the step is finished first."""
    stop: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: Any) -> None:
        stop.append(number)
        signal.signal(number, before[signal.Signals(number)])  # asked twice, it ends at once

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def compiled(model: LanguageModel, backend: Any = "inductor") -> Callable[..., Tensor]:
    """The model's forward: ids -> logits, and what else it takes but states.

    A block is compiled once for all of them, which as one graph would take many times as long; so are the logits. The
    blocks stay compiled: also the model's own forward runs them so from here on.

    Args:
        backend: of torch.compile.
    """
    for block in model.blocks:
        block.compile(backend=backend)
    logits = torch.compile(model.logits, backend=backend)

    def forward(ids: Tensor, **documents: Any) -> Tensor:
        return logits(model.hidden(ids, **documents)[0])

    return forward


class Evaluation(NamedTuple):
    """Over all predicted tokens of the held-out windows."""

    loss: float
    """Nats per token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float
    """All nats over the bytes of text that the tokens stand for: the same unit for every tokenizer."""
    tokens: int
    bytes: int


def summarize(nats: float, tokens: int, size: int) -> Evaluation:
    """The evaluation of a sum of losses in nats over that many tokens and bytes."""
    loss = nats / tokens
    return Evaluation(loss, math.exp(min(loss, 700.0)), nats / math.log(2) / max(size, 1), tokens, size)


@torch.no_grad()
def evaluate(
    model: Callable[..., Tensor],
    tokens: Tokens,
    context: int,
    *,
    batch_size: int,
    most: int | None = None,
    reset: Reset = "gate",
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Predict the held-out windows, each from empty memory; the same windows every time.

    Args:
        model: ids -> logits, a LanguageModel.
        context: tokens a window predicts.
        batch_size: windows at once.
        most: how many windows, evenly spread; None is all of the held-out part.

    Raises:
        UserError: nothing is held out.
    """
    windows = heldout_windows(tokens, context, most)
    nats, count, size = 0.0, 0, 0
    for first in range(0, len(windows), batch_size):
        group = windows[first : first + batch_size]
        for length in sorted({w.stop - w.start for w in group}, reverse=True):  # only the last window may be shorter
            same = [w for w in group if w.stop - w.start == length]
            rows = np.stack([tokens.heldout[w] for w in same]).astype(np.int64)
            losses = token_losses(model, torch.from_numpy(rows).to(device), tokens.tokenizer.bos, reset)
            nats += math.fsum(losses.flatten().tolist())
            count += losses.numel()
            size += sum(int(tokens.heldout_bytes[w][1:].sum()) for w in same)
    return summarize(nats, count, size)


class InputGateWatch:
    """Watches the input gates of a model through forward hooks; nothing waits for the device until :meth:`take`."""

    def __init__(self, model: nn.Module) -> None:
        self.largest: Tensor | None = None
        for name, module in model.named_modules():
            if isinstance(module, GatePreactivation) and name.endswith("input_gate"):
                module.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        largest = output.detach().amax()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def take(self) -> float | None:
        """The largest value since the last call; None if there was none, as in a model without such gates."""
        largest, self.largest = self.largest, None
        return None if largest is None else largest.item()


Reset = Literal["gate", "cu_seqlens"]


def document_borders(ids: Tensor, bos: int) -> Tensor:
    """cu_seqlens of a batch whose rows are laid end to end: rows and documents each start a sequence.

    ids: (B, T). Returns (sequences + 1,) int32, from 0 to B T.
    """
    start = ids == bos
    start[:, 0] = True
    edge = torch.tensor([ids.numel()], device=ids.device)
    return torch.cat([start.flatten().nonzero()[:, 0], edge]).int()


def token_losses(model: Callable[..., Tensor], windows: Tensor, bos: int, reset: Reset = "gate") -> Tensor:
    """Cross-entropy in nats of every token but the first of each row, given those before it in its document.

    Args:
        model: ids -> logits, a LanguageModel.
        windows: (B, T + 1) int64; a row starts with empty memory.
        bos: the token that starts a document.
        reset: how the model is told where documents start.

    Returns:
        (B, T) in the dtype of the logits, float32 or better.
    """
    ids, targets = windows[:, :-1], windows[:, 1:]
    if reset == "gate":
        logits = model(ids, document_start=ids == bos)
    else:
        logits = model(ids.reshape(1, -1), cu_seqlens=document_borders(ids, bos))
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.unflatten(0, ids.shape)
