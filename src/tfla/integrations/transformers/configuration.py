"""The configuration of tfla's language model as one of transformers."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig

from tfla.nn.config import ModelConfig

# Defaults of the fields that a ModelConfig requires: those of the paper's model of 160M parameters.
SMALLEST_SIZE = {"d_model": 768, "num_blocks": 12, "num_heads": 6}
FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))


class TflaConfig(PreTrainedConfig):
    """The configuration of a :class:`TflaForCausalLM`.

    It has the fields of :class:`tfla.nn.ModelConfig` under the same names. ``hidden_size``, ``num_hidden_layers`` and
    ``num_attention_heads`` are other names of ``d_model``, ``num_blocks`` and ``num_heads``.

    Args:
        kwargs: fields of :class:`tfla.nn.ModelConfig`, whose defaults are those of the paper's model of 160M
            parameters; ``use_cache`` (True) and ``tie_word_embeddings`` (False, which gives the unembedding a weight of
            its own); and the arguments of every configuration of transformers.

    Raises:
        ValueError: a field is out of range, no mixer of the blocks reads it, or it is given by two names with two
            values; the message names the field, what was given and what is allowed.
    """

    model_type = "tfla"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model", "num_hidden_layers": "num_blocks", "num_attention_heads": "num_heads",
    }  # fmt: skip

    def __init__(self, **kwargs: Any) -> None:
        for alias, name in self.attribute_map.items():
            if alias in kwargs:
                value = kwargs.pop(alias)
                if kwargs.setdefault(name, value) != value:
                    raise ValueError(f"{alias}: got {value}, expected {kwargs[name]}, the {name} that is also given")
        given = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        stored = given if "model_type" in kwargs else {}  # to_dict and save_pretrained write it
        for name, value in ModelConfig.from_dict(SMALLEST_SIZE | stored, given).to_dict().items():
            setattr(self, name, value)
        self.use_cache: bool = kwargs.pop("use_cache", True)
        self.tie_word_embeddings: bool = kwargs.pop("tie_word_embeddings", False)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, token, kwargs.pop(token, None))
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration that :meth:`to_dict` has written, with other values of the fields in kwargs.

        Options that no mixer of the blocks reads are kept as they are, without effect; in kwargs they are errors.

        Raises:
            ValueError: a field is out of range, or no mixer reads an option of kwargs; the message names it.
        """
        stored = {"model_type": cls.model_type, **config_dict}
        given = {cls.attribute_map.get(name, name): value for name, value in kwargs.items()}
        changes = {name: value for name, value in given.items() if name in FIELDS}
        dataclasses.replace(cls(**stored).to_model_config(), **changes)
        return super().from_dict(stored, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Leave the class as it is: a saved model imports it from tfla, so that its source is not copied."""

    def to_model_config(self) -> ModelConfig:
        """Return the same architecture as a configuration of tfla.nn.

        Raises:
            ValueError: a field was changed to a value out of range; the message names it.
        """
        return ModelConfig.from_dict({name: getattr(self, name) for name in FIELDS})


AutoConfig.register("tfla", TflaConfig, exist_ok=True)
