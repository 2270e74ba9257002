"""How weights start.

The paper states the start of the gates (appendix E.2): weights 0, input gate bias -10, forget gate biases equally
spaced in [3, 6]. It does not state the others; these are usual for xLSTM models: "small init" (Nguyen and Salazar,
2019), and a standard deviation that falls with depth (as in GPT-J 6B) for what is added to the residual stream.
"""

from __future__ import annotations

import math

from torch import nn


def input_std(d_model: int) -> float:
    """Of embeddings, of the unembedding and of all projections that read the residual stream: sqrt(2 / (5 d_model))."""
    return math.sqrt(2 / (5 * d_model))


def output_std(d_model: int, num_blocks: int) -> float:
    """Of projections whose output is added to the residual stream: 2 / (num_blocks sqrt(d_model))."""
    return 2 / (num_blocks * math.sqrt(d_model))


class Projection(nn.Linear):
    """Linear layer without bias, its weight (out_features, in_features) drawn from N(0, std^2)."""

    def __init__(self, in_features: int, out_features: int, std: float) -> None:
        self.std = std  # nn.Linear's own constructor draws the weight
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew, from torch's global generator."""
        nn.init.normal_(self.weight, std=self.std)
