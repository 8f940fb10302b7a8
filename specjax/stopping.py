"""Stop sequences and stop strings as one automaton that reports the token completing a stop.

A string may begin and end inside tokens, so it is searched in the bytes of the text (Aho-Corasick)
and each token is run through that search from each of its states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from specjax.automaton import Automaton, build, columns_of_words, joint_columns, trimmed

__all__ = ["cut", "held_back", "stop_automaton", "stop_sequences", "stop_strings"]


def stop_automaton(
    sequences: Sequence[Sequence[int]],
    strings: Sequence[str],
    token_bytes: Sequence[bytes],
    vocab_size: int,
) -> Automaton:
    """Searches token sequences and strings at once.

    Its `hits` say which token completes a stop. Reading goes on after a hit as if there had been
    none, so a caller may ignore the early ones.

    Args:
      sequences: of token ids, none of them empty.
      strings: none of them empty.
      token_bytes: the bytes of each token, as `Tokenizer.token_bytes` has them; only read for
        strings. Missing ones at the end are empty.
      vocab_size: V, of the model.

    Returns:
      The automaton; it never refuses a token.

    Raises:
      ValueError: an empty stop, one that is neither text nor token ids, or an id out of range.

    Example:
      >>> words = [b"a", b"b", b"ba"]
      >>> automaton = stop_automaton([(1, 1)], ["aba"], words, 3)
      >>> import jax.numpy as jnp
      >>> from specjax.automaton import advance, hit
      >>> state, found = jnp.int32(0), []
      >>> for token in jnp.array([0, 2, 1, 1]):  # a, ba, b, b
      ...     found.append(bool(hit(automaton, state, token)))
      ...     state = advance(automaton, state, token)
      >>> found
      [False, True, False, True]
    """
    if not strings:
        return stop_sequences(sequences, vocab_size)
    if not sequences:
        return stop_strings(strings, token_bytes, vocab_size)
    return _both(
        _sequences(sequences, vocab_size), _strings(strings), tuple(token_bytes), vocab_size
    )


def stop_sequences(sequences: Sequence[Sequence[int]], vocab_size: int) -> Automaton:
    """Searches token sequences: as `stop_automaton` without strings.

    Example:
      >>> stop_sequences([(5, 5)], 8).columns.tolist()
      [0, 0, 0, 0, 0, 1, 0, 0]
    """
    return _of_sequences(_sequences(sequences, vocab_size), vocab_size)


def stop_strings(
    strings: Sequence[str], token_bytes: Sequence[bytes], vocab_size: int
) -> Automaton:
    """Searches strings: as `stop_automaton` without token sequences.

    Example:
      >>> automaton = stop_strings(["ab"], [b"a", b"b", b"xabx", b"y"], 4)
      >>> automaton.hits[0, automaton.columns].tolist()  # which tokens complete it at the start
      [False, False, True, False]
    """
    return _of_strings(_strings(strings), tuple(token_bytes), vocab_size)


def cut(text: str, strings: Sequence[str]) -> str | None:
    """The text before the earliest occurrence of any of the strings, None if there is none.

    Example:
      >>> cut("one. two!", ["!", ". "]), cut("one", ["!"])
      ('one', None)
    """
    places = [place for string in strings if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else None


def held_back(text: str, strings: Sequence[str]) -> int:
    """How many characters at the end of a growing text may be the beginning of a stop string.

    Example:
      >>> held_back("so: <|e", ["<|end|>", ": <!"]), held_back("so", ["<|end|>"])
      (3, 0)
    """
    longest = max(map(len, strings), default=1) - 1
    for n in range(min(len(text), longest), 0, -1):
        if any(len(string) > n and string.startswith(text[-n:]) for string in strings):
            return n
    return 0


def _sequences(sequences: Sequence[Sequence[int]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    for sequence in sequences:
        if isinstance(sequence, str | bytes) or not isinstance(sequence, Sequence | np.ndarray):
            raise ValueError(f"stop has {sequence!r}; wanted token ids such as (13, 7)")
        if len(sequence) == 0:
            raise ValueError("stop has an empty sequence, which every text has. Leave it out.")
        for token in sequence:
            whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not whole or not 0 <= token < vocab_size:
                raise ValueError(
                    f"stop has {token!r} in {sequence!r}; wanted token ids from 0 to "
                    f"{vocab_size - 1}"
                )
    return tuple(tuple(int(token) for token in sequence) for sequence in sequences)


def _strings(strings: Sequence[str]) -> tuple[bytes, ...]:
    if isinstance(strings, str):
        raise ValueError(f"stop is {strings!r}; wanted a sequence of texts such as [{strings!r}]")
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(f"stop has {string!r}; wanted texts such as '\\n\\n'")
        if not string:
            raise ValueError("stop has an empty text, which every text has. Leave it out.")
    try:
        return tuple(string.encode() for string in strings)
    except UnicodeEncodeError as error:
        raise ValueError(f"stop has {error.object!r}, which is not Unicode text") from error


# One compiled program serves many requests with the same stops: build each of them once.
@functools.lru_cache(maxsize=64)
def _of_sequences(sequences: tuple[tuple[int, ...], ...], vocab_size: int) -> Automaton:
    symbols, following, hits = _aho_corasick(sequences)
    columns = np.zeros(vocab_size, np.int64)
    columns[symbols] = np.arange(1, len(symbols) + 1)
    return build(following, columns, hits)


@functools.lru_cache(maxsize=64)
def _of_strings(
    strings: tuple[bytes, ...], token_bytes: tuple[bytes, ...], vocab_size: int
) -> Automaton:
    symbols, following, hits = _aho_corasick(strings)
    column = np.zeros(256, np.int64)
    column[symbols] = np.arange(1, len(symbols) + 1)
    following, hits = following[:, column], hits[:, column]
    # State s becomes 2 s, and 2 s + 1 once a string was completed since the token began.
    table = np.repeat(2 * following, 2, axis=0)
    table[0::2] += hits
    table[1::2] += 1
    words = (*token_bytes[:vocab_size], *[b""] * (vocab_size - len(token_bytes)))
    columns, ends = columns_of_words(table, words, np.arange(0, len(table), 2))
    return build(ends >> 1, columns, (ends & 1).astype(bool))


@functools.lru_cache(maxsize=64)
def _both(
    sequences: tuple[tuple[int, ...], ...],
    strings: tuple[bytes, ...],
    token_bytes: tuple[bytes, ...],
    vocab_size: int,
) -> Automaton:
    """The product of the two automata, its reachable states only."""
    one = trimmed(_of_sequences(sequences, vocab_size))
    two = trimmed(_of_strings(strings, token_bytes, vocab_size))
    columns, members = joint_columns([one[0], two[0]])
    following_1, following_2 = one[1][:, members[0]], two[1][:, members[1]]
    base = len(following_2)

    def step(pairs: np.ndarray) -> np.ndarray:
        return following_1[pairs // base].astype(np.int64) * base + following_2[pairs % base]

    pairs = new = np.zeros(1, np.int64)
    while new.size:
        new = np.setdiff1d(step(new), pairs)
        pairs = np.union1d(pairs, new)
    hits = one[2][:, members[0]][pairs // base] | two[2][:, members[1]][pairs % base]
    return build(np.searchsorted(pairs, step(pairs)), columns, hits)


def _aho_corasick(
    patterns: Sequence[Sequence[int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The automaton that finds every occurrence of any pattern.

    Its states are the beginnings of patterns: the longest one that the text read so far ends with.

    Returns:
      symbols [A], following and hits [S, A + 1]; column 0 is for all other symbols.

    Reference:
      Aho and Corasick (1975), "Efficient string matching: an aid to bibliographic search".
    """
    symbols = sorted({symbol for pattern in patterns for symbol in pattern})
    column = {symbol: i for i, symbol in enumerate(symbols, start=1)}
    children: list[dict[int, int]] = [{}]
    complete = [False]
    for pattern in patterns:
        node = 0
        for symbol in pattern:
            if column[symbol] not in children[node]:
                children[node][column[symbol]] = len(children)
                children.append({})
                complete.append(False)
            node = children[node][column[symbol]]
        complete[node] = True
    following = np.zeros((len(children), len(symbols) + 1), np.int64)
    # Shorter beginnings first: the row of a node starts as that of the longest beginning that its
    # own text ends with, which is `fallback`.
    queue, fallback = [0], [0] * len(children)
    for node in queue:
        following[node] = following[fallback[node]]
        for symbol, child in children[node].items():
            fallback[child] = 0 if node == 0 else int(following[fallback[node], symbol])
            complete[child] = complete[child] or complete[fallback[child]]
            following[node, symbol] = child
            queue.append(child)
    return np.array(symbols, np.int64), following, np.array(complete)[following]
