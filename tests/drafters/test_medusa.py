"""Medusa: the heads and their trees against the reference, the law, and what checkpoints say."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import accept, cache, sharding
from specjax.checkpoints.safetensors_folder import read_safetensors
from specjax.checkpoints.tensors import match
from specjax.checkpoints.torch_file import read_torch
from specjax.decoding import stream_tokens
from specjax.drafters.choices import named_tree
from specjax.drafters.medusa import medusa
from specjax.models.medusa import FORMATS, MedusaConfig, medusa_heads, random_weights
from specjax.sampling import Sampling, row_keys
from specjax.types import Context, Heads, Params, Prefill
from tests import tiny
from tests.accept import laws

RULE = accept.recursive_rejection()
TINY = MedusaConfig(num_heads=4, num_layers=1, hidden_size=32, vocab_size=61, target_layers=2)


def loaded(shared, **changes):
    """The parity checkpoint: target, heads with `changes` in their configuration, and weights."""
    folder = shared / "parity" / "medusa1"
    params = specjax.load(folder.parent / "hf-llama-untied", dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    stored = read_torch(folder / "medusa_lm_head.pt")
    (form,) = (form for form in FORMATS if form.recognises(config, stored))
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    found = form.read(config, shapes, params.model.config)
    tensors = match(found.sources, stored, found.ignored, folder)
    draft = tree_of({path: held.read() for path, (held,) in tensors.items()})
    heads = medusa_heads(dataclasses.replace(found.config, **changes))
    return params.replace(draft=draft, drafter=medusa(heads)), heads


def tree_of(flat):
    """Nested dictionaries from dotted paths."""
    nested = {}
    for path, array in flat.items():
        *parts, last = (int(part) if part.isdigit() else part for part in path.split("."))
        node = nested
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = jnp.asarray(array)
    return nested


@pytest.fixture(scope="module")
def reference(shared):
    params, heads = loaded(shared)
    return params, heads, np.load(shared / "parity" / "medusa1" / "expected.npz")


def context_of(text, sampling=None) -> Context:
    text = jnp.atleast_2d(jnp.asarray(text, jnp.int32))
    return Context(
        tokens=text,
        lengths=jnp.full(text.shape[0], text.shape[1], jnp.int32),
        sampling=Sampling() if sampling is None else sampling,
        active=jnp.ones(text.shape[0], bool),
    )


def drafted(params, text, sampling=None):
    """The first proposal after `text [T]`, whose last token is the root."""
    context = context_of(text, sampling)
    tokens = jnp.pad(context.tokens, ((0, 0), (0, -context.tokens.shape[1] % 8)))
    held = params.model.init_cache(params.target, 1, 64)
    read = functools.partial(cache.prefill, params.model, params.target, chunk=8)
    _, features = read(held, tokens, context.lengths - 1, features=params.drafter.features)
    prefill = Prefill(tokens=tokens, lengths=context.lengths, features=features, slots=64, chunk=8)
    state = params.drafter.init(params, prefill)
    keys = row_keys(jax.random.key(0), 1)
    return specjax.draft_step(params, keys, state, context)[0], state


def test_logits_of_every_head(reference):
    params, heads, expected = reference
    unembed = functools.partial(params.model.unembed, params.target)
    logits = jax.jit(lambda x: heads.logits(params.draft, unembed, x))(expected["hidden"])
    assert logits.shape == (24, 5, 160)
    np.testing.assert_allclose(
        logits.swapaxes(0, 1), expected["medusa_logits"], atol=2e-4, rtol=2e-4
    )


def test_first_tree(reference):
    params, _, expected = reference
    text = [*expected["input_ids"][0], expected["greedy_ids"][0]]
    proposal, state = drafted(params, text)
    np.testing.assert_allclose(state.hidden[0], expected["hidden"][-1], atol=2e-4, rtol=2e-4)
    tokens = np.array([text[-1], *proposal.tokens[0].tolist()])
    np.testing.assert_array_equal(tokens, expected["tree_candidates"])
    assert proposal.probs is None
    assert proposal.valid.all()
    # Every path from the root to a leaf, padded with zeros.
    parents = proposal.parents.tolist()
    found = set()
    for leaf in set(range(1, 64)) - set(parents):
        path = [leaf]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        found.add((*tokens[path].tolist(), *[0] * (5 - len(path))))
    assert found == set(map(tuple, expected["cart_candidates"].tolist()))


@pytest.mark.parametrize("run", ["greedy", "typical", "typical2"])
def test_whole_runs(reference, run):
    """The reference reads all of the prompt first: its first root is the first new token."""
    params, _, expected = reference
    temperature, epsilon, delta = (float(x) for x in expected[f"{run}_params"])
    rule = RULE
    if run != "greedy":
        rule = accept.typical_acceptance(round(epsilon, 4), round(delta, 4))
    wanted = expected[f"{run}_ids"].tolist()
    prompt = [*expected["input_ids"][0].tolist(), wanted[0]]
    lengths = expected[f"{run}_accept_lengths"].tolist()
    options = {
        "max_new_tokens": sum(lengths) + len(lengths),
        "eos_ids": [],
        "acceptance": rule,
        "sampling": Sampling(temperature=round(temperature, 4)),
        "seed": 0,
    }
    results = list(stream_tokens(params, prompt, **options))
    written = np.diff([0, *(int(result.lengths[0]) for result in results)])
    assert (written - 1).tolist() == lengths
    text = [wanted[0], *tiny.emitted(results[-1])]
    assert text[: len(wanted)] == wanted
    histogram = np.bincount(lengths, minlength=5)
    np.testing.assert_array_equal(results[-1].stats.histogram[0], histogram)
    assert results[-1].stats.lossless == (run == "greedy")


def test_the_prompt_of_the_reference(reference):
    params, _, expected = reference
    for choices in ("mc_sim_7b_63", "vicuna_7b_stage2", 5, [(0,), (3,), (0, 2)]):
        own = params.replace(drafter=medusa(reference[1], choices))
        out = specjax.decode(
            own, expected["input_ids"], max_new_tokens=32, eos_ids=[], acceptance=RULE
        )
        assert tiny.emitted(out) == expected["greedy_ids"].tolist()


def test_heads_without_an_output_use_the_targets(shared, reference):
    _, _, expected = reference
    params, heads = loaded(shared, own_output=False)
    draft = jax.tree.map(lambda x: x, params.draft)
    for head in draft["heads"].values():
        del head["output"]
    unembed = functools.partial(params.model.unembed, params.target)
    hidden = expected["hidden"]
    logits = heads.logits(draft, unembed, hidden)
    block = draft["heads"][3]["blocks"][0]
    z = hidden + jax.nn.silu(hidden @ block["weight"].T + block["bias"][None])
    np.testing.assert_allclose(logits[:, 3], unembed(z), atol=2e-4, rtol=2e-4)
    own = params.replace(draft=draft, drafter=medusa(heads))
    out = specjax.decode(own, expected["input_ids"], max_new_tokens=8, acceptance=RULE, eos_ids=[])
    assert tiny.emitted(out) == expected["greedy_ids"][:8].tolist()


# --- decoding --------------------------------------------------------------------------------


def tiny_params(choices=None, depth=None) -> Params:
    draft = random_weights(TINY, jax.random.key(1))
    return tiny.params().replace(draft=draft, drafter=medusa(medusa_heads(TINY), choices, depth))


PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [11, 12], list(range(20))]


@pytest.mark.parametrize("choices", [None, 3, [(0,), (1,), (2,), (1, 0), (1, 0, 5)]], ids=str)
def test_greedy_equals_plain(choices):
    options = {"max_new_tokens": 40, "eos_ids": []}
    plain = specjax.decode(tiny.params(), PROMPTS, **options)
    # A chain needs no rule for trees.
    rule = None if choices == 3 else RULE
    out = specjax.decode(tiny_params(choices), PROMPTS, acceptance=rule, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    if choices is None:
        assert int(np.sum(out.stats.accepted)) > 0
        # A prompt of one token has no state: nothing is proposed in the first round.
        proposed = np.asarray(out.stats.proposed)[:, 0]
        np.testing.assert_array_equal(np.asarray(out.stats.rounds) - proposed, [1, 0, 0, 0])


def test_rows_do_not_depend_on_each_other():
    params = tiny_params()
    options = {
        "max_new_tokens": 24,
        "eos_ids": [],
        "acceptance": RULE,
        "sampling": Sampling(temperature=0.9),
    }
    keys = jax.random.split(jax.random.key(5), 4)
    together = specjax.decode(params, PROMPTS, key=keys, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = specjax.decode(params, [prompt], key=keys[row : row + 1], **options)
        assert tiny.emitted(alone) == tiny.emitted(together, row)


def markov_heads(vocab: int, count: int, traces: list | None = None) -> Heads:
    """Heads over a Markov model's one-hot states: weights are `[heads, V, V]` logits."""

    def logits(weights, unembed, hidden):
        if traces is not None:
            traces.append(hidden.shape)
        return weights[:, jnp.argmax(hidden, axis=-1)].swapaxes(0, 1)

    return Heads(logits=logits, heads=count, vocab_size=vocab, feature=0, logical_axes=())


