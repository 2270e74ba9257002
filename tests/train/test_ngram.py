"""The order-2 byte model."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np

from tfla.train.demo import BOS, VOCAB_SIZE, ByteTrigram

TRAIN = np.array([BOS, *b"abcabdabcab", BOS, *b"bcbc", BOS, BOS, *b"aab"])


def by_hand(train: np.ndarray, stream: list[int], at: int) -> float:
    """Return p of stream[at] with Witten-Bell backoff, straight from its definition."""

    def context(tokens: list[int], i: int, length: int) -> tuple[int, ...]:
        two = (BOS if i < 2 or tokens[i - 1] == BOS else tokens[i - 2], tokens[i - 1])
        return two[2 - length :] if length else ()

    p = 1 / VOCAB_SIZE
    for length in range(3):
        train_list = train.tolist()
        wanted = context(stream, at, length)
        followers = Counter(
            train_list[i] for i in range(1, len(train_list)) if context(train_list, i, length) == wanted
        )
        n, kinds = sum(followers.values()), len(followers)
        if n:
            p = (followers[stream[at]] + kinds * p) / (n + kinds)
    return p


def test_it_is_witten_bell_backoff():
    stream = [BOS, *b"abcxbca", BOS, *b"bcab"]
    nats = ByteTrigram(TRAIN).nats(np.array(stream))
    expected = [-math.log(by_hand(TRAIN, stream, i)) for i in range(1, len(stream))]
    np.testing.assert_allclose(nats, expected, rtol=1e-12)


def test_probabilities_add_up_to_one():
    model = ByteTrigram(TRAIN)
    for a, b in itertools.product([BOS, *b"abx"], repeat=2):
        streams = np.array([[a, b, c] for c in range(VOCAB_SIZE)])
        assert math.isclose(sum(math.exp(-model.nats(s)[1]) for s in streams), 1, rel_tol=1e-12)


def test_it_learns_what_two_bytes_tell():
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 2, 20_000)
    for i in range(2, len(bits)):  # the next letter follows from two, not from one
        bits[i] = bits[i - 1] ^ bits[i - 2]
        if draw.random() < 0.05:
            bits[i] ^= 1
    noise = -(0.95 * math.log2(0.95) + 0.05 * math.log2(0.05))
    found = ByteTrigram(97 + bits[:15_000]).nats(97 + bits[15_000:]).mean() / math.log(2)
    assert abs(found - noise) < 0.03
