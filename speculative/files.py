"""Writing a text file whole or not at all."""

from __future__ import annotations

import os
import secrets

from etils import epath


def write_text_atomic(path: epath.PathLike, text: str) -> epath.Path:
    """Writes `text` as UTF-8 so that a reader sees the old file or the new one, never a part.

    The text goes to a hidden temporary file in the same folder, which then replaces `path`. If
    anything fails on the way the temporary file is removed and an old `path` stays as it was.
    Folders that are absent are made.

    Args:
      path: local or remote (`gs://...`) path of the file.
      text: the whole content.

    Returns:
      The path written.

    Raises:
      OSError: the file system refuses the folder, the file or the replacement.
    """
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
