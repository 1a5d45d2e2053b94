"""Vocabularies: the round trip, SeqIO's ids, sameness, and what is refused."""

from __future__ import annotations

import hashlib
import pathlib

import pytest

from speculative.data import offline, vocabulary
from speculative.errors import VocabularyError


@pytest.fixture(scope="module")
def embedded() -> vocabulary.Vocabulary:
    return vocabulary.load(vocabulary.EMBEDDED_PATH)


def test_the_embedded_vocabulary_is_the_one_that_was_trained(embedded):
    model = pathlib.Path(vocabulary.EMBEDDED_PATH).read_bytes()
    # Checkpoints depend on it: train another one under another name.
    assert hashlib.sha256(model).hexdigest().startswith("8a2c908d3bca1bf3")
    assert len(model) < 400_000
    assert (embedded.size, embedded.extra_ids) == (4096, 0)
    assert (embedded.pad_id, embedded.eos_id, embedded.unk_id) == (0, 1, 2)
    assert embedded.processor.bos_id() == -1
    assert embedded.pieces[:3] == ("<pad>", "</s>", "<unk>")


def test_round_trip_of_every_held_out_verse(embedded):
    for pair in offline.verse_pairs("test") + offline.verse_pairs("validation"):
        for text in (pair.source, pair.target):
            ids = embedded.encode(text)
            assert embedded.unk_id not in ids
            assert embedded.decode(ids) == text


def test_every_ascii_character_has_a_piece(embedded):
    assert embedded.unk_id not in embedded.encode("".join(map(chr, range(33, 127))))


def test_end_of_sequence(embedded):
    ids = embedded.encode("In the beginning", add_eos=True)
    assert ids[-1] == embedded.eos_id
    assert embedded.encode("In the beginning") == ids[:-1]
    assert embedded.decode([*ids, *embedded.encode("God"), 9999]) == "In the beginning"
    assert embedded.decode([0, *ids[:-1], 0, 0]) == "In the beginning"
    assert embedded.decode([]) == embedded.decode([embedded.eos_id]) == ""


def test_ids_beyond_the_vocabulary_are_unknown(embedded):
    ids = embedded.encode("In the beginning")
    assert embedded.decode([*ids, 4096, 5000]) == embedded.decode([*ids, 2, 2])


@pytest.mark.parametrize("extra_ids", [0, 7, 100])
def test_ids_and_text_are_those_of_seqio(extra_ids):
    import numpy as np
    import seqio

    ours = vocabulary.load(vocabulary.EMBEDDED_PATH, extra_ids)
    theirs = seqio.SentencePieceVocabulary(vocabulary.EMBEDDED_PATH, extra_ids)
    assert ours.size == theirs.vocab_size == 4096 + extra_ids
    text = "And <extra_id_0> said, Let there be <extra_id_3>: and there was 漢 light."
    assert ours.encode(text) == list(theirs.encode(text))
    rng = np.random.default_rng(0)
    for _ in range(50):
        # SeqIO hands the end of sequence itself to SentencePiece, which drops it.
        ids = rng.integers(1, ours.size + 30, size=12).tolist()
        assert ours.decode(ids) == theirs.decode(ids)


def test_the_sentinels_come_last_and_count_down():
    loaded = vocabulary.load(vocabulary.EMBEDDED_PATH, 3)
    assert loaded.pieces[-3:] == ("<extra_id_2>", "<extra_id_1>", "<extra_id_0>")


def test_same_pieces_from_two_files_are_the_same_vocabulary(tmp_path, embedded):
    added = vocabulary.load(vocabulary.EMBEDDED_PATH, 100)
    holding = tmp_path / "with_sentinels.model"
    holding.write_bytes(added.processor.serialized_model_proto())
    inside = vocabulary.load(holding)
    assert (inside.extra_ids, inside.size) == (0, 4196)
    assert vocabulary.same_vocabulary(added, inside)
    vocabulary.check_same_vocabulary(added, inside)
    assert not vocabulary.same_vocabulary(added, embedded)
    with pytest.raises(VocabularyError, match="4196 ids"):
        vocabulary.check_same_vocabulary(added, embedded)


def test_check_vocabulary_against_the_width_of_a_model():
    assert vocabulary.check_vocabulary(vocabulary.EMBEDDED_PATH, 4096).size == 4096
    assert vocabulary.check_vocabulary(vocabulary.EMBEDDED_PATH, 4224, extra_ids=100).size == 4196
    with pytest.raises(VocabularyError, match=r"at most 4096 ids.*found 4196 ids, 100 of them"):
        vocabulary.check_vocabulary(vocabulary.EMBEDDED_PATH, 4096, extra_ids=100)


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"\x0a\xff\xff"])
def test_unreadable_files_are_one_line(tmp_path, content):
    path = tmp_path / "bad.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(VocabularyError, match=r"bad\.model") as caught:
        vocabulary.load(path)
    assert "\n" not in str(caught.value)
