"""Tiny checkpoints in the published format against another implementation's outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache, drafters
from tests.tiny import emitted

LLAMAS = ["hf-llama-untied", "hf-llama-tied-llama3rope", "target-llama-deep"]
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def _read(params: specjax.Params, ids: np.ndarray, features: tuple[int, ...]):
    """Logits and hidden states of one pass over `[1, T]` tokens."""
    model, steps = params.model, ids.shape[1]
    held = model.init_cache(params.target, 1, 1)

    @jax.jit
    def run(weights):
        out = model.forward(
            weights,
            jnp.asarray(ids),
            jnp.arange(steps)[None, :],
            held,
            jnp.tril(jnp.ones((1, steps, steps), bool)),
            features,
        )
        return model.unembed(weights, out.hidden), out.features

    return run(params.target)


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_hidden_states_and_greedy_text(shared, name):
    folder = shared / "parity" / name
    expected = np.load(folder / "expected.npz")
    params = specjax.load(folder, dtype="float32")
    ids = expected["input_ids"]
    layers = params.model.config.num_layers
    logits, features = _read(params, ids, tuple(range(layers + 1)))
    np.testing.assert_allclose(logits[0], expected["logits"], **TOLERANCE)
    for ours, theirs in zip(features, expected["hidden_states"], strict=True):
        np.testing.assert_allclose(ours[0], theirs, **TOLERANCE)

    # With a cache, in chunks: the positions after the prompt.
    text = np.concatenate([ids, expected["generated_ids"][None]], axis=1)
    held = params.model.init_cache(params.target, 1, 64)
    prompt = ids.shape[1]
    held, _ = cache.prefill(
        params.model, params.target, held, jnp.asarray(ids), jnp.array([prompt]), chunk=8
    )
    steps = text.shape[1] - prompt
    out = params.model.forward(
        params.target,
        jnp.asarray(text[:, prompt:]),
        jnp.arange(prompt, prompt + steps)[None, :],
        held,
        jnp.tril(jnp.ones((1, steps, steps), bool)),
    )
    np.testing.assert_allclose(
        params.model.unembed(params.target, out.hidden)[0], expected["logits_full"], **TOLERANCE
    )

    greedy = expected["generated_ids"].tolist()
    for drafter in (drafters.plain(), drafters.ngram(4)):
        out = specjax.decode(
            params.replace(drafter=drafter), ids, max_new_tokens=len(greedy), eos_ids=[]
        )
        assert emitted(out) == greedy


def test_assisted_generation(shared):
    """A one-layer draft model: its logits, and the rounds that assisted generation takes."""
    folder = shared / "parity" / "assisted-llama"
    expected = np.load(folder / "expected.npz")
    draft = specjax.load(folder, dtype="float32")
    for row, prompt in enumerate(expected["prompts"]):
        logits, _ = _read(draft, prompt[None], ())
        np.testing.assert_allclose(logits[0], expected["draft_logits"][row], **TOLERANCE)
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
