"""What the launcher checks that needs no gin: near names, and values against annotations."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`"Did you mean 'x' or 'y'"` for the names close to `name`, or the empty string."""
    pool = sorted(set(candidates) - {name})
    folded = {c.lower(): c for c in pool}
    close = [folded[c] for c in difflib.get_close_matches(name.lower(), folded, n=2, cutoff=0.6)]
    return "Did you mean " + " or ".join(f"'{c}'" for c in close) if close else ""


def unset_arguments(function: Callable, bound: Iterable[str]) -> list[str]:
    """The arguments of `function` that have neither a default nor a place in `bound`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = set(bound)
    return [
        name
        for name, parameter in _parameters(function).items()
        if parameter.kind in kinds
        and parameter.default is inspect.Parameter.empty
        and name not in given
    ]


def argument_names(function: Callable) -> list[str]:
    """The names that `function` can be called with."""
    return list(_parameters(function))


def literal_defaults(function: Callable) -> dict[str, Any]:
    """The defaults of `function` that can be written down as Python literals."""
    found = {name: p.default for name, p in _parameters(function).items()}
    return {name: value for name, value in found.items() if _is_literal(value)}


def type_mismatch(function: Callable, argument: str, value: Any) -> str | None:
    """What type `argument` wants, if `value` certainly is not of it; else None.

    Only what is plain is judged: numbers, strings, booleans, None, sequences and mappings of
    them, unions and `Literal`. An annotation beyond these never complains.
    """
    target = function.__init__ if inspect.isclass(function) else function
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # An annotation that only a type checker can resolve is not the user's fault.
        return None
    if argument not in hints or _fits(value, hints[argument]):
        return None
    hint = hints[argument]
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # A builtin without a signature.
        return {}


def _is_literal(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_literal(v) for v in value)
    if isinstance(value, dict):
        return all(_is_literal(v) for pair in value.items() for v in pair)
    if isinstance(value, float):
        return value - value == 0  # Not inf or nan, which gin cannot read back.
    return value is None or type(value) in (bool, int, str)


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is typing.Annotated:
        return _fits(value, inner[0])
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    kind = origin or hint
    if kind in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        # gin users write tuples and lists for one another, so either will do.
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            return False
        same = [h for h in inner if h is not Ellipsis]
        return len(same) != 1 or all(_fits(v, same[0]) for v in value)
    if kind in (dict, collections.abc.Mapping):
        if not isinstance(value, dict):
            return False
        return len(inner) != 2 or all(
            _fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items()
        )
    return True
