"""What training needs to know of a kind of drafter, and the head that all of them are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.models.decoder import head_rows
from specjax.train import losses
from specjax.train.windows import Batch
from specjax.types import Params, PyTree, record

__all__ = [
    "Choice",
    "Frozen",
    "Guess",
    "GuessesFn",
    "LossFn",
    "Metrics",
    "Recipe",
    "aligned",
    "frozen",
    "laws",
    "measured",
    "same_text",
    "step_loss",
    "worth",
]


@record
class Choice:
    """The tokens that laws are compared on, a sample of the vocabulary that every step draws anew.

    The tokens of the batch are always among them. Others stand for more than themselves: for
    `exp(log_weight)` tokens each, so that the sum over all of them is estimated without bias.
    """

    ids: Array  # [C] int32, of the draft's vocabulary
    log_weights: Array  # [C] float32


@record
class Frozen:
    """What training reads and never changes."""

    target: PyTree  # the target's weights
    draft_ids: Array  # [DV] int32: the target's id of each token of the draft


@record
class Metrics:
    """How well a batch was guessed, by step ahead. Sums, so that batches can be added."""

    agreed: Array  # [K] float32: places where the likeliest guess was the target's likeliest token
    accepted: Array  # [K] float32: sum of sum_x min(p, q)
    places: Array  # [K] float32


class Guess(NamedTuple):
    """What was guessed at one step ahead, at all places."""

    target: Array  # [..., C] logits of the target's law
    draft: Array  # [..., C] logits of the draft's
    weights: Array  # [...]: how much a place counts; 0: the law or the text is not known
    answer: Array  # [...] bool: the guessed token is part of an answer
    extra: Any = None  # what a recipe's loss needs beside


class GuessesFn(Protocol):
    """The guesses of a batch, for each step ahead: the head of every loss."""

    def __call__(
        self, weights: PyTree, frozen: Frozen, batch: Batch, choice: Choice, key: Array
    ) -> list[Guess]: ...


class LossFn(Protocol):
    """The loss of a batch, a mean over its places, and how well they were guessed.

    `training` is False where it is only measured: nothing is dropped then.
    """

    def __call__(
        self,
        weights: PyTree,
        frozen: Frozen,
        batch: Batch,
        choice: Choice,
        key: Array,
        training: bool = True,
    ) -> tuple[Array, Metrics]: ...


class Recipe(NamedTuple):
    """How one kind of drafter is trained. Made by a factory that checks its options."""

    name: str
    features: tuple[int, ...]  # the target's states that a batch must have
    steps: int  # K: how many steps ahead are guessed
    init: Callable[[Array, Params], PyTree]  # (key, target) -> weights
    guesses: GuessesFn
    loss: LossFn
    logical_axes: Any
    save: Callable[[Path, PyTree, np.ndarray], None]  # (folder, weights, draft ids)


def frozen(params: Params, draft_ids: np.ndarray) -> Frozen:
    """What training needs of a target."""
    return Frozen(target=params.target, draft_ids=jnp.asarray(draft_ids, jnp.int32))


def laws(
    frozen: Frozen, config: Any, choice: Choice, hidden: Array, states: Array, rows: Array | None
) -> tuple[Array, Array]:
    """Logits of target and draft over the chosen tokens, `[..., C]` each.

    Args:
      frozen: the target.
      config: of the target.
      choice: the tokens.
      hidden: `[..., E]`, the draft's, ready for its head.
      states: `[..., E]`, the target's, after its final norm.
      rows: `[DV, E]`, the draft's own head; None: it uses the target's.
    """
    theirs = head_rows(config, frozen.target, frozen.draft_ids[choice.ids])
    own = theirs if rows is None else rows[choice.ids]
    logits = states @ theirs.T
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    weights = jnp.broadcast_to(choice.log_weights, logits.shape)
    target = jax.lax.stop_gradient(logits + weights)
    product = jnp.einsum(
        "...e,ce->...c", hidden, own.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return target, product + weights


def aligned(x: Array, offset: int) -> Array:
    """`y[:, t] = x[:, t + offset]` along axis 1; places without a source hold anything."""
    return jnp.roll(x, -offset, axis=1)


def same_text(batch: Batch, first: int, last: int) -> Array:
    """Where `t + first` to `t + last` are tokens of one text within the window, `[B, T]` bool."""
    length = batch.tokens.shape[1]
    place = jnp.arange(length)[None, :]
    inside = (place + first >= 0) & (place + last < length)
    return inside & (aligned(batch.texts, first) == aligned(batch.texts, last))


def measured(guesses: Sequence[Guess]) -> Metrics:
    """How well answers were guessed, by step ahead."""
    rows = [_measured(jax.lax.stop_gradient(guess)) for guess in guesses]
    agreed, accepted, places = (jnp.stack(column) for column in zip(*rows, strict=True))
    return Metrics(agreed=agreed, accepted=accepted, places=places)


def _measured(guess: Guess) -> tuple[Array, Array, Array]:
    same = jnp.argmax(guess.target, axis=-1) == jnp.argmax(guess.draft, axis=-1)
    counts = (guess.weights > 0) & guess.answer
    total = lambda x: jnp.sum(jnp.where(counts, x, 0.0))
    accepted = losses.acceptance(guess.target, guess.draft)
    return total(same.astype(jnp.float32)), total(accepted), total(jnp.ones_like(accepted))


def step_loss(
    guesses: GuessesFn,
    value: Callable[[Guess], Array] | None = None,
    decay: float = 1.0,
    before: Callable[[PyTree, Array], PyTree] | None = None,
) -> LossFn:
    """The loss of all recipes: a mean over places for each step ahead, and step k counts decay^k.

    Args:
      guesses: of a batch.
      value: of a guess, at each of its places; None: -sum p log q.
      decay: from a step to the next.
      before: (weights, key) -> the weights that are trained on in this step, e.g. without a layer.
        Where the loss is only measured they are left as they are.
    """
    if value is None:
        value = lambda guess: losses.soft_cross_entropy(guess.target, guess.draft)

    def loss(
        weights: PyTree,
        frozen: Frozen,
        batch: Batch,
        choice: Choice,
        key: Array,
        training: bool = True,
    ) -> tuple[Array, Metrics]:
        if training and before is not None:
            weights = before(weights, key)
        found = guesses(weights, frozen, batch, choice, key)
        values = [losses.weighted_mean(value(guess), guess.weights) for guess in found]
        scale = sum(decay**k for k in range(len(found)))
        return losses.decayed(jnp.stack(values), decay) / scale, measured(found)

    return loss


def worth(known: Array, answer: Array, prompt_weight: float) -> Array:
    """How much a place counts: answers 1, prompts less, what is not known nothing."""
    return jnp.where(known, jnp.where(answer, 1.0, prompt_weight), 0.0)
