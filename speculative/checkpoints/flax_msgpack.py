"""The msgpack file of T5X's legacy checkpoints, in Flax's encoding of arrays.

The file is `{'version': 3, 'optimizer': {'state': {'step': ...}, 'target': {...}}}`. It is read as
a stream and everything but `version`, `step` and `target` is skipped unread: optimizer state can
be as large as the model.

Source: flax/serialization.py (extension types 1 and 3, chunked arrays); T5X checkpoints.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

from speculative.errors import CheckpointError

VERSION = 3  # float leaves as they are; 2 kept bfloat16 as the uint16 of its bits
_VERSIONS = (2, 3)

_EXT_ARRAY = 1
_EXT_SCALAR = 3
_CHUNKED = "__msgpack_chunked_array__"
# A msgpack object of 4 GiB is the format's own limit; Flax chunks inline arrays above 1 GiB.
_LARGEST_OBJECT = 2**32 - 1
_UNPACK_ERRORS = (msgpack.exceptions.UnpackException, ValueError, TypeError, OverflowError)


class Index(NamedTuple):
    """What the file says: the stored step (None where absent) and the tree of leaves.

    A leaf of `target` is a numpy array, or the raw dictionary of a TensorStore spec.
    """

    step: Any
    target: dict[str, Any]


def is_spec(node: Any) -> bool:
    """Whether a dictionary of the tree is a TensorStore spec, by T5X's own rule."""
    return isinstance(node, Mapping) and {"driver", "kvstore", "metadata"} <= set(node)


def dtype_from_name(name: Any) -> np.dtype:
    """`'float32'`, `'bfloat16'`, ... -> dtype; ValueError for anything that is not a number."""
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    if not isinstance(name, str):
        raise ValueError(f"dtype name {name!r}")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"unknown dtype {name!r}") from error
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {name!r} is not numeric")
    return dtype


def read_index(stream: BinaryIO, where: object) -> Index:
    """Read the step and the target's leaves from an open msgpack file.

    Args:
      stream: the file, open for reading bytes.
      where: its path, for messages.

    Raises:
      CheckpointError: the file is cut short, is not msgpack, has no `version` and `optimizer`, a
        version that T5X does not read, or no `target`.
    """
    unpacker = msgpack.Unpacker(
        stream,
        raw=False,
        strict_map_key=False,
        ext_hook=_decode_extension,
        max_buffer_size=_LARGEST_OBJECT,
    )
    try:
        top = _read_map(unpacker, {"optimizer": {"state": {"step": None}, "target": None}})
    except msgpack.OutOfData as error:
        raise CheckpointError(
            f"{where} is cut short or not a checkpoint",
            expected="a whole msgpack file of T5X",
            found="its end inside a value",
            mend="Copy the checkpoint again",
        ) from error
    except _UNPACK_ERRORS as error:
        raise CheckpointError(
            f"{where} is not a T5X checkpoint",
            expected="a msgpack file with Flax arrays",
            found=_reason(error),
            mend="Check the path",
        ) from error
    return _checked(top, where)


def _read_map(unpacker: msgpack.Unpacker, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read a map, going down into the maps that `wanted` describes.

    `version` and the leaves of `wanted` are read. Any other key is skipped and stands as None, so
    that a message can name it.
    """
    found: dict[str, Any] = {}
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        if key == "version":
            found[key] = unpacker.unpack()
        elif key not in wanted:
            found[key] = None
            unpacker.skip()
        elif wanted[key] is None:
            found[key] = unpacker.unpack()
        else:
            found[key] = _read_map(unpacker, wanted[key])
    return found


def _checked(top: dict[str, Any], where: object) -> Index:
    keys = sorted(map(str, top))
    if "version" not in top or "optimizer" not in top:
        orbax = "; an Orbax checkpoint has such keys" if {"state", "target"} & set(keys) else ""
        raise CheckpointError(
            f"{where} is not a legacy T5X checkpoint",
            expected="keys 'version' and 'optimizer'",
            found=f"keys {keys[:6]}{orbax}",
        )
    if top["version"] not in _VERSIONS:
        raise CheckpointError(
            f"The format version of {where}",
            expected=" or ".join(map(str, _VERSIONS)),
            found=repr(top["version"]),
            mend="Save it again with a later T5X",
        )
    target = top["optimizer"].get("target")
    if not isinstance(target, dict) or not target:
        raise CheckpointError(
            f"The tree of {where}",
            expected="parameters under 'optimizer/target'",
            found=f"keys {sorted(map(str, top['optimizer']))[:6]} under 'optimizer'"
            if target is None
            else repr(target)[:60],
        )
    state = top["optimizer"].get("state") or {}
    return Index(state.get("step"), target)


def join_chunks(node: Mapping[Any, Any]) -> np.ndarray | None:
    """The array of a chunked node (Flax splits inline arrays above 1 GiB), or None for others.

    Raises:
      ValueError: the chunks are not the arrays that the node's shape needs.
    """
    if _CHUNKED not in node:
        return None
    shape = tuple(_in_order(node.get("shape")))
    chunks = _in_order(node.get("chunks"))
    if not chunks or not all(isinstance(chunk, np.ndarray) for chunk in chunks):
        raise ValueError("a chunked array without its chunks")
    _check_shape(shape)
    if sum(chunk.size for chunk in chunks) != math.prod(shape):
        raise ValueError(f"chunks of {sum(c.size for c in chunks)} values for shape {shape}")
    return np.concatenate([chunk.reshape(-1) for chunk in chunks]).reshape(shape)


def _in_order(numbered: Any) -> list[Any]:
    """Values of `{'0': a, '1': b, ..., '10': k}` by number (Flax's form of a tuple)."""
    if not isinstance(numbered, Mapping):
        raise ValueError("a chunked array of another form")
    return [numbered[key] for key in sorted(numbered, key=int)]


def _check_shape(shape: tuple) -> None:
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise ValueError(f"shape {shape!r}")


def _decode_extension(code: int, data: bytes) -> Any:
    if code not in (_EXT_ARRAY, _EXT_SCALAR):
        # Kept as it is: an error only if it turns out to be a parameter.
        return msgpack.ExtType(code, data)
    record = msgpack.unpackb(data, raw=False)
    if not isinstance(record, list) or len(record) != 3:
        raise ValueError("an array that is not (shape, dtype, bytes)")
    shape, name, content = record
    shape = tuple(shape)
    _check_shape(shape)
    dtype = dtype_from_name(name)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {name} of shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape)


def encode_index(step: int, target: Mapping[str, Any]) -> bytes:
    """The file's bytes for a tree of TensorStore specs (and inline arrays), as T5X writes it."""
    content = {
        "version": VERSION,
        "optimizer": {"state": {"step": np.asarray(step, np.int32)}, "target": target},
    }
    return msgpack.packb(content, default=encode_array, strict_types=True)


def encode_array(array: Any) -> msgpack.ExtType:
    """A numpy array as Flax's extension type 1: `(shape, dtype name, bytes in C order)`."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} in a checkpoint's tree")
    record = (array.shape, array.dtype.name, array.tobytes("C"))
    return msgpack.ExtType(_EXT_ARRAY, msgpack.packb(record))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
