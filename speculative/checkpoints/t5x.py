"""Reading and writing T5X checkpoints of a T5's parameters.

A format is one function from a path to an `Opened` (the step, and the tensors still on disk) in
`_OPENERS`; everything here is common to all formats. Only the parameters (`target`) are read;
optimizer state is skipped unread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from speculative.checkpoints import steps, t5x_legacy, trees, zarr_arrays
from speculative.checkpoints.steps import Step, resolve
from speculative.checkpoints.t5x_writer import write
from speculative.checkpoints.trees import TensorInfo
from speculative.errors import CheckpointError

__all__ = ["TensorInfo", "read", "read_step", "resolve", "tensor_shapes", "write"]

DTYPES = ("float32", "bfloat16")


def _refuse_orbax(path: epath.Path) -> t5x_legacy.Opened:
    raise CheckpointError(
        f"{path} is an Orbax checkpoint",
        expected="the legacy T5X format (a msgpack file named checkpoint)",
        mend="Save it with T5X's use_orbax=False",
    )


_OPENERS: dict[str, Callable[[epath.Path], t5x_legacy.Opened]] = {
    "legacy": t5x_legacy.open_checkpoint,
    "orbax": _refuse_orbax,
}


def _open(path: str | os.PathLike, step: Step) -> tuple[epath.Path, t5x_legacy.Opened]:
    found = resolve(path, step)
    return found, _OPENERS[steps.detect(found)](found)


def tensor_shapes(path: str | os.PathLike, step: Step = "latest") -> dict[str, TensorInfo]:
    """Shapes and dtypes of a checkpoint's parameters, without reading the weights.

    Args:
      path, step: as for `resolve`.

    Returns:
      Name -> (shape, dtype name), names sorted, joined by '/', without `target/`, for instance
      `{'token_embedder/embedding': ((32128, 512), 'float32')}`. They are what the checkpoint's
      index states; that the arrays are there and agree is checked by `read`.

    Raises:
      CheckpointError: there is no checkpoint, or its index is damaged or of another format.
    """
    _, opened = _open(path, step)
    return zarr_arrays.infos(opened.leaves)


def read_step(path: str | os.PathLike, step: Step = "latest") -> int:
    """The training step that a checkpoint states (its directory's name, where it states none).

    Args:
      path, step: as for `resolve`.

    Raises:
      CheckpointError: as `tensor_shapes`; or neither the checkpoint nor its name states a step.
    """
    found, opened = _open(path, step)
    number = opened.step
    if number is None:
        number = steps.step_of_name(found if found.is_dir() else found.parent)
    if number is None:
        raise CheckpointError(
            f"The step of {found}", expected="state/step, or a name checkpoint_<step>", found="none"
        )
    return number


def read(
    path: str | os.PathLike,
    *,
    step: Step = "latest",
    shapes: Mapping[str, Sequence[int]] | None = None,
    dtype: str | None = None,
    progress: zarr_arrays.Progress | None = None,
) -> dict[str, Any]:
    """Read the parameters of a checkpoint.

    Tensors are read concurrently, and cast one by one as they arrive: beside the result about
    1 GiB and one tensor are in memory, never a second copy of the tree.

    Args:
      path, step: as for `resolve`.
      shapes: name -> expected shape of every parameter (`models.config.parameter_shapes`). If
        given, the checkpoint must have exactly these; this is checked before any weight is read.
      dtype: 'float32' or 'bfloat16' to cast to (round to nearest even); None keeps each tensor as
        it is stored.
      progress: called after each tensor with (bytes read, bytes in all), as stored.

    Returns:
      Nested dictionary of numpy arrays as in `target`; bfloat16 is `ml_dtypes.bfloat16`.

    Raises:
      CheckpointError: one line; as `tensor_shapes`, or the tensors are not those of `shapes`, or
        an array is missing, damaged, or of another shape than the index states.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(
            "The dtype to read in", expected=" or ".join(DTYPES), found=repr(dtype)
        )
    found, opened = _open(path, step)
    if shapes is not None:
        trees.check_shapes(zarr_arrays.infos(opened.leaves), shapes, found)
    return trees.unflatten(zarr_arrays.read_all(opened.leaves, dtype, progress))
