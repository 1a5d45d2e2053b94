"""Trains the small vocabulary of the embedded corpus: 4,096 SentencePiece unigram pieces.

    python scripts/train_vocabulary.py [--output speculative/assets/kjv_web/vocabulary.model]

Ids are laid out as in T5's own vocabulary: padding 0, end of sequence 1, unknown 2, no beginning
of sequence. Trained on both sides of the training split only; two runs with one version of
SentencePiece write the same bytes. Takes about ten seconds on one core.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import string
import sys

import sentencepiece

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "speculative" / "assets" / "kjv_web" / "vocabulary.model"
SIZE = 4096


def train(size: int = SIZE) -> bytes:
    """The bytes of a SentencePiece model of `size` pieces."""
    sys.path.insert(0, str(ROOT))  # the checkout need not be installed
    from speculative.data import offline

    pairs = offline.verse_pairs("train")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(text for pair in pairs for text in (pair.source, pair.target)),
        model_writer=model,
        model_type="unigram",
        vocab_size=size,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        character_coverage=1.0,
        # Whatever a user types in ASCII has a piece, though the corpus holds no digits.
        required_chars=string.digits + string.ascii_letters + string.punctuation,
        num_threads=1,
        minloglevel=1,
    )
    return model.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT)
    output = parser.parse_args().output
    model = train()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(model)
    print(f"{output}: {SIZE} pieces, {len(model)} bytes")


if __name__ == "__main__":
    main()
