"""The training loop: from a config to a trained model and the files of its run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tfla._util.device import pick_device
from tfla._util.errors import UserError, notice, reason
from tfla.nn import LanguageModel, ModelConfig
from tfla.train.bar import StepBar
from tfla.train.checkpoint import Checkpoints, restore
from tfla.train.config import TrainConfig, from_json, to_json
from tfla.train.data import Batches, Tokens, fingerprint, read_tokens
from tfla.train.evaluation import Evaluation, evaluate, token_losses
from tfla.train.initial import load_weights
from tfla.train.input_gates import InputGateMonitor
from tfla.train.layout import autocast_of, distribute
from tfla.train.logging import Metrics, plot_curves
from tfla.train.memory import peak_memory
from tfla.train.pending import PendingStep
from tfla.train.preparation import prepare_run
from tfla.train.ranks import Ranks, join_ranks
from tfla.train.recipe import Schedule, clipped_gradients, optimizer
from tfla.train.run_folder import CHECKPOINTS_FOLDER, CURVES_FILE, TOKENS_FOLDER, open_run
from tfla.train.stop_signals import catch_stop_signals


class Trained(NamedTuple):
    """The result of a run."""

    step: int
    """The number of updates done, fewer than requested if the run was stopped."""
    model: LanguageModel
    tokens: Tokens
    run: Path
    """The folder of the run."""
    signal: int | None = None
    """The number of the signal that stopped the run before its last step; None if the run is finished."""
    rank: int = 0
    """The number of this process; the first one, 0, writes files and messages."""

    @property
    def exit_code(self) -> int:
        """The conventional exit code of a command: 0, or 128 + signal: 130 after Ctrl-C, 143 when terminated."""
        return 0 if self.signal is None else 128 + self.signal


def train(config: TrainConfig, baselines: Callable[[Tokens], dict[str, float]] | None = None) -> Trained:
    """Train a model, from the run's last checkpoint if it has one.

    Args:
        config: the options of the run.
        baselines: returns horizontal lines for the figure of the curves: name -> bits per byte.

    Raises:
        UserError: an error that the user can correct, in the text, the options or the disk. Checkpoints that were
            complete still are.
    """
    config.check()
    device = pick_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with join_ranks(config.parallel, device) as ranks, ExitStack() as stack:
        device = ranks.device
        if ranks.first:
            stack.enter_context(open_run(config))
        checkpoints = Checkpoints(config.run / CHECKPOINTS_FOLDER, config.keep_last, config.keep_every, ranks)
        ranks.last_good = partial(checkpoints.last_good, contents=False)  # at once, however large it is
        prepared: list[Tokens] = []

        def prepare() -> dict[str, Any]:
            latest = checkpoints.latest()
            tokens, model = prepare_run(config, config.run, latest, ranks)
            prepared.append(tokens)
            return {"config": to_json(config), "model": model.to_dict(), "latest": latest and str(latest)}

        shared = ranks.ask_first(prepare)
        if not ranks.first:
            config = from_json(TrainConfig, shared["config"])
            prepared.append(read_tokens(config.data, config.run / TOKENS_FOLDER))
        (tokens,), model_config = prepared, ModelConfig.from_dict(shared["model"])
        latest = None if shared["latest"] is None else Path(shared["latest"])
        training = _Training(config, ranks, tokens, model_config, checkpoints, latest)
        lines = baselines(tokens) if baselines is not None else {}
        if ranks.first:
            _announce(config, training.model, tokens, ranks, training.step)
        stopped_by = training.run()
        if ranks.first:
            if stopped_by is not None:
                notice(
                    f"stopped at step {training.step} of {config.steps}, which is saved; "
                    "the same command continues from there"
                )
            plot_curves(config.run, config.run / CURVES_FILE, clip=config.optim.clip, baselines=lines)
    return Trained(
        step=training.step, model=training.model, tokens=tokens, run=config.run, signal=stopped_by, rank=ranks.rank
    )


class _Training:
    """A run: the model, the optimizer, the number of updates done, and the files that are written.

    The host reads the loss of an update after it has enqueued the next one, see :mod:`tfla.train.pending`.

    Args:
        config: the options of the run.
        ranks: the processes of the run.
        tokens: the token streams.
        model_config: the architecture of the model.
        checkpoints: the checkpoints of the run.
        latest: the checkpoint to continue from; None starts at step 0.
    """

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        tokens: Tokens,
        model_config: ModelConfig,
        checkpoints: Checkpoints,
        latest: Path | None,
    ) -> None:
        self.config, self.ranks, self.tokens, self.checkpoints = config, ranks, tokens, checkpoints
        self.device = ranks.device
        self.batches = Batches(tokens, config.context, config.batch_size, config.seed)
        self.schedule = Schedule(config.optim, config.steps)

        torch.manual_seed(config.seed)
        self.model = LanguageModel(model_config)
        if latest is None and config.init_from is not None:
            load_weights(self.model, config.init_from, announce=ranks.first)
        distribute(self.model, config, ranks)
        self.optimizer = optimizer(self.model, config.optim)
        self.step = 0
        self.progress: dict[str, Any] = {"elapsed": 0.0}
        self.timed_from: float | None = None  # when the last step ended; None if the next one has its own start
        if latest is not None:
            self.step, self.progress = restore(latest, self.model, self.optimizer, ranks)
        if ranks.first:
            self._compare_text()
        self.input_gates = InputGateMonitor(self.model)
        self.metrics = Metrics(config.run, self.step, config.tensorboard) if ranks.first else None

    def run(self) -> int | None:
        """Train until the last step or a signal; return the signal's number, or None after the last step.

        Raises:
            UserError: the loss is not finite, the disk is full, or the memory does not suffice.
        """
        try:
            return self._run()
        except OSError as error:
            raise UserError(
                f"{error.filename or self.config.run}: {error.strerror or error}; {self.checkpoints.last_good()}"
            ) from error
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise UserError(
                f"step {self.step + 1}: out of memory on {self.device}: {reason(error)}; a larger accumulate, a "
                f"smaller batch_size or a shorter context needs less. {self.checkpoints.last_good()}"
            ) from error
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _run(self) -> int | None:
        """Train as :meth:`run` does, with the errors of the libraries."""
        config = self.config
        saved_step = self.step
        untrained = self._evaluate() if self.step == 0 else None
        bar = StepBar(config.steps, self.step, visible=self.ranks.first)
        if untrained is not None:
            bar.show_evaluation(untrained.bits_per_byte)
        stopped_by = 0
        pending: PendingStep | None = None
        with catch_stop_signals(notice if self.ranks.first else None, self.ranks.size) as stop:
            with closing(bar):
                while self.step < config.steps and not stopped_by:
                    before, pending = pending, self._enqueue()
                    if before is not None:
                        stopped_by = self._finish(before, stop, bar, pending.computed)
                    evaluates = self.step % config.eval_every == 0 or self.step == config.steps
                    saves = self.step % config.checkpoint_every == 0
                    if evaluates or saves:  # the loss of what is saved is checked, and recorded before its evaluation
                        stopped_by, pending = self._finish(pending, stop, bar) or stopped_by, None
                        self.timed_from = None  # the time that these take is that of no step
                    self.checkpoints.raise_failure()
                    if evaluates:
                        bar.show_evaluation(self._evaluate().bits_per_byte)
                    if saves:
                        saved_step = self._save()
                    if stop and self.ranks.size == 1:
                        stopped_by = stop[0]
                if pending is not None:
                    self._finish(pending, stop, bar)
            if saved_step != self.step:
                self._save()
            self.checkpoints.finish()
        return stopped_by if self.step < config.steps else None

    def _enqueue(self) -> PendingStep:
        """Enqueue the next update of the weights, without waiting for any of its numbers."""
        config = self.config
        if self.timed_from is None:
            self.timed_from = time.perf_counter()
        lr = self.schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        index, parts = self.ranks.rows
        micro_batches = self.batches(self.step).split(config.micro_batch_size)
        micro_batches = [rows.chunk(parts)[index] for rows in micro_batches]
        clipped = clipped_gradients(
            self.model, self._losses, micro_batches, config.optim.clip, self.ranks, config.parallel.reduce_each_pass
        )
        gate = self.input_gates.take()
        reading = clipped.reading(*([] if gate is None else [gate]))
        self.optimizer.step()
        self.step += 1
        computed = time.perf_counter() if reading.arrived() else None
        return PendingStep(self.step, lr, peak_memory(self.device), reading, computed)

    def _finish(self, pending: PendingStep, stop: list[int], bar: StepBar, following: float | None = None) -> int:
        """Wait for the numbers of an update, check them and record them.

        The seconds of a step are those from the end of the last reading to the end of its own, in which the device
        computes one step. The first step of a run, and the first one after an evaluation or a checkpoint, is timed from
        its own start. A step that the device has computed by the time it is enqueued, as a CPU has, ends at that time,
        and a step before it that was not computed when it was enqueued has half of the time that both take.

        Args:
            pending: the update.
            stop: the signals that this process has caught.
            bar: the progress bar.
            following: the time at which the next update was enqueued, if the device had computed that by then.

        Returns:
            the number of a signal that any process has caught, else 0.

        Raises:
            UserError: the loss or the norm of the gradients is not finite.
        """
        numbers = pending.read(self.ranks, stop[0] if stop else 0)
        if not numbers.finite:
            raise UserError(
                f"step {pending.step}: loss {numbers.loss}, gradient norm {numbers.grad_norm}: training has failed; "
                f"try a lower optim.lr. {self.checkpoints.last_good()}"
            )
        assert self.timed_from is not None
        if pending.computed is not None:
            ended = pending.computed
        else:
            ended = time.perf_counter() if following is None else (self.timed_from + following) / 2
        seconds, self.timed_from = ended - self.timed_from, ended
        self.progress["elapsed"] += seconds
        tokens_per_s = self.config.batch_size * self.config.context / seconds
        self._record(
            "train", pending.step, loss=numbers.loss, lr=pending.lr, grad_norm=numbers.grad_norm,
            max_input_gate=numbers.max_input_gate, tokens_per_s=tokens_per_s,
            tokens_per_s_per_process=tokens_per_s / self.ranks.size, peak_memory=numbers.peak_memory,
            elapsed=self.progress["elapsed"],
        )  # fmt: skip
        bar.advance(numbers.loss, tokens_per_s)
        return numbers.signal

    def _losses(self, windows: Tensor) -> Tensor:
        """Return the loss of every token of windows (B, T + 1): (B, T)."""
        with autocast_of(self.config, self.device):
            return token_losses(
                self.model, windows, self.tokens.tokenizer.bos, self.config.reset, steps=self.ranks.steps,
                device=self.device, recompute_logits=self.config.activation_checkpointing,
            )  # fmt: skip

    def _evaluate(self) -> Evaluation:
        """Evaluate the model on the held-out windows and record the result."""
        config = self.config
        with autocast_of(config, self.device):
            result = evaluate(
                self.model, self.tokens, config.context, batch_size=config.micro_batch_size,
                max_windows=config.eval_windows, reset=config.reset, device=self.device, ranks=self.ranks,
                recompute_logits=config.activation_checkpointing,
            )  # fmt: skip
        self.input_gates.take()  # the metric is that of training
        self._record("eval", self.step, **result._asdict())
        return result

    def _record(self, kind: str, step: int, **values: Any) -> None:
        """Write a record of the metrics, on the first process."""
        if self.metrics is not None:
            self.metrics.write(kind, step, **values)

    def _save(self) -> int:
        """Write a checkpoint of the current step and return the step."""
        if self.metrics is not None:
            self.metrics.sync()
        self.checkpoints.save(self.step, self.model, self.optimizer, self.tokens.tokenizer, self.progress)
        return self.step

    def _compare_text(self) -> None:
        """Print a notice if the tokens of the run are not those that it was trained on so far."""
        folder = self.config.run / TOKENS_FOLDER
        digest = fingerprint(folder)
        if digest != self.progress.setdefault("tokens", digest):
            notice(
                f"{folder}: not the tokens that this run was trained on up to step {self.step}: its text has changed"
            )
            self.progress["tokens"] = digest


def _announce(config: TrainConfig, model: LanguageModel, tokens: Tokens, ranks: Ranks, step: int) -> None:
    """Print the sizes of the run, and the step from which it continues."""
    where = str(ranks.device)
    if ranks.size > 1:
        layout = " x ".join(f"{name} {size}" for name, size in ranks.sizes.items() if size > 1)
        where = f"{ranks.size} processes ({layout}) on {ranks.device.type}"
    notice(
        f"{model.num_parameters():,} parameters on {where}; {len(tokens.train):,} tokens to train on, "
        f"{len(tokens.heldout):,} held out; {config.batch_size * config.context:,} tokens a step"
    )
    if step:
        notice(f"{config.run}: continues after step {step} of {config.steps}")
