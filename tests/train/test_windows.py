"""Texts on disk, and the windows that are cut from them."""

import numpy as np
import pytest

from specjax.train import windows as windows_lib
from specjax.train.texts import Writing, read_texts, write_texts
from specjax.train.windows import batch_at, held_out, open_windows
from tests.train import toy

T = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy.write_toy_texts(tmp_path_factory.mktemp("texts"), shards=3, rows=8)


def test_states_are_those_of_a_pass_over_the_text(folder):
    params = toy.toy_target()
    features = windows_lib.open_windows(folder, T).features
    for conversation in list(read_texts(folder))[:3]:
        assert conversation.prompt == 8
        whole = toy.states_of(params, conversation.tokens[None], features)
        assert len(conversation.states) == len(features)
        for kept, state in zip(conversation.states, whole, strict=True):
            expected = np.asarray(state[0, :-1])
            scale = np.abs(expected).max()
            np.testing.assert_allclose(kept.astype(np.float32), expected, atol=scale / 128)


def test_texts_are_the_target_s_greedy_answers(folder):
    import specjax

    params = toy.toy_target()
    kept = list(read_texts(folder))[:4]
    result = specjax.decode(params, [c.tokens[:8] for c in kept], max_new_tokens=40)
    for row, conversation in enumerate(kept):
        np.testing.assert_array_equal(conversation.tokens[8:], result.tokens[row])


def test_a_window_knows_texts_answers_and_where_states_are(folder):
    windows = open_windows(folder, T)
    (shard, *_), length = windows.shards, 48  # 8 of the prompt, 40 of the answer
    batch = batch_at(windows._replace(places=np.array([[0, 32]])), 0, 1)
    place = np.arange(32, 32 + T)
    np.testing.assert_array_equal(batch.tokens[0], shard.tokens[place])
    np.testing.assert_array_equal(batch.texts[0], place // length)
    np.testing.assert_array_equal(batch.answer[0], place % length >= 8)
    np.testing.assert_array_equal(batch.known[0], place % length != length - 1)
    for kept, states in zip(batch.states, shard.states, strict=True):
        np.testing.assert_array_equal(kept[0], states[place])


def test_every_window_comes_once_an_epoch(folder):
    windows = open_windows(folder, T)
    count = len(windows.places)
    seen = [batch_at(windows, step, 1).tokens[0].tobytes() for step in range(2 * count)]
    cut = {
        batch_at(windows._replace(places=windows.places[[i]]), 0, 1).tokens[0].tobytes()
        for i in range(count)
    }
    assert set(seen[:count]) == set(seen[count:]) == cut
    assert seen[:count] != seen[count:]
    again = batch_at(windows, 3, 1).tokens[0].tobytes()
    assert again == seen[3]


def test_held_out_windows_are_not_trained_on(folder):
    windows = open_windows(folder, T)
    train, held = held_out(windows, 0.3)
    pairs = lambda w: {tuple(place) for place in w.places.tolist()}
    assert pairs(train) | pairs(held) == pairs(windows)
    assert not {shard for shard, _ in pairs(train)} & {shard for shard, _ in pairs(held)}


def test_a_run_that_was_stopped_goes_on(folder, tmp_path):
    """Shards are a function of settings and number: missing ones alone are made, and equal."""
    target = toy.toy_target()
    writing = Writing(features=(0, 3), rows=4, answer_tokens=6, temperatures=(0.0, 1.0), data="x")
    own = toy.prompts(12)
    made = lambda shards: list(
        write_texts(tmp_path / "a", target, writing, shards=shards, prompts=own)
    )
    first = made(range(3))
    kept = [c.tokens for c in read_texts(tmp_path / "a")]
    (tmp_path / "a" / "text-00001.npz").unlink()
    (tmp_path / "a" / "text-00002.part").write_bytes(b"half")
    assert made(range(3)) == first
    for old, new in zip(kept, read_texts(tmp_path / "a"), strict=True):
        np.testing.assert_array_equal(old, new.tokens)


def test_other_settings_are_refused(folder):
    writing = Writing(features=(1,), data="random")
    with pytest.raises(
        ValueError, match=r"holds texts of other settings: .*features was \[1, 2, 3\], is \[1\]"
    ):
        list(write_texts(folder, toy.toy_target(), writing, shards=[0], prompts=toy.prompts(1)))


def test_what_cannot_be_opened(folder, tmp_path):
    with pytest.raises(ValueError, match=r"holds states of the layers \[1, 2, 3\], wanted \[0\]"):
        open_windows(folder, T, (0,))
    with pytest.raises(ValueError, match="shorter than one window of 100000"):
        open_windows(folder, 100_000)
    with pytest.raises(ValueError, match="holds states of the layers"):
        open_windows(tmp_path, T, (0,))
    with pytest.raises(ValueError, match="has no texts"):
        open_windows(tmp_path, T)