def markov_params(heads: Heads, choices) -> Params:
    """A random target, and heads that know its powers roughly."""
    vocab = heads.vocab_size
    target, draft = laws.pair(("random", "random"), vocab)
    known = [np.linalg.matrix_power(target, i + 2) + 0.3 * draft for i in range(heads.heads)]
    return Params(
        target=jnp.log(jnp.asarray(target, jnp.float32)),
        draft=jnp.log(jnp.asarray(np.stack(known), jnp.float32)),
        model=tiny.markov_model(vocab),
        drafter=medusa(heads, choices),
    )


@pytest.mark.parametrize("choices", [[(0,), (1,), (0, 0), (0, 1), (1, 0)], 3], ids=str)
def test_law(choices):
    """Chi-square of three tokens at temperature 1, from prompts of different lengths."""
    params = markov_params(markov_heads(4, 3), choices)
    target = np.exp(np.asarray(params.target, np.float64))
    counts, accepted = np.zeros((4,) * 3), 0
    for seed in range(3):
        out = specjax.decode(
            params,
            [[0], [0, 1, 2, 3, 1, 0], [3, 0], [2, 1, 0]] * 4096,
            max_new_tokens=3,
            sampling=Sampling(temperature=1.0),
            key=jax.random.key(seed),
            acceptance=RULE,
        )
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
        accepted += int(np.sum(out.stats.accepted))
    expected = laws.markov_law(target, 3) * counts.sum()
    statistic = np.sum((counts - expected) ** 2 / expected)
    assert statistic < 110, statistic  # 63 degrees of freedom: p = 0.0002
    assert accepted > 0.2 * counts.sum()


