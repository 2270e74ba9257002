"""The options of training, generation and the demo. The command line is made from these classes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tfla._util.errors import UserError
from tfla._util.options import MAX_INT, check_count, check_range, check_threads, is_number, require
from tfla.backends import BACKENDS
from tfla.nn import ModelConfig
from tfla.nn.config import Mixer

# Options that do not change what is learned, so that a run may continue with other values.
RESUMABLE_FIELDS = frozenset(
    {"run", "device", "threads", "compile", "eval_every", "eval_windows"}
    | {"checkpoint_every", "keep_last", "keep_every", "tensorboard", "activation_checkpointing"}
    | {f"parallel.{name}" for name in ("dp_replicate", "dp_shard", "cp", "tp", "reshard_after_forward")}
    | {f"parallel.{name}" for name in ("blocks_per_gather", "prefetch", "reduce_each_pass", "cp_order")}
)

# Options of the layout that have no meaning where no processes share sequences or their steps.
OF_FSDP = (
    "gather_dtype", "reduce_dtype", "reshard_after_forward", "blocks_per_gather", "prefetch", "reduce_each_pass",
)  # fmt: skip
UNSHARDED = {"reshard_after_forward": True, "blocks_per_gather": 1}  # changes nothing then; in configs of earlier runs

C = TypeVar("C")


@dataclass(frozen=True)
class Data:
    """The text and its tokenizer."""

    paths: tuple[Path, ...] = ()
    """Text files in UTF-8, each one document; .jsonl files, each line a document; folders with such files."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py")
    """Endings of the files that are read from folders; a file named in paths is always read."""
    exclude: tuple[str, ...] = ()
    """Names of folders that are skipped."""
    dataset: str | None = None
    """Hugging Face dataset instead of paths: a name, or a folder that save_to_disk wrote. Needs tfla[datasets]."""
    dataset_config: str | None = None
    """The configuration of the dataset."""
    dataset_files: tuple[str, ...] = ()
    """Files for a generic dataset such as json, csv or parquet."""
    dataset_split: str = "train"
    """The split of the dataset to read; the held-out part is taken from it."""
    dataset_field: str = "text"
    """The column of a dataset, or the field in each line of a .jsonl file, that holds the text."""
    binary: bool = False
    """Accept files that are not text; for the tokenizer bytes only."""
    tokenizer: str = "bytes"
    """"bytes", a tokenizer.json, or the name of a Hugging Face tokenizer."""
    bos_token: str | None = None
    """The tokenizer's token that starts a document; None looks for a common one. Bytes have their own, number 256."""
    heldout: float = 0.05
    """Fraction of the documents to hold out; if fewer than ten would be held out, the end of each document."""
    split_seed: int = 0
    """Seed of the choice of the held-out documents."""

    def check(self) -> None:
        """Raise UserError where a value is out of range or options contradict each other; the message names them."""
        check_range("data.heldout", self.heldout, 0, 1, with_low=False, with_high=False)
        check_count("data.split_seed", self.split_seed, -MAX_INT)
        require(self.dataset != "", "data.dataset", self.dataset, "a name or a folder")
        require("" not in self.dataset_files, "data.dataset_files", self.dataset_files, "names of files")
        require(self.tokenizer != "", "data.tokenizer", self.tokenizer, '"bytes", a tokenizer.json or a name')
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
    """The architecture; a field that is None has the paper's value, or that of the size."""

    size: Literal["160M", "400M", "1.4B", "7B"] | None = None
    """One of the paper's sizes; the fields below override its values."""
    d_model: int | None = None
    """Width of the residual stream; 256 without a size."""
    num_blocks: int | None = None
    """Number of blocks; 4 without a size."""
    num_heads: int | None = None
    """Number of heads; 4 without a size."""
    mixer: Mixer = "mlstm_exp"
    """The sequence mixer of all blocks (docs/models.md describes them)."""
    layers: tuple[Mixer, ...] | None = None
    """The mixers of the blocks in order, instead of `mixer`; the pattern is repeated."""
    num_kv_heads: int | None = None
    """Heads of the keys and values of attention; num_heads if None."""
    window: int | None = None
    """Number of tokens that a token of attention sees; all of its document if None."""
    attention_sinks: bool = False
    """Whether heads of attention can attend to nothing."""
    key_width: float | None = None
    """Width of all keys divided by d_model, for gla, retnet, delta_net, gated_delta_net and kda; that of the paper if
    None."""
    value_width: float | None = None
    """The same for values."""
    negative_eigenvalues: bool = False
    """Whether write strengths of the delta rule reach to 2, which state tracking needs."""
    mamba_head_dim: int | None = None
    """Value dimension of mamba2's heads; 64 if None."""
    mamba_state_dim: int | None = None
    """Key dimension of mamba2's heads; 128 if None."""
    input_gate_bias: float | None = None
    """Initial bias of the input gates."""
    input_gate_trainable: bool = True
    """Whether the input gates are trained."""
    head_norm: Literal["layer", "rms"] | None = None
    """The norm over each head."""
    head_norm_eps: float | None = None
    """Epsilon of the norm over each head."""
    chunk_size: int | None = None
    """Steps between stored states; None lets the operator choose."""
    backend: str | None = None
    """Backend of the operator; None lets it choose."""

    def build(self, vocab_size: int, saved: Model | None = None) -> ModelConfig:
        """Return the config of the model for a vocabulary of ``vocab_size`` tokens.

        Args:
            vocab_size: the number of tokens.
            saved: the options of the run so far; what they have as well is no error where no mixer reads it.

        Raises:
            UserError: the fields do not fit together, or no mixer of the blocks reads an option.
        """
        self.check()
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        try:
            if fields.pop("size", None) is None:
                sizes = {"d_model": 256, "num_blocks": 4, "num_heads": 4}
            else:
                sizes = ModelConfig.named(str(self.size), self.num_heads).to_dict()
            return self.override(sizes | {"vocab_size": vocab_size}, fields, saved)
        except ValueError as error:
            raise UserError(f"model: {error}") from error

    @staticmethod
    def override(config: dict[str, Any], fields: dict[str, Any], saved: Model | None) -> ModelConfig:
        """Return a config with other values of some fields, of which those of the run so far are not checked again.

        Raises:
            ValueError: a field is out of range, or no mixer of the blocks reads an option.
        """
        kept = {name: value for name, value in fields.items() if saved is not None and getattr(saved, name) == value}
        return ModelConfig.from_dict(config | kept, {k: v for k, v in fields.items() if k not in kept})

    def check(self) -> None:
        """Raise UserError for values that no model can have; :meth:`build` checks how the fields fit together."""
        if self.backend is not None and self.backend not in BACKENDS:
            raise UserError(f"model.backend: got {self.backend!r}, allowed are {', '.join(map(repr, BACKENDS))}")
        if self.input_gate_bias is not None:
            check_range("model.input_gate_bias", self.input_gate_bias, -1e30, 1e30)  # float32 can hold it


