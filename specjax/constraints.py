"""Grammars that the output must follow: which tokens are allowed, as data that runs on the device.

A constraint masks the target's law before it is normalised, at every position and for every
drafter alike, so that the output has exactly the target's law under that mask.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import automaton
from specjax.types import Params, record, static

__all__ = [
    "AdvanceFn",
    "AllowedFn",
    "Constraint",
    "json_schema",
    "per_row",
    "regex",
    "token_dfa",
]

PyTree = Any


class AllowedFn(Protocol):
    """Which tokens may follow: states `[...]` to `[..., V]` bool.

    From every state that allowed tokens lead to, at least one token is allowed. A state behind a
    token that was not allowed has any row that is not all False.
    """

    def __call__(self, data: PyTree, states: PyTree) -> Array: ...


class AdvanceFn(Protocol):
    """The states after one token each: states `[...]` and tokens `[...]` to states `[...]`."""

    def __call__(self, data: PyTree, states: PyTree, tokens: Array) -> PyTree: ...


@record
class Constraint:
    """A grammar over token ids.

    `states` may be any pytree of arrays with the same leading axes; the makers of this module use
    one int32. Another constraint whose data have the same shapes does not compile again.
    """

    data: PyTree  # tables; traced
    start: PyTree  # [], or [B]: the state before the first new token
    allowed: AllowedFn = static()
    advance: AdvanceFn = static()


def regex(params: Params, pattern: str, *, eos_ids: Sequence[int] | None = None) -> Constraint:
    """Output whose whole text matches a regular expression.

    An end token is allowed where the text is complete, and after it end tokens only. Special tokens
    and other tokens without text are never allowed, and an end token is never part of the text.
    Output that ends for another reason (its length, say) is the beginning of a match.

    Args:
      params: their tokenizer gives the tokens' text.
      pattern: in the syntax of Rust's `regex` crate (`\\d` and `\\w` are Unicode's; no look-around,
        no back-references), matched against the whole text; so it needs no anchors.
      eos_ids: end tokens; None: those of params.

    Returns:
      The constraint. It is kept: the same arguments give the same record.

    Raises:
      ImportError: the package outlines-core is not installed.
      ValueError: there is no tokenizer or no end token, the pattern is not valid, or no sequence of
        tokens matches it.

    Example:
      >>> import specjax
      >>> params = specjax.load("smollm2-135m")
      >>> three = regex(params, "yes|no|[0-9]{3}")
      >>> first = three.allowed(three.data, three.start)
      >>> [params.tokenizer.decode([i]) for i in np.flatnonzero(first)]
      ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'n', 'y', 'no', 'ye', 'yes']
      >>> end = three.advance(three.data, three.start, params.tokenizer.encode("no")[0])
      >>> np.flatnonzero(three.allowed(three.data, end)).tolist() == list(params.eos_ids)
      True
    """
    if params.tokenizer is None:
        raise ValueError(
            f"the checkpoint {params.name!r} has no tokenizer, so the text of its tokens is not "
            "known; put tokenizer.json into its folder, or use token_dfa"
        )
    if not isinstance(pattern, str):
        raise ValueError(f"pattern is {pattern!r}; wanted a regular expression as a text")
    ends = _ends(params.eos_ids if eos_ids is None else eos_ids, params.model.vocab_size)
    return _regex(params.tokenizer, params.model.vocab_size, pattern, ends)


def json_schema(
    params: Params,
    schema: Mapping[str, Any] | str,
    *,
    whitespace: str | None = None,
    eos_ids: Sequence[int] | None = None,
) -> Constraint:
    """Output that is JSON and satisfies a schema.

    Objects have their properties in the order of the schema. What of JSON Schema is understood is
    up to outlines-core.

    Args:
      params: as for `regex`.
      schema: a JSON schema, as a mapping or as JSON text.
      whitespace: the pattern of space between elements; None: at most one space.
      eos_ids: as for `regex`.

    Returns:
      The constraint.

    Raises:
      ImportError: the package outlines-core is not installed.
      ValueError: as for `regex`, or the schema is not valid or not understood.

    Example:
      >>> import specjax
      >>> params = specjax.load("smollm2-135m")
      >>> boolean = json_schema(params, {"type": "boolean"})
      >>> first = boolean.allowed(boolean.data, boolean.start)
      >>> [params.tokenizer.decode([i]) for i in np.flatnonzero(first)]
      ['f', 't', 'tr', 'true', 'fa', 'false', 'fal']
    """
    if not isinstance(schema, Mapping | str):
        raise ValueError(
            f"schema is {schema!r}; wanted a JSON schema, as a mapping or as JSON text"
        )
    build_regex = _outlines_core().json_schema.build_regex_from_schema
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        pattern = build_regex(text, whitespace)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"schema is {text}; outlines-core cannot make it a regular expression: {error}"
        ) from error
    return regex(params, pattern, eos_ids=eos_ids)


def token_dfa(
    transitions: Mapping[int, Mapping[int, int]],
    accepting: Sequence[int] | set[int],
    eos_ids: Sequence[int],
    vocab_size: int,
) -> Constraint:
    """A finite automaton over token ids as a constraint.

    Args:
      transitions: state -> token -> next state; it starts in state 0. A state without an entry has
        no way on.
      accepting: the states in which the output may end.
      eos_ids: the end tokens: allowed in accepting states, and after one another.
      vocab_size: V, of the model.

    Returns:
      The constraint; ways that cannot end in an accepting state are taken out.

    Raises:
      ValueError: no end token, a token out of range, an end token as part of the language, or a
        language without any sequence.

    Example:
      >>> pairs = token_dfa({0: {5: 1}, 1: {6: 0, 7: 2}}, {0}, eos_ids=(9,), vocab_size=10)
      >>> state = pairs.start
      >>> for token in (5, 6):
      ...     print(np.flatnonzero(pairs.allowed(pairs.data, state)).tolist())
      ...     state = pairs.advance(pairs.data, state, jnp.int32(token))
      [5, 9]
      [6]
    """
    ends = _ends(eos_ids, vocab_size)
    edges = [(s, token, to) for s, way in transitions.items() for token, to in way.items()]
    names = {0, *transitions, *accepting, *(to for _, _, to in edges)}
    for name in names:
        _check_integer("state", name)
    for _, token, _ in edges:
        _check_integer("token", token)
        if not 0 <= token < vocab_size or token in ends:
            raise ValueError(
                f"transitions has the token {token}; wanted ids from 0 to {vocab_size - 1} without "
                f"the end tokens {ends}: which states may end is said by accepting"
            )
    number = _numbered(names, 0)
    column = {token: i for i, token in enumerate(sorted({token for _, token, _ in edges}))}
    following = np.full((len(number), len(column) + 1), -1)  # the last one: all other tokens
    for state, token, to in edges:
        following[number[state], column[token]] = number[to]
    columns = np.full(vocab_size, len(column))
    columns[list(column)] = list(column.values())
    complete = np.zeros(len(number), bool)
    complete[[number[name] for name in accepting]] = True
    return _constraint(columns, following, complete, ends, "transitions")


def per_row(constraints: Sequence[Constraint | None]) -> Constraint:
    """One constraint for a batch whose rows follow different grammars.

    Args:
      constraints: B of them, from the makers of this module; None: that row is free.

    Returns:
      A constraint with `start` [B], and one table that holds all of them.

    Raises:
      ValueError: no row has a constraint, one is of another kind or for rows already, or their
        vocabularies differ in size.

    Example:
      >>> ab = token_dfa({0: {0: 1}, 1: {1: 2}}, {2}, eos_ids=(3,), vocab_size=4)
      >>> rows = per_row([ab, None, ab])
      >>> rows.allowed(rows.data, rows.start).astype(int).tolist()
      [[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    """
    given = {id(c): c for c in constraints if c is not None}
    if not given:
        raise ValueError(
            "constraints has no constraint; wanted at least one. Leave it out instead."
        )
    for one in given.values():
        if one.allowed is not automaton.allowed or jnp.ndim(one.start) != 0:
            raise ValueError(
                f"constraints has one whose start has shape {jnp.shape(one.start)} and whose "
                f"function is {one.allowed}; wanted one grammar a row, each from regex, "
                "json_schema or token_dfa"
            )
    tables = [automaton.trimmed(one.data)[:2] for one in given.values()]
    sizes = {len(columns) for columns, _ in tables}
    if len(sizes) > 1:
        raise ValueError(f"constraints are for vocabularies of sizes {sorted(sizes)}; wanted one")
    columns, members = automaton.joint_columns([columns for columns, _ in tables])
    blocks = [np.zeros((1, members.shape[1]), np.int64)]  # state 0 allows everything, for ever
    starts, offset = {id(None): 0}, 1
    for (name, one), (_, following), member in zip(given.items(), tables, members, strict=True):
        starts[name] = offset + int(one.start)
        block = following[:, member]
        blocks.append(np.where(block < 0, -1, block + offset))
        offset += len(block)
    start = [starts[id(one)] for one in constraints]
    return _record(automaton.build(np.concatenate(blocks), columns), start)


@functools.lru_cache(maxsize=32)
def _regex(tokenizer: Any, vocab_size: int, pattern: str, ends: tuple[int, ...]) -> Constraint:
    table, complete = _byte_dfa(pattern)
    words = tokenizer.token_bytes()[:vocab_size]
    words += (b"",) * (vocab_size - len(words))
    columns, following = automaton.columns_of_words(table, words, np.arange(len(table)))
    # Tokens without text would let a row go on for ever without getting anywhere.
    empty = [not word for word in words]
    columns[empty] = following.shape[1]
    following = np.pad(following, ((0, 0), (0, 1)), constant_values=-1)
    return _constraint(
        columns,
        following,
        complete,
        ends,
        f"pattern {pattern!r} (which is for the whole text: leave out ^ and $)",
    )


# A character that is none (Unicode reserves it), to mark the end of a text.
_MARK = "\U0010ffff"


def _byte_dfa(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """The automaton of a pattern over UTF-8 bytes: following [S, 256], and complete [S].

    outlines-core indexes a vocabulary by a pattern. Here that is the 256 bytes: running longer
    tokens through the result is much less work than its index of them.

    It builds an automaton that searches, and this one must match the whole text; so the text is
    put between marks.
      - "a|ab" would find "a" and not look further. With a mark after it, a text is complete where
        the mark would be accepted.
      - The automaton also follows matches that begin later, which are exponentially many states
        for patterns such as "b.{30}". "x" is a second, less wanted match that ends that at once.
      - The index leaves out states one byte behind a match, so it steps over that one: "xy" and the
        first byte of the text are one word to it.
    """
    outlines_core = _outlines_core()
    words = {bytes([byte]): [byte] for byte in range(256)}
    words |= {b"xy" + byte: [256 + number] for byte, (number,) in words.items()}
    try:
        index = outlines_core.Index(
            f"xy(?:{pattern}){_MARK}|x", outlines_core.Vocabulary(512, words)
        )
    except ValueError as error:
        raise ValueError(
            f"pattern is {pattern!r}; wanted a regular expression in the syntax of Rust's regex "
            f"crate: {error}"
        ) from error
    transitions, first = index.get_transitions(), index.get_initial_state()
    transitions[first] = {i - 256: to for i, to in transitions[first].items() if 256 <= i < 512}
    names = {first, *transitions, *(to for way in transitions.values() for to in way.values())}
    number = _numbered(names, first)
    table = np.full((len(number) + 1, 513), -1)  # the last row: state -1
    for state, way in transitions.items():
        table[number[state], list(way)] = [number[to] for to in way.values()]
    matched = np.zeros(len(table), bool)
    matched[[number[state] for state in index.get_final_states()]] = True
    *begin, last = _MARK.encode()
    marking = np.arange(len(number))
    for byte in begin:
        marking = table[marking, byte]
    complete = matched[table[marking, last]]
    table[marking[complete], last] = -1  # the mark ends the text, hence is no part of it
    source, target = _edges(table[:-1, :256])
    reached = np.flatnonzero(_closure(source, target, 0, len(number)))
    number = np.full(len(table), -1)
    number[reached] = np.arange(len(reached))
    return number[table[reached, :256]], complete[reached]


def _numbered(names: set[int], first: int) -> dict[int, int]:
    return {name: i for i, name in enumerate([first, *sorted(names - {first})])}


def _constraint(
    columns: np.ndarray,
    following: np.ndarray,
    complete: np.ndarray,
    ends: tuple[int, ...],
    what: str,
) -> Constraint:
    """Adds the end, and leaves only states on some way from the start to it.

    Args:
      columns: [V].
      following: [S, C], where state 0 is the start.
      complete: [S] bool, where end tokens are allowed.
      ends: the end tokens, whatever their columns.
      what: names the grammar in errors.
    """
    states, width = following.shape
    end = states
    table = np.full((states + 1, width + 1), -1)
    table[:states, :width] = following
    table[np.append(complete, True), width] = end
    columns = columns.copy()
    columns[list(ends)] = width

    source, target = _edges(table[:, np.unique(columns)])
    begun = _closure(source, target, 0, len(table))
    kept = np.flatnonzero(begun & _closure(target, source, end, len(table)))
    if 0 not in kept:
        raise ValueError(f"no sequence of tokens of this vocabulary completes the {what}")
    number = np.full(states + 2, -1)  # the last one: state -1
    number[kept] = np.arange(len(kept))
    return _record(automaton.build(number[table[kept]], columns), 0)


def _edges(following: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which states follow which: sources [E] and targets [E]."""
    source, column = np.nonzero(following >= 0)
    code = np.unique(source * len(following) + following[source, column])
    return np.divmod(code, len(following))


def _closure(source: np.ndarray, target: np.ndarray, start: int, states: int) -> np.ndarray:
    """The states that edges lead to from a state, itself included: [S] bool."""
    order = np.argsort(source, kind="stable")
    target, begin = target[order], np.searchsorted(source[order], np.arange(states + 1))
    reached = np.zeros(states, bool)
    reached[start] = True
    waiting = [start]
    while waiting:
        state = waiting.pop()
        new = target[begin[state] : begin[state + 1]]
        new = new[~reached[new]]
        reached[new] = True
        waiting += new.tolist()
    return reached


def _record(data: automaton.Automaton, start: int | list[int]) -> Constraint:
    with jax.ensure_compile_time_eval():
        start = jnp.asarray(start, jnp.int32)
    return Constraint(data=data, start=start, allowed=automaton.allowed, advance=automaton.advance)


def _ends(eos_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(eos_ids) == 0:
        raise ValueError("eos_ids is empty; wanted at least one token that ends the output")
    for token in eos_ids:
        _check_integer("eos_ids", token)
        if not 0 <= token < vocab_size:
            raise ValueError(f"eos_ids has {token}; wanted ids from 0 to {vocab_size - 1}")
    return tuple(int(token) for token in dict.fromkeys(eos_ids))


def _check_integer(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}: got {value!r}, wanted an integer")


def _outlines_core() -> Any:
    try:
        import outlines_core
        import outlines_core.json_schema
    except ImportError as error:
        raise ImportError(
            "regex and json_schema need the package outlines-core: pip install specjax[grammar]"
        ) from error
    return outlines_core
