"""The closed form against numpy, and heads that start from it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.train.choosing import choose
from specjax.train.least_squares import least_squares, unit_rms
from specjax.train.recipe import frozen
from specjax.train.recipes import PLANNERS, Plan
from specjax.train.windows import Batch, batch_at, open_windows
from tests.train import toy


def _data(seed=0, rows=300):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 7)).astype(np.float32)
    y = x @ draw.normal(size=(7, 4)).astype(np.float32) + 0.3 * draw.normal(size=(rows, 4))
    return x, y.astype(np.float32), draw.integers(0, 3, rows).astype(np.float32)


def test_the_closed_form_is_that_of_numpy():
    x, y, w = _data()
    found, explained = least_squares([(x[:100], y[:100], w[:100]), (x[100:], y[100:], w[100:])], 0)
    root = np.sqrt(w)[:, None].astype(np.float64)
    wanted = np.linalg.lstsq(root * x, root * y, rcond=None)[0]
    np.testing.assert_allclose(found, wanted.T, rtol=1e-4, atol=1e-4)
    left = (root * (y - x @ wanted)) ** 2
    assert explained == pytest.approx(1 - left.sum() / (root * y * (root * y)).sum(), abs=1e-5)


def test_a_ridge_shrinks_and_makes_what_is_singular_solvable():
    x, y, w = _data()
    twice = np.concatenate([x, x], axis=1)
    found, _ = least_squares([(twice, y, w)], 1e-3)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:, :7], found[:, 7:], atol=1e-3)  # sums are in float32
    less, _ = least_squares([(x, y, w)], 10.0)
    assert np.linalg.norm(less) < 0.3 * np.linalg.norm(found[:, :7] + found[:, 7:])


def test_nothing_to_fit():
    x, y, w = _data()
    with pytest.raises(ValueError, match="nothing to fit"):
        least_squares([(x, y, 0 * w)])


class _Started(NamedTuple):
    """A plan, batches of toy texts, and weights before and after the fit."""

    params: specjax.Params
    plan: Plan
    batches: list[Batch]
    fresh: dict
    fitted: dict

    def agreed(self, weights) -> np.ndarray:
        """Share of places where the likeliest guess is the target's likeliest token, by slot."""
        ids = np.arange(toy.CONFIG.vocab_size, dtype=np.int32)
        choice = choose(ids, ids, ids, ids.size, [0])
        args = frozen(self.params, ids)
        sums = [
            self.plan.recipe.loss(weights, args, batch, choice, jax.random.key(0))[1]
            for batch in self.batches
        ]
        total = jax.tree.map(lambda *x: sum(x), *sums)
        return np.asarray(total.agreed / total.places)


def _started(folder, method, options) -> _Started:
    params = specjax.load(toy.saved_target(folder))
    plan = PLANNERS[method].plan(params, **options)
    windows = open_windows(toy.write_toy_texts(folder / "texts"), 32, plan.recipe.features)
    batches = [batch_at(windows, i, 4) for i in range(len(windows.places) // 4)]
    fresh = plan.start(jax.random.key(0))
    return _Started(params, plan, batches, fresh, plan.fit(fresh, lambda: batches))


def test_a_head_starts_as_the_linear_guess(tmp_path):
    """Its first guesses are those of a fit by numpy, and better than an untrained head's."""
    made = _started(tmp_path, "eagle3", {"steps": 2})
    params, last = made.params, toy.CONFIG.num_layers
    rows, wanted = [], []
    for batch in made.batches:
        tokens, texts_of = np.asarray(batch.tokens), np.asarray(batch.texts)
        for r, t in np.ndindex(tokens.shape[0], tokens.shape[1] - 2):
            if texts_of[r, t] == texts_of[r, t + 2] and batch.answer[r, t + 2]:
                parts = [params.model.embed(params.target, jnp.asarray(tokens[r, t + 1]))]
                parts += [batch.state(i)[r, t] for i in made.plan.recipe.features]
                rows.append(np.concatenate([np.asarray(unit_rms(x)) for x in parts]))
                wanted.append(np.asarray(batch.state(last)[r, t + 1]))
    x, y = np.stack(rows), np.stack(wanted)
    guess = x @ np.linalg.lstsq(x, y, rcond=None)[0]
    explained = 1 - ((y - guess) ** 2).sum() / (y**2).sum()
    head = np.asarray(params.target["head"]["weight"])
    linear = np.mean(np.argmax(guess @ head.T, axis=1) == np.argmax(y @ head.T, axis=1))
    assert explained > 0.3
    assert made.agreed(made.fitted)[0] == pytest.approx(linear, abs=0.05)
    assert made.agreed(made.fitted)[0] > made.agreed(made.fresh)[0] + 0.2


METHODS = {
    "medusa": {"num_heads": 3},
    "dflash": {"mask_token_id": 1, "block_size": 5, "mixed": 3, "anchors": 12},
    "dspark": {"mask_token_id": 1, "block_size": 4, "mixed": 3, "markov_rank": 4, "anchors": 12},
}


@pytest.mark.parametrize("method", METHODS)
def test_heads_and_blocks_start_as_linear_guesses(tmp_path, method):
    made = _started(tmp_path, method, METHODS[method])
    same = jax.tree.map(lambda a, b: a.shape == b.shape, made.fresh, made.fitted)
    assert all(jax.tree.leaves(same))
    assert np.all(made.agreed(made.fitted)[:3] > made.agreed(made.fresh)[:3] + 0.4)


def test_how_much_prompts_count_is_the_recipes_own(tmp_path):
    a, b = (
        _started(tmp_path / str(weight), "medusa", {"num_heads": 1, "prompt_weight": weight})
        for weight in (0.0, 1.0)
    )
    differ = jax.tree.map(lambda x, y: bool(np.any(x != y)), a.fitted, b.fitted)
    assert any(jax.tree.leaves(differ))
