"""Everything that can be set for a training run, in one place; the command line is made from these classes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tfla._util.errors import UserError
from tfla.backends import BACKENDS
from tfla.nn import ModelConfig
from tfla.train.ranges import LARGEST, check_count, check_range, is_number, require

# Changing one of these leaves what is learned alone, so a run may go on with another value.
FREE = frozenset(
    {"run", "device", "threads", "compile", "eval_every", "eval_windows"}
    | {"checkpoint_every", "keep_last", "keep_every", "tensorboard"}
)

C = TypeVar("C")


@dataclass(frozen=True)
class Data:
    """Where the text comes from and how it becomes tokens."""

    paths: tuple[Path, ...] = ()
    """Text files in UTF-8, each one document; .jsonl files, each line a document; folders with such files."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")
    """Which files of a folder are read; a file named in paths always is."""
    exclude: tuple[str, ...] = ()
    """Names of folders that are left out."""
    dataset: str | None = None
    """Hugging Face dataset instead of paths: a name, or a folder that save_to_disk wrote. Needs tfla[datasets]."""
    dataset_config: str | None = None
    """Which configuration of the dataset."""
    dataset_files: tuple[str, ...] = ()
    """Files for a generic dataset such as json, csv or parquet."""
    dataset_split: str = "train"
    """Which split of the dataset to read; the held-out part is cut from it."""
    dataset_field: str = "text"
    """The column of a dataset, or the field in each line of a .jsonl file, that holds the text."""
    binary: bool = False
    """Accept files that are not text, byte for byte; for the tokenizer bytes."""
    tokenizer: str = "bytes"
    """"bytes", a tokenizer.json, or the name of a Hugging Face tokenizer."""
    bos_token: str | None = None
    """The tokenizer's token that starts a document; None looks for a usual one. Bytes have their own, number 256."""
    heldout: float = 0.05
    """Part of the documents that is held out; of each document, where that would be fewer than ten documents."""
    split_seed: int = 0
    """Draws which documents are held out."""

    def check(self) -> None:
        """Raise UserError where a value is out of range or options contradict each other; the message names them."""
        check_range("data.heldout", self.heldout, 0, 1, with_low=False, with_high=False)
        check_count("data.split_seed", self.split_seed, -LARGEST)
        if self.paths and self.dataset is not None:
            raise UserError("data.paths, data.dataset: got both, expected one of them")
        if not self.paths and self.dataset is None:
            raise UserError("data.paths: expected text files or folders, or else data.dataset")
        for name in ("dataset_config", "dataset_files"):
            if getattr(self, name) and self.dataset is None:
                raise UserError(f"data.{name}: got {getattr(self, name)!r} without data.dataset, which it is for")
        if self.binary and self.tokenizer != "bytes":
            raise UserError(f"data.binary: got True with the tokenizer {self.tokenizer!r}, expected bytes")
        if self.tokenizer == "bytes" and self.bos_token is not None:
            raise UserError(
                f"data.bos_token: got {self.bos_token!r}, expected None for bytes, which have a token for it"
            )


