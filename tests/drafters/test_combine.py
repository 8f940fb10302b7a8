"""Two drafters as one: who drafts, which tree is made of two, and that the law stays."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.analysis import summary
from specjax.cli.drafter_options import drafter_argument
from specjax.drafters.combine import joined
from specjax.types import Block, Context, Drafter, Outcome, Params, Prefill, Proposal, Scores
from tests import test_conformance as small
from tests import tiny
from tests.accept import laws
from tests.accept.drafters import markov_tree
from tests.drafters.reading import case
from tests.tiny import emitted

VOCAB = 32


def _proposal(tokens, parents, valid=None, probs=None, **fields) -> Proposal:
    tokens = jnp.asarray(tokens, jnp.int32)
    yes = jnp.ones(tokens.shape, bool)
    fields = {"candidate": yes, **fields}
    return Proposal(
        tokens=tokens,
        parents=jnp.asarray(parents, jnp.int32),
        probs=probs,
        valid=yes if valid is None else jnp.asarray(valid, bool),
        **fields,
    )


def _texts(proposal: Proposal, row: int) -> dict[tuple[int, ...], int]:
    """The valid paths of a row, with the node at their end."""
    parents = np.broadcast_to(proposal.parents, proposal.tokens.shape)[row]
    path, found = {0: ()}, {}
    for node, (token, parent) in enumerate(zip(proposal.tokens[row], parents, strict=True), 1):
        assert parent < node
        path[node] = (*path[int(parent)], int(token))
        if proposal.valid[row, node - 1]:
            assert path[node] not in found
            found[path[node]] = node
    return found


# --- the tree of two -------------------------------------------------------------------------


def test_a_tree_of_two():
    """The picture in the docstring of `joined`, and a row without anything in common."""
    one = _proposal([[1, 2], [1, 2]], [0, 1])
    other = _proposal([[1, 4, 2, 3], [5, 6, 7, 8]], [[0, 0, 1, 1], [0, 1, 2, 2]])
    made = joined(one, other, 6, 3, 9)
    assert made.probs is None
    assert made.confidence is None
    assert set(_texts(made, 0)) == {(1,), (1, 2), (4,), (1, 3)}
    assert set(_texts(made, 1)) == {(1,), (1, 2), (5,), (5, 6), (5, 6, 7), (5, 6, 8)}
    np.testing.assert_array_equal(made.tokens[:, :2], one.tokens)


@pytest.mark.parametrize(
    ("nodes", "first", "second"),
    [
        (3, {(1,), (1, 2), (4,)}, {(1,), (1, 2), (5,)}),
        (4, {(1,), (1, 2), (4,), (1, 3)}, {(1,), (1, 2), (5,), (5, 6)}),
        (5, {(1,), (1, 2), (4,), (1, 3)}, {(1,), (1, 2), (5,), (5, 6), (5, 6, 7)}),
    ],
)
def test_what_does_not_fit(nodes, first, second):
    one = _proposal([[1, 2], [1, 2], [1, 2]], [0, 1], [[1, 1], [1, 1], [0, 0]])
    other = _proposal(
        [[1, 4, 2, 3], [5, 6, 7, 8], [5, 6, 7, 8]], [[0, 0, 1, 1], [0, 1, 2, 2], [0, 1, 2, 2]]
    )
    made = joined(one, other, nodes, 3, 9)
    assert made.tokens.shape == (3, nodes)
    assert set(_texts(made, 0)) == first
    assert set(_texts(made, 1)) == second
    # Where the first has nothing, its room is the second's.
    assert len(_texts(made, 2)) == min(nodes, 4)


def test_nodes_that_cannot_stand_are_no_twins():
    """Neither those after an invalid one, nor riders, which are kept for their scores."""
    one = _proposal([[1, 2, 3]], [0, 1, 2], [[1, 0, 1]])
    riders = jnp.array([[True, False, True]])
    other = _proposal([[1, 1, 2]], [0, 0, 1], candidate=riders)
    made = joined(one, other, 6, 3, 9)
    valid = np.asarray(made.valid[0])
    assert valid.tolist() == [True, False, True, False, True, True]
    assert made.parents[0].tolist() == [0, 1, 2, 0, 0, 1]
    assert made.candidate[0].tolist() == [True, True, True, True, False, True]
    assert joined(one, other, 5, 3, 9).tokens.shape == (1, 5)


def test_what_was_drawn_keeps_its_law_and_its_place():
    law = jnp.full((1, 2, 9), 1 / 9)
    sure, drawn = _proposal([[1, 2]], [0, 1]), _proposal([[1, 3]], [0, 1], probs=law)
    for one, other in ((sure, drawn), (drawn, sure)):
        made = joined(one, other, 4, 2, 9)
        assert made.tokens.tolist() == [[1, 3, 1, 2]]
        assert made.parents.tolist() == [[0, 1, 0, 1]]
        assert made.valid.tolist() == [[True, True, False, True]]
        np.testing.assert_array_equal(made.probs[:, :2], law)
        np.testing.assert_array_equal(made.probs[0, 2:], np.eye(9)[[1, 2]])
    made = joined(sure, drawn, 3, 2, 9)  # the second's last node is left out
    assert (made.tokens.tolist(), made.valid.tolist()) == ([[1, 1, 2]], [[True, False, True]])
    made = joined(drawn, drawn, 4, 2, 9)  # two draws are two nodes
    assert made.parents.tolist() == [[0, 1, 0, 3]]
    assert np.all(made.valid)


def test_confidence_of_one_of_two():
    doubted = _proposal([[1, 3]], [0, 1], confidence=jnp.array([[0.5, 0.25]]))
    made = joined(_proposal([[1, 2]], [0, 1]), doubted, 4, 2, 9)
    assert made.confidence.tolist() == [[1.0, 1.0, 0.5, 0.25]]


# --- the law ---------------------------------------------------------------------------------

DEPTH = laws.DEPTH
RECURSIVE = ("recursive_rejection", False)
TRAVERSAL = ("traversal_verification", False)


def _emitted_law(proposal: Proposal, mass: np.ndarray, target: np.ndarray, rule) -> np.ndarray:
    """The law of DEPTH + 1 tokens after token 0: what a round emits, then the target.

    Args:
      proposal: R rows in float64.
      mass: `[R]`, how often each comes.
    """
    rows, nodes = proposal.tokens.shape
    vocab = len(target)
    most = 1 if rule == TRAVERSAL else DEPTH  # coins that pass
    coins = np.array([c for c in itertools.product([0, 1], repeat=nodes) if sum(c) <= most], bool)
    coins = np.pad(coins, ((0, 0), (1, 0)))
    again, fall = (x.ravel() for x in np.indices((rows, len(coins))))
    every = np.concatenate([np.zeros((rows, 1), np.int32), proposal.tokens], axis=1)
    parents = np.broadcast_to(proposal.parents, proposal.tokens.shape)
    probs = None if proposal.probs is None else np.asarray(proposal.probs)
    arrays = [proposal.tokens, parents, probs, proposal.valid, target[every]]
    arrays = [None if x is None else np.asarray(x)[again] for x in arrays]
    node, after, chance = laws._in_chunks(laws._walked, [*arrays, coins[fall]], rule=rule)

    total = np.zeros((vocab,) * (DEPTH + 1))
    for row, coin, end, law, p in zip(again, coins[fall], node, after, chance, strict=True):
        path = []
        while end:
            path.insert(0, end)
            end = parents[row, end - 1]
        # A coin that was not tossed must be False, so that no fall is counted twice.
        used = bool(path) if rule == TRAVERSAL else len(path)
        if coin.sum() != used or (rule == TRAVERSAL and path and not coin[path[-1]]):
            continue
        text = tuple(int(proposal.tokens[row, j - 1]) for j in path)
        rest = law * mass[row] * p
        for _ in range(DEPTH - len(text)):
            rest = rest[..., None] * target
        total[text] += rest
    return total


def _drafts(parents, drawn, draft) -> tuple[Proposal, np.ndarray]:
    tokens, probs, weight = laws.drafts(parents, draft, 0, drawn)
    return _proposal(tokens, parents, probs=None if probs is None else jnp.asarray(probs)), weight


def _product(one, other):
    """Every pair of two independent drafts."""
    (a, left), (b, right) = one, other
    i, j = (x.ravel() for x in np.indices((len(left), len(right))))
    pick = lambda x, rows: jax.tree.map(lambda v: v if v.ndim == 1 else v[jnp.asarray(rows)], x)
    return pick(a, i), pick(b, j), left[i] * right[j]


SURE = ((0, 0, 1), "top_k")  # two children of the root, and one more
CERTAIN_CHAIN = ((0, 1), "top_k")
CHAIN = ((0, 1), "replacement")
PATHS = ((0, 0, 1, 2), "replacement")
TWINS = ((0, 0), "replacement")
# With these a rule that is wrong by a twin is wrong in its law: the target's law exceeds that of
# the first draft in more than one token.
LAWS = ((("random", "random"), 4), (("random", "random"), 5), (("sparse", "random"), 2))


@pytest.mark.parametrize("rule", [RECURSIVE, TRAVERSAL], ids=lambda rule: rule[0])
@pytest.mark.parametrize(
    ("first", "second", "nodes"),
    [
        (SURE, PATHS, 7),
        (SURE, PATHS, 5),
        (PATHS, SURE, 7),
        (PATHS, SURE, 6),
        (SURE, CERTAIN_CHAIN, 4),
        (CHAIN, TWINS, 4),
        (CHAIN, CHAIN, 3),
    ],
)
def test_the_law_is_the_targets(rule, first, second, nodes):
    """By enumeration: all drafts of both, and all falls of the coins, in float64."""
    for kinds, seed in LAWS:
        target, draft = laws.pair(kinds, 3, seed)
        _, other = laws.pair(kinds, 3, seed + 7)
        with jax.enable_x64(True):
            one, two, mass = _product(_drafts(*first, draft), _drafts(*second, other))
            made = joined(one, two, nodes, DEPTH, 3)
            law = _emitted_law(made, mass, target, rule)
        np.testing.assert_allclose(law, laws.markov_law(target, DEPTH + 1), atol=1e-11)


@pytest.mark.parametrize("drawn", ["top_k", "replacement"])
def test_a_draw_that_is_forgotten_is_noticed(drawn):
    """If the second's draw were left out where the first says the same."""
    kinds, seed = LAWS[0]
    target, draft = laws.pair(kinds, 3, seed)
    _, other = laws.pair(kinds, 3, seed + 7)
    with jax.enable_x64(True):
        one, two, mass = _product(_drafts((0,), drawn, draft), _drafts((0,), "replacement", other))
        law = one.probs
        if law is None:
            law = jax.nn.one_hot(one.tokens, 3, dtype=two.probs.dtype)
        made = _proposal(
            jnp.concatenate([one.tokens, two.tokens], axis=1),
            [0, 0],
            valid=jnp.concatenate([one.valid, one.tokens != two.tokens], axis=1),
            probs=jnp.concatenate([law, two.probs], axis=1),
        )
        law = _emitted_law(made, mass, target, RECURSIVE)
    assert np.abs(law - laws.markov_law(target, DEPTH + 1)).max() > 1e-3


