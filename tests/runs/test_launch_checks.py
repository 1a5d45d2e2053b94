"""Values against annotations, and near names."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest

from speculative.runs.launch import checks


def function(
    a: int = 0,
    b: float | None = None,
    c: Literal["x", "y"] = "x",
    d: Mapping[str, int] | None = None,
    e: tuple[int, str] = (1, "a"),
    f: Any = None,
    g: "Unresolvable" = None,
    h: bool = False,
):
    """Takes one of each kind."""


def resolvable(
    a: int = 0,
    b: float | None = None,
    c: Literal["x", "y"] = "x",
    d: Mapping[str, int] | None = None,
    e: Sequence[str] = (),
    f: Any = None,
    h: bool = False,
):
    """As `function`, without the one that cannot be resolved."""


@pytest.mark.parametrize(
    ("argument", "value", "fits"),
    [
        ("a", 1, True),
        ("a", 1.0, False),
        ("a", True, False),
        ("a", None, False),
        ("b", 1, True),
        ("b", None, True),
        ("b", "1", False),
        ("c", "y", True),
        ("c", "z", False),
        ("d", {"inputs": 3}, True),
        ("d", {"inputs": "3"}, False),
        ("d", [3], False),
        ("e", ["a"], True),
        ("e", "a", False),
        ("e", ("a", 1), False),
        ("f", object(), True),
        ("h", 1, False),
        ("absent", 1, True),
    ],
)
def test_type_mismatch(argument, value, fits):
    assert (checks.type_mismatch(resolvable, argument, value) is None) is fits


def test_an_annotation_that_cannot_be_resolved_never_complains():
    assert checks.type_mismatch(function, "a", "x") is None


def test_literal_defaults_leave_out_what_gin_cannot_read_back():
    def f(a=1, b=(1, "x"), c=None, d=checks, *, e=print, g):
        """Defaults of every kind."""

    f.__defaults__ = (1, (1, "x"), {"k": None}, float("inf"))
    assert checks.literal_defaults(f) == {"a": 1, "b": (1, "x"), "c": {"k": None}}
    assert checks.unset_arguments(f, ["a"]) == ["g"]


def test_did_you_mean():
    assert checks.did_you_mean("BATCH_SISE", ["BATCH_SIZE", "SEED"]) == "Did you mean 'BATCH_SIZE'"
    assert checks.did_you_mean("xyz", ["BATCH_SIZE"]) == ""