@dataclass(frozen=True)
class Model:
    """Architecture; what is None is the paper's, or that of the size."""

    size: Literal["160M", "400M", "1.4B", "7B"] | None = None
    """One of the paper's sizes; the fields below override it."""
    d_model: int | None = None
    """Width; 256 without a size."""
    num_blocks: int | None = None
    """Blocks; 4 without a size."""
    num_heads: int | None = None
    """Heads; 4 without a size."""
    mixer: Literal["mlstm_exp", "mlstm_sig", "attention"] = "mlstm_exp"
    """The sequence mix: mLSTM with exponential or sigmoid input gate, or attention."""
    input_gate_bias: float | None = None
    """Of the input gates at the start."""
    input_gate_trainable: bool = True
    """Whether the input gates learn."""
    head_norm: Literal["layer", "rms"] | None = None
    """Norm over each head."""
    head_norm_eps: float | None = None
    """Epsilon of the norm over each head."""
    chunk_size: int | None = None
    """Steps between stored states; None picks it."""
    backend: str | None = None
    """Of the kernels; None picks what is fastest here."""

    def build(self, vocab_size: int) -> ModelConfig:
        """The model's config for that many tokens.

        Raises:
            UserError: the fields do not fit together.
        """
        self.check()
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and k != "size"}
        try:
            if self.size is not None:
                return ModelConfig.named(self.size, vocab_size=vocab_size, **fields)
            return ModelConfig(**{"d_model": 256, "num_blocks": 4, "num_heads": 4, "vocab_size": vocab_size, **fields})
        except ValueError as error:
            raise UserError(f"model: {error}") from error

    def check(self) -> None:
        """Raise UserError for what no model can have; the rest is checked with the model's other fields."""
        if self.backend is not None and self.backend not in BACKENDS:
            raise UserError(f"model.backend: got {self.backend!r}, allowed are {', '.join(map(repr, BACKENDS))}")
        if self.input_gate_bias is not None:
            check_range("model.input_gate_bias", self.input_gate_bias, -1e30, 1e30)  # float32 holds it


