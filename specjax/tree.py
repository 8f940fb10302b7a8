"""Topology of a drafted tree: who sees whom, at which depth, along which path.

Nodes are numbered 0..N; node 0 is the root (the last committed token) and `parents[j - 1]` is the
parent of node j. Children come after their parents. A chain is the tree 0 <- 1 <- 2 ...

    parents = [0, 0, 1, 1]        nodes r a b c d        r sees r
                                                         a sees r a
          r                       depth 0 1 1 2 2        b sees r   b
         / \\                                             c sees r a   c
        a   b                                            d sees r a     d
       / \\
      c   d
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.types import Block, Proposal

__all__ = [
    "ancestors",
    "chain",
    "chain_proposal",
    "compact",
    "depths",
    "first_nodes",
    "path_to",
]


def chain(nodes: int) -> np.ndarray:
    """Parents `[N]` of a chain: 0, 1, ..., N - 1."""
    return np.arange(nodes, dtype=np.int32)


def chain_proposal(tokens: Array, valid: Array, probs: Array | None = None) -> Proposal:
    """A proposal in which each guess follows the one before.

    Args:
      tokens: `[B, N]` int32.
      valid: `[B, N]` bool; False from a guess on makes the draft shorter.
      probs: `[B, N, V]` float32, the law q of each guess; None: one-hot.

    Example:
      >>> chain_proposal(jnp.array([[5, 6]]), jnp.array([[True, False]])).parents
      Array([0, 1], dtype=int32)
    """
    return Proposal(
        tokens=tokens,
        parents=jnp.asarray(chain(tokens.shape[1])),
        probs=probs,
        valid=valid,
        candidate=jnp.ones(tokens.shape, bool),
    )


def first_nodes(proposal: Proposal, count: int) -> Proposal:
    """The first nodes of a proposal, which are a tree, too: parents come before children."""
    parents = proposal.parents[..., :count]
    rest = dataclasses.replace(proposal, parents=None)
    return dataclasses.replace(jax.tree.map(lambda x: x[:, :count], rest), parents=parents)


def ancestors(parents: Array) -> Array:
    """The verification mask: `[..., i, j]` is True where j is i or an ancestor of i.

    Args:
      parents: `[N]` or `[B, N]` int32, topologically sorted.

    Returns:
      `[1, M, M]` or `[B, M, M]` bool.

    Example:
      >>> ancestors(jnp.array([0, 0, 1, 1]))[0].astype(int)
      Array([[1, 0, 0, 0, 0],
             [1, 1, 0, 0, 0],
             [1, 0, 1, 0, 0],
             [1, 1, 0, 1, 0],
             [1, 1, 0, 0, 1]], dtype=int32)
    """
    parents = jnp.atleast_2d(jnp.asarray(parents, jnp.int32))
    rows, nodes = parents.shape
    self_or_parent = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), parents], axis=1)
    size = nodes + 1
    reach = self_or_parent[:, :, None] == jnp.arange(size)[None, None, :]
    reach = reach | jnp.eye(size, dtype=bool)[None]
    for _ in range(max(size - 1, 1).bit_length()):  # paths of length 1, 2, 4, ...
        reach = jnp.einsum("bij,bjk->bik", reach, reach, preferred_element_type=jnp.int32) > 0
    return reach


def depths(mask: Array) -> Array:
    """Distance from the root, given `ancestors`: `[..., M, M]` bool to `[..., M]` int32."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1


def path_to(mask: Array, node: Array, length: int) -> Array:
    """The path from the root to a node.

    Args:
      mask: `[1 or B, M, M]` bool from `ancestors`.
      node: `[B]` int32.
      length: entries wanted, K + 1.

    Returns:
      `[B, length]` int32, the node at each depth; the last one repeats beyond its depth.

    Example:
      >>> path_to(ancestors(jnp.array([0, 0, 1, 1])), jnp.array([4]), 4)
      Array([[0, 1, 4, 4]], dtype=int32)
    """
    batch = node.shape[0]
    mask = jnp.broadcast_to(mask, (batch, *mask.shape[1:]))
    row = jnp.take_along_axis(mask, node[:, None, None], axis=1)[:, 0]  # [B, M]
    depth = depths(mask)  # [B, M]
    at = row[:, None, :] & (depth[:, None, :] == jnp.arange(length)[None, :, None])
    found = jnp.argmax(at, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.any(at, axis=-1), found, node[:, None])


def compact(block: Block, path: Array) -> Block:
    """Keys and values of the accepted path, in order: one gather a layer.

    Args:
      block: T = M nodes.
      path: `[B, P]` int32 nodes.

    Returns:
      A block with T = P.
    """
    index = path[:, None, :, None]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, index, axis=2), block)
