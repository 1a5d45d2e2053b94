"""Writing T5X's legacy format, whole or not at all.

What is written is what every T5X since 2021 reads for inference: parameters as zarr directories,
gzip level 1, and a msgpack file with their specs and the step. There is no optimizer state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from speculative.checkpoints import flax_msgpack, steps, trees, zarr_arrays
from speculative.checkpoints.steps import is_local
from speculative.errors import CheckpointError

_DTYPES = ("float32", "bfloat16")
_LARGEST_STEP = 2**31 - 1  # T5X's step is an int32


def write(
    directory: str | os.PathLike,
    params: Mapping[Any, Any],
    step: int,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: zarr_arrays.Progress | None = None,
) -> epath.Path:
    """Write `directory/checkpoint_<step>/` with the parameters of a model.

    On a local disk everything is written to `checkpoint_<step>.tmp-<unix seconds>`, the msgpack
    file last, and then renamed: a write that is killed leaves only a temporary directory, which no
    reader takes, and what was there before stays (with `overwrite`, a kill between the two renames
    leaves the old one whole under a temporary name). A bucket has no rename, so there the msgpack
    file, written last, is the mark of a whole checkpoint.

    Args:
      directory: the model directory; made if absent. Local or `gs://`.
      params: nested mapping of arrays (numpy or jax) in the layout of `target`, each of any shape
        with at least one element; float32 or bfloat16, other floats only with `dtype`.
      step: training step, 0 to 2**31 - 1.
      dtype: 'float32' or 'bfloat16' to save every tensor in; None keeps each one's own.
      overwrite: replace a checkpoint of this step (on a local disk).
      progress: called after each tensor with (bytes written, bytes in all), before compression.

    Returns:
      The path of `checkpoint_<step>`.

    Raises:
      CheckpointError: the step is there already, an argument is wrong, or the disk refuses.
    """
    if type(step) is not int or not 0 <= step <= _LARGEST_STEP:
        raise CheckpointError(
            "The step to write", expected=f"a whole number from 0 to {_LARGEST_STEP}", found=step
        )
    flat = _checked(trees.flatten(params), dtype)
    parent = epath.Path(directory).expanduser()
    final = parent / steps.step_directory_name(step)
    local = is_local(parent)
    mend = "Check the space and the permissions of the disk"
    with steps.file_errors(f"{final} cannot be written", parent, mend):
        _check_free(final, overwrite, local)
        parent.mkdir(parents=True, exist_ok=True)
        work = _temporary(final) if local else final
        work.mkdir(parents=True, exist_ok=not local)
        try:
            _write_into(work, flat, step, dtype, progress)
            if local:
                _check_free(final, overwrite, local)
                _rename(work, final)
        except BaseException:
            # An interrupt as well; only a kill leaves the temporary directory behind.
            if local and work.exists():
                work.rmtree()
            raise
    return final


def _checked(flat: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype is not None and dtype not in _DTYPES:
        raise CheckpointError("The dtype to save in", expected=_DTYPES, found=repr(dtype))
    if not flat:
        raise CheckpointError("The parameters to write", expected="a tree of arrays", found="none")
    # Two names of one directory: 'a.b/c' and 'a/b.c'.
    places: dict[str, str] = {}
    for name, array in flat.items():
        found = str(getattr(array, "dtype", type(array).__name__))
        floats = (*_DTYPES, "float16", "float64") if dtype else _DTYPES
        if found not in floats:
            raise CheckpointError(
                f"The parameter '{name}'", expected=" or ".join(floats), found=found
            )
        if 0 in array.shape:
            raise CheckpointError(
                f"The parameter '{name}'", expected="at least one element", found=array.shape
            )
        other = places.setdefault(_place(name), name)
        if other != name:
            raise CheckpointError(
                f"The parameters '{other}' and '{name}'",
                expected="names that differ with '.' for '/'",
                found=f"'{_place(name)}' for both",
            )
    return flat


def _place(name: str) -> str:
    return f"target.{name.replace('/', '.')}"


def _check_free(final: epath.Path, overwrite: bool, local: bool) -> None:
    taken = final.exists() if local else (final / steps.CHECKPOINT_FILE).exists()
    if taken and not (overwrite and local):
        raise CheckpointError(
            f"{final} exists",
            expected="a step that is not there yet",
            mend="Write another step, or give overwrite=True"
            if local
            else "Remove it first: a bucket cannot replace a directory at once",
        )


def _temporary(final: epath.Path, mark: str = "") -> epath.Path:
    """A free name `checkpoint_<step>.tmp-<unix seconds>`, which T5X and we skip as unfinished."""
    seconds = int(time.time())
    while (path := final.parent / f"{final.name}.tmp-{seconds}{mark}").exists():
        seconds += 1
    return path


def _write_into(
    work: epath.Path,
    flat: Mapping[str, Any],
    step: int,
    dtype: str | None,
    progress: zarr_arrays.Progress | None,
) -> None:
    wanted = flax_msgpack.dtype_from_name(dtype) if dtype else None
    specs: dict[str, Any] = {}

    def arrays() -> Iterator[tuple[str, epath.Path, np.ndarray]]:
        for name, leaf in flat.items():
            array = np.asarray(leaf)
            if wanted is not None and array.dtype != wanted:
                array = array.astype(wanted)
            specs[name] = _spec(name, array)
            yield name, work / _place(name), array

    total = sum(
        leaf.size * (wanted.itemsize if wanted else np.dtype(leaf.dtype).itemsize)
        for leaf in flat.values()
    )
    zarr_arrays.write_all(arrays(), total, progress)
    content = flax_msgpack.encode_index(step, trees.unflatten(specs))
    (work / steps.CHECKPOINT_FILE).write_bytes(content)


def _spec(name: str, array: np.ndarray) -> dict[str, Any]:
    # T5X needs every one of these fields, and no other.
    return {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "kvstore": {"driver": "file", "path": f"{_place(name)}/"},
        "metadata": zarr_arrays.array_metadata(array),
    }


def _rename(work: epath.Path, final: epath.Path) -> None:
    if not final.exists():
        work.rename(final)
        return
    old = _temporary(final, "-replaced")
    final.rename(old)
    try:
        work.rename(final)
    except BaseException:
        old.rename(final)
        raise
    old.rmtree()
