"""Rendering a conversation by a checkpoint's chat template, in a sandbox.

A template is code that came with the weights. It gets no access to Python's internals and cannot
change what it is given.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

__all__ = ["render"]


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    named_tokens: Mapping[str, str],
) -> str:
    """Renders messages.

    Args:
      template: the Jinja source.
      messages: each with "role" and "content".
      add_generation_prompt: whether to end with the opening of the assistant's turn.
      named_tokens: variables such as bos_token.

    Returns:
      The text.

    Raises:
      ValueError: messages has another form, or the template is not valid or refuses them.
    """
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(
                f"messages has {message!r}; wanted mappings with 'role' and 'content', such as "
                "{'role': 'user', 'content': 'Hello'}."
            )
    try:
        return _compiled(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **named_tokens,
        )
    except jinja2.TemplateError as error:
        raise ValueError(
            f"the chat template refuses the messages: {error}. Change the messages, or give the "
            "whole prompt as text."
        ) from error


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own protocol)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter would escape <, > and & for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
