"""Logits to distribution, and keys."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import controls, sampling, seen
from specjax.sampling import Purpose, Sampling


def test_mixed_rows():
    logits = jnp.array([[-1.0, 3.0, 2.0]] * 4)
    probs = sampling.distribution(logits, Sampling(temperature=jnp.array([0.0, 1.0, 0.5, 1e-8])))
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs[0], [0, 1, 0])
    np.testing.assert_allclose(probs[1], jax.nn.softmax(logits[1]), atol=1e-6)
    np.testing.assert_allclose(probs[2], jax.nn.softmax(2 * logits[2]), atol=1e-6)
    np.testing.assert_allclose(probs[3], [0, 1, 0])


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-8, 1e-3, 1.0, 100.0, 3e38])
def test_banned_tokens_and_ties_give_no_nan(temperature):
    logits = jnp.array([[1e4, 1e4, -jnp.inf], [-jnp.inf, -5.0, -jnp.inf]])
    probs = sampling.distribution(logits, Sampling(temperature=temperature))
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(probs[1], [0, 1, 0])
    expected = [1, 0, 0] if temperature == 0 else [0.5, 0.5, 0]  # greedy takes the first
    np.testing.assert_allclose(probs[0], expected, atol=1e-6)
    in_jit = jax.jit(sampling.distribution)(logits, Sampling(temperature=temperature))
    np.testing.assert_allclose(in_jit, probs, atol=1e-6)


def test_probability_of_one_token():
    logits = jax.random.normal(jax.random.key(0), (3, 5, 7))
    controls = Sampling(temperature=jnp.array([0.0, 0.7, 2.0]))
    tokens = jax.random.randint(jax.random.key(1), (3, 5), 0, 7)
    whole = sampling.distribution(logits, controls)
    expected = jnp.take_along_axis(whole, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        sampling.probability_of(logits, tokens, controls), expected, atol=1e-6
    )


def test_draw_stays_in_the_support():
    probs = jnp.tile(jnp.array([[0.0, 0.2, 0.0, 0.8]]), (4096, 1))
    tokens = np.asarray(sampling.draw(jax.random.split(jax.random.key(0), 4096), probs))
    assert set(tokens) == {1, 3}
    assert abs((tokens == 1).mean() - 0.2) < 0.03
    certain = sampling.draw(jax.random.split(jax.random.key(0), 2), jnp.eye(3)[:2])
    np.testing.assert_array_equal(certain, [0, 1])


def test_keys_depend_on_row_position_and_purpose_only():
    keys = sampling.row_keys(jax.random.key(3), 4)
    np.testing.assert_array_equal(
        jax.random.key_data(keys[0]), jax.random.key_data(jax.random.key(3))
    )
    grid = sampling.at_positions(keys, Purpose.DRAFT, jnp.tile(jnp.arange(5), (4, 1)))
    one = sampling.at_positions(keys[2:3], Purpose.DRAFT, jnp.array([3]))
    np.testing.assert_array_equal(jax.random.key_data(grid[2, 3]), jax.random.key_data(one[0]))
    every = [
        tuple(np.asarray(jax.random.key_data(k)).ravel())
        for purpose in Purpose
        for k in sampling.at_positions(keys, purpose, jnp.tile(jnp.arange(5), (4, 1))).reshape(-1)
    ]
    assert len(set(every)) == len(every) == 3 * 4 * 5


def test_reference_distributions(shared):
    """Every combination of controls, as another implementation's processors give it."""
    cases = json.loads((shared / "data" / "hf_sampling_reference.json").read_text())["cases"]
    for case in cases:
        logits, context = jnp.array(case.pop("logits")), jnp.array(case.pop("context"))
        expected = case.pop("probs")
        probs = sampling.distribution(logits, Sampling(**case), context)
        np.testing.assert_allclose(probs, expected, atol=1e-5)


def test_reference_distributions_as_rows(shared):
    """The same in one batch with one value a row, at two places a row."""
    cases = json.loads((shared / "data" / "hf_sampling_reference.json").read_text())["cases"]
    columns = {name: [case[name] for case in cases] for name in cases[0]}
    logits, expected = (np.array(columns.pop(x), np.float32) for x in ("logits", "probs"))
    context = np.array(columns.pop("context"))
    banned = columns.pop("banned")
    controls_ = Sampling(**{k: np.array(v) for k, v in columns.items()}, banned=banned)
    twice = jnp.stack([logits, logits], axis=1)
    probs = sampling.distribution(twice, controls_, context)
    for place in range(2):
        np.testing.assert_allclose(probs[:, place], expected, atol=1e-5)
    # Packed for a program, the penalties' context as counts.
    packed = controls.packed(controls_, len(cases), 64, logits.shape[-1])
    padded = np.zeros((64, logits.shape[-1]), np.float32)
    padded[: len(cases)] = logits
    counts = np.zeros(padded.shape, np.int32)
    np.add.at(counts, (np.arange(len(cases))[:, None], context), 1)
    adjusted = sampling.adjusted(padded, packed, seen.Seen(counts=jnp.asarray(counts)))
    np.testing.assert_allclose(sampling.law(adjusted, packed)[: len(cases)], expected, atol=1e-5)


