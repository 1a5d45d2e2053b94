"""The errors that a user can mend.

Every one is a single line: what is wrong, what was expected, what was found, and how to mend it.
`speculative.main` prints that line and exits with code 2; nothing else is turned into exit code 2,
so a stack trace always means a fault of the project's own.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: a flag, a path, a checkpoint, a vocabulary, a record."""

    def __init__(self, what: str, *, expected: object = None, found: object = None, mend: str = ""):
        parts = [what.rstrip(".")]
        if expected is not None:
            parts.append(f"expected {expected}")
        if found is not None:
            parts.append(f"found {found}")
        line = "; ".join(parts) + "."
        if mend:
            line += f" {mend}" if mend.endswith(".") else f" {mend}."
        super().__init__(" ".join(line.split()))


class ConfigError(UserError):
    """A configuration (gin, flags, a model's or a decoder's settings) that cannot be run."""


class CheckpointError(UserError):
    """A checkpoint that is absent, unfinished, damaged, or of another shape than the model."""


class VocabularyError(UserError):
    """A vocabulary that is absent, unreadable, or not the one the model was trained with."""


class TaskError(UserError):
    """A task, split or data set that is unknown or not prepared."""


class RecordError(UserError):
    """A result record that does not follow the schema."""
