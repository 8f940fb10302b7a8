"""Layers that see the last tokens only: their ring of slots gives what a whole cache would give."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafters
from specjax.models.config import RopeConfig
from specjax.models.decoder import decoder_model, first_layers, random_weights
from specjax.types import Params
from tests import tiny

WINDOW, NEW, DEPTH = 8, 40, 6
RING = 256  # window and a chunk of the prompt, in whole steps of 128
CONFIG = dataclasses.replace(  # with all else that Gemma's layers have
    tiny.CONFIG,
    windows=(WINDOW, None),
    local_rope=RopeConfig(theta=100.0),
    attention_softcap=5.0,
    logit_softcap=10.0,
    qk_norm=True,
    post_norms=True,
    norm_offset=1.0,
)
LENGTHS = (3, 140, 300)


@pytest.fixture(scope="module")
def params() -> Params:
    weights = random_weights(CONFIG, jax.random.key(1))
    return Params(target=weights, model=decoder_model(CONFIG), drafter=drafters.plain(), pad_id=60)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 60, length).tolist() for length in LENGTHS]


def decode(params: Params, prompts: list[list[int]]) -> list[list[int]]:
    out = specjax.decode(params, prompts, max_new_tokens=NEW, eos_ids=[])
    return np.asarray(out.tokens).tolist()


@pytest.fixture(scope="module")
def plain(params, prompts) -> list[list[int]]:
    return decode(params, prompts)


def whole_pass(config, weights, tokens, mask):
    """Logits without a cache."""
    model, steps = decoder_model(config), tokens.shape[1]
    empty = model.init_cache(weights, tokens.shape[0], 1)
    positions = jnp.broadcast_to(jnp.arange(steps)[None, :], tokens.shape)
    run = lambda weights: model.unembed(
        weights, model.forward(weights, tokens, positions, empty, mask).hidden
    )
    return jax.jit(run)(weights)


def test_a_window_is_a_band_of_the_mask():
    weights = random_weights(tiny.CONFIG, jax.random.key(1))
    tokens = jax.random.randint(jax.random.key(2), (1, 40), 0, 60)
    apart = jnp.arange(40)[None, :, None] - jnp.arange(40)[None, None, :]
    causal = apart >= 0
    local = dataclasses.replace(tiny.CONFIG, windows=(WINDOW, WINDOW))
    ours = whole_pass(local, weights, tokens, causal)
    banded = whole_pass(tiny.CONFIG, weights, tokens, causal & (apart < WINDOW))
    np.testing.assert_allclose(ours, banded, atol=1e-5)
    everything = whole_pass(tiny.CONFIG, weights, tokens, causal)
    assert np.abs(np.asarray(ours - everything)).max() > 0.01


def test_long_texts_are_those_of_a_pass_without_a_cache(params, prompts, plain):
    total = LENGTHS[-1] + NEW
    texts = [prompt + row for prompt, row in zip(prompts, plain, strict=True)]
    tokens = jnp.asarray([text + [0] * (total - len(text)) for text in texts])
    causal = jnp.tril(jnp.ones((1, total, total), bool))
    best = np.argmax(whole_pass(CONFIG, params.target, tokens, causal), axis=-1)
    for row, (length, continuation) in enumerate(zip(LENGTHS, plain, strict=True)):
        assert best[row, length - 1 : length + NEW - 1].tolist() == continuation


@pytest.mark.parametrize("shift", [1, 0])
def test_drafts_leave_no_trace_in_a_ring(params, prompts, plain, shift):
    """Wrong and right drafts for the longest row; for the others they are any tokens."""
    text = tuple(prompts[-1] + plain[-1])
    drafting = params.replace(drafter=tiny.oracle(text, DEPTH, shift))
    out = specjax.decode(drafting, prompts, max_new_tokens=NEW, eos_ids=[])
    assert np.asarray(out.tokens).tolist() == plain
    assert int(out.stats.rounds[-1]) == (NEW if shift else -(-NEW // (DEPTH + 1)))


def test_a_draft_model_with_windows(params, prompts, plain):
    config, draft = first_layers(CONFIG, params.target, 1)
    assert config.windows == (WINDOW,)
    drafter = drafters.draft_model(decoder_model(config), DEPTH)
    assert decode(params.replace(drafter=drafter, draft=draft), prompts) == plain


def test_memory_does_not_grow_with_the_text(params):
    cache = jax.eval_shape(lambda: params.model.init_cache(params.target, 1, 100_000))
    assert cache.rings == (True, False)
    assert [keys.shape[2] for keys in cache.keys] == [RING, 100_000]


def test_the_loop_copies_no_ring(params, prompts):
    batch = 2
    drafting = params.replace(drafter=drafters.ngram(4))
    job = decoding._job(drafting, prompts[1:], max_new_tokens=NEW)
    lowered = decoding._decode_program.lower(job.params, job.request, job.prompt, plan=job.plan)
    text = lowered.compile().as_text()
    dims = f"{batch},{CONFIG.num_kv_heads},{RING},{CONFIG.head_dim}"
    assert f"f32[{dims}]" in text
    loops = [c for c in re.split(r"\n(?=\S)", text) if not c.startswith("ENTRY")]
    pattern = rf"= \w+\[{dims}\]\S* (?:copy|copy-start|convert)\(.*"
    assert not [line for c in loops for line in re.findall(pattern, c)]