@dataclass(frozen=True)
class Optim:
    """The paper's recipe (appendix E.2): AdamW, warm-up, cosine, cooldown."""

    lr: float = 3e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 0.1
    """On the weights of linear layers, the last one too; none on biases, norms and embeddings."""
    clip: float = 0.5
    """Largest norm of the gradient; inf leaves gradients as they are."""
    warmup_steps: int | None = None
    """Linear warm-up; None is 750 steps, but a tenth of a short run."""
    cooldown_steps: int | None = None
    """Linear cooldown to 0 at the end; None is 1000 steps, but a tenth of a short run."""
    final_fraction: float = 0.1
    """Of the peak, where the cosine ends and the cooldown begins."""

    def check(self) -> None:
        """Raise UserError where a value is out of range; the message names it."""
        for name in ("lr", "eps"):
            check_range(f"optim.{name}", getattr(self, name), 0, with_low=False)
        ok = (
            isinstance(self.betas, tuple)
            and len(self.betas) == 2
            and all(is_number(b) and 0 <= b < 1 for b in self.betas)
        )
        require(ok, "optim.betas", self.betas, "two numbers from 0 and below 1")
        check_range("optim.weight_decay", self.weight_decay, 0)
        if self.clip != math.inf:
            check_range("optim.clip", self.clip, 0, with_low=False)
        for name in ("warmup_steps", "cooldown_steps"):
            if getattr(self, name) is not None:
                check_count(f"optim.{name}", getattr(self, name), 0)
        check_range("optim.final_fraction", self.final_fraction, 0, 1)


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model on text. A run that was stopped continues when it is started again."""

    run: Path = Path("runs/train")
    """Folder of the run: configuration, tokens, checkpoints, metrics, curves."""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    init_from: Path | None = None
    """Start a new run from the weights of a run, a checkpoint or a saved model, with a new optimizer: fine-tuning.
    Architecture and tokenizer are the saved model's; options that name others are errors."""
    steps: int = 2000
    """Updates of the weights; more of them continue a finished run.
    Its learning rate is from there on that of a run of the new length, so it rises at once after the cooldown."""
    batch_size: int = 32
    """Sequences in one update."""
    accumulate: int = 1
    """Passes in which one update's sequences are computed, for less memory: gradient accumulation."""
    context: int = 512
    """Tokens in a sequence."""
    reset: Literal["gate", "cu_seqlens"] = "gate"
    """How the memory is reset at the start of a document: a closed forget gate, or sequences packed by cu_seqlens."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 is autocast; auto uses it on a GPU."""
    compile: bool = False
    """Run the model through torch.compile, which gets one block for all of them."""
    device: str = "auto"
    """auto is the GPU if there is one."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice. Results are bit for bit the same only for the same number."""
    seed: int = 0
    """Of the weights and of the order of the text."""
    eval_every: int = 200
    """Steps between evaluations on the held-out part."""
    eval_windows: int | None = 256
    """Sequences of an evaluation, spread over the held-out part; None is all of it."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this many steps are kept for good."""
    tensorboard: bool = True
    """Also write the metrics for TensorBoard."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences that are computed at once."""
        return self.batch_size // self.accumulate

    def check(self) -> None:
        """Raise UserError where a value is out of range; the message names it."""
        for name in ("steps", "batch_size", "accumulate", "context", "eval_every", "checkpoint_every", "keep_last"):
            check_count(name, getattr(self, name))
        for name in ("keep_every", "eval_windows"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.batch_size % self.accumulate:
            raise UserError(f"accumulate: got {self.accumulate}, expected a divisor of batch_size, {self.batch_size}")
        check_threads(self.threads)
        check_count("seed", self.seed, 0)
        self.data.check()
        self.optim.check()


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with a trained model, as a stream; an mLSTM needs the same memory however long it gets."""

    checkpoint: Path
    """A run's folder (its newest checkpoint), a checkpoint, or a model that save_pretrained wrote."""
    tokenizer: str | None = None
    """bytes, a tokenizer.json or a folder with one; None: the one beside the model."""
    prompt: str = ""
    """What the text begins with; by default the model starts a document."""
    max_new_tokens: int = 500
    """Tokens at most; the end of the document ends it earlier."""
    temperature: float = 0.8
    """0 takes the likeliest token every time."""
    top_k: int | None = None
    """Sample among the k likeliest tokens."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together have this probability."""
    seed: int | None = None
    """The same seed gives the same text."""
    device: str = "auto"
    """auto is the GPU if there is one."""


@dataclass(frozen=True)
class DemoConfig:
    """Train a small mLSTMexp model on the source of Python's standard library and compare it with counting."""

    run: Path = Path("runs/demo")
    """Folder of the run; with a number behind it if a finished run is there already."""
    seconds: float = 120.0
    """For the training, about: a few steps are timed beforehand to choose how many, 400 at least and 1200 at most."""
    steps: int | None = None
    """Updates of the weights; None leaves it to `seconds`."""
    threads: int = 1
    """CPU threads. Two are up to 1.6 times as fast on idle cores, but many times slower where one of them is busy."""

    def check(self) -> None:
        """Raise UserError where a value is out of range; the message names it."""
        check_range("seconds", self.seconds, 0)
        if self.steps is not None:
            check_count("steps", self.steps)
        check_threads(self.threads)


def check_threads(threads: int | None) -> None:
    """Raise UserError for a number of CPU threads that this machine cannot be expected to start."""
    if threads is not None:
        check_count("threads", threads, 1, max(64, 4 * (os.cpu_count() or 1)))


def to_json(config: Any) -> str:
    """A config as JSON text, fields in order."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_json(kind: type[C], text: str) -> C:
    """The config that :func:`to_json` gave.

    Raises:
        ValueError: the text is no JSON object, or has a field that does not exist.
    """
    return _revive(kind, json.loads(text))


def _revive(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ValueError(f"unknown field {', '.join(unknown)}")
        return kind(**{name: _revive(hints[name], v) for name, v in value.items()})  # type: ignore[operator]
    if isinstance(value, list) and get_origin(kind) is tuple:
        return tuple(_revive(get_args(kind)[0], v) for v in value)
    if isinstance(value, str) and Path in (kind, *get_args(kind)):
        return Path(value)
    return value


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two configs differ: dotted field name -> (old value, new value)."""
    found: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(old):
        a, b = getattr(old, f.name), getattr(new, f.name)
        if dataclasses.is_dataclass(a):
            found |= differences(a, b, f"{prefix}{f.name}.")
        elif a != b:
            found[prefix + f.name] = (a, b)
    return found