def _markov(drafter, draft) -> tuple[Params, np.ndarray]:
    target, _ = laws.pair(("random", "random"), 4)
    params = Params(
        target=jnp.log(jnp.asarray(target, jnp.float32)),
        draft=draft,
        model=tiny.markov_model(4),
        drafter=drafter,
    )
    return params, target


def test_two_drafters_do_not_share_their_random_numbers():
    """Chi-square of the first two tokens; with the same draws in both parts it is thousands."""
    _, draft = laws.pair(("random", "random"), 4)
    logits = jnp.log(jnp.asarray(draft, jnp.float32))
    part = markov_tree((0, 1), "replacement", 2)
    params, target = _markov(drafters.merged(part, part), (logits, logits))
    counts = np.zeros((4, 4))
    for seed in range(3):
        out = specjax.decode(
            params,
            np.zeros((16384, 1), np.int32),
            max_new_tokens=2,
            sampling=specjax.Sampling(temperature=1.0),
            key=jax.random.key(seed),
        )
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
    expected = laws.markov_law(target, 2) * counts.sum()
    assert np.sum((counts - expected) ** 2 / expected) < 45  # 15 degrees of freedom
    assert out.stats.rule == "recursive_rejection"


# --- who drafts ------------------------------------------------------------------------------


def _guessing(tokens, valid, *, drawn: bool = False, parents=None) -> Drafter:
    """Drafts the same rows in every round."""
    tokens = np.array(tokens, np.int32)
    parents = np.arange(tokens.shape[1]) if parents is None else np.array(parents)

    def draft(params, key, state, context):
        vocab = params.model.vocab_size
        probs = jnp.full((*tokens.shape, vocab), 1 / vocab) if drawn else None
        return _proposal(tokens, parents, valid, probs), state

    return Drafter(
        init=lambda params, prefill: (),
        draft=draft,
        update=lambda params, state, outcome: state,
        name="guessing",
        depth=len(parents) if np.all(parents == np.arange(len(parents))) else 2,
        nodes=len(parents),
    )


