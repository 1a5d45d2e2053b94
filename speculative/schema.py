"""Frozen dataclasses to JSON and back, checked field by field.

A schema is a dataclass whose annotations are built of `int`, `float`, `str`, `bool`, `X | None`,
`tuple[X, ...]`, `dict[str, X]`, `Literal[...]`, `Annotated[X, Limits(...)]` and other dataclasses.
One that derives from `Checked` also says in `faults` what its fields get wrong together. Every
departure is one `RecordError` that names the field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from speculative.errors import RecordError

T = TypeVar("T")
Fault = tuple[str, str, object]  # field, expected, found

_MISSING = dataclasses.MISSING
_UNIONS = (typing.Union, types.UnionType)
_WORDS = {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false"}
_LONGEST_FOUND = 60


@dataclasses.dataclass(frozen=True)
class Limits:
    """Range of a number, for `Annotated`.

    Attributes:
      low: smallest value allowed.
      high: largest value allowed.
      above: bound that must be exceeded.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def hold(self, value: int | float) -> bool:
        """Whether the value is in the range."""
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f" from {self.low:g} to {self.high:g}"
        text = "" if self.above is None else f" above {self.above:g}"
        text += "" if self.low is None else f" of at least {self.low:g}"
        return text + ("" if self.high is None else f" of at most {self.high:g}")


Count = Annotated[int, Limits(low=0.0)]
PositiveCount = Annotated[int, Limits(low=1.0)]
NonNegative = Annotated[float, Limits(low=0.0)]
Positive = Annotated[float, Limits(above=0.0)]
Share = Annotated[float, Limits(low=0.0, high=1.0)]


class Checked:
    """Base of the dataclasses whose fields can contradict each other."""

    def faults(self) -> Iterator[Fault]:
        """Yields (field, what was expected, what was found) for each contradiction."""
        yield from ()


def to_json(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, NumPy scalars and arrays as Python's own.

    Nothing is checked: `from_json` of the result does that.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value


def from_json(cls: type[T], value: Any, where: str) -> T:
    """Builds `cls` from parsed JSON.

    Args:
      cls: the dataclass.
      value: what `json.loads` gave.
      where: name of the value in error lines, such as `record`.

    Raises:
      RecordError: a field that is unknown, missing, of another type or out of range, or fields
        that contradict each other; one line naming the field, what was expected and found.
    """
    if not isinstance(value, dict):
        raise fault(where, "an object", value)
    fields = _fields(cls)
    for name in value:
        if name not in fields:
            raise RecordError(
                f"{where} has an unknown field",
                expected="one of " + ", ".join(fields),
                found=_shown(name),
            )
    arguments = {}
    for name, (field, annotation) in fields.items():
        path = f"{where}.{name}"
        if name in value:
            arguments[name] = _value(annotation, value[name], path)
        elif field.default is _MISSING and field.default_factory is _MISSING:
            raise RecordError(f"{path} is missing", expected=_describe(annotation))
    built = cls(**arguments)
    if isinstance(built, Checked):
        for name, expected, found in built.faults():
            raise fault(f"{where}.{name}", expected, found)
    return built


def fault(where: str, expected: str, found: Any) -> RecordError:
    """The error for one value that is not what the schema says."""
    return RecordError(f"{where} is not valid", expected=expected, found=_shown(found))


@functools.cache
def _fields(cls: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    annotations = typing.get_type_hints(cls, include_extras=True)
    return {f.name: (f, annotations[f.name]) for f in dataclasses.fields(cls)}


def _value(annotation: Any, value: Any, where: str) -> Any:
    """The value as the annotation wants it, or a `RecordError` that names `where`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _UNIONS:
        return None if value is None else _value(_option(inner), value, where)
    if dataclasses.is_dataclass(annotation):
        return from_json(annotation, value, where)
    wrong = fault(where, _describe(annotation), value)
    if origin is Annotated:
        number = _value(inner[0], value, where) if _is_number(inner[0], value) else None
        if number is None or not inner[1].hold(number):
            raise wrong
        return number
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong
        return tuple(_value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong
        for key in value:
            _value(str, key, f"key of {where}")
        return {key: _value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        if value not in inner:
            raise wrong
        return value
    if annotation in (int, float):
        if not _is_number(annotation, value):
            raise wrong
        return annotation(value)
    if not isinstance(value, annotation):
        raise wrong
    if annotation is str and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise fault(where, "text that UTF-8 can hold", ascii(value)) from None
    return value


def _is_number(kind: type, value: Any) -> bool:
    """Whether the value is finite and a whole number where one is meant; true and false are not."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return kind is int


def _option(inner: tuple[Any, ...]) -> Any:
    """The X of `X | None`."""
    (option,) = (option for option in inner if option is not types.NoneType)
    return option


def _describe(annotation: Any) -> str:
    """The annotation in words, for error lines."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _UNIONS:
        return f"{_describe(_option(inner))} or null"
    if origin is Annotated:
        return f"{_describe(inner[0])}{inner[1]}"
    if origin is tuple:
        return f"a list, each item {_describe(inner[0])}"
    if origin is dict:
        return f"an object, each value {_describe(inner[1])}"
    if origin is Literal:
        return "one of " + ", ".join(repr(option) for option in inner)
    return _WORDS.get(annotation, "an object")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= _LONGEST_FOUND else text[: _LONGEST_FOUND - 3] + "..."
