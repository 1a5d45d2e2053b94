"""Vocabularies by SentencePiece alone: text to ids and back, and when two are the same.

Nothing here imports TensorFlow, SeqIO or JAX, so that a decoder can be used where none of the data
tools are installed. The ids are those of `seqio.SentencePieceVocabulary` for the same file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import struct
from collections.abc import Iterable
from typing import Any

import sentencepiece

from speculative.errors import VocabularyError

# The public vocabulary of T5 (32,000 pieces and 100 sentinels), and T5X's variant of it, whose
# file holds the sentinels already.
T5_PATH = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model"
T5_PATH_WITH_EXTRA_IDS = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
T5_PIECES = 32_000
T5_EXTRA_IDS = 100

# The 4,096 pieces that `scripts/train_vocabulary.py` learned on the embedded corpus.
EMBEDDED_PATH = str(
    pathlib.Path(__file__).resolve().parents[1] / "assets" / "kjv_web" / "vocabulary.model"
)

_USER_DEFINED = 4  # SentencePiece's type of a piece that is never cut


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """A SentencePiece model, with sentinels at its end.

    Attributes:
      path: the file that it was read from.
      extra_ids: how many sentinels were added to the file's own pieces: `<extra_id_0>` has the
        highest id, as in T5.
      processor: the SentencePiece processor, sentinels included.
    """

    path: str
    extra_ids: int
    processor: Any = dataclasses.field(repr=False)

    @property
    def size(self) -> int:
        """Number of ids: pieces and sentinels. A model may be wider (T5's are padded to 32,128)."""
        return self.processor.get_piece_size()

    @property
    def pad_id(self) -> int:
        """Id of padding, 0 in every T5 model whatever the file says (some leave it undefined)."""
        return max(self.processor.pad_id(), 0)

    @property
    def eos_id(self) -> int:
        """Id of the end of a sequence (1 in T5)."""
        return self.processor.eos_id()

    @property
    def unk_id(self) -> int:
        """Id of what has no piece (2 in T5)."""
        return self.processor.unk_id()

    def encode(self, text: str, *, add_eos: bool = False) -> list[int]:
        """The ids of `text`, without the end of sequence unless asked for."""
        ids = self.processor.encode(text)
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` up to the first end of sequence.

        Ids at or beyond `size`, which a model wider than its vocabulary can produce, read as
        unknown; padding is dropped.
        """
        kept: list[int] = []
        for token in map(int, ids):
            if token == self.eos_id:
                break
            kept.append(token if 0 <= token < self.size else self.unk_id)
        return self.processor.decode(kept)

    @functools.cached_property
    def pieces(self) -> tuple[str, ...]:
        """The piece of every id, sentinels without the mark of a word's beginning."""
        return tuple(
            piece.removeprefix("▁") if "<extra_id_" in piece else piece
            for piece in map(self.processor.id_to_piece, range(self.size))
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the pieces in order: equal for two files that mean the same by every id."""
        digest = hashlib.sha256()
        for piece in self.pieces:
            digest.update(piece.encode() + b"\0")
        return digest.hexdigest()


def load(path: str | os.PathLike[str], extra_ids: int | None = None) -> Vocabulary:
    """Reads a SentencePiece model.

    Args:
      path: local, or remote (`gs://...`), which needs a file system that etils.epath can open.
      extra_ids: number of sentinels to add; None adds T5's 100 to a file with T5's 32,000 pieces
        and none to any other.

    Raises:
      VocabularyError: absent, unreadable, no SentencePiece model, or without an end of sequence.
    """
    path = os.fspath(path)
    model = _read(path)
    processor = _processor(model, path)
    if extra_ids is None:
        extra_ids = T5_EXTRA_IDS if processor.get_piece_size() == T5_PIECES else 0
    if extra_ids < 0:
        raise VocabularyError("extra_ids", expected="0 or more", found=extra_ids)
    if extra_ids:
        processor = _processor(model + _sentinels(extra_ids), path)
    if processor.eos_id() < 0 or processor.unk_id() < 0:
        raise VocabularyError(
            f"the vocabulary {path} lacks a special piece",
            expected="an end of sequence and an unknown piece",
            found=f"eos id {processor.eos_id()}, unk id {processor.unk_id()}",
            mend="Train it with pad_id=0, eos_id=1, unk_id=2",
        )
    return Vocabulary(path, extra_ids, processor)


def check_vocabulary(
    path: str | os.PathLike[str], model_vocab_size: int, extra_ids: int | None = None
) -> Vocabulary:
    """Loads a vocabulary and makes sure that a model has a row for every id of it.

    Args:
      path: as for `load`.
      model_vocab_size: width of the model's embedding and logits. Wider than the vocabulary is
        usual (T5's 32,100 ids in a width of 32,128).
      extra_ids: as for `load`.

    Raises:
      VocabularyError: as for `load`, or the vocabulary is larger than the model is wide.
    """
    vocabulary = load(path, extra_ids)
    if vocabulary.size > model_vocab_size:
        raise VocabularyError(
            f"the vocabulary {path} does not fit the model",
            expected=f"at most {model_vocab_size} ids (the model's vocab_size)",
            found=f"{vocabulary.size} ids, {vocabulary.extra_ids} of them added as extra_ids",
            mend="Give the vocabulary that the model was trained with",
        )
    return vocabulary


def same_vocabulary(one: Vocabulary, other: Vocabulary) -> bool:
    """Whether every id means the same piece in both, wherever the two files lie.

    T5's file with 100 sentinels added and T5X's file that holds them are the same vocabulary,
    though SeqIO, which compares paths, calls them different.
    """
    return one.fingerprint == other.fingerprint


def check_same_vocabulary(
    one: Vocabulary, other: Vocabulary, *, what: str = "vocabularies"
) -> None:
    """Raises a VocabularyError that shows the first difference if two vocabularies differ."""
    if same_vocabulary(one, other):
        return
    if one.size != other.size:
        found = f"{one.size} ids in {one.path}, {other.size} in {other.path}"
    else:
        pairs = enumerate(zip(one.pieces, other.pieces, strict=True))
        place, (mine, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        found = f"id {place} is {mine!r} in {one.path} and {theirs!r} in {other.path}"
    raise VocabularyError(
        f"the {what} differ",
        expected="the same piece for every id",
        found=found,
        mend="Use models that were trained with one vocabulary",
    )


def _read(path: str) -> bytes:
    try:
        if "://" in path:
            from etils import epath  # only here: it loads a whole file system

            return epath.Path(path).read_bytes()
        return pathlib.Path(path).expanduser().read_bytes()
    except Exception as error:  # every file system has errors of its own
        raise VocabularyError(
            f"cannot read the vocabulary {path}",
            expected="a SentencePiece model file",
            found=f"{type(error).__name__}: {error}".splitlines()[0],
            mend="Give the path of a .model file",
        ) from error


def _processor(model: bytes, path: str) -> Any:
    try:
        if not model:
            raise ValueError("an empty file")
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except (RuntimeError, ValueError, OSError) as error:
        raise VocabularyError(
            f"the vocabulary {path} is not a SentencePiece model",
            found=str(error).splitlines()[0],
            mend="Give the path of a .model file",
        ) from error


def _sentinels(count: int) -> bytes:
    """Pieces to append to a serialised model, as SeqIO adds them: `<extra_id_0>` comes last.

    A serialised message followed by another is their merger, and repeated fields (field 1, the
    pieces) are joined, so no protocol-buffer library is needed. Within a piece, field 1 is the
    text, 2 the score (0), 3 the type.
    """
    out = bytearray()
    for number in reversed(range(count)):
        text = f"▁<extra_id_{number}>".encode()
        body = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", 0.0)
        body += b"\x18" + bytes([_USER_DEFINED])
        out += b"\x0a" + bytes([len(body)]) + body
    return bytes(out)