def _drafted(drafter: Drafter, rows: int) -> Proposal:
    params = tiny.scripted([1, 2, 3]).replace(drafter=drafter)
    context = Context(
        tokens=jnp.zeros((rows, 8), jnp.int32),
        lengths=jnp.ones(rows, jnp.int32),
        sampling=specjax.Sampling(),
        active=jnp.ones(rows, bool),
    )
    keys = jax.random.split(jax.random.key(0), rows)
    return drafter.draft(params, keys, ((), ()), context)[0]


FEW = _guessing([[1, 2], [1, 2], [1, 2]], [[1, 1], [1, 0], [0, 0]])
MANY = [[5, 6, 7]] * 3


@pytest.mark.parametrize(("least", "chosen"), [(1, [1, 1, 0]), (2, [1, 0, 0])])
@pytest.mark.parametrize("drawn", [False, True])
def test_each_row_has_its_own_drafter(least, chosen, drawn):
    second = _guessing(MANY, np.ones((3, 3), bool), drawn=drawn)
    made = drafters.fallback(FEW, second, least)
    assert (made.depth, made.nodes, made.tree, made.mixed) == (3, 3, False, False)
    out = _drafted(made, 3)
    for row, first in enumerate(chosen):
        assert out.tokens[row].tolist() == ([1, 2, 0] if first else [5, 6, 7])
        assert out.valid[row].sum() == (2 - row if first else 3)
        if drawn and first:
            np.testing.assert_array_equal(out.probs[row, :2], np.eye(VOCAB)[[1, 2]])
        elif drawn:
            np.testing.assert_allclose(out.probs[row], 1 / VOCAB)
    assert (out.probs is not None) == drawn
    assert out.parents.tolist() == [0, 1, 2]


