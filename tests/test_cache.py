"""The cache: ragged appends, rollback, chunked prefill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache
from specjax.types import Block, Cache
from tests import tiny


@pytest.mark.parametrize("batch", [1, 3])
def test_append_at_each_rows_length(batch):
    lengths = jnp.array([2, 0, 5])[:batch]
    kv = (jnp.zeros((batch, 2, 8, 3)),)
    held = Cache(keys=kv, values=kv, lengths=lengths)
    new = (jax.random.normal(jax.random.key(0), (batch, 2, 3, 3)),)
    out = cache.append(held, Block(keys=new, values=new), lengths + 2)
    for b in range(batch):
        start = int(lengths[b])
        np.testing.assert_array_equal(out.keys[0][b, :, start : start + 2], new[0][b, :, :2])
        assert not np.asarray(out.keys[0][b, :, start + 2]).any()  # beyond the new length
        assert not np.asarray(out.values[0][b, :, :start]).any()
    np.testing.assert_array_equal(out.lengths, lengths + 2)
    np.testing.assert_array_equal(
        cache.truncate(out, jnp.array([3, 9, 1])[:batch]).lengths,
        jnp.minimum(out.lengths, jnp.array([3, 9, 1])[:batch]),
    )


@pytest.mark.parametrize("chunk", [1, 7, 42])
def test_chunked_prefill_is_the_same(chunk):
    """Cache and features do not depend on the chunk; rows may be shorter, or empty."""
    params = tiny.params()
    tokens = jax.random.randint(jax.random.key(1), (3, 42), 0, 61)
    lengths = jnp.array([42, 11, 0])
    features = (0, 1, 2)

    def read(chunk):
        held = params.model.init_cache(params.target, 3, 64)
        return cache.prefill(
            params.model, params.target, held, tokens, lengths, chunk=chunk, features=features
        )

    held, kept = read(chunk)
    whole, expected = read(42)
    for b, n in enumerate([42, 11, 0]):
        for a, e in zip(held.keys + held.values, whole.keys + whole.values, strict=True):
            np.testing.assert_allclose(a[b, :, :n], e[b, :, :n], atol=1e-5)
        for a, e in zip(kept, expected, strict=True):
            np.testing.assert_allclose(a[b, :n], e[b, :n], atol=1e-5)
    np.testing.assert_array_equal(held.lengths, lengths)


def test_what_lies_beyond_the_length_is_never_seen():
    params = tiny.params()
    held = params.model.init_cache(params.target, 1, 16)
    tokens = jnp.array([[5, 6, 7, 8]])
    held, _ = cache.prefill(params.model, params.target, held, tokens, jnp.array([4]), chunk=4)
    dirty = Cache(
        keys=tuple(k.at[:, :, 4:].set(1e3) for k in held.keys),
        values=tuple(v.at[:, :, 4:].set(-1e3) for v in held.values),
        lengths=held.lengths,
    )
    mask = jnp.ones((1, 1, 1), bool)
    out = [
        params.model.forward(params.target, jnp.array([[9]]), jnp.array([[4]]), c, mask).hidden
        for c in (held, dirty)
    ]
    np.testing.assert_array_equal(out[0], out[1])
