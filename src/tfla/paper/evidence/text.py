"""Text by its bytes: the loss at each position, up to many times the length of the training sequences."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tfla._util.errors import UserError
from tfla.nn import LanguageModel
from tfla.paper.evidence.task import Batch, Row, losses
from tfla.train.data import FILES
from tfla.train.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class Text:
    """Windows of a text's bytes; the byte after each one is asked. Longer windows for measuring lie in one document."""

    length: int
    """Bytes of a training window."""
    longest: int
    """Bytes of the windows on which models are measured, a power of 2 times the length."""
    folder: str = field(default="", compare=False)
    """The folder of the tokens, as :func:`tfla.train.data.prepare_tokens` writes it."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens: bytes, and the start of a document."""
        return ByteTokenizer.vocab_size

    def sampler(self, batch_size: int, generator: torch.Generator) -> Callable[[], Batch]:
        """Return a function that draws windows of the text to train on."""
        stream, offsets = self._stream(0, generator), torch.arange(self.length + 1, device=generator.device)

        def sample() -> Batch:
            places = torch.randint(
                len(stream) - self.length, (batch_size, 1), generator=generator, device=generator.device
            )
            windows = stream[places + offsets].long()
            return Batch(windows[:, :-1], windows[:, 1:])

        return sample

    def measure(self, model: LanguageModel, generator: torch.Generator, sequences: int) -> list[Row]:
        """Return the mean loss in bits per byte by position, in parts that grow by a factor of 2.

        Args:
            model: the model.
            generator: its device is that of the windows, which are the same for every seed.
            sequences: the number of windows.

        Raises:
            UserError: no document of the held-out text is long enough.
        """
        stream = self._stream(1, generator)
        starts = [0, *(stream[1:] == ByteTokenizer.vocab_size - 1).nonzero().add(1).flatten().tolist()]
        places = [
            place
            for first, end in zip(starts, [*starts[1:], len(stream)], strict=True)
            for place in range(first, end - self.longest - 1, self.longest)
        ]
        if not places:
            raise UserError(f"length: no held-out document has {self.longest} bytes, the longest window to measure on")
        chosen = torch.tensor(places, device=stream.device)[:: max(1, len(places) // sequences)][:sequences, None]
        windows = stream[chosen + torch.arange(self.longest + 1, device=stream.device)].long()
        bits = losses(model, windows[:, :-1], windows[:, 1:]).double().mean(0) / math.log(2)
        rows, first, end = [], 0, max(1, self.length // 8)
        while end <= self.longest:
            rows.append({"end": end, "bits_per_byte": bits[first:end].mean().item()})
            first, end = end, 2 * end
        return rows

    def _stream(self, part: int, generator: torch.Generator) -> Tensor:
        """Return the text to train on, 0, or the held-out one, 1, as (N,) int16 on the device of a generator."""
        path = Path(self.folder) / FILES[part]
        if os.path.getsize(path) < 2 * (self.length + 2):
            raise UserError(f"{path}: got fewer than {self.length + 2} bytes of text, which one window needs")
        return torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int16)).to(generator.device)
