"""Every lossless rule, by enumeration: what it emits has exactly the target's law."""

import numpy as np
import pytest

from tests.accept import laws

TOKENWISE = ("speculative_sampling", False)
BLOCK = ("block_verification", False)
RECURSIVE = ("recursive_rejection", False)
RECURSIVE_WITHOUT = ("recursive_rejection", True)
SPECTR = ("spectr", False)
TRAVERSAL = ("traversal_verification", False)
TRAVERSAL_WITHOUT = ("traversal_verification", True)


def check(rule, parents, drawn, vocab, pairs=laws.PAIRS):
    for kinds in pairs:
        target, draft = laws.pair(kinds, vocab)
        law = laws.output_law(rule, parents, target, draft, drawn)
        exact = laws.markov_law(target, 3)
        np.testing.assert_allclose(law, exact, atol=1e-11, err_msg=f"{rule} {drawn} {kinds}")


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("drawn", ["replacement", "top_k"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "rule", [TOKENWISE, BLOCK, RECURSIVE, SPECTR, TRAVERSAL], ids=lambda rule: rule[0]
)
def test_chains(rule, depth, drawn, vocab):
    check(rule, laws.CHAINS[depth], drawn, vocab)


@pytest.mark.parametrize("drawn", ["replacement", "top_k"])
@pytest.mark.parametrize("rule", [RECURSIVE, TRAVERSAL], ids=lambda rule: rule[0])
def test_trees(rule, drawn):
    for parents in (laws.STAR, laws.LEAN):
        check(rule, parents, drawn, 4)
    for parents in (laws.BINARY, laws.UNEVEN):
        check(rule, parents, drawn, 3, laws.PAIRS[:3])
    check(rule, laws.BINARY, drawn, 3, laws.PAIRS[3:])


@pytest.mark.parametrize(
    ("rule", "drawn"),
    [(RECURSIVE, "top_k"), (RECURSIVE, "replacement"), (RECURSIVE_WITHOUT, "base")],
    ids=["top_k", "with_replacement", "without_replacement"],
)
def test_row_16_two_children_of_three_tokens(rule, drawn):
    """A report of users: is a tree of the most likely children lossless, as one of samples is?"""
    check(rule, (0, 0), drawn, 3)


@pytest.mark.parametrize("drawn", ["base", "conditional"])
@pytest.mark.parametrize("rule", [RECURSIVE_WITHOUT, TRAVERSAL_WITHOUT], ids=lambda rule: rule[0])
def test_trees_without_replacement(rule, drawn):
    for parents in (laws.STAR, laws.LEAN):
        check(rule, parents, drawn, 4)
    for parents in (laws.BINARY, laws.UNEVEN):
        check(rule, parents, drawn, 3)


@pytest.mark.parametrize("rule", [RECURSIVE, TRAVERSAL], ids=lambda rule: rule[0])
def test_trees_whose_laws_are_conditional_need_no_removal(rule):
    check(rule, laws.LEAN, "conditional", 4)


@pytest.mark.parametrize("drawn", ["replacement", "top_k"])
def test_k_chains(drawn):
    for parents in (laws.k_chains(2, 1), laws.k_chains(3, 1), laws.k_chains(2, 2)):
        check(SPECTR, parents, drawn, 4, laws.PAIRS[:5])
    check(SPECTR, laws.k_chains(3, 2), drawn, 3, laws.PAIRS[:1])
    check(SPECTR, laws.k_chains(2, 3), drawn, 3, laws.PAIRS[:1])
    check(RECURSIVE, laws.k_chains(2, 2), drawn, 4, laws.PAIRS[:3])
    check(RECURSIVE, laws.k_chains(3, 2), drawn, 3, laws.PAIRS[:1])


def test_no_drafts():
    for rule in (TOKENWISE, BLOCK, RECURSIVE, SPECTR, TRAVERSAL):
        check(rule, (), "replacement", 3, laws.PAIRS[:1])
