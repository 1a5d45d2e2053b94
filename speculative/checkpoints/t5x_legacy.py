"""The legacy T5X format: from its msgpack file to tensors that are still on disk.

Source: T5X checkpoints.py and state_utils.py (`use_orbax=False`, the default until 2024-02).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
import numpy as np
from etils import epath

from speculative.checkpoints import flax_msgpack, steps, trees, zarr_arrays
from speculative.errors import CheckpointError

_DEEPEST = 64  # a damaged file may nest until Python's own stack ends


class Opened(NamedTuple):
    """A checkpoint whose weights were not read: what every format's reader returns.

    Attributes:
      step: the step as stored, or None where the checkpoint states none.
      leaves: name (without `target/`) -> inline array or tensor on disk.
    """

    step: int | None
    leaves: dict[str, zarr_arrays.Leaf]


def open_checkpoint(path: epath.Path) -> Opened:
    """Read the index of a legacy checkpoint.

    Args:
      path: the step directory, or the msgpack file itself.

    Raises:
      CheckpointError: see `flax_msgpack.read_index`; or a parameter is neither an array nor a
        TensorStore spec, or its path leads outside the checkpoint.
    """
    file = path / steps.CHECKPOINT_FILE if path.is_dir() else path
    errors = steps.file_errors(f"{file} cannot be read", file, "Check its permissions")
    with errors, file.open("rb") as stream:
        index = flax_msgpack.read_index(stream, file)
    leaves: dict[str, zarr_arrays.Leaf] = {}
    for name, node in trees.flatten(_marked(index.target, "", file)).items():
        leaves[name] = node.leaf
    if not leaves:
        raise CheckpointError(f"The tree of {file}", expected="parameters", found="none")
    return Opened(_step(index.step, file), leaves)


class _Marked(NamedTuple):
    # Sets a leaf apart from the dictionaries of the tree, which specs are too.
    leaf: zarr_arrays.Leaf


def _marked(node: Mapping[Any, Any], prefix: str, file: epath.Path) -> dict[Any, Any]:
    if prefix.count("/") > _DEEPEST:
        raise _bad(prefix[:60], file, f"at most {_DEEPEST} levels of names", "more")
    tree: dict[Any, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        if flax_msgpack.is_spec(value):
            tree[key] = _Marked(_stored(value, name, file))
        elif isinstance(value, np.ndarray):
            tree[key] = _Marked(value)
        elif isinstance(value, dict):
            try:
                joined = flax_msgpack.join_chunks(value)
            except (ValueError, TypeError) as error:
                raise _bad(name, file, "a chunked array", str(error)) from error
            tree[key] = _marked(value, f"{name}/", file) if joined is None else _Marked(joined)
        else:
            kind = "an extension" if isinstance(value, msgpack.ExtType) else repr(value)[:60]
            raise _bad(name, file, "an array or a TensorStore spec", kind)
    return tree


def _stored(spec: Mapping[str, Any], name: str, file: epath.Path) -> zarr_arrays.StoredTensor:
    """A spec's place, shape and dtype; all its other fields are TensorStore's to find out.

    The store's driver (`file`, `gfile`, or `gcs` with a made-up bucket) tells where the checkpoint
    was written, not where it is now: only the path counts, beside the msgpack file.
    """
    if spec["driver"] != "zarr":
        raise _bad(name, file, "driver 'zarr'", f"driver {spec['driver']!r}")
    kvstore, metadata = spec["kvstore"], spec["metadata"]
    if not isinstance(kvstore, Mapping) or not isinstance(metadata, Mapping):
        raise _bad(name, file, "a spec with dictionaries 'kvstore' and 'metadata'", "other values")
    # TensorStore before 0.1.14 had the path at the top level.
    path = kvstore.get("path", spec.get("path"))
    directory = file.parent / _inside(path, name, file)
    shape, dtype = metadata.get("shape"), spec.get("dtype")
    if shape is not None and not _is_shape(shape):
        raise _bad(name, file, "metadata with a shape of whole numbers", f"shape {shape!r}")
    if dtype is not None:
        try:
            flax_msgpack.dtype_from_name(dtype)
        except ValueError as error:
            raise _bad(name, file, "a numeric dtype", str(error)) from error
    return zarr_arrays.StoredTensor(
        kvstore=zarr_arrays.kvstore_of(directory),
        place=str(directory),
        shape=None if shape is None else tuple(shape),
        dtype=dtype,
    )


def _inside(path: Any, name: str, file: epath.Path) -> str:
    """The path of a spec, if it stays inside the checkpoint."""
    parts = path.removesuffix("/").split("/") if isinstance(path, str) else []
    # An absolute path and a URL have an empty part as well.
    if not parts or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise _bad(name, file, "a path inside the checkpoint", repr(path))
    return "/".join(parts)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)


def _step(stored: Any, file: epath.Path) -> int | None:
    if stored is None:
        return None
    number = stored.item() if isinstance(stored, np.ndarray) and stored.size == 1 else stored
    if type(number) is not int or number < 0:
        raise _bad("state/step", file, "a whole number >= 0", repr(stored)[:60])
    return number


def _bad(name: str, file: epath.Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(f"'{name}' in {file}", expected=expected, found=found)
