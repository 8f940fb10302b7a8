"""Drafts that a round accepts on average, by enumeration: which rule accepts more than which."""

import numpy as np
import pytest

from tests.accept import laws
from tests.accept.test_enumeration import (
    BLOCK,
    RECURSIVE,
    RECURSIVE_WITHOUT,
    SPECTR,
    TOKENWISE,
    TRAVERSAL,
    TRAVERSAL_WITHOUT,
)


def both(first, second, parents, kinds, vocab, drawn):
    target, draft = laws.pair(kinds, vocab)
    return (laws.expected_accepted(rule, parents, target, draft, drawn) for rule in (first, second))


def test_block_accepts_at_least_as_much_as_token_by_token():
    gains = []
    for depth, parents in laws.CHAINS.items():
        for kinds in laws.PAIRS:
            tokens, block = both(TOKENWISE, BLOCK, parents, kinds, 4, "replacement")
            assert (block >= tokens - 1e-12).all(), (depth, kinds)
            gains.append((block - tokens).max())
    assert max(gains) > 0.05


@pytest.mark.parametrize(
    ("drawn", "first", "second"),
    [
        ("replacement", RECURSIVE, TRAVERSAL),
        ("base", RECURSIVE_WITHOUT, TRAVERSAL_WITHOUT),
        ("top_k", RECURSIVE, TRAVERSAL),
    ],
)
def test_traversal_accepts_at_least_as_much_as_recursive_rejection(drawn, first, second):
    gains = []
    for parents, vocab in ((laws.STAR, 4), (laws.LEAN, 4), (laws.BINARY, 3)):
        for kinds in laws.PAIRS[:5]:
            down, up = both(first, second, parents, kinds, vocab, drawn)
            assert (up >= down - 1e-12).all(), (parents, kinds)
            gains.append((up - down).max())
    assert drawn == "top_k" or max(gains) > 0.01  # one-hot q: no rule can keep more


def test_more_siblings_are_accepted_more_often():
    target, draft = laws.pair(("random", "random"), 4)
    overlap = np.minimum(target, draft).sum(-1)
    for rule, drawn in (
        (SPECTR, "replacement"),
        (RECURSIVE, "replacement"),
        (RECURSIVE_WITHOUT, "base"),
    ):
        rates = [laws.expected_accepted(rule, (0,) * k, target, draft, drawn) for k in (1, 2, 3, 4)]
        np.testing.assert_allclose(rates[0], overlap, atol=1e-12)
        assert (np.diff(rates, axis=0) > 0).all(), rule


def test_k_seq_accepts_at_least_as_much_as_one_by_one():
    """True of the laws in this table, not in general."""
    for k in (2, 3):
        for kinds in laws.PAIRS:
            one_by_one, k_seq = both(RECURSIVE, SPECTR, (0,) * k, kinds, 4, "replacement")
            assert (k_seq >= one_by_one - 1e-9).all(), (k, kinds)
