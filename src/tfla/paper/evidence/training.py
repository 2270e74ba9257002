"""The training of one run and its measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tfla._util.garbage_collection import paused_collection
from tfla.nn import LanguageModel
from tfla.paper.evidence.models import Shape, model_config, state_size
from tfla.paper.evidence.task import IGNORED, Row, Task
from tfla.train.config import Optim
from tfla.train.recipe import Schedule, optimizer

CLIP = 1.0
WEIGHT_DECAY = 0.1
POINTS = 20  # of the stored curve of the loss
WARM_UP = 3  # steps before a step is captured in a CUDA graph
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Run:
    """A model, the task that it learns, and how."""

    model: str
    """One of :data:`tfla.paper.evidence.models.MODELS`."""
    task: Any
    shape: Shape
    batch_size: int
    steps: int
    lr: float
    seed: int
    sequences: int
    """Fresh sequences of each kind on which the model is measured."""
    precision: Precision = "float32"
    """The dtype of the operators on a GPU; bfloat16 is autocast to it. On a CPU it is float32."""

    def autocast(self, device: str) -> torch.autocast:
        """Return the context in which the model runs."""
        kind = torch.device(device).type
        # A CUDA graph would keep a cache of cast weights that a later step does not fill.
        enabled = kind == "cuda" and self.precision == "bfloat16"
        return torch.autocast(kind, torch.bfloat16, enabled=enabled, cache_enabled=False)


def train_and_measure(run: Run, device: str, cuda_graph: bool = True) -> Row:
    """Train a model from random weights and return what it can do.

    Args:
        run: the run.
        device: the device.
        cuda_graph: whether steps on a GPU are replayed from a CUDA graph, where they can be captured in one.

    Returns:
        the number of parameters and of the numbers in the state, points of the loss, the tokens per second, whether
        steps came from a CUDA graph, and the rows of the task's measurements.
    """
    torch.random.default_generator.manual_seed(run.seed)  # weights are drawn on the CPU, the same on every device
    task: Task = run.task
    config = model_config(run.model, run.shape, task.vocab_size)
    model = LanguageModel(config).to(device)
    generator = torch.Generator(device).manual_seed(run.seed)
    trainer = _Trainer(run, model, task.sampler(run.batch_size, generator))
    trainer.advance(min(WARM_UP, run.steps))
    captured = device.startswith("cuda") and cuda_graph and run.steps > WARM_UP and trainer.capture()
    trainer.wait()
    start, timed = time.perf_counter(), (run.steps - trainer.done) * trainer.tokens
    trainer.advance(run.steps - trainer.done)
    trainer.wait()
    seconds = time.perf_counter() - start
    losses = torch.stack(trainer.losses).tolist()
    every = max(1, run.steps // POINTS)
    parts = [losses[n : n + every] for n in range(0, run.steps, every)]
    with run.autocast(device):
        rows = task.measure(model.eval(), torch.Generator(device).manual_seed(2**31 + run.seed), run.sequences)
    return {
        "parameters": model.num_parameters(),
        "state": state_size(config),
        "seconds": round(seconds, 2),
        "tokens_per_second": round(timed / seconds) if timed else None,
        "cuda_graph": captured,
        "losses": [round(sum(part) / len(part), 4) for part in parts],
        "rows": rows,
    }  # fmt: skip


class _Trainer:
    """A model in training, whose steps can be replayed from a CUDA graph.

    Args:
        run: the run.
        model: the model.
        sample: draws a batch.
    """

    def __init__(self, run: Run, model: LanguageModel, sample: Callable[[], Any]) -> None:
        self.run, self.model, self.sample = run, model, sample
        options = Optim(lr=run.lr, weight_decay=WEIGHT_DECAY)
        self.schedule, self.done = Schedule(options, run.steps), 0
        self.device = model.embedding.weight.device
        self.batch = sample()
        self.tokens = self.batch.ids.numel()
        self.lr = torch.zeros((), device=self.device)
        self.optimizer = optimizer(model, options)
        for group in self.optimizer.param_groups:
            group |= {"lr": self.lr, "capturable": self.device.type == "cuda"}
        self.losses: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        # All steps run on one stream: a capture fails where autograd has nodes of another one.
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.wait()

    def advance(self, steps: int) -> None:
        """Do a number of steps."""
        with torch.cuda.stream(self.stream):
            for _ in range(steps):
                self.lr.fill_(self.schedule(self.done))
                for kept, new in zip(self.batch, self.sample(), strict=True):
                    kept.copy_(new)
                if self.graph is None:
                    self.losses.append(self._step())
                else:
                    self.graph.replay()
                    self.losses.append(self.loss.clone())
                self.done += 1

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def capture(self) -> bool:
        """Capture a step in a CUDA graph; return whether that was possible.

        A failed capture leaves traces in the process, so that a step is first tried where waiting for the device, as
        the computation of gates by channel does, is an error.
        """
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.advance(1)
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.wait()
        graph = torch.cuda.CUDAGraph()
        try:
            self.model.zero_grad()
            with paused_collection(), torch.cuda.graph(graph, stream=self.stream):
                self.loss = self._step()
        except RuntimeError:  # an operation that cannot be captured; steps go on without a graph
            self.model.zero_grad()
            return False
        self.graph = graph
        return True

    def _step(self) -> Tensor:
        """Update the weights by the batch, and return its loss."""
        self.model.zero_grad()
        with self.run.autocast(str(self.device)):
            logits = self.model(self.batch.ids)
        loss = F.cross_entropy(logits.flatten(0, 1), self.batch.targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.detach()