def test_rows_with_trees_of_their_own():
    branched = _guessing([[5, 6, 7, 8]] * 3, np.ones((3, 4), bool), parents=(0, 0, 1, 1))
    made = drafters.fallback(FEW, branched)
    assert (made.depth, made.nodes, made.tree) == (2, 4, True)
    out = _drafted(made, 3)
    assert out.parents.tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]]


def test_a_first_that_draws_may_not_be_chosen_by_its_length():
    drawing = _guessing(MANY, np.ones((3, 3), bool), drawn=True)
    with pytest.raises(ValueError, match="least is 2, but guessing draws its drafts"):
        _drafted(drafters.fallback(drawing, FEW, 2), 3)
    assert _drafted(drafters.fallback(drawing, FEW), 3).tokens.tolist() == MANY


def test_right_and_wrong_drafters():
    text = tuple(range(1, 30))
    params = tiny.scripted(text, depth=3)
    right, wrong = params.drafter, tiny.oracle(text, 3, shift=1)
    for made, tau in (
        (drafters.fallback(right, wrong), 4),
        (drafters.fallback(wrong, right), 1),
        (drafters.merged(right, wrong), 4),
        (drafters.merged(wrong, right), 4),
        (drafters.merged(wrong, right, nodes=4), 2),  # room for one node of the right one
        (drafters.merged(right, right, nodes=4), 4),
    ):
        out = specjax.decode(params.replace(drafter=made), [1], max_new_tokens=16, eos_ids=[])
        assert emitted(out) == list(text[1:17])
        assert summary(out.stats).tau == tau, made.name


# --- states follow what others guessed -------------------------------------------------------


