"""A drafter whose short drafts are verified by short passes."""

from __future__ import annotations

from typing import Any

from specjax.types import Drafter

__all__ = ["sized"]


def sized(drafter: Drafter, sizes: Any) -> Drafter:
    """The drafter, with verifying passes of several sizes compiled beside the one for all N nodes.

    A round takes the smallest pass that holds the valid nodes of every row. Where rows of weights
    cost (a CPU, or large batches), a draft that may be short then costs what it is: 0 makes a round
    without a draft as cheap as plain decoding. Each size is another copy of the target to compile.

    Args:
      drafter: one whose drafts vary in length, such as `ngram()`, or a tree with `min_probability`.
      sizes: numbers of drafted nodes, ascending, from 0 to below N.

    Raises:
      ValueError: no drafter, or sizes that are not that.

    Example:
      >>> from specjax.drafters import ngram
      >>> sized(ngram(5), [0, 2]).sizes
      (0, 2)
    """
    if not isinstance(drafter, Drafter):
        raise ValueError(f"drafter must be a Drafter, got {drafter!r}")
    given = tuple(sizes) if isinstance(sizes, (list, tuple)) else None
    if given is None or not all(isinstance(x, int) and not isinstance(x, bool) for x in given):
        raise ValueError(f"verify_sizes must be a list of integers, got {sizes!r}")
    if list(given) != sorted(set(given)) or any(not 0 <= x < drafter.nodes for x in given):
        raise ValueError(
            f"verify_sizes must ascend, from 0 to below the {drafter.nodes} nodes that the drafter "
            f"{drafter.name} has; got {sizes!r}"
        )
    return drafter._replace(sizes=given)