def test_states_follow_the_accepted_path():
    """Heads that know a text by heart, from the state that they should see: all of it stands."""
    text = np.random.default_rng(0).permutation(32)
    following = {int(a): int(b) for a, b in zip(text, np.roll(text, -1), strict=True)}

    def power(steps):
        logits = np.zeros((32, 32), np.float32)
        for token in range(32):
            after = token
            for _ in range(steps):
                after = following[after]
            logits[token, after] = 4.0
        return logits

    heads = markov_heads(32, 3)
    params = Params(
        target=jnp.asarray(power(1)),
        draft=jnp.asarray(np.stack([power(i + 2) for i in range(3)])),
        model=tiny.markov_model(32),
        drafter=medusa(heads, [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]),
    )
    prompts = [text[:2].tolist(), text[3:10].tolist(), text[5:6].tolist()]
    out = specjax.decode(params, prompts, max_new_tokens=17, eos_ids=[], acceptance=RULE)
    for row, prompt in enumerate(prompts):
        at = int(np.flatnonzero(text == prompt[-1])[0])
        wanted = np.roll(text, -at - 1)[:17]
        np.testing.assert_array_equal(out.tokens[row], wanted)
    # Four tokens a round; the row of one token writes one in its first round.
    np.testing.assert_array_equal(out.stats.rounds, [5, 5, 5])
    np.testing.assert_array_equal(out.stats.histogram[2], [1, 0, 0, 4])


