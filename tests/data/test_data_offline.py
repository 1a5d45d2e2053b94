"""The embedded corpus: cleaning, and a split that never changes."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest

from speculative.data import offline
from speculative.errors import TaskError


@pytest.fixture(scope="module")
def by_id() -> dict[int, offline.VersePair]:
    return {pair.reference_id: pair for pair in offline.verse_pairs()}


def test_counts_and_order(by_id):
    pairs = offline.verse_pairs()
    assert len(pairs) == len(by_id) == 31_095
    assert [pair.reference_id for pair in pairs] == sorted(by_id)
    assert not offline.PLACEHOLDERS & by_id.keys()
    assert all(pair.source and pair.target for pair in pairs)


def test_the_split_is_fixed_disjoint_and_whole(by_id):
    splits = {split: offline.verse_pairs(split) for split in offline.SPLITS}
    assert {split: len(pairs) for split, pairs in splits.items()} == {
        "train": 29_090,
        "validation": 951,
        "test": 1_054,
    }
    ids = [pair.reference_id for pairs in splits.values() for pair in pairs]
    assert sorted(ids) == sorted(by_id)
    assert all(pair.split == split for split, pairs in splits.items() for pair in pairs[:50])
    # The very verses, in this order: checkpoints were trained on this split.
    digests = {
        split: hashlib.sha256(",".join(str(p.reference_id) for p in pairs).encode()).hexdigest()[
            :16
        ]
        for split, pairs in splits.items()
    }
    assert digests == {
        "train": "4782d5e77e966912",
        "validation": "eed99daae639dae4",
        "test": "b0865c6efdcb298c",
    }


def test_no_source_of_evaluation_is_trained_on():
    trained = {pair.source for pair in offline.verse_pairs("train")}
    for split in ("validation", "test"):
        sources = [pair.source for pair in offline.verse_pairs(split)]
        assert len(set(sources)) == len(sources)
        assert not trained.intersection(sources)


@pytest.mark.parametrize(
    ("number", "source", "target"),
    [
        # Brackets around supplied words, and curly or back-quoted marks.
        (
            1_001_002,
            (
                "And the earth was without form, and void; and darkness was upon the face of "
                "the deep. And the Spirit of God moved upon the face of the waters."
            ),
            (
                "Now the earth was formless and empty. Darkness was on the surface of the deep."
                " God's Spirit was hovering over the surface of the waters."
            ),
        ),
        # The heading "BOOK I  Psalm 1" after the last verse of Job.
        (
            18_042_017,
            "So Job died, being old and full of days.",
            "So Job died, being old and full of days.",
        ),
        # A psalm's number and title after the last verse of the psalm before, and runs of spaces.
        (
            19_023_006,
            (
                "Surely goodness and mercy shall follow me all the days of my life: and I will "
                "dwell in the house of the LORD for ever."
            ),
            (
                "Surely goodness and lovingkindness shall follow me all the days of my life, "
                "And I shall dwell in Yahweh's house forever."
            ),
        ),
        # "Psalm 119  ALEPH", then a letter alone.
        (
            19_118_029,
            "O give thanks unto the LORD; for he is good: for his mercy endureth for ever.",
            "Oh give thanks to Yahweh, for he is good, For his lovingkindness endures forever.",
        ),
        (
            19_119_160,
            (
                "Thy word is true from the beginning: and every one of thy righteous judgments "
                "endureth for ever."
            ),
            "All of your words are truth. Every one of your righteous ordinances endures forever.",
        ),
        # Speakers in the Song of Songs, within a verse and at its end.
        (
            22_001_004,
            (
                "Draw me, we will run after thee: the king hath brought me into his chambers: "
                "we will be glad and rejoice in thee, we will remember thy love more than wine:"
                " the upright love thee."
            ),
            (
                "Take me away with you. Let us hurry. The king has brought me into his "
                "chambers. We will be glad and rejoice in you. We will praise your love more "
                "than wine! They are right to love you."
            ),
        ),
        (
            22_001_017,
            "The beams of our house are cedar, and our rafters of fir.",
            "The beams of our house are cedars. Our rafters are firs.",
        ),
        # A round bracket with a space after it.
        (
            1_010_014,
            "And Pathrusim, and Casluhim, (out of whom came Philistim,) and Caphtorim.",
            "Pathrusim, Casluhim (which the Philistines descended from), and Caphtorim.",
        ),
    ],
)
def test_cleaning_of_real_verses(by_id, number, source, target):
    assert (by_id[number].source, by_id[number].target) == (source, target)


def test_words_that_look_like_headings_stay(by_id):
    assert by_id[62_004_007].target.startswith("Beloved, let us love one another")
    assert by_id[27_005_025].target.endswith("MENE, MENE, TEKEL, UPHARSIN.")
    assert by_id[44_013_033].target.count("psalm") == 1


def test_nothing_is_left_to_clean(by_id):
    characters = {c for pair in by_id.values() for c in pair.source + pair.target}
    assert not characters & set("[]<>{}*#`\n\t\N{PILCROW SIGN}0123456789")
    assert all("  " not in pair.source + pair.target for pair in by_id.values())


def test_an_unknown_split_is_one_line():
    with pytest.raises(TaskError, match="unknown split") as caught:
        offline.verse_pairs("dev")
    assert "\n" not in str(caught.value)


def test_neither_corpus_nor_vocabulary_loads_the_data_tools():
    code = (
        "import sys, speculative.data.offline as o, speculative.data.vocabulary as v,"
        " speculative.data.metrics as m;"
        " o.verse_pairs('test'); v.load(v.EMBEDDED_PATH).encode('a'); m.bleu(['a b'], ['a b']);"
        " print([n for n in ('tensorflow', 'seqio', 'jax', 'gin') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