PARTS = {
    "draft_model": lambda: small._draft_model(depth=3),
    "draft_tree": lambda: small._draft_model(drafters.draft_tree, 2, paths=2),
    "eagle3": lambda: small._eagle(num_speculative_tokens=2),
    "mtp": lambda: small._mtp(3, 2),
    "medusa": lambda: small._medusa(3),
    "dspark": small.TABLE["dspark"],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_state_follows_what_others_guessed(name):
    """After rounds of another, deeper drafter a part drafts as one that has just read the text."""
    part, weights = PARTS[name]()
    depth = 5
    params = small._target().replace(
        drafter=drafters.fallback(tiny.oracle((1,), depth), part), draft=weights
    )
    model, target = params.model, params.target
    text = jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 32)), jnp.int32)
    every = jnp.full(2, 32)
    layers = (*part.features, small.SMALL.num_layers)
    empty = model.init_cache(target, 2, 32)
    _, states = specjax.cache.prefill(model, target, empty, text, every, chunk=8, features=layers)
    keys = jax.random.split(jax.random.key(1), 2)
    init, draft, update = map(jax.jit, (part.init, part.draft, part.update))

    def read(lengths):
        features = tuple(x[:, :24] for x in states[:-1])
        return init(
            params,
            Prefill(tokens=text[:, :24], lengths=lengths, features=features, slots=64, chunk=8),
        )

    def drafted(state, lengths):
        context = Context(
            tokens=jnp.pad(text, ((0, 0), (0, 32))),
            lengths=lengths,
            sampling=specjax.Sampling(temperature=1.0),
            active=jnp.ones(2, bool),
        )
        return draft(params, keys, state, context)

    lengths = jnp.array([6, 9])
    state = read(lengths)
    for accepted in ([5, 2], [0, 5], [3, 1]):
        _, state = drafted(state, lengths)
        nodes = (lengths - 1)[:, None] + jnp.arange(depth + 1)[None]
        *features, hidden = (jnp.take_along_axis(x, nodes[..., None], axis=1) for x in states)
        lengths = lengths + jnp.array(accepted) + 1
        outcome = Outcome(
            tokens=jnp.pad(text, ((0, 0), (0, 32))),
            lengths=lengths,
            path=jnp.broadcast_to(jnp.arange(depth + 1)[None], nodes.shape),
            accepted=jnp.array(accepted),
            scores=Scores(
                logits=jnp.zeros((2, depth + 1, 7)),
                hidden=hidden,
                features=tuple(features),
                block=Block(keys=(), values=()),
            ),
        )
        state = update(params, state, outcome)
    ours, theirs = drafted(state, lengths)[0], drafted(read(lengths), lengths)[0]
    assert np.all(ours.valid)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _text() -> list[int]:
    plain = small._decode(small._target(), small.PROMPTS)
    return emitted(plain, 1)


def _run(drafter, draft):
    params = small._target().replace(drafter=drafter, draft=draft)
    out = specjax.decode(params, [small.PROMPTS[1]], max_new_tokens=24, eos_ids=[], max_len=64)
    assert emitted(out) == _text()
    return out


def test_a_model_that_is_right_stays_right():
    """The draft is the target itself; where the other knows the text, five stand and not two."""
    model, depth = small._target().model, 2
    other = tiny.oracle((*small.PROMPTS[1], *_text()[:12]), 5)
    made = drafters.fallback(other, drafters.draft_model(model, depth))
    out = _run(made, (None, small._target().target))
    assert out.stats.histogram[0].tolist() == [0, 0, 4, 0, 0, 2]


@pytest.mark.parametrize("make", ["head first", "nested"])
def test_greedy_equals_plain(make):
    head, weights = small._eagle(num_speculative_tokens=2)
    model = drafters.draft_model(small._target().model, 3)
    own = small._target().target
    drafter, draft = {
        "head first": lambda: (drafters.merged(head, model, nodes=4), (weights, own)),
        "nested": lambda: (
            drafters.fallback(drafters.merged(drafters.ngram(2), head), model),
            ((None, weights), own),
        ),
    }[make]()
    _run(drafter, draft)


# --- arguments -------------------------------------------------------------------------------


def test_equal_arguments_give_the_same_drafter():
    one, other = drafters.ngram(2), drafters.ngram(3)
    assert drafters.fallback(one, other) is drafters.fallback(first=one, second=other, least=1)
    assert drafters.merged(one, other) is drafters.merged(one, other, nodes=5)
    assert drafters.merged(one, other) is not drafters.merged(other, one)


def test_names_and_features():
    head, _ = small._eagle(num_speculative_tokens=2)
    other, _ = small._medusa(small.BRANCHED)
    made = drafters.merged(head, other)
    assert made.features == (0, 1, 2)
    assert made.name == "merged(eagle, medusa)"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda a: drafters.fallback(a, "ngram"), "second must be a Drafter"),
        (lambda a: drafters.fallback(drafters.plain(), a), "first is plain, which never drafts"),
        (lambda a: drafters.merged(a, drafters.plain()), "second is plain, which never drafts"),
        (lambda a: drafters.fallback(a, a, 0), "least must be an integer of at least 1, got 0"),
        (lambda a: drafters.fallback(a, a, True), "least must be an integer"),
        (lambda a: drafters.fallback(a, a, 4), "least must be at most 3, the longest path"),
        (lambda a: drafters.merged(a, a, 2.5), "nodes must be an integer"),
        (lambda a: drafters.merged(a, a, 3), "nodes must be from 4.* to 6.* got 3"),
        (lambda a: drafters.merged(a, a, 7), "nodes must be from 4.* to 6.* got 7"),
    ],
)
def test_bad_arguments(make, said):
    with pytest.raises(ValueError, match=said):
        make(drafters.ngram(3))