def test_no_second_trace():
    traces = []
    params = markov_params(markov_heads(6, 3, traces), [(0,), (1,), (0, 0), (0, 0, 1)])
    run = functools.partial(specjax.decode, params, acceptance=RULE)
    run([[0, 1, 2], [3]], max_new_tokens=8, sampling=Sampling(temperature=1.0), seed=0)
    first = len(traces)
    assert first > 0
    run([[5, 1], [3, 1, 4, 1]], max_new_tokens=7, sampling=Sampling(temperature=0.5), seed=9)
    assert len(traces) == first


def test_equal_arguments_give_the_same_drafter():
    heads = medusa_heads(TINY)
    assert medusa_heads(dataclasses.replace(TINY)) is heads
    assert medusa(heads) is medusa(heads, "mc_sim_7b_63", 4)
    assert medusa(heads, [[0], [0, 0]]) is medusa(heads, ((0, 0), (0,))) is medusa(heads, 2)


def test_paths_are_cut_to_the_heads():
    drafter = medusa(medusa_heads(dataclasses.replace(TINY, num_heads=2)))
    kept = [path for path in named_tree("mc_sim_7b_63").paths if len(path) <= 2]
    assert (drafter.depth, drafter.nodes, drafter.features) == (2, len(kept), (2,))
    assert medusa(medusa_heads(TINY), num_speculative_tokens=1).nodes == 10


