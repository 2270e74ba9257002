"""State tracking: what is the product of the elements of a group so far?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import torch
from torch import Tensor

from tfla.nn import LanguageModel
from tfla.paper.evidence.task import Batch, Row, answers

SYMMETRIC, CYCLIC = "S", "Z"


@lru_cache
def group_table(group: str) -> Tensor:
    """Return the table of a group: entry (a, b) is the number of the product a b, "a after b" for permutations.

    Args:
        group: "Z2" is parity, "Zn" addition modulo n, "Sn" the permutations of n things, n <= 5.

    Raises:
        ValueError: there is no such group.
    """
    kind, number = group[:1], group[1:]
    if kind == CYCLIC and number.isdecimal() and int(number) > 1:
        index = torch.arange(int(number))
        return (index[:, None] + index) % int(number)
    if kind == SYMMETRIC and number in ("2", "3", "4", "5"):
        elements = list(permutations(range(int(number))))
        place = {element: n for n, element in enumerate(elements)}
        return torch.tensor([[place[tuple(a[i] for i in b)] for b in elements] for a in elements])
    raise ValueError(f"group: got {group!r}, expected Z and a number of at least 2, or S2, S3, S4 or S5")


def products(table: Tensor, elements: Tensor) -> Tensor:
    """Return the products of the first 1, 2, ... elements (B, T) of a group, in log2(T) steps."""
    found, distance = elements, 1
    while distance < found.shape[1]:
        found = torch.cat([found[:, :distance], table[found[:, :-distance], found[:, distance:]]], 1)
        distance *= 2
    return found


@dataclass(frozen=True)
class Tracking:
    """Sequences of random elements of a group; the product of all elements so far is asked after each of them."""

    group: str
    """As :func:`group_table` has it."""
    length: int
    """Tokens of a training sequence."""
    longest: int
    """Tokens of the sequences on which models are measured, a power of 2 times the length."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens, which are the elements of the group."""
        return len(group_table(self.group))

    def sampler(self, batch_size: int, generator: torch.Generator) -> Callable[[], Batch]:
        """Return a function that draws a batch of random elements."""
        table = group_table(self.group).to(generator.device)
        return lambda: self._batch(table, batch_size, self.length, generator)

    def measure(self, model: LanguageModel, generator: torch.Generator, sequences: int) -> list[Row]:
        """Return the fraction of right answers up to the training length, from there to its double, and so on."""
        table = group_table(self.group).to(generator.device)
        ids, targets = self._batch(table, sequences, self.longest, generator)
        right = (answers(model, ids) == targets).double().mean(0)
        rows, first, end = [], 0, self.length
        while end <= self.longest:
            rows.append({"end": end, "accuracy": right[first:end].mean().item(), "last": right[end - 1].item()})
            first, end = end, 2 * end
        return rows

    def _batch(self, table: Tensor, count: int, length: int, generator: torch.Generator) -> Batch:
        """Return sequences of random elements and their products by the table of the group."""
        ids = torch.randint(len(table), (count, length), generator=generator, device=generator.device)
        return Batch(ids, products(table, ids))
