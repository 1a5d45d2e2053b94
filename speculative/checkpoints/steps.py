"""Step directories: `checkpoint_<step>`, unfinished ones, and which of them a path means.

The names are those of T5X, for every format it has written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Literal

from etils import epath

from speculative.errors import CheckpointError

Step = int | str  # a step number, its digits, or 'latest'
Format = Literal["legacy", "orbax", "mesh_tensorflow"]

CHECKPOINT_FILE = "checkpoint"
_STEP_NAME = re.compile(r"checkpoint_(\d+)$")
_TEMPORARY_NAME = re.compile(r"checkpoint_\d+\.(tmp-|orbax-checkpoint-tmp)")
_MESH_TF_HEAD = b"model_checkpoint_path"
_MESH_TF_FILE = re.compile(r"model\.ckpt-\d+\.(index|meta|data-\d+-of-\d+)$")
_ORBAX_MARKERS = ("_CHECKPOINT_METADATA", "_METADATA", "state/_METADATA", "state/checkpoint")
_ORBAX_MARKERS += ("manifest.ocdbt", "state/manifest.ocdbt")


def is_local(path: str | os.PathLike) -> bool:
    """Whether a path is on a disk of this machine, which renames a directory at once."""
    return "://" not in os.fspath(path)


@contextlib.contextmanager
def file_errors(what: str, path: str | os.PathLike, mend: str) -> Iterator[None]:
    """Turn what a file system raises into a one-line `CheckpointError`.

    The clients of remote file systems are optional packages with exceptions of their own, so on a
    remote path everything is the file system's; on a local one only what Python says is.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if is_local(path) and not isinstance(error, (OSError, ImportError)):
            raise
        raise CheckpointError(what, found=f"{type(error).__name__}: {error}", mend=mend) from error


def step_directory_name(step: int) -> str:
    """`checkpoint_1000` for 1000."""
    return f"checkpoint_{step}"


def step_of_name(path: epath.Path) -> int | None:
    """The step in a directory's name, or None where the name is not `checkpoint_<step>`."""
    match = _STEP_NAME.match(path.name)
    return int(match.group(1)) if match else None


def detect(path: epath.Path) -> Format | None:
    """The format of a step directory or checkpoint file; None where `path` is neither.

    A directory counts only once its marker is there (the legacy format writes `checkpoint` last),
    so a half-copied one is not taken for a checkpoint.
    """
    if not path.is_dir():
        if _MESH_TF_FILE.search(path.name) or epath.Path(f"{path}.index").exists():
            return "mesh_tensorflow"
        if not path.exists():
            return None
        if (path.parent / "_METADATA").exists():
            return "orbax"
        return "mesh_tensorflow" if _head(path) == _MESH_TF_HEAD else "legacy"
    if any((path / marker).exists() for marker in _ORBAX_MARKERS):
        return "orbax"
    file = path / CHECKPOINT_FILE
    if file.is_file():
        return "mesh_tensorflow" if _head(file) == _MESH_TF_HEAD else "legacy"
    return None


def _head(file: epath.Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(len(_MESH_TF_HEAD))


def list_steps(directory: epath.Path) -> dict[int, epath.Path]:
    """Step -> path of the finished checkpoints in a model directory, in rising order."""
    found = {
        step_of_name(p): p
        for p in directory.iterdir()
        if _STEP_NAME.match(p.name) and p.is_dir() and detect(p)
    }
    return dict(sorted(found.items()))


def parse_step(step: object) -> int | None:
    """The step number asked for; None for 'latest'.

    Raises:
      CheckpointError: `step` is neither 'latest' nor a whole number >= 0.
    """
    if step == "latest":
        return None
    if isinstance(step, str) and step.isascii() and step.isdigit():
        return int(step)
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    raise CheckpointError(
        "The checkpoint's step", expected="'latest' or a whole number >= 0", found=repr(step)
    )


def resolve(path: str | os.PathLike, step: Step = "latest") -> epath.Path:
    """Find the checkpoint that `path` and `step` mean.

    Args:
      path: a model directory (with `checkpoint_<step>` directories), one step directory under
        any name, or a checkpoint file with everything inline. Local or `gs://`.
      step: which one of a model directory: 'latest' or a number. For a step directory a number
        must agree with its name.

    Returns:
      The path of the step directory, or of the file. Unfinished directories are never chosen.

    Raises:
      CheckpointError: nothing is there, nothing finished is there, the step is not there, or the
        directory is a Mesh TensorFlow checkpoint.
    """
    wanted = parse_step(step)
    mend = "Check the path, its permissions, and that its file system is installed"
    with file_errors(f"Cannot look into {path}", path, mend):
        return _resolve(epath.Path(path).expanduser(), wanted)


def _resolve(path: epath.Path, wanted: int | None) -> epath.Path:
    if any(_TEMPORARY_NAME.match(p.name) for p in (path, path.parent)):
        raise CheckpointError(
            f"{path} is unfinished",
            expected="a directory named checkpoint_<step>",
            found="a temporary one, whose writing was interrupted",
            mend="Use an earlier step",
        )
    kind = detect(path)
    if kind == "mesh_tensorflow" or (kind is None and _holds_mesh_tf(path)):
        raise CheckpointError(
            f"{path} is a Mesh TensorFlow checkpoint",
            expected="a T5X checkpoint",
            mend="Use its T5X version (names and places are in T5X's docs/models.md)",
        )
    if kind is not None:
        named = step_of_name(path if path.is_dir() else path.parent)
        if wanted is not None and named is not None and named != wanted:
            raise CheckpointError(
                f"{path} is one checkpoint", expected=f"step {wanted}", found=f"step {named}"
            )
        return path
    if not path.exists():
        raise CheckpointError(
            "There is no checkpoint",
            expected="a model directory, a checkpoint_<step> directory or a checkpoint file",
            found=f"nothing at {path}",
            mend="Check the path",
        )
    steps = list_steps(path)
    if not steps:
        raise CheckpointError(
            f"There is no checkpoint in {path}",
            expected="checkpoint_<step> directories, or a file named checkpoint",
            found=_what_is_in(path),
            mend="Check the path; an unfinished directory is not read",
        )
    if wanted is not None and wanted not in steps:
        listed = ", ".join(map(str, list(steps)[-8:]))
        raise CheckpointError(
            f"There is no such step in {path}",
            expected=f"step {wanted}",
            found=f"steps {'..., ' if len(steps) > 8 else ''}{listed}",
        )
    return _resolve(steps[max(steps) if wanted is None else wanted], None)


def _holds_mesh_tf(path: epath.Path) -> bool:
    return path.is_dir() and any(_MESH_TF_FILE.search(p.name) for p in path.iterdir())


def _what_is_in(directory: epath.Path) -> str:
    names = sorted(p.name for p in directory.iterdir())
    if not names:
        return "an empty directory"
    listed = ", ".join(names[:5])
    return f"{listed}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
