"""The order-2 byte model: what counting pairs of bytes before a byte gets, a bar for any model that learns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfla.train.tokenizer import ByteTokenizer

SYMBOLS, BOS = ByteTokenizer.vocab_size, ByteTokenizer.bos


class ByteTrigram:
    """p(c | a b) with Witten-Bell backoff to p(c | b), p(c) and uniform.

    The more different bytes followed a context, the more weight goes to the shorter one:
    p(c | a b) = (N(a b c) + K(a b) p(c | b)) / (N(a b) + K(a b)), K counting the different c. Nothing is tuned.
    Contexts do not reach over the start of a document.

    Args:
        tokens: (N,) stream of the byte tokenizer to count on.
    """

    def __init__(self, tokens: NDArray[np.integer]) -> None:
        a, b, c = _triples(tokens)
        self.triples = np.bincount((a * SYMBOLS + b) * SYMBOLS + c, minlength=SYMBOLS**3).astype(np.uint32)
        self.pairs = np.bincount(b * SYMBOLS + c, minlength=SYMBOLS**2)
        self.singles = np.bincount(c, minlength=SYMBOLS)
        grid = self.triples.reshape(-1, SYMBOLS)
        self.after_pair = grid.sum(1, dtype=np.int64), np.count_nonzero(grid, 1)
        rows = self.pairs.reshape(-1, SYMBOLS)
        self.after_single = rows.sum(1), np.count_nonzero(rows, 1)

    def nats(self, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
        """-log p of every token of a stream but the first, given those before it: (N,) -> (N - 1,)."""
        a, b, c = _triples(tokens)
        p = (self.singles[c] + np.count_nonzero(self.singles) / SYMBOLS) / (
            self.singles.sum() + np.count_nonzero(self.singles)
        )
        p = _back_off(self.pairs[b * SYMBOLS + c], self.after_single, b, p)
        p = _back_off(self.triples[(a * SYMBOLS + b) * SYMBOLS + c], self.after_pair, a * SYMBOLS + b, p)
        return -np.log(p)


def _back_off(
    count: NDArray[np.integer],
    after: tuple[NDArray[np.integer], NDArray[np.integer]],
    context: NDArray[np.int64],
    shorter: NDArray[np.float64],
) -> NDArray[np.float64]:
    total, kinds = after[0][context], after[1][context]
    seen = total + kinds
    return np.where(seen > 0, (count + kinds * shorter) / np.maximum(seen, 1), shorter)


def _triples(tokens: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Each token c but the first with the two before it, a b; bos where the document starts later than that."""
    stream = np.asarray(tokens, np.int64)
    b, c = stream[:-1], stream[1:]
    a = np.concatenate([[BOS], stream[:-2]])
    return np.where(b == BOS, BOS, a), b, c
