"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from tfla._util.errors import UserError, one_line, pick_device
from tfla.nn import LanguageModel, generate
from tfla.nn.pretrained import read_config
from tfla.train import tokenizer as tokenizers
from tfla.train.checkpoint import find_model
from tfla.train.config import GenerateConfig
from tfla.train.tokenizer import Document, Tokenizer


def sample(config: GenerateConfig) -> Iterator[str]:
    """Continue the prompt, piece by piece as the text becomes certain.

    Raises:
        UserError: there is no model, or an option is out of range; the call itself raises it. The iteration does where
            the model's weights or state are not finite.
    """
    device = pick_device(config.device)
    try:
        directory = find_model(config.checkpoint)
        # Before the tokenizer, since it names other layouts.
        vocab_size = read_config(directory, {"backend": None}).vocab_size
        tokenizer = tokenizers.find(directory, config.tokenizer)
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"tokenizer: got one of {tokenizer.vocab_size} tokens, expected at most {vocab_size}, the model's"
            )
        # The backend that trained it may be missing here.
        model = LanguageModel.from_pretrained(directory, device, backend=None)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: out of memory
        raise UserError(one_line(error)) from error
    return continue_text(model, tokenizer, config)


def continue_text(model: LanguageModel, tokenizer: Tokenizer, config: GenerateConfig) -> Iterator[str]:
    """:func:`sample` with a model that is in memory; config's checkpoint and device are not used."""
    # A command line hands over bytes that are no UTF-8 as surrogates.
    prompt = Document("prompt", config.prompt.encode("utf-8", "surrogateescape"))
    ids = torch.from_numpy(tokenizer.encode([prompt])[0].astype(np.int64))[None].to(model.embedding.weight.device)
    try:
        tokens = generate(
            model, ids, config.max_new_tokens, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
            seed=config.seed, stop_token=tokenizer.bos,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise UserError(one_line(error)) from error
    return _decoded(tokens, tokenizer.decoder())


def _decoded(tokens: Iterator[torch.Tensor], decode: Callable[[int], str]) -> Iterator[str]:
    try:
        for token in tokens:
            yield decode(int(token))
    except (ValueError, torch.OutOfMemoryError) as error:
        raise UserError(one_line(error)) from error