def test_warpers(shared):
    """Single warpers of another implementation."""
    data = np.load(shared / "parity" / "verify-spec-sampling" / "expected.npz")
    logits = jnp.asarray(data["warp_input"])
    for name, fields in {
        "warp_temperature_0p7": {"temperature": 0.7},
        "warp_topk_5": {"temperature": 1.0, "top_k": 5},
        "warp_topp_0p8": {"temperature": 1.0, "top_p": 0.8},
        "warp_minp_0p1": {"temperature": 1.0, "min_p": 0.1},
    }.items():
        expected = jax.nn.softmax(data[name], axis=-1)
        probs = sampling.distribution(logits, Sampling(**fields))
        np.testing.assert_allclose(probs, expected, atol=1e-5, err_msg=name)
    probs = sampling.distribution(logits, Sampling(temperature=0.6, top_k=8, top_p=0.9))
    np.testing.assert_allclose(probs, data["warp_t0p6_k8_p0p9_probs"], atol=1e-5)


def test_penalties_by_hand():
    """logits [2, -1, 3, 0], the context holds token 0 once, token 1 twice."""
    logits, context = jnp.array([2.0, -1.0, 3.0, 0.0]), jnp.array([0, 1, 1, 2])
    mask = jnp.array([True, True, True, False])
    hot = {"temperature": 1.0}
    for fields, expected in (
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 3.0, 0.0]),
        ({"presence_penalty": 0.5}, [1.5, -1.5, 3.0, 0.0]),
        ({"frequency_penalty": 0.5}, [1.5, -2.0, 3.0, 0.0]),
        (
            {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
            [0.25, -3.0, 3.0, 0.0],
        ),
    ):
        probs = sampling.distribution(logits, Sampling(**hot, **fields), context, mask)
        np.testing.assert_allclose(probs, jax.nn.softmax(jnp.array(expected)), atol=1e-6)
        nothing = sampling.distribution(logits, Sampling(**hot, **fields), jnp.zeros(0, jnp.int32))
        np.testing.assert_allclose(nothing, jax.nn.softmax(logits), atol=1e-6)


def test_truncation_edges():
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    law = lambda **fields: sampling.distribution(logits, Sampling(temperature=1.0, **fields))
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_k": 4}, {"top_k": 99}, {"top_p": 1.0}, {}):
        np.testing.assert_allclose(law(**off), [0.4, 0.3, 0.2, 0.1], atol=1e-6)
    for one in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 0.39}, {"min_p": 1.0}):
        np.testing.assert_allclose(law(**one), [1, 0, 0, 0], atol=1e-6)
    # top-p sees what top-k left: of [4/7, 3/7], 0.5 needs the first only.
    np.testing.assert_allclose(law(top_k=2, top_p=0.5), [1, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(law(top_p=0.5), [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    # Tokens that tie with the last one kept are kept.
    tied = sampling.distribution(jnp.zeros(5), Sampling(temperature=1.0, top_k=2))
    np.testing.assert_allclose(tied, [0.2] * 5, atol=1e-6)


def test_truncation_equals_sorting():
    """Against the same rules by a full sort, on laws of many scales, at a large vocabulary."""
    rng = np.random.default_rng(0)
    vocab = 30_000
    for scale in (0.1, 3.0, 30.0):
        logits = (rng.standard_normal(vocab) * scale).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        for top_k, top_p in ((0, 0.9), (50, 1.0), (1000, 0.5), (0, 0.999), (7, 0.0)):
            p = np.exp(logits.astype(np.float64) - logits.max())[order]
            if top_k:
                p[top_k:] = 0
            p /= p.sum()
            if top_p < 1:
                p[np.cumsum(p) - p >= max(top_p, 1e-12)] = 0
            expected = np.zeros(vocab)
            expected[order] = p / p.sum()
            controls_ = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
            probs = np.asarray(sampling.distribution(jnp.asarray(logits), controls_))
            # Rounding of the mass can move the edge of top-p by a token that weighs nothing.
            assert np.abs(probs - expected).sum() < 2e-4
            if top_p == 1:
                np.testing.assert_array_equal(probs > 0, expected > 0)


def test_bias_and_bans():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]] * 2))
    law = lambda **fields: sampling.distribution(logits, Sampling(temperature=1.0, **fields))
    half = float(np.log(2.0))
    for fields, expected in (
        ({"banned": [0]}, [[0, 1 / 2, 1 / 3, 1 / 6]] * 2),
        ({"banned": [[0], None]}, [[0, 1 / 2, 1 / 3, 1 / 6], [0.4, 0.3, 0.2, 0.1]]),
        ({"allowed": (1, 2)}, [[0, 0.6, 0.4, 0]] * 2),
        ({"allowed": [[3], [1, 2]]}, [[0, 0, 0, 1], [0, 0.6, 0.4, 0]]),
        ({"allowed": [1, 2], "banned": [1]}, [[0, 0, 1, 0]] * 2),
        ({"logit_bias": {3: half}}, [[4 / 11, 3 / 11, 2 / 11, 2 / 11]] * 2),
        ({"logit_bias": [{0: -np.inf}, {}]}, [[0, 1 / 2, 1 / 3, 1 / 6], [0.4, 0.3, 0.2, 0.1]]),
        ({"logit_bias": np.zeros((2, 4)), "banned": {0}}, [[0, 1 / 2, 1 / 3, 1 / 6]] * 2),
        ({"banned": []}, [[0.4, 0.3, 0.2, 0.1]] * 2),
    ):
        np.testing.assert_allclose(law(**fields), expected, atol=1e-6, err_msg=str(fields))
    greedy = sampling.distribution(logits, Sampling(banned=[0], logit_bias={3: 9.0}))
    np.testing.assert_allclose(greedy, [[0, 0, 0, 1]] * 2)


