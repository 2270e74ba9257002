"""Generation of text with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from tfla._util.device import pick_device
from tfla._util.errors import UserError, one_line
from tfla.nn import LanguageModel, generate
from tfla.nn.pretrained import read_config
from tfla.train.checkpoint import find_model
from tfla.train.config import GenerateConfig
from tfla.train.documents import Document
from tfla.train.tokenizer import Tokenizer, find_tokenizer


def sample(config: GenerateConfig) -> Iterator[str]:
    """Return an iterator over the text that continues the prompt, each part as soon as its characters are complete.

    Raises:
        UserError: there is no model, or an option is out of range; the call itself raises it. The iteration raises it
            if the model's weights or state are not finite.
    """
    device = pick_device(config.device)
    try:
        directory = find_model(config.checkpoint)
        # Read before the tokenizer, because its error names the layouts of other libraries.
        vocab_size = read_config(directory, {"backend": None}).vocab_size
        tokenizer = find_tokenizer(directory, config.tokenizer)
        if tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"tokenizer: got one of {tokenizer.vocab_size} tokens, expected at most {vocab_size}, the model's"
            )
        # The backend of the training may be missing on this machine.
        model = LanguageModel.from_pretrained(directory, device, backend=None)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: out of memory
        raise UserError(one_line(error)) from error
    return continue_text(model, tokenizer, config)


def continue_text(model: LanguageModel, tokenizer: Tokenizer, config: GenerateConfig) -> Iterator[str]:
    """Return what :func:`sample` does, for a loaded model; the checkpoint and the device of config are not used."""
    # Python decodes bytes of a command line that are not UTF-8 as surrogates.
    prompt = Document("prompt", config.prompt.encode("utf-8", "surrogateescape"))
    ids = torch.from_numpy(tokenizer.encode([prompt])[0].astype(np.int64))[None].to(model.embedding.weight.device)
    try:
        tokens = generate(
            model, ids, config.max_new_tokens, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
            seed=config.seed, stop_token=tokenizer.bos,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise UserError(one_line(error)) from error
    return _decoded(tokens, tokenizer.decoder(ids[0].tolist()))


def _decoded(tokens: Iterator[torch.Tensor], decode: Callable[[int], str]) -> Iterator[str]:
    """Return the text of each token, and turn errors of the model into UserErrors."""
    try:
        for token in tokens:
            yield decode(int(token))
    except (ValueError, torch.OutOfMemoryError) as error:
        raise UserError(one_line(error)) from error
