"""Arrays of a checkpoint that are still on disk: opening, reading and writing many at once.

TensorStore does the work and is imported only when an array is touched. All its errors (it maps
them to many builtin exceptions) come out as one-line `CheckpointError`s.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from speculative.checkpoints.flax_msgpack import dtype_from_name
from speculative.checkpoints.trees import TensorInfo
from speculative.errors import CheckpointError

if TYPE_CHECKING:
    import tensorstore as ts

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), after each tensor

CHUNK_BYTES = 64 * 2**20
# In flight at once: enough to hide the latency of a remote disk, and little beside the weights.
_MOST_TENSORS = 32
_MOST_BYTES = 2**30
_LONGEST_REASON = 240
_MEND_READING = "Copy the checkpoint again, or use another step"
_MEND_WRITING = "Check the space and the permissions of the disk"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """An array that was not read yet.

    Attributes:
      kvstore: TensorStore's description of the place (`kvstore_of`, or another driver's).
      place: the same for a human, to be named in messages.
      shape: the shape that the checkpoint's index states, or None where it states none.
      dtype: likewise the dtype's name.
    """

    kvstore: Mapping[str, Any]
    place: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


Leaf = np.ndarray | StoredTensor


def kvstore_of(directory: epath.Path) -> dict[str, Any]:
    """TensorStore's key-value store for a directory, local or `gs://`.

    Raises:
      CheckpointError: the path is on another kind of file system.
    """
    text = os.fspath(directory)
    if text.startswith("gs://"):
        bucket, _, path = text.removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": f"{path.rstrip('/')}/"}
    if "://" in text:
        raise CheckpointError(
            f"The file system of {text}", expected="a local or a gs:// path", mend="Copy it first"
        )
    return {"driver": "file", "path": f"{os.path.abspath(text)}/"}


def choose_chunks(shape: Sequence[int], itemsize: int, limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """T5X's chunk shape: at most `limit` bytes, and every chunk whole.

    While a chunk is too big, its largest dimension (the first among equals) falls to the next
    smaller divisor of that axis.

    Args:
      shape: shape of the array.
      itemsize: bytes of one element.
      limit: bytes of one chunk; at least one element is always in it.
    """
    chunks = list(shape)
    while math.prod(chunks) * itemsize > limit and max(chunks) > 1:
        axis = chunks.index(max(chunks))
        chunks[axis] = next(n for n in range(chunks[axis] - 1, 0, -1) if shape[axis] % n == 0)
    return tuple(chunks)


def infos(leaves: Mapping[str, Leaf]) -> dict[str, TensorInfo]:
    """Name -> shape and dtype, from the index where it states both, else from the arrays' metadata.

    Raises:
      CheckpointError: metadata had to be opened and is missing or wrong.
    """
    found: dict[str, TensorInfo] = {}
    unstated = {name: leaf for name, leaf in leaves.items() if not _stated(leaf)}
    opened = dict(_open_all(unstated.items())) if unstated else {}
    for name, leaf in leaves.items():
        if name in opened:
            store = opened[name]
            found[name] = TensorInfo(tuple(store.shape), _weight_dtype(store.dtype.name))
        elif isinstance(leaf, np.ndarray):
            found[name] = TensorInfo(leaf.shape, _weight_dtype(leaf.dtype.name))
        else:
            found[name] = TensorInfo(leaf.shape, _weight_dtype(leaf.dtype))
    return found


def _stated(leaf: Leaf) -> bool:
    return isinstance(leaf, np.ndarray) or (leaf.shape is not None and leaf.dtype is not None)


def _weight_dtype(name: str) -> str:
    # The second version of the format kept the bits of a bfloat16 as a uint16, and no T5 has
    # whole-number weights.
    return "bfloat16" if name == "uint16" else name


def read_all(
    leaves: dict[str, Leaf], dtype: str | None = None, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Read tensors, many at once, each cast as soon as it is there.

    Beside the result, about 1 GiB and the largest tensor are in memory at a time. Inline
    leaves are taken out of `leaves` as they are copied.

    Args:
      leaves: name -> leaf; emptied.
      dtype: dtype name to cast floating tensors to, or None to keep each as stored.
      progress: called after each tensor.

    Returns:
      name -> array, in the order of `leaves`; each owns its memory and may be written to.

    Raises:
      CheckpointError: an array or one of its chunks is missing, damaged or of another shape.
    """
    wanted = dtype_from_name(dtype) if dtype else None
    order = list(leaves)
    sizes = {
        n: math.prod(i.shape) * dtype_from_name(i.dtype).itemsize for n, i in infos(leaves).items()
    }
    total, done = sum(sizes.values()), 0
    result: dict[str, np.ndarray] = {}

    def keep(name: str, array: np.ndarray) -> None:
        nonlocal done
        if array.dtype == np.uint16:
            array = array.view(dtype_from_name("bfloat16"))
        casts = wanted is not None and array.dtype != wanted and _is_float(array.dtype)
        result[name] = array.astype(wanted) if casts else array
        done += sizes[name]
        if progress:
            progress(done, total)

    for name in order:
        if isinstance(leaves[name], np.ndarray):
            keep(name, np.array(leaves.pop(name)))
    places = {name: leaf.place for name, leaf in leaves.items()}

    def start() -> Iterator[tuple[str, int, Any]]:
        for name, store in _open_all(leaves.items()):
            yield name, sizes[name], store.read()

    for name, array in _in_flight(start(), lambda n: _cannot_read(n, places[n]), _MEND_READING):
        keep(name, array)
    leaves.clear()
    return {name: result[name] for name in order}