def test_controls_inside_jit():
    """All fields traced, lists and mappings of traced values included."""
    logits = jax.random.normal(jax.random.key(0), (2, 9))
    context = jnp.array([[1, 2, 2], [3, 3, 3]])
    controls_ = Sampling(
        temperature=jnp.array([0.0, 0.7]),
        top_k=5,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=jnp.array([1.2, 0.9]),
        frequency_penalty=0.1,
        logit_bias={4: 1.0},
        banned=[0, 8],
    )
    inside = jax.jit(sampling.distribution)(logits, controls_, context)
    outside = sampling.distribution(logits, controls_, context)
    np.testing.assert_allclose(inside, outside, atol=1e-6)


def test_extreme_penalties_and_padding_ids():
    logits, context = jnp.array([2.0, -1.0, 3.0]), jnp.array([0, 1])
    for fields in (
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 1e38},
        {"frequency_penalty": -3e38},
        {"presence_penalty": 3e38},
    ):
        for temperature in (0.0, 1.0):
            made = Sampling(temperature=temperature, **fields)
            probs = sampling.distribution(logits, made, context)
            assert np.isfinite(probs).all()
            assert float(probs.sum()) == pytest.approx(1.0)
    banned = jax.jit(lambda ids: sampling.distribution(logits, Sampling(banned=ids)))
    np.testing.assert_array_equal(banned(jnp.array([-1, 1])), [0, 0, 1])
    np.testing.assert_array_equal(banned(jnp.array([2, 9])), [1, 0, 0])
    numbers = Sampling(temperature=None, ignore_eos=None, logit_bias={0: jnp.bfloat16(9)})
    np.testing.assert_array_equal(sampling.distribution(logits, numbers), [1, 0, 0])
    with pytest.raises(ValueError, match=r"sampling\.top_k"):
        jax.eval_shape(lambda k: sampling.distribution(logits, Sampling(top_k=k)), jnp.array(2.7))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *[("temperature", bad) for bad in (-1.0, float("nan"), float("inf"), 1e300, "hot")],
        ("temperature", [1.0, 2.0, 3.0]),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", [0.1, 2.0]),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("min_new_tokens", -1),
        ("ignore_eos", 1.5),
        ("banned", [9]),
        ("banned", [-1]),
        ("banned", [1.5]),
        ("banned", "a"),
        ("banned", list(range(9))),
        ("allowed", []),
        ("allowed", [[1], [2], [3]]),
        ("logit_bias", {0: float("nan")}),
        ("logit_bias", {0: float("inf")}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", np.zeros(8)),
        ("logit_bias", 3.0),
    ],
)
def test_bad_controls(field, bad):
    with pytest.raises(ValueError, match=rf"sampling\..*{field}"):
        controls.check_sampling(Sampling(**{field: bad}), 2, 9)


def test_bad_contexts():
    logits = jnp.zeros((2, 9))
    for context, mask, message in (
        (jnp.zeros((3, 4), jnp.int32), None, "context must be"),
        (jnp.zeros((2, 4)), None, "context must hold integer"),
        (None, jnp.ones((2, 4), bool), "context_mask needs a context"),
        (jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 3), bool), "context_mask must have"),
    ):
        with pytest.raises(ValueError, match=message):
            sampling.distribution(logits, Sampling(), context, mask)
