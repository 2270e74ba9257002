"""The short causal convolution before a recurrence."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfla.nn import batch_invariance
from tfla.nn.layers import at_least_float32, local, recomputed
from tfla.nn.mixers import fused_convolution, plain_convolution
from tfla.nn.mixers.documents import Documents


class ShortConvolution(nn.Module):
    """A causal convolution of each channel over the last ``size`` tokens of its document, followed by SiLU.

    y_t = silu(sum_j w_j x_{t - j} + b) for j from 0 to size - 1, with the x of earlier documents left out.

    Args:
        channels: number of channels.
        size: number of tokens that an output depends on.
        bias: whether there is a bias b.
    """

    batch_invariant = False

    def __init__(self, channels: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly from +-1 / sqrt(size), as torch's convolutions do."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(self.size), 1 / math.sqrt(self.size))

    def forward(self, x: Tensor, before: Tensor | None, documents: Documents, carried: Tensor | None = None) -> Tensor:
        """Convolve whole sequences.

        Args:
            x: (B, T, channels).
            before: (B, size - 1, channels), or with packed sequences (sequences, size - 1, channels): the inputs before
                the first token; None is zeros.
            documents: the documents of the call.
            carried: (1, T, channels), what :meth:`carried` returns, where ``documents`` are not packed; or None.

        Returns:
            (B, T, channels) in x's dtype.
        """
        if before is not None and documents.offsets is not None:
            carried, before = self.carried(before, documents), None
        inputs = x if before is None else torch.cat([before.to(x.dtype), x], 1)
        return self._convolve(inputs, 0 if before is None else self.size - 1, documents.boundaries(), carried)

    def step(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve one token of each sequence.

        Args:
            x: (B, channels).
            before: (B, size - 1, channels).

        Returns:
            (B, channels) in x's dtype, and the inputs before the next token.
        """
        y, inputs = self.steps(x[:, None], before)
        return y[:, 0], inputs[:, 1:]

    def steps(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a few tokens of each sequence.

        Args:
            x: (B, T, channels).
            before: (B, size - 1, channels).

        Returns:
            (B, T, channels) in x's dtype, and the inputs before and of the tokens, (B, size - 1 + T, channels).
        """
        inputs = torch.cat([before.to(x.dtype), x], 1)
        return self._convolve(inputs, self.size - 1, None, None), inputs

    def _convolve(self, inputs: Tensor, before: int, first: Tensor | None, carried: Tensor | None) -> Tensor:
        """Convolve by the kernels for GPUs where they take the call, else in PyTorch.

        Args:
            inputs: (B, before + T, channels), the inputs after those before the first token.
            before: the number of inputs before the first token, size - 1, or 0 where they are zeros.
            first: (B, T) or (1, T), the index of the first token of each token's document, or None.
            carried: (1, T, channels), to be added before the activation, or None.
        """
        weight, bias = local(self.weight), _local(self.bias)
        plain = self.batch_invariant or carried is not None  # prefill and decoding have the same bits in PyTorch
        if not plain and fused_convolution.unsupported(inputs, weight, bias) is None:
            return fused_convolution.convolve(inputs, weight, bias, first, before)
        silu = batch_invariance.silu if self.batch_invariant else F.silu
        if before < self.size - 1:
            zeros = inputs.new_zeros(inputs.shape[0], self.size - 1, inputs.shape[2])
            inputs = torch.cat([zeros, inputs], 1)
        return recomputed(partial(plain_convolution.convolve, silu), inputs, weight, bias, first, carried)

    def last_inputs(self, x: Tensor, before: Tensor | None, documents: Documents) -> Tensor:
        """Return the inputs before the token after the last one, of the same document: (B, size - 1, channels).

        With packed sequences they are those of each sequence, (sequences, size - 1, channels). Arguments are those of
        :meth:`forward`.
        """
        back = torch.arange(1 - self.size, 0, device=x.device)  # the last inputs, counted from the end
        if documents.offsets is None:
            history = x.new_zeros(x.shape[0], self.size - 1, x.shape[2]) if before is None else before.to(x.dtype)
            inputs = torch.cat([history, x], 1)[:, x.shape[1] :]
            first = documents.boundaries()
            return inputs if first is None else torch.where((x.shape[1] + back >= first[:, -1:])[..., None], inputs, 0)
        at = documents.offsets[1:, None] + back  # (sequences, size - 1), the tokens of the last inputs
        inputs = torch.where((at >= documents.offsets[:-1, None])[..., None], x[0, at.clamp(0)], 0)
        return after_sequences(inputs, before, documents)

    def carried(self, before: Tensor, documents: Documents) -> Tensor:
        """Return the parts (1, T, channels) of the convolution of packed sequences that come from earlier calls.

        Args:
            before: (sequences, size - 1, channels), the inputs before the first token of each sequence.
            documents: the packed sequences.
        """
        age = documents.position(None)[0]  # (T,), the tokens of the sequence before each token, in this call
        sequence = documents.sequence().clamp(0, before.shape[0] - 1)
        weight = at_least_float32(local(self.weight))
        total = torch.zeros((), dtype=weight.dtype, device=before.device)
        for j in range(1, self.size):
            row = (age - j + self.size - 1).clamp(0, self.size - 2)
            term = at_least_float32(before[sequence, row]) * weight[:, self.size - 1 - j]
            total = total + torch.where((age < j)[:, None], term, 0)
        return total[None]


def inputs_after(inputs: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return the last inputs (B, size - 1, channels) after the first lengths (B,) of ``count`` tokens.

    Args:
        inputs: (B, size - 1 + count, channels), those before and of the tokens.
        lengths: (B,) int.
        count: the number of tokens.
    """
    last = lengths[:, None] + torch.arange(inputs.shape[1] - count, device=inputs.device)
    return inputs.gather(1, last.to(torch.int64)[..., None].expand(-1, -1, inputs.shape[2]))


def after_sequences(inputs: Tensor, before: Tensor | None, documents: Documents) -> Tensor:
    """Return the last inputs of packed sequences, with those before a sequence that is shorter.

    Args:
        inputs: (sequences, size - 1, channels), the last inputs of each sequence, zeros before its first token.
        before: (sequences, size - 1, channels), the inputs before the first token; None is zeros.
        documents: the packed sequences.
    """
    if before is None:
        return inputs
    assert documents.offsets is not None
    count = inputs.shape[1]
    token = torch.arange(-count, 0, device=inputs.device) + documents.offsets.diff()[:, None]  # within its sequence
    older = (token + count).clamp(0, count - 1)[..., None].expand_as(inputs)
    return torch.where((token >= 0)[..., None], inputs, before.to(inputs.dtype).gather(1, older))


def _local(parameter: Tensor | None) -> Tensor | None:
    """Return this process's part of a parameter, None for None."""
    return None if parameter is None else local(parameter)
