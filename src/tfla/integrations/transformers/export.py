"""The command that writes a trained model, with its tokenizer, into a folder that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfla._util import outputs
from tfla._util.errors import UserError, one_line, reason
from tfla._util.parsing import parse
from tfla.nn import LanguageModel
from tfla.nn.pretrained import CONFIG
from tfla.train.checkpoint import find_model
from tfla.train.tokenizer import HuggingFaceTokenizer, Tokenizer, find_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BYTES_BOS = "<|bos|>"  # the name of the token that starts a document of bytes


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained model and its tokenizer into a folder that transformers reads."""

    checkpoint: Path
    """The folder of a run (its newest checkpoint), a checkpoint, or a model that save_pretrained of tfla.nn wrote."""
    to: Path
    """The folder to write; files in it are replaced. The folder of a run or of a model of tfla is an error."""
    tokenizer: str | None = None
    """bytes, a tokenizer.json or a folder with one; None is the tokenizer that is saved with the model."""
    dtype: str | None = None
    """float32, bfloat16 or float16; None is the stored one."""


def export_command(args: Sequence[str]) -> int:
    """Run ``tfla export``."""
    config = parse(ExportConfig, args, "tfla export")
    export(config.checkpoint, config.to, config.tokenizer, config.dtype)
    print(f'saved in {config.to}: AutoModelForCausalLM.from_pretrained("{config.to}", trust_remote_code=True) loads it')
    return 0


def export(
    checkpoint: str | Path, directory: str | Path, tokenizer: str | None = None, dtype: str | None = None
) -> None:
    """Write a trained model and its tokenizer into a folder that transformers reads.

    The tokenizer of transformers gives each text the tokens of training, the start of a document first.

    Args:
        checkpoint: the folder of a run of ``tfla train`` (its newest checkpoint), a checkpoint, or a folder that
            :meth:`tfla.nn.LanguageModel.save_pretrained` wrote.
        directory: the folder to write, which is created if needed.
        tokenizer: "bytes", a tokenizer.json or a folder with one; None is the tokenizer that is saved with the model.
        dtype: "float32", "bfloat16" or "float16" for the weights; None is the stored one.

    Raises:
        UserError: there is no model or no tokenizer, one of them cannot be read or converted, or the folder cannot be
            written to or holds a run, a checkpoint or a model of tfla.nn; the message names it.
    """
    import torch

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise UserError(f"dtype: got {dtype!r}, expected float32, bfloat16 or float16")
    try:
        from tfla.integrations.transformers.modeling import TflaForCausalLM
    except ImportError as error:
        raise UserError('this needs transformers: pip install "tfla[train,transformers]"') from error
    source, directory = Path(checkpoint), Path(directory)
    outputs.check_folder("to", directory)
    _check_no_model_of_tfla(directory)
    folder = find_model(source)
    found = find_tokenizer(folder, tokenizer)
    try:
        model = LanguageModel.from_pretrained(folder, dtype=getattr(torch, dtype or "", None), backend=None)
        if found.vocab_size > model.config.vocab_size:
            raise UserError(
                f"tokenizer: got one of {found.vocab_size} tokens, expected at most {model.config.vocab_size}"
            )
        # A model ends a document with the token that starts the next one.
        ends = {"bos_token_id": found.bos, "eos_token_id": found.bos, "pad_token_id": found.bos}
        TflaForCausalLM.from_language_model(model, **ends).save_pretrained(directory)
        convert_tokenizer(found).save_pretrained(str(directory))
    except (OSError, ValueError) as error:
        raise UserError(one_line(error)) from error


def _check_no_model_of_tfla(directory: Path) -> None:
    """Raise UserError where the config.json of a run, a checkpoint or a model of tfla.nn would be replaced.

    Those of transformers have a ``model_type``.
    """
    path = directory / CONFIG
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError:  # broken, so that nothing is lost; errors of JSON and of Unicode are ValueErrors
        return
    except OSError as error:
        raise UserError(f"{path}: {reason(error)}") from error
    if isinstance(fields, dict) and "model_type" not in fields:
        raise UserError(
            f"to: got {directory}, whose {CONFIG} is not one of transformers but, for instance, that of a run or a "
            "model of tfla; expected another folder"
        )


def convert_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers that gives each text the tokens of a tokenizer of training, bos first."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, HuggingFaceTokenizer):
        inner, bos = type(tokenizer.inner).from_str(tokenizer.inner.to_str()), tokenizer.bos_token
    else:
        inner, bos = _bytes_tokenizer(tokenizer.vocab_size - 1), BYTES_BOS
    start = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos)])
    inner.post_processor = start
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), bos)
    # Training reads the names of special tokens in a text as plain text.
    return PreTrainedTokenizerFast(tokenizer_object=inner, split_special_tokens=True, **names)


def _bytes_tokenizer(num_bytes: int) -> Any:
    """Return a tokenizer of the library tokenizers whose tokens are the bytes, in order, and then bos."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    vocabulary = {character: byte for byte, character in enumerate(byte_characters(num_bytes))}
    inner = Inner(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(BYTES_BOS, special=True)])
    return inner


def byte_characters(num_bytes: int = 256) -> list[str]:
    """Return the character by which the library tokenizers represents each byte.

    Printable characters of Latin-1 represent themselves; the other bytes follow, in order, from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(num_bytes)]
