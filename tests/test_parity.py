"""Tiny checkpoints in the published format against another implementation's outputs."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache, checkpoints, drafters
from tests.tiny import emitted, oracle

TARGETS = [
    "hf-gemma2",
    "hf-gemma3-text",
    "hf-gpt-neox",
    "hf-gpt2",
    "hf-llama-tied-llama3rope",
    "hf-llama-untied",
    "hf-mistral",
    "hf-mixtral",
    "hf-qwen2",
    "hf-qwen3",
    "hf-qwen3-moe",
    "mtp-deepseek-v3",
    "target-llama-deep",
    "target-qwen3-deep",
]
PLAIN = {"hf-gemma3-text", "hf-llama-untied", "mtp-deepseek-v3"}  # the others with a drafter only
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def _causal(steps: int) -> jax.Array:
    return jnp.tril(jnp.ones((1, steps, steps), bool))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _read(model, weights, ids, text, features):
    """Logits and hidden states of `ids [1, P]` in one pass, and logits of what follows in `text`.

    The latter with a cache that has read the prompt in chunks.
    """
    steps, total = ids.shape[1], text.shape[1]
    empty = model.init_cache(weights, 1, 1)
    whole = model.forward(weights, ids, jnp.arange(steps)[None, :], empty, _causal(steps), features)
    held = model.init_cache(weights, 1, 64)
    padded = jnp.pad(ids, ((0, 0), (0, -steps % 8)))
    held, _ = cache.prefill(model, weights, held, padded, jnp.array([steps]), chunk=8)
    positions = jnp.arange(steps, total)[None, :]
    rest = model.forward(weights, text[:, steps:], positions, held, _causal(total - steps))
    logits = [model.unembed(weights, out.hidden)[0] for out in (whole, rest)]
    return *logits, whole.features


@pytest.mark.parametrize("name", TARGETS)
def test_logits_hidden_states_and_greedy_text(shared, name):
    folder = shared / "parity" / name
    expected = np.load(folder / "expected.npz")
    params = specjax.load(folder, dtype="float32")
    ids = expected["input_ids"]
    text = np.concatenate([ids, expected["generated_ids"][None]], axis=1)
    layers = params.model.config.num_layers
    logits, rest, features = _read(params.model, params.target, ids, text, tuple(range(layers + 1)))
    np.testing.assert_allclose(logits, expected["logits"], **TOLERANCE)
    for ours, theirs in zip(features, expected["hidden_states"], strict=True):
        np.testing.assert_allclose(ours[0], theirs, **TOLERANCE)
    if "logits_full" in expected:
        np.testing.assert_allclose(rest, expected["logits_full"], **TOLERANCE)
    else:
        following = np.argmax(rest, axis=-1)[:-1]
        np.testing.assert_array_equal(following, expected["generated_ids"][1:])

    greedy = expected["generated_ids"].tolist()
    for drafter in (drafters.ngram(4), *[drafters.plain()] * (name in PLAIN)):
        out = specjax.decode(
            params.replace(drafter=drafter), ids, max_new_tokens=len(greedy), eos_ids=[]
        )
        assert emitted(out) == greedy


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_with_a_draft_model_and_with_wrong_drafts(shared, name):
    """The model's own first layer drafts; then six drafts a round that are all wrong."""
    folder = shared / "parity" / name
    expected = np.load(folder / "expected.npz")
    ids, greedy = expected["input_ids"], expected["generated_ids"].tolist()
    drafter = {"method": "draft_model", "draft_layers": 1, "num_speculative_tokens": 4}
    params = specjax.load(folder, drafter, dtype="float32")
    options = {"max_new_tokens": len(greedy), "eos_ids": []}
    out = specjax.decode(params, ids, **options)
    assert emitted(out) == greedy
    wrong = oracle((*ids[0].tolist(), *greedy, *[0] * 6), 6, 1)
    out = specjax.decode(params.replace(drafter=wrong, draft=None), ids, **options)
    assert emitted(out) == greedy
    assert int(out.stats.rounds[0]) == len(greedy)


@pytest.mark.parametrize("name", TARGETS)
def test_both_dialects_of_a_configuration_agree(shared, name):
    checkpoint = checkpoints.read(shared / "parity" / name)
    file = shared / "parity" / name / "config_transformers5.json"
    if not file.exists():
        pytest.skip("only one dialect is there")
    assert checkpoint.family.config_from_hf(json.loads(file.read_text())) == checkpoint.config


def test_latent_attention_and_experts_on_a_mesh(shared):
    folder = shared / "parity" / "mtp-deepseek-v3"
    expected = np.load(folder / "expected.npz")
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    params = specjax.load(folder, "ngram", mesh=mesh, dtype="float32")
    prompts = np.repeat(expected["input_ids"], 2, axis=0)
    out = specjax.decode(params, prompts, max_new_tokens=32, eos_ids=[])
    np.testing.assert_array_equal(out.tokens, np.tile(expected["generated_ids"], (2, 1)))


def test_assisted_generation(shared):
    """A one-layer draft model: its logits, and the rounds that assisted generation takes."""
    folder = shared / "parity" / "assisted-llama"
    expected = np.load(folder / "expected.npz")
    draft = specjax.load(folder, dtype="float32")
    for row, prompt in enumerate(expected["prompts"]):
        text = np.concatenate([prompt, prompt[:1]])
        logits, _, _ = _read(draft.model, draft.target, prompt[None], text[None], ())
        np.testing.assert_allclose(logits, expected["draft_logits"][row], **TOLERANCE)
    params = specjax.load(
        shared / "parity" / "hf-llama-untied",
        {"method": "draft_model", "model": folder, "num_speculative_tokens": 5},
        dtype="float32",
    )
    out = specjax.decode(params, expected["prompts"], max_new_tokens=40, eos_ids=[])
    np.testing.assert_array_equal(out.tokens, expected["plain_ids"])
    for row in (0, 2):  # in row 1 the reference cuts a draft short at its own end token
        rounds = [r for r in expected["assisted_rounds"][row] if r[0] >= 0]
        assert int(out.stats.rounds[row]) == len(rounds)
        accepted = np.bincount([r[1] for r in rounds], minlength=6)
        np.testing.assert_array_equal(out.stats.histogram[row], accepted)


def test_prompt_lookup_gives_the_same_text(shared):
    folder = shared / "parity" / "hf-llama-untied"
    expected = np.load(shared / "parity" / "assisted-llama" / "expected.npz")
    params = specjax.load(
        folder,
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        dtype="float32",
    )
    out = specjax.decode(params, expected["prompts"], max_new_tokens=40, eos_ids=[])
    np.testing.assert_array_equal(out.tokens, expected["lookup_ids"])
