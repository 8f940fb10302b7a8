"""Modules that predict further tokens, against the reference's code."""

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import checkpoints
from specjax.drafters.eagle import reader_of
from specjax.models.mtp import mtp_network
from tests.drafters.reading import TOLERANCE, assert_rounds, case, target, weights
from tests.tiny import emitted


def _steps(params, found, hidden, text, steps):
    """Hidden states and logits of each step over a whole text, teacher-forced."""
    draft = checkpoints.read_draft(found.folder, params.model.config, "mtp", np.float32)
    network, tree = mtp_network(draft.config), weights(draft)
    length = hidden.shape[1]
    for k in range(steps):
        own = tree["modules"][k % draft.config.modules]
        reader = reader_of(network, params, own, None)
        out = reader.forward(
            jnp.asarray(text[:, k + 1 : k + 1 + length]),
            hidden,
            jnp.arange(length)[None],
            network.init_cache(own, 1, 8),
            jnp.tril(jnp.ones((1, length, length), bool)),
        )
        hidden = out.features[0]
        yield hidden[0], reader.logits(out.hidden)[0]


def test_deepseek_modules(shared):
    found = case(shared, "mtp-deepseek-v3")
    params, expected = target(found.target), found.expected
    modules = sum(f"mtp{k}_hidden" in expected for k in range(4))
    ids = expected["input_ids"]
    drafts = expected["mtp_draft_tokens"].reshape(1, -1)
    text = np.concatenate([ids, expected["next_token"][None], drafts], axis=1).astype(np.int32)
    hidden = jnp.asarray(expected["hidden_states"][-1])[None]
    found_steps = list(_steps(params, found, hidden, text, modules))
    for k, (states, logits) in enumerate(found_steps):
        np.testing.assert_allclose(states, expected[f"mtp{k}_hidden"], **TOLERANCE)
        np.testing.assert_allclose(logits, expected[f"mtp{k}_logits"], **TOLERANCE)
        assert int(jnp.argmax(logits[-1])) == drafts[0, k]


def test_deepseek_text_and_matches(shared):
    found = case(shared, "mtp-deepseek-v3")
    expected = found.expected
    steps = expected["mtp_draft_tokens"].size
    drafter = {"method": "mtp", "num_speculative_tokens": steps}
    params = specjax.load(found.target, drafter, dtype="float32")
    wanted = expected["mtp_generated_ids"].tolist()
    prompt = np.concatenate([expected["input_ids"], [wanted[:1]]], axis=1)
    out = specjax.decode(params, prompt, max_new_tokens=len(wanted) - 1, eos_ids=[])
    assert emitted(out) == wanted[1:] == expected["generated_ids"].tolist()[1:]
    # The reference notes what the round before has matched: first nothing, then the prompt's pass.
    matched = expected["n_last_matches_per_round"][2:]
    assert_rounds(out, np.append(matched, steps) + 1)


def test_speculators_steps(shared):
    found = case(shared, "spec-mtp-qwen3")
    params, expected = target(found.target), found.expected
    hidden = jnp.asarray(expected["target_hidden"])[None]
    text = expected["input_ids"].astype(np.int32)
    steps = list(_steps(params, found, hidden, text, 3))
    for k, (states, logits) in enumerate(steps):
        np.testing.assert_allclose(states, expected[f"step{k}_hidden"], **TOLERANCE)
        np.testing.assert_allclose(logits, expected[f"step{k}_logits"], **TOLERANCE)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_driver_drafts_what_a_pass_over_the_whole_text_would(shared, steps):
    """The rounds of a run, counted by hand: each step over all of the text, drafts included."""
    found = case(shared, "spec-mtp-qwen3")
    plain = target(found.target)
    prompt = found.expected["input_ids"][:, :24].astype(np.int32)
    text = emitted(specjax.decode(plain, prompt, max_new_tokens=24, eos_ids=[]))
    text = [*prompt[0].tolist(), *text]
    drafter = {"method": "mtp", "model": found.folder, "num_speculative_tokens": steps}
    params = specjax.load(found.target, drafter, dtype="float32")
    out = specjax.decode(params, prompt, max_new_tokens=24, eos_ids=[])
    assert emitted(out) == text[24:]
    # hs[n] of the whole text, once.
    tokens = jnp.asarray([text])
    mask = jnp.tril(jnp.ones((1, len(text), len(text)), bool))
    model = plain.model
    states = model.forward(
        plain.target,
        tokens,
        jnp.arange(len(text))[None],
        model.init_cache(plain.target, 1, 8),
        mask,
    ).hidden
    length, rounds = 24, []
    while length < len(text):
        known = text[:length]
        for _ in range(steps):
            # Always as long: what lies behind is not seen, and no new program is compiled.
            padded = np.zeros((1, len(text) + steps + 1), np.int32)
            padded[0, : len(known)] = known
            *_, (_, logits) = _steps(params, found, states, padded, len(known) - length + 1)
            known = [*known, int(jnp.argmax(logits[length - 2]))]
        accepted = 0
        while (
            accepted < steps
            and known[length + accepted : length + accepted + 1]
            == text[length + accepted : length + accepted + 1]
        ):
            accepted += 1
        rounds.append(accepted + 1)
        length += accepted + 1
    assert_rounds(out, np.array(rounds))
