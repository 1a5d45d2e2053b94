"""Nested dictionaries of parameters and their flat form, with names joined by '/'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from speculative.errors import CheckpointError

# A report names this many tensors of each kind; a wrong model size would list hundreds.
_NAMED = 3


class TensorInfo(NamedTuple):
    """Shape and dtype name (`'float32'`, `'bfloat16'`, ...) of a tensor that was not read."""

    shape: tuple[int, ...]
    dtype: str


def flatten(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """`{'a': {'b': x}}` -> `{'a/b': x}`, names sorted; mappings are nodes, all else is a leaf.

    An empty mapping holds no parameter and leaves no trace.

    Raises:
      CheckpointError: a key is not a string, is empty, or holds a '/' (it could not be undone).
    """
    flat: dict[str, Any] = {}

    def visit(node: Mapping[Any, Any], prefix: str) -> None:
        for key, value in node.items():
            if not isinstance(key, str) or not key or "/" in key or "\0" in key:
                raise CheckpointError(
                    f"A key under '{prefix}' of a parameter tree",
                    expected="a non-empty string without '/'",
                    found=repr(key),
                )
            if isinstance(value, Mapping):
                visit(value, f"{prefix}{key}/")
            else:
                flat[prefix + key] = value

    visit(tree, "")
    return dict(sorted(flat.items()))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{'a/b': x}` -> `{'a': {'b': x}}`, the inverse of `flatten`.

    Raises:
      CheckpointError: a name has an empty part, or is a leaf and a node at once.
    """
    tree: dict[str, Any] = {}
    leaves: set[str] = set()
    for name, value in flat.items():
        parts = name.split("/")
        if not all(parts):
            raise CheckpointError(
                "A parameter's name", expected="parts joined by single '/'", found=repr(name)
            )
        node = tree
        for depth, part in enumerate(parts[:-1], start=1):
            if "/".join(parts[:depth]) in leaves:
                raise _both(name, "/".join(parts[:depth]))
            node = node.setdefault(part, {})
        if parts[-1] in node:
            raise _both(name, name)
        node[parts[-1]] = value
        leaves.add(name)
    return tree


def _both(name: str, clash: str) -> CheckpointError:
    return CheckpointError(
        f"The parameter '{name}'",
        expected="a tensor or a group of tensors under each name",
        found=f"both under '{clash}'",
    )


def check_shapes(
    found: Mapping[str, TensorInfo], expected: Mapping[str, Sequence[int]], where: object
) -> None:
    """Compare a checkpoint's tensors with those of a model, strictly, both ways.

    Args:
      found: name -> info of each tensor in the checkpoint.
      expected: name -> shape of each parameter (`models.config.parameter_shapes`).
      where: the checkpoint's path, for the message.

    Raises:
      CheckpointError: one line with the number and the first few of the missing, the extra and
        the misshaped tensors.
    """
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected))
    misshaped = [
        f"{name} {tuple(found[name].shape)} for {tuple(expected[name])}"
        for name in sorted(set(expected) & set(found))
        if tuple(found[name].shape) != tuple(expected[name])
    ]
    kinds = (("missing", missing), ("extra", extra), ("misshaped", misshaped))
    parts = [f"{len(names)} {kind} ({_first(names)})" for kind, names in kinds if names]
    if parts:
        raise CheckpointError(
            f"The tensors of {where} are not those of the model",
            expected=f"{len(expected)} tensors",
            found=", ".join([f"{len(found)}: {parts[0]}", *parts[1:]]),
            mend="Give the model configuration that this checkpoint was trained with",
        )


def _first(names: Sequence[str]) -> str:
    more = "" if len(names) <= _NAMED else f", and {len(names) - _NAMED} more"
    return ", ".join(names[:_NAMED]) + more