@dataclass(frozen=True)
class Optim:
    """The optimizer of the paper (appendix E.2): AdamW with warm-up, cosine and cooldown."""

    lr: float = 3e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: float = 1e-8
    """Epsilon of AdamW."""
    weight_decay: float = 0.1
    """Weight decay of linear layers, the unembedding included; none for biases, norms and embeddings."""
    clip: float = 0.5
    """Largest norm of the gradient; inf does not clip."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; None is 750, or a tenth of the run if that is shorter."""
    cooldown_steps: int | None = None
    """Steps of linear cooldown to 0; None is 1000, or a tenth of the run if that is shorter."""
    final_fraction: float = 0.1
    """Fraction of the peak at which the cosine ends and the cooldown begins."""

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
        above_0 = self.clip == math.inf or (is_number(self.clip) and self.clip > 0)
        require(above_0, "optim.clip", self.clip, "a number above 0, or inf")
        for name in ("warmup_steps", "cooldown_steps"):
            if getattr(self, name) is not None:
                check_count(f"optim.{name}", getattr(self, name), 0)
        check_range("optim.final_fraction", self.final_fraction, 0, 1)


@dataclass(frozen=True)
class Parallel:
    """The layout of the processes that torchrun starts; their number is the product of the four sizes.

    A run may continue with another layout: results are then equal to rounding.
    """

    dp_replicate: int = 1
    """Groups of processes with a copy of the model each, and different sequences."""
    dp_shard: int | None = None
    """Processes that share one copy of the model (FSDP), with different sequences; None takes all that are left."""
    cp: int = 1
    """Processes that share each sequence, a part of its steps each. The model is shared over these as well."""
    cp_order: Literal["contiguous", "zigzag"] = "contiguous"
    """The parts of the steps: one span for each process, or two with zigzag, which gives all processes of attention
    layers as many pairs of tokens."""
    tp: int = 1
    """Processes that share the heads of each layer; a divisor of num_heads."""
    reshard_after_forward: bool | None = None
    """Whether the gathered weights of a block are freed between its forward and its backward, which gathers them again;
    kept, they take the memory of all weights. None keeps them on GPUs where they fit by an estimate."""
    blocks_per_gather: int | None = None
    """Consecutive blocks whose weights are gathered, and whose gradients are reduced, in one message; None takes two on
    GPUs where kept weights fit, else one."""
    prefetch: int | None = None
    """Further gathers that each gather starts; None leaves the order to FSDP2."""
    gather_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which FSDP2 gathers weights; bfloat16, for bfloat16 precision, also rounds the weights of gates and
    norms, and the residual stream."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which FSDP2 adds up the gradients of the processes."""
    reduce_each_pass: bool = True
    """Whether gradients are reduced after each of the passes of `--accumulate`, or once an update, with the memory of
    all gradients."""

    def check(self) -> None:
        """Raise UserError where a value is out of range; :meth:`sizes` checks those of the layout."""
        if self.blocks_per_gather is not None:
            check_count("parallel.blocks_per_gather", self.blocks_per_gather)
        if self.prefetch is not None:
            check_count("parallel.prefetch", self.prefetch)

    def sizes(self, processes: int) -> dict[str, int]:
        """Return the size of each dimension for a number of processes.

        Raises:
            UserError: a size is no number from 1, or the product of the sizes is not the number of processes.
        """
        given = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        for name, value in given.items():
            if value is not None:
                check_count(f"parallel.{name}", value)
        product = math.prod(value for value in given.values() if value is not None)
        fits = product == processes if self.dp_shard is not None else processes % product == 0
        text = " x ".join(f"{name} {value}" for name, value in given.items() if value not in (None, 1)) or "1"
        if not fits and processes == 1:
            raise UserError(
                f"parallel: got {text}, expected that many processes: torchrun --nproc-per-node {product} -m tfla train"
            )
        if not fits:
            some = "a divisor of" if self.dp_shard is None else "a product of"
            raise UserError(f"parallel: got {text}, expected {some} {processes}, the number of processes")
        return {name: processes // product if value is None else value for name, value in given.items()}

    def resumed(self, processes: int, given: Collection[str]) -> Parallel:
        """Return this layout of a run for its continuation, perhaps on another number of processes.

        Where it does not fit these, dp_shard is all that are left. Options that have no meaning on them have their
        defaults.

        Args:
            processes: the number of processes.
            given: the options that are given now; the others are those of the run so far.

        Raises:
            UserError: another size does not fit. The message says by which option it is changed.
        """
        left = self if "dp_shard" in given else dataclasses.replace(self, dp_shard=None)
        with suppress(UserError):
            return self._with_meaning(self.sizes(processes), given)
        try:
            return left._with_meaning(left.sizes(processes), given)
        except UserError as error:
            kept = [n for n in ("dp_replicate", "cp", "tp") if n not in given and getattr(self, n) != 1]
            if not kept:
                raise
            so_far = " and ".join(f"{name} {getattr(self, name)}" for name in kept)
            options = " ".join(f"--parallel.{name.replace('_', '-')} 1" for name in kept)
            raise UserError(f"{error}; the run so far had {so_far}, to continue without: {options}") from error

    def without_meaning(self, sharing: int, cp: int) -> list[str]:
        """Return the names of the options that are given but have no meaning.

        Args:
            sharing: the number of processes that share sequences or their steps.
            cp: the number of processes that share the steps of each sequence.
        """
        names = ("cp_order",) * (cp == 1) + OF_FSDP * (sharing == 1)
        default = Parallel()
        harmless = {n: (getattr(default, n), UNSHARDED.get(n, getattr(default, n))) for n in names}
        return [n for n in names if getattr(self, n) not in harmless[n]]

    def _with_meaning(self, sizes: dict[str, int], given: Collection[str]) -> Parallel:
        """Return this layout with the defaults of those options that have no meaning for its sizes."""
        names = self.without_meaning(sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"], sizes["cp"])
        return dataclasses.replace(self, **{n: getattr(Parallel(), n) for n in names if n not in given})


@dataclass(frozen=True)
class TrainConfig:
    """Train a language model on text. A run that was stopped continues when it is started again."""

    run: Path = Path("runs/train")
    """Folder of the run, with its configuration, tokens, checkpoints, metrics and curves. `--run-folder` is the same
    option, for torchrun, which takes `--run` for an abbreviation of its own."""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    parallel: Parallel = field(default_factory=Parallel)
    init_from: Path | None = None
    """Fine-tuning: start a new run from the weights of a run, a checkpoint or a saved model, with a new optimizer.
    Architecture and tokenizer are those of the saved model; options that name others are errors."""
    steps: int = 2000
    """Number of updates of the weights. A larger number continues a finished run; its learning rate is then that of a
    run of the new length, so that it rises at once after the cooldown."""
    batch_size: int = 32
    """Number of sequences in an update."""
    accumulate: int = 1
    """Gradient accumulation: number of passes in which an update's sequences are computed, which saves memory."""
    context: int = 512
    """Number of tokens in a sequence."""
    reset: Literal["gate", "cu_seqlens"] = "gate"
    """Reset of the memory at the start of a document: a closed forget gate, or sequences packed by cu_seqlens."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 is autocast to it; auto is bfloat16 on a GPU, else float32."""
    compile: bool = False
    """Run the model through torch.compile, with one graph for all blocks."""
    activation_checkpointing: bool = False
    """Keep only the input of each block for the backward, which computes blocks and logits again, with less memory."""
    device: str = "auto"
    """auto is the GPU if there is one."""
    threads: int | None = None
    """CPU threads; None is torch's choice. Results are bitwise equal only for the same number."""
    seed: int = 0
    """Seed of the weights and of the order of the text."""
    eval_every: int = 200
    """Steps between evaluations on the held-out part."""
    eval_windows: int | None = 256
    """Number of sequences in an evaluation, spread evenly over the held-out part; None is all of it."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    keep_last: int = 2
    """Number of the newest checkpoints to keep."""
    keep_every: int | None = None
    """Checkpoints at multiples of this many steps are never deleted."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard as well."""

    @property
    def micro_batch_size(self) -> int:
        """The number of sequences that are computed at once."""
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
        self.parallel.check()


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with a trained model. With an mLSTM, memory does not grow with the length of the text."""

    checkpoint: Path
    """The folder of a run (its newest checkpoint), a checkpoint, or a model that save_pretrained wrote."""
    tokenizer: str | None = None
    """bytes, a tokenizer.json or a folder with one; None is the tokenizer that is saved with the model."""
    prompt: str = ""
    """Start of the text; by default the model starts a document."""
    max_new_tokens: int = 500
    """Largest number of tokens; the end of the document ends the text earlier."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token every time."""
    top_k: int | None = None
    """Sample among the k likeliest tokens; None samples among all."""
    top_p: float | None = None
    """Sample among the likeliest tokens that together reach this probability; None samples among all."""
    seed: int | None = None
    """The same seed gives the same text."""
    device: str = "auto"
    """auto is the GPU if there is one."""


@dataclass(frozen=True)
class DemoConfig:
    """Train a small mLSTMexp model on the source of Python's standard library and compare it with a trigram model."""

    run: Path = Path("runs/demo")
    """Folder of the run; a number is appended if it holds a finished run."""
    seconds: float = 120.0
    """About the duration of the training. A few steps are timed to choose their number, from 400 to 1200."""
    steps: int | None = None
    """Number of updates of the weights; None chooses it by `seconds`."""
    threads: int = 1
    """CPU threads. Two are up to 1.6 times as fast on idle cores, but many times slower where one of them is busy."""

    def check(self) -> None:
        """Raise UserError where a value is out of range; the message names it."""
        check_range("seconds", self.seconds, 0)
        if self.steps is not None:
            check_count("steps", self.steps)
        check_threads(self.threads)


def to_json(config: Any) -> str:
    """Return a config as JSON text, fields in order."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_json(kind: type[C], text: str) -> C:
    """Return the config of type ``kind`` that :func:`to_json` has written.

    Raises:
        ValueError: the text is not a JSON object, or it has a field that does not exist.
    """
    return _revive(kind, json.loads(text))


def _revive(kind: Any, value: Any) -> Any:
    """Return a value of JSON as an instance of a dataclass, a tuple, a path or itself, as its type says."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ValueError(f"unknown field {', '.join(unknown)}")
        return kind(**{name: _revive(hints[name], v) for name, v in value.items()})  # type: ignore[operator]
    if isinstance(value, list):
        of = next(k for k in (kind, *get_args(kind)) if get_origin(k) is tuple)  # a tuple, or a tuple or None
        return tuple(_revive(get_args(of)[0], v) for v in value)
    if isinstance(value, str) and Path in (kind, *get_args(kind)):
        return Path(value)
    return value


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return where two configs differ: dotted field name -> (old value, new value)."""
    found: dict[str, tuple[Any, Any]] = {}
    for f in dataclasses.fields(old):
        a, b = getattr(old, f.name), getattr(new, f.name)
        if dataclasses.is_dataclass(a):
            found |= differences(a, b, f"{prefix}{f.name}.")
        elif a != b:
            found[prefix + f.name] = (a, b)
    return found
