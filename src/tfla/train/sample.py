"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tfla.nn import LanguageModel, generate
from tfla.train import tokenizer as tokenizers
from tfla.train.checkpoint import find_model
from tfla.train.config import GenerateConfig
from tfla.train.device import pick_device
from tfla.train.documents import Document
from tfla.train.messages import UserError
from tfla.train.tokenizer import Tokenizer


def sample(config: GenerateConfig) -> Iterator[str]:
    """The continuation of the prompt, piece by piece as it becomes certain.

    Raises:
        UserError: there is no model, or an option is out of range. Raised by the call itself.
    """
    device = pick_device(config.device)
    directory = find_model(config.checkpoint)
    tokenizer = tokenizers.load(directory)
    try:
        # The backend that trained it may be missing here.
        model = LanguageModel.from_pretrained(directory, device, backend=None)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error
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
        raise UserError(str(error)) from error
    decode = tokenizer.decoder()
    return (decode(int(token)) for token in tokens)
