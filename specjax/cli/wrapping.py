"""Breaking a growing text into lines between words, for a terminal."""

from __future__ import annotations

import re

from rich.cells import cell_len

__all__ = ["WordWrap"]

_LONGEST_HELD = 24  # text without spaces (Chinese, a long address) must not wait for its end


class WordWrap:
    """Holds back the last word until it is complete, and begins a new line where it does not fit.

    Example:
      >>> wrap = WordWrap(width=10)
      >>> [wrap.push(piece) for piece in ("one t", "wo thr", "ee", " four\\n")]
      ['one', ' two', '', '\\nthree four\\n']
      >>> wrap.push("fi"), wrap.flush()
      ('', 'fi')
    """

    def __init__(self, width: int):
        self._width = width
        self._column = 0
        self._space = ""  # to be written before the next word, or dropped at the end of the line
        self._word = ""

    def push(self, piece: str) -> str:
        """Takes the next piece of the text, and returns what can be written."""
        *whole, self._word = re.split(r"(\s)", self._word + piece)
        if len(self._word) > _LONGEST_HELD:
            whole, self._word = [*whole, self._word], ""
        return "".join(map(self._place, whole))

    def flush(self) -> str:
        """Ends the text, and returns what was held back."""
        word, self._word = self._word, ""
        return self._place(word)

    def _place(self, part: str) -> str:
        if not part:
            return ""
        if part == "\n":
            self._column, self._space = 0, ""
            return part
        if part.isspace():
            self._space += part
            return ""
        text, size = self._space + part, cell_len(self._space + part)
        self._space = ""
        if self._column and self._column + size > self._width:
            text, size, self._column = "\n" + part, cell_len(part), 0
        self._column = (self._column + size) % self._width or self._width
        return text