def test_logits_that_are_no_law_end_the_draft():
    params = tiny_params([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    weight = params.draft["heads"][1]["output"]["weight"]
    draft = jax.tree.map(lambda x: x, params.draft)
    draft["heads"][1]["output"]["weight"] = weight.at[3].set(jnp.nan)
    params = params.replace(draft=draft)
    proposal, _ = drafted(params, [1, 2, 3])
    assert proposal.valid.tolist() == [[True, True, False, False, False]]
    options = {"max_new_tokens": 16, "eos_ids": []}
    out = specjax.decode(params, PROMPTS, acceptance=RULE, **options)
    np.testing.assert_array_equal(
        out.tokens, specjax.decode(tiny.params(), PROMPTS, **options).tokens
    )


def test_banned_tokens_are_not_drafted():
    params = tiny_params([(0,), (1,), (0, 0)])
    proposal, _ = drafted(params, [1, 2, 3])
    first, second, below = proposal.tokens[0].tolist()
    bias = jnp.zeros(61).at[first].set(-jnp.inf)
    proposal, _ = drafted(params, [1, 2, 3], Sampling(logit_bias=bias))
    assert proposal.tokens[0, 0] == second
    assert first not in proposal.tokens[0].tolist()
    assert (proposal.tokens[0, 2] == below) == (below != first)


def test_arguments():
    heads = medusa_heads(TINY)
    for arguments, message in [
        ((heads, 5), "choices must be between 1 and 4, the number of heads, got 5"),
        ((heads, 0), "choices must be between 1 and 4"),
        ((heads, None, 5), "num_speculative_tokens must be between 1 and 4"),
        ((heads, None, 2.0), "num_speculative_tokens must be an integer"),
        ((heads, None, True), "num_speculative_tokens must be an integer"),
        ((heads, [(0,), (61,)]), "the rank 61, but there are only 61 tokens"),
        ((heads, [(0,), (1, 0)]), r"the path \[1, 0\] without \[1\]"),
        ((heads, "eagle"), "'eagle' is not known"),
        (("medusa",), "heads must come from"),
    ]:
        with pytest.raises(ValueError, match=message):
            medusa(*arguments)
    with pytest.raises(ValueError, match=r"params\.draft is None"):
        specjax.decode(tiny_params().replace(draft=None), [1, 2], acceptance=RULE)
    other = medusa(medusa_heads(dataclasses.replace(TINY, vocab_size=60)))
    with pytest.raises(ValueError, match="heads for 60 tokens, but the target has 61"):
        specjax.decode(tiny_params().replace(drafter=other), [1, 2], acceptance=RULE)


# --- checkpoints -----------------------------------------------------------------------------

TARGET = tiny.CONFIG


def head_shapes(prefix="", heads=3, layers=1, output=True, width=32, vocab=61):
    shapes = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{prefix}{head}.{layer}.linear.weight"] = (width, width)
            shapes[f"{prefix}{head}.{layer}.linear.bias"] = (width,)
        if output:
            shapes[f"{prefix}{head}.{layers}.weight"] = (vocab, width)
    return shapes


def form_of(config, shapes):
    return [form.name for form in FORMATS if form.recognises(config, shapes)]


CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # wrong on purpose


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_heads_and_blocks_are_counted(prefix, layers, output):
    own = head_shapes(prefix, 3, layers, output)
    if not own:
        return
    others = {"model.layers.0.self_attn.q_proj.weight": (32, 32), "lm_head.weight": (61, 32)}
    shapes = own | others if prefix else own
    assert form_of(CONFIG, shapes) == [FORMATS[bool(prefix)].name]
    found = FORMATS[bool(prefix)].read(CONFIG, shapes, TARGET)
    assert found.config == MedusaConfig(
        num_heads=3,
        num_layers=layers,
        hidden_size=32,
        vocab_size=61,
        target_layers=2,
        own_output=output,
    )
    named = {name: source.shape for source in found.sources.values() for name in source.names}
    assert named == own
    assert found.ignored("lm_head.weight") == bool(prefix)
    assert not found.ignored(f"{prefix}7.0.linear.weight")


def test_other_checkpoints_are_not_recognised(shared):
    assert form_of({}, head_shapes()) == []
    assert form_of(CONFIG, {"fc.weight": (32, 64)}) == []
    names = read_safetensors(shared / "parity" / "hf-llama-untied" / "model.safetensors")
    assert form_of({"model_type": "llama"}, names) == []


def changed(shapes, **changes):
    """Tensors with "/" for the dots of their names; None: left out."""
    new = shapes | {name.replace("/", "."): shape for name, shape in changes.items()}
    return {name: shape for name, shape in new.items() if shape is not None}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (head_shapes(width=48), r"\(48, 48\), but the target has the hidden size 32"),
        (head_shapes(vocab=64), r"0\.1\.weight has the shape \(64, 32\).* 32 and 61 tokens"),
        (changed(head_shapes(), **{"1/0/linear/bias": (31,)}), r"1\.0\.linear\.bias has the shape"),
        (
            {name: shape for name, shape in head_shapes().items() if name[0] != "1"},
            "head 1 is missing",
        ),
        (
            changed(head_shapes(), **{"2/1/weight": None}),
            r"head 2 has the blocks \[0\] and the out",
        ),
        (
            changed(head_shapes(), **{"2/1/linear/weight": (32, 32)}),
            r"head 2 has the blocks \[0, 1",
        ),
        (changed(head_shapes(), **{"2/2/weight": (61, 32)}), r"head 2 .* the outputs \[1, 2\]"),
    ],
)
def test_heads_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        FORMATS[0].read(CONFIG, shapes, TARGET)


def test_logical_axes():
    heads = medusa_heads(TINY)
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2])
    specs = {
        path: sharding.spec(axes, (64,) * len(axes), mesh) for path, axes in heads.logical_axes
    }
    assert tuple(specs["heads", 0, "output", "weight"]) == ("model", None)
    assert len(specs) == len(jax.tree.leaves(random_weights(TINY, jax.random.key(0))))
