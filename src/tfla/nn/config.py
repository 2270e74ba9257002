"""The architecture of a language model, and the sizes of the paper's models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal, NamedTuple, get_args

from tfla.backends import BACKENDS

Mixer = Literal["mlstm_exp", "mlstm_sig", "mamba2", "retnet", "gla", "delta_net", "gated_delta_net", "kda", "attention"]
HeadNormKind = Literal["layer", "rms"]


class Size(NamedTuple):
    """A row of table 4; num_heads lists the variants, the default first."""

    d_model: int
    num_blocks: int
    num_heads: tuple[int, ...]
    vocab_size: int


SIZES: dict[str, Size] = {
    "160M": Size(768, 12, (6, 12), 50257),
    "400M": Size(1024, 24, (8, 16), 50257),
    "1.4B": Size(2048, 24, (8, 4, 16), 50257),
    "7B": Size(4096, 32, (8,), 50304),
}

# Widths of all keys and of all values, divided by d_model, in the papers of the mixers (docs/models.md).
PAPER_WIDTHS: dict[str, tuple[float, float]] = {
    "gla": (0.5, 1.0),
    "retnet": (1.0, 2.0),
    "delta_net": (1.0, 1.0),
    "gated_delta_net": (0.75, 1.5),
    "kda": (1.0, 1.0),
}

# The metadata of options: the mixers that read them.
_MLSTM = {"mixers": ("mlstm_exp", "mlstm_sig")}
_RECURRENT = {"mixers": get_args(Mixer)[:-1]}
_WIDTHS = {"mixers": tuple(PAPER_WIDTHS)}
_CONVOLVED = {"mixers": ("mamba2", "delta_net", "gated_delta_net", "kda")}
_DELTA = {"mixers": ("delta_net", "gated_delta_net", "kda")}
_MAMBA = {"mixers": ("mamba2",)}
_ATTENTION = {"mixers": ("attention",)}

MAX_SIZE = 2**31 - 1  # the largest size; products of two sizes fit into 64 bits


class _Values:
    """A descriptor whose value is the fields of a config by name; None for the class, and so where nothing is given."""

    def __get__(self, config: ModelConfig | None, owner: object = None) -> dict[str, Any] | None:
        return None if config is None else vars(config)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a :class:`LanguageModel`; the defaults are the paper's (appendix E.2).

    Another value than the default for an option that no mixer of the blocks reads is an error. It is none where
    ``dataclasses.replace`` keeps the value, for example with another mixer, or where :meth:`from_dict` reads it.

    Attributes:
        d_model: width of the residual stream.
        num_blocks: number of blocks.
        num_heads: number of heads. The head dimension of the mLSTM and of attention is dhv = d_model / num_heads, which
            has to be a whole number. Those of other mixers follow from key_width and value_width.
        mixer: the sequence mixer of every block: "mlstm_exp" (1)-(8), "mlstm_sig" (22)-(24), "mamba2", "retnet", "gla",
            "delta_net", "gated_delta_net", "kda", or "attention", causal and rotary. docs/models.md describes them.
        layers: the mixers of the blocks in order, instead of ``mixer``; the pattern is repeated, and cut off after the
            last block. ``["gated_delta_net"] * 3 + ["attention"]`` makes every fourth block attention.
        vocab_size: number of tokens; 50257 is that of the GPT-NeoX tokenizer.
        qk_factor: dqk / dhv of the mLSTM.
        ffn_factor: hidden width of the SwiGLU divided by d_model, before rounding.
        ffn_multiple: the hidden width of the SwiGLU is rounded up to a multiple of this.
        gate_soft_cap: c of (110) for the pre-activations of the input and the forget gate.
        logit_soft_cap: c of (110) for the logits.
        norm_eps: epsilon of the RMSNorms.
        head_norm_eps: epsilon of the norm over each head, and of that over all of mamba2's channels.
        head_norm: "layer" (LayerNorm) or "rms" (RMSNorm).
        input_gate_bias: initial bias of the input gate of every head.
        input_gate_trainable: False freezes the input gate at weights 0 and its initial bias.
        forget_gate_bias: initial bias of the forget gate of the first and of the last head; equally spaced between.
        key_width: width of all keys together divided by d_model, for gla, retnet, delta_net, gated_delta_net and kda;
            None is that of the mixer's paper.
        value_width: the same for values.
        conv_size: tokens that the short convolutions of mamba2, delta_net, gated_delta_net and kda see.
        negative_eigenvalues: write strengths of delta_net, gated_delta_net and kda reach to 2 instead of 1, so that a
            step can reverse the sign of what is stored, as state tracking needs.
        mamba_expand: width of mamba2's values divided by d_model.
        mamba_head_dim: value dimension of mamba2's heads; divides mamba_expand * d_model, and replaces num_heads there.
        mamba_state_dim: key dimension of mamba2's heads.
        num_kv_heads: heads of the keys and values of attention (grouped-query attention); divides num_heads. None is
            num_heads.
        window: number of tokens that a token of attention sees, itself included; None is all of its document.
        attention_sinks: each head of attention learns the logit of a key whose value is 0, so that it can attend to
            nothing.
        rope_base: base of the frequencies of the rotary embedding of attention.
        chunk_size: steps between the states that are stored for the backward; None lets the operator choose.
        backend: backend of the operator; None lets it choose.
        batch_invariant: the outputs of a sequence do not depend on the other sequences of the batch, not even in the
            last bit. It takes time, see docs/numerics.md.

    Raises:
        ValueError: a field is out of range, or no mixer of the blocks reads it; the message names the field, what was
            given and what is allowed.
    """

    d_model: int
    num_blocks: int
    num_heads: int
    mixer: Mixer = "mlstm_exp"
    layers: tuple[Mixer, ...] | None = None
    vocab_size: int = 50257
    qk_factor: float = dataclasses.field(default=0.5, metadata=_MLSTM)
    ffn_factor: float = 8 / 3
    ffn_multiple: int = 64
    gate_soft_cap: float = dataclasses.field(default=15.0, metadata=_MLSTM)
    logit_soft_cap: float = 30.0
    norm_eps: float = 1e-6
    head_norm_eps: float = dataclasses.field(default=1e-6, metadata=_RECURRENT)
    head_norm: HeadNormKind = dataclasses.field(default="layer", metadata=_MLSTM)
    input_gate_bias: float = dataclasses.field(default=-10.0, metadata=_MLSTM)
    input_gate_trainable: bool = dataclasses.field(default=True, metadata=_MLSTM)
    forget_gate_bias: tuple[float, float] = dataclasses.field(default=(3.0, 6.0), metadata=_MLSTM)
    key_width: float | None = dataclasses.field(default=None, metadata=_WIDTHS)
    value_width: float | None = dataclasses.field(default=None, metadata=_WIDTHS)
    conv_size: int = dataclasses.field(default=4, metadata=_CONVOLVED)
    negative_eigenvalues: bool = dataclasses.field(default=False, metadata=_DELTA)
    mamba_expand: int = dataclasses.field(default=2, metadata=_MAMBA)
    mamba_head_dim: int = dataclasses.field(default=64, metadata=_MAMBA)
    mamba_state_dim: int = dataclasses.field(default=128, metadata=_MAMBA)
    num_kv_heads: int | None = dataclasses.field(default=None, metadata=_ATTENTION)
    window: int | None = dataclasses.field(default=None, metadata=_ATTENTION)
    attention_sinks: bool = dataclasses.field(default=False, metadata=_ATTENTION)
    rope_base: float = dataclasses.field(default=10_000.0, metadata=_ATTENTION)
    chunk_size: int | None = dataclasses.field(default=None, metadata=_RECURRENT)
    backend: str | None = dataclasses.field(default=None, metadata=_RECURRENT)
    batch_invariant: bool = False
    # Fields that another config or a stored one has, and that the caller has not given; dataclasses.replace passes it.
    _kept: InitVar[Mapping[str, Any] | None] = _Values()

    def __post_init__(self, _kept: Mapping[str, Any] | None) -> None:
        for field in ("forget_gate_bias", "layers"):
            object.__setattr__(self, field, _hashable(getattr(self, field)))
        self._check_fields()
        for mixer in self.mixer_counts:
            self._check_mixer(mixer)
        self._check_unread(_kept or {})

    def _check_unread(self, kept: Mapping[str, Any]) -> None:
        """Raise ValueError where an option that no mixer of the blocks reads has a value that was not kept."""
        mixers = sorted(self.mixer_counts)
        for option in dataclasses.fields(self):
            readers, given = option.metadata.get("mixers", mixers), getattr(self, option.name)
            if given != option.default and not set(readers) & {*mixers} and kept.get(option.name) != given:
                chosen, having = (", ".join(map(repr, names)) for names in (mixers, readers))
                allowed = f"{option.default!r} with {chosen}: only {having} {'has' if len(readers) == 1 else 'have'} it"
                _require(False, option.name, given, allowed)

    def _check_fields(self) -> None:
        """Raise ValueError where a field is out of range."""
        for field in (
            "d_model", "num_blocks", "num_heads", "vocab_size", "ffn_multiple", "conv_size", "mamba_expand",
            "mamba_head_dim", "mamba_state_dim",
        ):  # fmt: skip
            value = getattr(self, field)
            _require(_is_count(value), field, value, f"an int from 1 to {MAX_SIZE}")
        for field in ("num_kv_heads", "window", "chunk_size"):
            value = getattr(self, field)
            _require(value is None or _is_count(value), field, value, "None or an int of at least 1")
        for field, allowed in (("mixer", get_args(Mixer)), ("head_norm", get_args(HeadNormKind))):
            value = getattr(self, field)
            _require(value in allowed, field, value, f"one of {', '.join(map(repr, allowed))}")
        for field in (
            "qk_factor", "ffn_factor", "gate_soft_cap", "logit_soft_cap", "norm_eps", "head_norm_eps", "rope_base",
        ):  # fmt: skip
            value = getattr(self, field)
            _require(_is_number(value) and value > 0, field, value, f"a number above 0 and at most {MAX_SIZE}")
        for field in ("key_width", "value_width"):
            value = getattr(self, field)
            ok = value is None or (_is_number(value) and value > 0)
            _require(ok, field, value, f"None or a number above 0 and at most {MAX_SIZE}")
        for field in ("input_gate_trainable", "negative_eigenvalues", "attention_sinks", "batch_invariant"):
            value = getattr(self, field)
            _require(isinstance(value, bool), field, value, "True or False")
        _require(
            _is_number(self.input_gate_bias), "input_gate_bias", self.input_gate_bias, f"a number of at most {MAX_SIZE}"
        )
        pair = self.forget_gate_bias
        _require(
            isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair)),
            "forget_gate_bias", pair, "two finite numbers",
        )  # fmt: skip
        _require(
            self.backend is None or (isinstance(self.backend, str) and self.backend in BACKENDS),
            "backend", self.backend, f"None or one of {', '.join(map(repr, BACKENDS))}",
        )  # fmt: skip
        _require(
            self.ffn_dim >= 1, "ffn_factor", self.ffn_factor, f"one that makes ffn_factor * {self.d_model} at least 1"
        )
        self._check_layers()

    def _check_layers(self) -> None:
        """Raise ValueError unless ``layers`` is None or a pattern of mixers for the blocks."""
        layers, names = self.layers, get_args(Mixer)
        if layers is None:
            return
        ok = isinstance(layers, tuple) and bool(layers) and all(name in names for name in layers)
        _require(ok, "layers", layers, f"None or a sequence of {', '.join(map(repr, names))}")
        _require(self.mixer == "mlstm_exp", "mixer", self.mixer, "no mixer together with layers")

    def _check_mixer(self, mixer: str) -> None:
        """Raise ValueError where a field does not fit a mixer of the blocks."""
        head = self.d_model // self.num_heads
        if mixer in ("attention", "mlstm_exp", "mlstm_sig"):
            _require(
                self.d_model % self.num_heads == 0,
                "num_heads", self.num_heads, f"a divisor of d_model, {self.d_model}",
            )  # fmt: skip
        if mixer == "attention":
            _require(head % 2 == 0, "num_heads", self.num_heads, "an even d_model / num_heads for attention")
            _require(
                self.num_kv_heads is None or self.num_heads % self.num_kv_heads == 0,
                "num_kv_heads", self.num_kv_heads, f"None or a divisor of num_heads, {self.num_heads}",
            )  # fmt: skip
        elif mixer == "mamba2":
            width = self.mamba_expand * self.d_model
            _require(
                width % self.mamba_head_dim == 0,
                "mamba_head_dim", self.mamba_head_dim, f"a divisor of mamba_expand * d_model, {width}",
            )  # fmt: skip
        elif mixer in PAPER_WIDTHS:
            for field, factor in zip(("key_width", "value_width"), self._widths(mixer), strict=True):
                _require(
                    _head_dim(factor, self.d_model, self.num_heads) is not None,
                    field, factor, f"one that makes {field} * {self.d_model} / {self.num_heads} a whole number above 0",
                )  # fmt: skip
            key_dim = _head_dim(self._widths(mixer)[0], self.d_model, self.num_heads)
            _require(
                mixer != "retnet" or (key_dim is not None and key_dim % 2 == 0),
                "num_heads",
                self.num_heads,
                "one that makes retnet's key dimension even",
            )
        else:
            dqk = self.qk_factor * head
            _require(
                dqk >= 1 and dqk == int(dqk),
                "qk_factor", self.qk_factor, f"one that makes qk_factor * {head} a whole number above 0",
            )  # fmt: skip

    def _widths(self, mixer: str) -> tuple[float, float]:
        """Return the widths of all keys and of all values of a mixer, divided by d_model."""
        key, value = PAPER_WIDTHS[mixer]
        return (
            key if self.key_width is None else self.key_width,
            value if self.value_width is None else self.value_width,
        )

    @property
    def block_mixers(self) -> tuple[Mixer, ...]:
        """The mixer of every block."""
        pattern = self._pattern
        return (pattern * -(-self.num_blocks // len(pattern)))[: self.num_blocks]

    @property
    def mixer_counts(self) -> dict[Mixer, int]:
        """The number of blocks with each mixer, in the order of the first ones."""
        pattern, counts = self._pattern, dict[Mixer, int]()
        for index, mixer in enumerate(pattern[: self.num_blocks]):
            counts[mixer] = counts.get(mixer, 0) + (self.num_blocks - index - 1) // len(pattern) + 1
        return counts

    @property
    def _pattern(self) -> tuple[Mixer, ...]:
        """The mixers that are repeated over the blocks."""
        return (self.mixer,) if self.layers is None else self.layers

    def for_block(self, index: int) -> ModelConfig:
        """Return the same config with the mixer of block ``index`` as ``mixer``, and no ``layers``."""
        if self.layers is None:
            return self
        return dataclasses.replace(self, mixer=self.layers[index % len(self.layers)], layers=None)

    @property
    def head_dim(self) -> int:
        """The value dimension of a head of ``mixer``, dhv."""
        if self.mixer == "mamba2":
            return self.mamba_head_dim
        if self.mixer in PAPER_WIDTHS:
            return _head_dim(self._widths(self.mixer)[1], self.d_model, self.num_heads) or 0
        return self.d_model // self.num_heads

    @property
    def qk_head_dim(self) -> int:
        """The query and key dimension of a head of ``mixer``, dqk."""
        if self.mixer == "mamba2":
            return self.mamba_state_dim
        if self.mixer in PAPER_WIDTHS:
            return _head_dim(self._widths(self.mixer)[0], self.d_model, self.num_heads) or 0
        head = self.d_model // self.num_heads
        return head if self.mixer == "attention" else int(self.qk_factor * head)

    @property
    def ffn_dim(self) -> int:
        """The hidden width of the SwiGLU."""
        # A product such as 8/3 * 768 may exceed its multiple by a rounding error.
        return self.ffn_multiple * math.ceil(round(self.ffn_factor * self.d_model, 6) / self.ffn_multiple)

    @classmethod
    def named(
        cls, name: str, num_heads: int | None = None, mixer: Mixer = "mlstm_exp", **overrides: Any
    ) -> ModelConfig:
        """Return the config of one of the paper's models (table 4), or of xLSTM-7B.

        Args:
            name: "160M" (6 or 12 heads), "400M" (8 or 16), "1.4B" (8, 4 or 16) or "7B" (8, vocabulary of 50304).
            num_heads: one of the numbers above; None is the first of them.
            mixer: the sequence mixer.
            overrides: values of other fields.

        Raises:
            ValueError: there is no model of that name, or none with so many heads; the message lists the models.
        """
        _require(isinstance(name, str) and name in SIZES, "name", name, f"one of {', '.join(map(repr, SIZES))}")
        size = SIZES[name]
        num_heads = size.num_heads[0] if num_heads is None else num_heads
        _require(
            num_heads in size.num_heads,
            "num_heads", num_heads, f"one of {', '.join(map(str, size.num_heads))} for {name!r}",
        )  # fmt: skip
        fields = size._asdict() | {"num_heads": num_heads, "mixer": mixer} | overrides
        return cls(**fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Return the config whose :meth:`to_dict` is given.

        Args:
            fields: the stored fields. Options that no mixer of the blocks reads are kept as they are, without effect.
            overrides: other values of some fields, checked as the constructor does; such options are errors.

        Raises:
            TypeError: fields is not a mapping.
            ValueError: a field is unknown, missing or out of range, or no mixer reads an option of overrides.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"fields: got {type(fields).__name__}, expected a mapping such as to_dict returns")
        allowed = {f.name for f in dataclasses.fields(cls)}
        needed = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        given = {**fields, **(overrides or {})}
        unknown, missing = sorted(map(str, set(given) - allowed)), sorted(needed - set(given))
        _require(not unknown, "fields", unknown, f"only {', '.join(sorted(allowed))}")
        _require(not missing, "fields", sorted(given), f"also {', '.join(missing)}")
        return cls(**given, _kept={name: _hashable(value) for name, value in fields.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values that JSON can hold."""
        layers = None if self.layers is None else list(self.layers)
        return dataclasses.asdict(self) | {"forget_gate_bias": list(self.forget_gate_bias), "layers": layers}


def check_config(config: object, *mixers: str) -> None:
    """Raise unless config is a ModelConfig with one of these mixers in all blocks."""
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected a ModelConfig")
    allowed = f"one of {', '.join(map(repr, mixers))}"
    for mixer in config.mixer_counts:
        _require(mixer in mixers, "config.mixer" if config.layers is None else "config.layers", mixer, allowed)


def _head_dim(width: float, d_model: int, num_heads: int) -> int | None:
    """Return the channels of a head of num_heads that are width * d_model wide together; None if it is no whole number.

    A width such as 4096 / 2304 is a rounded number.
    """
    dim = width * d_model / num_heads
    return round(dim) if round(dim) >= 1 and abs(dim - round(dim)) <= 1e-9 * dim else None


def _hashable(value: Any) -> Any:
    """Return a value as a config has it: a tuple for a list, since JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def _require(ok: bool, field: str, given: object, allowed: str) -> None:
    """Raise ValueError, with a message that names the field, unless ``ok``."""
    if not ok:
        raise ValueError(f"{field}: got {given!r}, expected {allowed}")


def _is_number(x: object) -> bool:
    """Return whether x is a finite number of at most MAX_SIZE."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= MAX_SIZE  # false for NaN


def _is_count(x: object) -> bool:
    """Return whether x is an int from 1 to MAX_SIZE."""
    return isinstance(x, int) and not isinstance(x, bool) and 1 <= x <= MAX_SIZE