def test_weights_that_are_no_pair():
    params = tiny.params("ngram").replace(
        drafter=drafters.fallback(drafters.ngram(2), drafters.ngram(3)), draft={"a": 1}
    )
    with pytest.raises(ValueError, match=r"params\.draft must be the pair"):
        specjax.decode(params, [1, 2, 3], max_new_tokens=2)


def test_a_rule_for_drafts_of_one_law_is_refused():
    made = drafters.merged(drafters.ngram(2), drafters.ngram(3))
    params = tiny.params().replace(drafter=made)
    with pytest.raises(ValueError, match="acceptance spectr keeps the target's law only"):
        specjax.decode(params, [1, 2, 3], max_new_tokens=2, acceptance="spectr")


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"method": "fallback", "least": 2}, "fallback(ngram, eagle3)"),
        ({"method": "merged", "nodes": 9}, "merged(ngram, eagle3)"),
    ],
)
def test_loaded(shared, options, name):
    found = case(shared, "eagle3")
    spec = {"method": "ngram", "num_speculative_tokens": 3}
    second = str(found.folder)
    if options["method"] == "merged":
        second = {"method": "eagle3", "model": second, "tree": {"nodes": 8, "depth": 3, "top_k": 3}}
    given = {**options, "first": spec, "second": second}
    params = specjax.load(found.target, given, dtype="float32")
    assert params.drafter.name == name
    assert params.drafter.nodes == options.get("nodes", params.drafter.nodes)
    out = specjax.decode(params, found.expected["input_ids"], max_new_tokens=8, eos_ids=[])
    assert emitted(out) == found.expected["generated_ids"].tolist()[:8]


def test_nested_specifications(shared):
    target = shared / "parity" / "hf-llama-untied"
    inner = {"method": "merged", "first": "ngram", "second": drafters.ngram(2)}
    given = {
        "method": "fallback",
        "first": inner,
        "second": {"method": "draft_model", "draft_layers": 1},
    }
    params = specjax.load(target, given)
    assert params.drafter.name == "fallback(merged(ngram, ngram), draft_model)"
    assert params.draft[0] == (None, None)
    assert params.drafter is specjax.load(target, given).drafter


BOTH = {"first": "ngram", "second": "ngram"}


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ("fallback", "the drafter 'fallback' needs \"first\", a drafter"),
        ({"method": "merged", "first": "ngram"}, "the drafter 'merged' needs \"second\""),
        ({"method": "merged", **BOTH, "second": None}, "plain decoding cannot be a part"),
        ({"method": "merged", **BOTH, "least": 2}, "'merged' has no option 'least'; it has: first"),
        ({"method": "fallback", **BOTH, "nodes": 2}, "'fallback' has no option 'nodes'"),
        ({"method": "fallback", **BOTH, "least": "2"}, "least must be an integer .* got '2'"),
        ({"method": "fallback", **BOTH, "least": 9}, "least must be at most 5"),
        ({"method": "merged", **BOTH, "nodes": 0}, "nodes must be an integer of at least 1"),
        ({"method": "merged", **BOTH, "nodes": 99}, "nodes must be from 6.* to 10"),
        (
            {"method": "merged", **BOTH, "first": "ngrm"},
            "\"first\" of the drafter 'merged': .*ngrm",
        ),
        (
            {"method": "merged", **BOTH, "second": {"method": "ngram", "k": 2}},
            "\"second\" of the drafter 'merged': .* has no option 'k'",
        ),
        ({"method": "merged", **BOTH, "first": drafters.plain()}, "first is plain"),
    ],
)
def test_bad_specifications(shared, drafter, said):
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        specjax.load(shared / "parity" / "hf-llama-untied", drafter)


def test_on_the_command_line():
    text = '{"method": "fallback", "first": "ngram", "second": {"method": "mtp"}}'
    none = {"num_speculative_tokens": None, "draft_layers": None}
    given = drafter_argument(text, plain=False, **none)
    assert given == {"method": "fallback", "first": "ngram", "second": {"method": "mtp"}}
