"""Weights in 8 and 4 bits behind the same products, and keys and values in 8."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import cache, drafters
from specjax.models.config import DecoderConfig, ExpertsConfig, LatentConfig
from specjax.models.decoder import decoder_model, random_weights
from specjax.models.layers import look_up, matmul
from specjax.models.quantized import (
    QuantizedTensor,
    dequantize,
    integers,
    quantize,
    quantize_weight,
)
from specjax.types import Params
from tests import tiny
from tests.tiny import emitted

PROMPTS = [[5], [1, 2, 3, 4, 5], list(range(10, 27)), [7, 7]]
WINDOWS = dataclasses.replace(tiny.CONFIG, num_layers=2, windows=(8, None))
TIED = dataclasses.replace(tiny.CONFIG, tie_embeddings=True)
LATENT = dataclasses.replace(
    tiny.CONFIG,
    num_layers=1,
    latent=LatentConfig(query_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
    experts=ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=24, shared_size=24),
)


def in_bits(weights, bits):
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: quantize_weight(tuple(e.key for e in path), leaf, bits), weights
    )


def models(config: DecoderConfig, *, target=None, draft=None, kv_cache=None):
    """A random target, in some bits, plain and with a draft model: itself in others."""
    weights = random_weights(config, jax.random.key(0))
    model = decoder_model(config, kv_cache=kv_cache)
    plain = Params(
        target=weights if target is None else in_bits(weights, target),
        model=model,
        drafter=drafters.plain(),
        pad_id=config.vocab_size - 1,
    )
    drafted = plain.replace(
        drafter=drafters.draft_model(model, 3),
        draft=weights if draft is None else in_bits(weights, draft),
    )
    return plain, drafted


# --- the container ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 64), (3, 5, 96), (64,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bits_are_off_by_half_a_scale_at_most(shape, dtype):
    array = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    small = quantize(array, 8)
    assert (small.shape, small.ndim, small.dtype) == (shape, len(shape), dtype)
    exact = dequantize(small, jnp.float32)
    off = np.abs(np.asarray(exact) - np.asarray(array, np.float32))
    assert np.all(off <= 0.5001 * np.asarray(small.scales))
    # The largest element of a row is one of the ends.
    assert np.all(np.max(np.abs(np.asarray(small.values, np.int32)), axis=-1) == 127)
    assert dequantize(small).dtype == dtype


@pytest.mark.parametrize("group", [16, 32, 64])
@pytest.mark.parametrize("bits", [8, 4])
def test_groups(bits, group):
    """Half a scale, and the rounding of scale and offset to float16."""
    array = 3 + jax.random.normal(jax.random.key(1), (6, 128))
    small = quantize(array, bits, group)
    assert small.shape == (6, 128)
    assert small.values.shape == (6, 128 * bits // 8)
    assert small.scales.shape == small.offsets.shape == (6, 128 // group)
    off = np.abs(np.asarray(dequantize(small) - array)).reshape(6, -1, group)
    grouped = np.asarray(array).reshape(off.shape)
    largest = np.abs(grouped).max(axis=-1, keepdims=True)
    even = np.ptp(grouped, axis=-1, keepdims=True) / (2**bits - 1)
    assert np.all(off <= 0.5 * even + 2**-10 * largest)
    numbers = np.asarray(integers(small), np.int32)
    assert numbers.max() == 2**bits - 1


def test_what_fits_is_kept_exactly():
    """What was held in as many bits or fewer before, with a scale and an offset for each 32 (GGUF:
    Q4_1, Q4_0 and Q8_0)."""
    rng = np.random.default_rng(0)
    d = np.float16(rng.uniform(0.01, 0.1, (5, 2, 1))).astype(np.float32)
    numbers = rng.integers(0, 16, (5, 2, 32))
    numbers[..., 0], numbers[..., 1] = 0, 15
    offset = np.float16(rng.normal(size=d.shape)).astype(np.float32)
    symmetric = numbers - 8
    eight = rng.integers(-127, 128, (5, 2, 32))
    eight[:, :, 3] = [[-127, 127]] * 5
    sign = rng.choice([-1, 1], d.shape)
    for bits, array in [
        (4, d * numbers + offset),
        (8, d * numbers + offset),
        (4, sign * d * symmetric),
        (8, sign * d * symmetric),
        (8, d * eight),
    ]:
        array = jnp.asarray(array, jnp.float32).reshape(5, 64)
        np.testing.assert_array_equal(dequantize(quantize(array, bits, 32)), array)
    zero = jnp.zeros((2, 64))
    for bits in (8, 4):
        np.testing.assert_array_equal(dequantize(quantize(zero, bits)), zero)


def test_bytes():
    array = jnp.ones((512, 576), jnp.float32)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert size(quantize(array, 8)) == 512 * 576 + 4 * 512
    assert size(quantize(array, 8, 32)) == 512 * 576 + 2 * 2 * 512 * 18
    assert size(quantize(array, 4)) == 512 * 576 // 2 + 2 * 2 * 512 * 18


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((jnp.ones((2, 64)), 5), "bits must be 8 or 4"),
        ((jnp.ones((2, 48)), 4), r"group must divide the last axis \(48\)"),
        ((jnp.ones((2, 48)), 8, 0), "group must divide"),
        ((jnp.ones((2, 9)), 4, 3), "be even"),
        ((jnp.ones((2, 4), jnp.int32), 8), "floating point"),
        ((jnp.float32(1), 8), "at least one axis"),
    ],
)
def test_refused(args, said):
    with pytest.raises(ValueError, match=said):
        quantize(*args)


# --- products and tables ---------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("out", [8, 128, 300])
@pytest.mark.parametrize("rows", [1, 2, 5, 70])
def test_matmul_is_that_of_what_the_weight_stands_for(bits, out, rows):
    x = jax.random.normal(jax.random.key(0), (rows, 64))
    weight = quantize(jax.random.normal(jax.random.key(1), (out, 64)), bits)
    expected = np.asarray(x, np.float64) @ np.asarray(dequantize(weight), np.float64).T
    for y in (matmul(x, weight), jax.jit(matmul)(x, weight)):
        assert (y.shape, y.dtype) == ((rows, out), jnp.float32)
        np.testing.assert_allclose(y, expected, atol=2e-5)
    np.testing.assert_array_equal(matmul(x[None], weight)[0], matmul(x, weight))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_form_of_accelerators(bits, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (3, 64))
    weight = quantize(jax.random.normal(jax.random.key(1), (40, 64)), bits)
    expected = matmul(x, weight)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_allclose(matmul(x, weight), expected, atol=2e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_look_up(bits):
    table = quantize(jax.random.normal(jax.random.key(0), (20, 32)), bits)
    index = jnp.array([[3, 19], [0, 3]])
    np.testing.assert_array_equal(look_up(table, index), dequantize(table)[index])


def test_which_weights():
    """Everything that is multiplied, but for routers; embedding and head always take 8 bits."""
    config = dataclasses.replace(LATENT, learned_positions=True, qk_norm=False)
    small = in_bits(random_weights(config, jax.random.key(0)), 4)
    layer = small["layers"][0]
    assert small["embed"]["weight"].bits == small["head"]["weight"].bits == 8
    for module in ("q_a", "q", "kv_a", "k", "v", "o"):
        assert layer["attn"][module]["weight"].bits == 4
    for stack in ("gate", "up", "down"):
        assert layer["mlp"][stack].bits == 4
    for kept in (layer["mlp"]["router"], small["positions"]):
        assert not isinstance(kept["weight"], QuantizedTensor)
    assert not isinstance(small["norm"]["scale"], QuantizedTensor)
    again = quantize_weight(("layers", 0, "attn", "q", "weight"), layer["attn"]["q"]["weight"], 8)
    assert again is layer["attn"]["q"]["weight"]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("config", [tiny.CONFIG, TIED, LATENT], ids=["untied", "tied", "latent"])
def test_a_model_is_that_of_what_its_weights_stand_for(config, bits):
    model = decoder_model(config)
    small = in_bits(random_weights(config, jax.random.key(0)), bits)
    whole = jax.tree.map(
        lambda leaf: dequantize(leaf) if isinstance(leaf, QuantizedTensor) else leaf,
        small,
        is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor),
    )
    tokens = jnp.array([[5, 6, 7, 8, 9]])
    mask = jnp.tril(jnp.ones((1, 5, 5), bool))

    @jax.jit
    def logits(weights):
        held = model.init_cache(weights, 1, 8)
        out = model.forward(weights, tokens, jnp.arange(5)[None], held, mask)
        return model.unembed(weights, out.hidden)

    np.testing.assert_allclose(logits(small), logits(whole), atol=1e-4)


# --- decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "draft"), [(None, 8), (None, 4), (8, 4), (8, 8), (4, None)])
def test_speculative_is_plain(target, draft):
    plain, drafted = models(tiny.CONFIG, target=target, draft=draft)
    ours, theirs = (specjax.decode(p, PROMPTS, max_new_tokens=24) for p in (drafted, plain))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    if target == draft:
        assert int(ours.stats.accepted.sum()) == int(ours.stats.proposed.sum())


def test_a_quantised_draft_agrees_with_its_target():
    _, drafted = models(tiny.CONFIG, draft=8)
    stats = specjax.decode(drafted, PROMPTS, max_new_tokens=24).stats
    assert int(stats.accepted.sum()) > 0.8 * int(stats.proposed.sum())


@pytest.mark.parametrize(("bits", "shape"), [(8, (4, 2)), (4, (2, 4))])
def test_on_a_mesh(bits, shape):
    _, drafted = models(tiny.CONFIG, target=bits, draft=bits, kv_cache="int8")
    mesh = jax.make_mesh(shape, ("data", "model"))
    one = specjax.decode(drafted, PROMPTS, max_new_tokens=16)
    many = specjax.decode(drafted, PROMPTS, max_new_tokens=16, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, many, one)


# --- keys and values -------------------------------------------------------------------------


def test_a_rounded_cache_holds_bytes_and_scales():
    model = decoder_model(tiny.CONFIG, kv_cache="int8")
    assert model is decoder_model(tiny.CONFIG, kv_cache="int8")
    assert model is not decoder_model(tiny.CONFIG)
    assert decoder_model(tiny.CONFIG) is decoder_model(tiny.CONFIG, kv_cache=None)
    weights = random_weights(tiny.CONFIG, jax.random.key(0))
    held = model.init_cache(weights, 3, 16)
    assert held.keys[0].values.shape == (3, 2, 16, 8)
    assert held.keys[0].values.dtype == jnp.int8
    assert held.keys[0].scales.shape == (3, 2, 16, 1)
    with pytest.raises(ValueError, match="kv_cache must be None or \"int8\", got 'int4'"):
        decoder_model(tiny.CONFIG, kv_cache="int4")


@pytest.mark.parametrize("chunk", [1, 7])
def test_tokens_of_a_pass_are_seen_as_they_are_read_later(chunk):
    """One pass over the prompt and passes over parts of it differ by float32 rounding only."""
    model = decoder_model(tiny.CONFIG, kv_cache="int8")
    weights = random_weights(tiny.CONFIG, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 42), 0, 61)

    def read(chunk):
        held = model.init_cache(weights, 2, 64)
        lengths = jnp.array([42, 11])
        return cache.prefill(model, weights, held, tokens, lengths, chunk=chunk, features=(0, 1, 2))

    (held, kept), (whole, expected) = read(chunk), read(42)
    for row, n in enumerate([42, 11]):
        for ours, theirs in zip(kept, expected, strict=True):
            np.testing.assert_allclose(ours[row, :n], theirs[row, :n], atol=1e-5)
        for ours, theirs in zip(held.keys, whole.keys, strict=True):
            ours, theirs = (np.asarray(x.values[row, :, :n], np.int32) for x in (ours, theirs))
            assert np.abs(ours - theirs).max() <= 1  # a tie may fall either way


def test_append_and_rollback_of_a_rounded_cache():
    model = decoder_model(tiny.CONFIG, kv_cache="int8")
    weights = random_weights(tiny.CONFIG, jax.random.key(0))
    held = model.init_cache(weights, 2, 16)
    mask = jnp.tril(jnp.ones((1, 4, 4), bool))
    positions = jnp.arange(4)[None].repeat(2, 0)
    out = jax.jit(model.forward)(weights, jnp.ones((2, 4), jnp.int32), positions, held, mask)
    held = cache.append(held, out.block, jnp.array([3, 1]))
    for slots, new in zip(held.keys + held.values, out.block.keys + out.block.values, strict=True):
        for part, fresh in ((slots.values, new.values), (slots.scales, new.scales)):
            np.testing.assert_array_equal(part[0, :, :3], fresh[0, :, :3])
            np.testing.assert_array_equal(part[1, :, :1], fresh[1, :, :1])
            assert not np.asarray(part[0, :, 3:]).any()
            assert not np.asarray(part[1, :, 1:]).any()
    np.testing.assert_array_equal(cache.truncate(held, jnp.array([2, 5])).lengths, [2, 1])


@pytest.mark.parametrize("config", [tiny.CONFIG, WINDOWS, LATENT], ids=["full", "ring", "latent"])
def test_speculative_is_plain_with_a_rounded_cache(config):
    """A draft in 4 bits falls often, so that much is rolled back; the rings turn round."""
    plain, drafted = models(config, draft=4, kv_cache="int8")
    steps = 150 if config is WINDOWS else 24
    ours, theirs = (specjax.decode(p, PROMPTS, max_new_tokens=steps) for p in (drafted, plain))
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def test_a_tree_of_drafts_with_a_rounded_cache():
    plain, _ = models(tiny.CONFIG, kv_cache="int8")
    text = emitted(specjax.decode(plain, [3, 1, 4], max_new_tokens=20))
    parents, right = (0, 0, 1, 2, 2, 4), (2, 4, 6)
    tree = tiny.tree_oracle((3, 1, 4, *text), parents, right)
    out = specjax.decode(plain.replace(drafter=tree), [3, 1, 4], max_new_tokens=20)
    assert emitted(out) == text


def test_a_rounded_cache_changes_little():
    exact, rounded = (models(tiny.CONFIG, kv_cache=kind)[0] for kind in (None, "int8"))
    tokens = jax.random.randint(jax.random.key(1), (1, 32), 0, 61)

    def states(params):
        held = params.model.init_cache(params.target, 1, 32)
        out = cache.prefill(
            params.model, params.target, held, tokens, jnp.array([32]), chunk=8, features=(2,)
        )
        return np.asarray(out[1][0])

    a, b = states(exact), states(rounded)
    assert 0 < np.abs(a - b).max() < 0.05 * np.abs(a).max()


# --- loading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_load(shared, quantize):
    folder = shared / "parity" / "hf-llama-untied"
    params = specjax.load(folder, quantize=quantize, kv_cache="int8")
    gate = params.target["layers"][0]["mlp"]["gate"]["weight"]
    whole = specjax.load(folder)
    size = lambda weights: sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert size(params.target) < 0.3 * size(whole.target)
    exact = whole.target["layers"][0]["mlp"]["gate"]["weight"]
    rounded = quantize_weight(("layers",), exact, {"int8": 8, "int4": 4}[quantize])
    jax.tree.map(np.testing.assert_array_equal, gate, rounded)
    assert params.model is decoder_model(params.model.config, kv_cache="int8")
    prompts = [[1, 2, 3], [4, 5]]
    drafted = params.replace(drafter=drafters.ngram(4))
    a, b = (specjax.decode(p, prompts, max_new_tokens=20, eos_ids=[]) for p in (params, drafted))
    np.testing.assert_array_equal(a.tokens, b.tokens)


def test_load_onto_a_mesh(shared):
    folder = shared / "parity" / "hf-llama-untied"
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    drafter = {"method": "draft_model", "quantize": "int4"}
    sharded = specjax.load(folder, drafter, mesh=mesh, quantize="int8")
    down = sharded.target["layers"][0]["mlp"]["down"]["weight"]
    assert down.values.sharding.shard_shape(down.values.shape) == (64, 40)
    assert down.scales.sharding.shard_shape(down.scales.shape) == (64, 5)
    gate = sharded.draft["layers"][0]["mlp"]["gate"]["weight"]
    assert gate.scales.sharding.shard_shape(gate.scales.shape) == (40, 2)
    alone = specjax.load(folder, drafter, quantize="int8")
    a, b = (
        specjax.decode(p, [[1, 2, 3], [4, 5]], max_new_tokens=12, eos_ids=[])
        for p in (sharded, alone)
    )
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_quantised_drafts(shared):
    """A checkpoint, the target itself and its first layers: leaves are quantised, text is not."""
    folder = shared / "parity" / "hf-llama-untied"
    greedy = np.load(folder / "expected.npz")
    ids, text = greedy["input_ids"], greedy["generated_ids"].tolist()
    kinds = (
        {"model": shared / "parity" / "assisted-llama", "quantize": "int8"},
        {"quantize": "int8"},
        {"quantize": "int4", "draft_layers": 1},
    )
    for kind in kinds:
        params = specjax.load(folder, {"method": "draft_model", **kind}, dtype="float32")
        assert isinstance(params.draft["layers"][0]["attn"]["q"]["weight"], QuantizedTensor)
        assert params.draft["norm"]["scale"].dtype == jnp.float32
        out = specjax.decode(params, ids, max_new_tokens=len(text), eos_ids=[])
        assert emitted(out) == text
    own = specjax.load(folder, {"method": "draft_model", "quantize": "int8"})
    assert own.draft["norm"]["scale"] is own.target["norm"]["scale"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int3"}, "quantize must be None or one of 'int8', 'int4', got 'int3'"),
        ({"quantize": 8}, "quantize must be None or one of"),
        ({"kv_cache": "int4"}, 'kv_cache must be None or "int8"'),
        ({"drafter": {"method": "draft_model"}}, 'needs one of "model", its checkpoint'),
        ({"drafter": {"method": "draft_model", "quantize": "fp8"}}, "got 'fp8'"),
        (
            {"drafter": {"method": "draft_model", "quantize": "int8"}, "quantize": "int8"},
            "the draft would be the target itself",
        ),
    ],
)
def test_load_refuses(shared, options, said):
    with pytest.raises(ValueError, match=said):
        specjax.load(shared / "parity" / "hf-llama-untied", **options)