def _cannot_read(name: str, place: str) -> str:
    return f"The tensor '{name}' cannot be read from {place}"


def _cannot_write(name: str, place: object) -> str:
    return f"The tensor '{name}' cannot be written to {place}"


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype == dtype_from_name("bfloat16")


def _open_all(leaves: Iterable[tuple[str, StoredTensor]]) -> Iterator[tuple[str, ts.TensorStore]]:
    """Open arrays ahead of their use, and check that each has the shape its index states."""
    kept: dict[str, StoredTensor] = {}

    def start() -> Iterator[tuple[str, int, Any]]:
        import tensorstore as ts

        context = ts.Context()
        for name, leaf in leaves:
            kept[name] = leaf
            spec = {
                "driver": "zarr",
                "kvstore": dict(leaf.kvstore),
                # Else a lost chunk file would be read as zeros, in silence.
                "fill_missing_data_reads": False,
            }
            # A bad specification is refused by the call itself, not by its future.
            with _one_line(_cannot_read(name, leaf.place), _MEND_READING):
                future = ts.open(spec, open=True, read=True, context=context)
            yield name, 0, future

    for name, store in _in_flight(start(), lambda n: _cannot_read(n, kept[n].place), _MEND_READING):
        leaf = kept.pop(name)
        if leaf.shape is not None and tuple(store.shape) != leaf.shape:
            raise CheckpointError(
                f"The tensor '{name}' in {leaf.place}",
                expected=f"shape {leaf.shape}, as the checkpoint file says",
                found=f"shape {tuple(store.shape)}",
                mend="Copy the checkpoint again",
            )
        with _one_line(_cannot_read(name, leaf.place), _MEND_READING):
            dtype_from_name(store.dtype.name)
        yield name, store


def write_all(
    arrays: Iterable[tuple[str, epath.Path, np.ndarray]],
    total: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write arrays as zarr directories, gzip level 1, several at once.

    Args:
      arrays: (name, directory, array) of each, drawn only as they are needed, so that an iterator
        which casts never holds two copies of a model. What a directory holds is deleted.
      total: bytes in all, for `progress`.
      progress: called after each array is on disk.

    Raises:
      CheckpointError: a write failed (no space, no permission).
    """
    places: dict[str, tuple[epath.Path, int]] = {}

    def start() -> Iterator[tuple[str, int, Any]]:
        import tensorstore as ts

        for name, directory, array in arrays:
            places[name] = (directory, array.nbytes)
            spec = {
                "driver": "zarr",
                "kvstore": kvstore_of(directory),
                "dtype": array.dtype.name,
                "metadata": array_metadata(array),
            }
            with _one_line(_cannot_write(name, directory), _MEND_WRITING):
                # Deleting matters in a bucket only, where a killed write leaves its arrays.
                store = ts.open(spec, create=True, delete_existing=True).result()
            yield name, array.nbytes, store.write(array)

    done = 0
    for name, _ in _in_flight(start(), lambda n: _cannot_write(n, places[n][0]), _MEND_WRITING):
        done += places.pop(name)[1]
        if progress:
            progress(done, total)


def array_metadata(array: np.ndarray) -> dict[str, Any]:
    """The part of the zarr metadata that T5X's index repeats: chunks, compressor, shape."""
    return {
        "chunks": list(choose_chunks(array.shape, array.dtype.itemsize)),
        "compressor": {"id": "gzip", "level": 1},
        "shape": list(array.shape),
    }


def _in_flight(
    started: Iterator[tuple[str, int, Any]], what: Callable[[str], str], mend: str
) -> Iterator[tuple[str, Any]]:
    """Results of futures in order, with a bounded number and size of them running.

    Args:
      started: (name, bytes, future); drawing one starts its work.
      what: name -> what failed, for the message.
      mend: how to mend it.
    """
    running: collections.deque[tuple[str, int, Any]] = collections.deque()
    in_flight = 0
    try:
        while True:
            while len(running) < _MOST_TENSORS and (not running or in_flight < _MOST_BYTES):
                item = next(started, None)
                if item is None:
                    break
                running.append(item)
                in_flight += item[1]
            if not running:
                return
            name, size, future = running.popleft()
            in_flight -= size
            with _one_line(what(name), mend):
                result = future.result()
            yield name, result
    finally:
        # After a failure nothing may still be writing into a directory that is being removed.
        for _, _, future in running:
            future.exception()


@contextlib.contextmanager
def _one_line(what: str, mend: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # TensorStore raises ValueError, OSError, NotImplementedError, ...
        raise CheckpointError(what, found=_brief(error), mend=mend) from error


def _brief(error: Exception) -> str:
    """TensorStore's message without the specification and source places that it appends."""
    text = " ".join(str(error).split()).split(" [tensorstore_spec=")[0]
    text = text.split(" [source locations=")[0]
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
