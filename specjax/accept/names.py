"""Verification rules by name, for command lines and configuration files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from specjax.accept.block import block_verification
from specjax.accept.chain import lenient_sampling, speculative_sampling
from specjax.accept.rule import Acceptance
from specjax.accept.synthetic import synthetic_acceptance
from specjax.accept.traversal import traversal_verification
from specjax.accept.tree import recursive_rejection, spectr
from specjax.accept.typical import typical_acceptance

__all__ = ["RULES", "rule"]

RULES: Mapping[str, Callable[..., Acceptance]] = {
    make.__name__: make
    for make in (
        speculative_sampling,
        block_verification,
        recursive_rejection,
        spectr,
        traversal_verification,
        typical_acceptance,
        lenient_sampling,
        synthetic_acceptance,
    )
}


def rule(spec: Acceptance | str | Mapping[str, Any]) -> Acceptance:
    """The rule that is meant.

    Args:
      spec: a rule, which is returned; a name in `RULES`; or a mapping with the name as "rule" and
        the options of its factory.

    Raises:
      ValueError: an unknown name or option, an option that is missing or has a bad value.

    Example:
      >>> rule("block_verification").name
      'block_verification'
      >>> rule({"rule": "lenient_sampling", "lenience": 0.8}).lossless
      False
    """
    if isinstance(spec, Acceptance):
        return spec
    options = dict(spec) if isinstance(spec, Mapping) else {"rule": spec}
    name = options.pop("rule", None)
    if not isinstance(name, str):
        raise ValueError(
            f'acceptance must be a rule, the name of one, or a mapping with its name as "rule", '
            f"got {spec!r}; known: {', '.join(RULES)}"
        )
    if name not in RULES:
        raise ValueError(f"acceptance rule {name!r} is not known; known: {', '.join(RULES)}")
    known = inspect.signature(RULES[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        has = f"it has: {', '.join(known)}" if known else "it has none"
        raise ValueError(
            f"acceptance rule {name!r} has no option {', '.join(map(repr, unknown))}; {has}"
        )
    needed = [option for option, p in known.items() if p.default is p.empty]
    missing = [option for option in needed if option not in options]
    if missing:
        raise ValueError(
            f"acceptance rule {name!r} needs {', '.join(map(repr, missing))}, as in "
            f'{{"rule": "{name}", "{missing[0]}": ...}}'
        )
    return RULES[name](**options)
