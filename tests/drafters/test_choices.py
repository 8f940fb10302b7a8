"""Trees of one shape: their topology against the reference's buffers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import tree
from specjax.drafters.choices import TREES, named_tree, static_tree


@pytest.mark.parametrize("name", TREES)
def test_published_trees(shared, name):
    folder = shared / "parity" / "medusa-tree-buffers"
    expected = np.load(folder / "expected.npz")
    paths = json.loads((folder / "choices.json").read_text())[name]
    shape = named_tree(name)
    assert shape == static_tree(paths)
    mask = tree.ancestors(jnp.array(shape.parents))
    np.testing.assert_array_equal(mask[0], expected[f"{name}/attn_mask"])
    np.testing.assert_array_equal(tree.depths(mask)[0], expected[f"{name}/position_ids"])
    assert (0, *shape.depths) == tuple(expected[f"{name}/position_ids"])
    # The reference numbers candidates: the root, then ten of each head.
    index = [rank + 10 * (depth - 1) + 1 for rank, depth in zip(*shape[:1:-1], strict=True)]
    np.testing.assert_array_equal([0, *index], expected[f"{name}/tree_indices"])

    leaves = [node for node in range(1, len(paths) + 1) if node not in shape.parents]
    ends = tree.path_to(mask, jnp.array(leaves)[:1], shape.levels + 1)
    assert ends.shape == (1, 5)
    found = set()
    for leaf in leaves:
        path = [leaf]
        while path[0]:
            path.insert(0, shape.parents[path[0] - 1])
        found.add((*path, *[-1] * (shape.levels + 1 - len(path))))
    assert found == set(map(tuple, expected[f"{name}/retrieve_indices"].tolist()))


def test_levels():
    shape = static_tree([(2,), (0,), (0, 1), (2, 0), (2, 3), (2, 3, 1)])
    assert shape.paths == ((0,), (2,), (0, 1), (2, 0), (2, 3), (2, 3, 1))
    assert (shape.levels, shape.width) == (3, 3)
    assert shape.slots.tolist() == [0, 1, 3, 4, 5, 6]
    origins, ranks = shape.by_level()
    assert origins.tolist() == [[0, 0, 0], [0, 1, 1], [2, 0, 0]]
    assert ranks.tolist() == [[0, 2, 0], [1, 0, 3], [1, 0, 0]]


def test_chain():
    shape = named_tree(3)
    assert (shape.parents, shape.ranks) == ((0, 1, 2), (0, 0, 0))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("mc_sim", "'mc_sim' is not known; known: mc_sim_7b_63"),
        (0, "from 1 to 1024 for a chain, got 0"),
        (True, "must be paths of ranks"),
        (2.5, "must be paths of ranks"),
        ([], "at least one path"),
        ([()], r"has \(\); wanted ranks"),
        ([(0,), (0, -1)], r"has \(0, -1\); wanted ranks"),
        ([(0,), "01"], "has '01'; wanted ranks"),
        ([(0.0,)], "wanted ranks"),
        ([0, 1], "has 0; wanted ranks"),
        ([(0,), (1, 0)], r"the path \[1, 0\] without \[1\]"),
        ([(0,), (0, 0, 1)], r"the path \[0, 0, 1\] without \[0, 0\]"),
        ([(0,), (0,)], r"the path \[0\] twice"),
    ],
)
def test_what_is_no_tree(choices, message):
    with pytest.raises(ValueError, match=message):
        named_tree(choices)
