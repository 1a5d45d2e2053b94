"""The Python door: two tiny checkpoints and a vocabulary in, texts out."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

import speculative
from speculative.checkpoints import t5x
from speculative.data import vocabulary as vocabularies
from speculative.errors import CheckpointError, ConfigError, UserError, VocabularyError
from speculative.pair import load_pair
from tests import tiny
from tests.decoding import toys

CONFIG = tiny.config(num_decoder_layers=2)
DRAFT = CONFIG.replace(num_decoder_layers=1)
WORDS = vocabularies.EMBEDDED_PATH
TEXTS = ["In the beginning God created the heaven and the earth.", "", "And God said:"]
SHORT = {"max_length": 8, "gamma": 2}


def cut(tree: dict, layers: int) -> dict:
    """The tree without the decoder's layers from `layers` on."""
    left = [n for n in tree["decoder"] if not n.startswith("layers_") or int(n[7:]) < layers]
    return {**tree, "decoder": {name: tree["decoder"][name] for name in left}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> pathlib.Path:
    """A target, a draft that is its first decoder layer, and a draft of another vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    tree = toys.random_tree(CONFIG, 0)
    t5x.write(folder / "target", tree, 7)
    t5x.write(folder / "draft", cut(tree, 1), 7)
    t5x.write(folder / "wide", toys.random_tree(DRAFT.replace(vocab_size=4100), 1), 7)
    return folder


@pytest.fixture(scope="module")
def pair(checkpoints):
    return load_pair(checkpoints / "target", checkpoints / "draft", WORDS)


@pytest.fixture(scope="module")
def sampled(pair):
    return pair.generate(TEXTS, temperature=1.0, seed=3, **SHORT)


def tokens(generations):
    return [generation.tokens for generation in generations]


def test_what_is_loaded(pair, checkpoints):
    assert (pair.target.name, pair.draft.name) == ("target", "draft")
    # The activations and the dropout are no shapes; the rest is read off the checkpoint.
    assert pair.target.model.config == CONFIG.replace(dropout_rate=0.1)
    assert pair.draft.model.config == DRAFT.replace(dropout_rate=0.1)
    assert pair.draft.parameters < pair.target.parameters
    assert pair.vocabulary.size == 4096


def test_temperature_0_is_the_same_with_and_without_a_draft(pair):
    fast = pair.generate(TEXTS, **SHORT)
    plain = pair.generate(TEXTS, speculative=False, **SHORT)
    assert tokens(fast) == tokens(plain)
    assert [g.text for g in fast] == [g.text for g in plain]
    assert [g.ended for g in fast] == [g.ended for g in plain]
    for one, other in zip(fast, plain, strict=True):
        assert 1 <= len(one.tokens) <= 8
        assert one.text == pair.vocabulary.decode(one.tokens)
        assert one.ended == ("eos" if one.tokens[-1] == 1 else "budget")
        assert one.target_runs <= other.target_runs == len(other.tokens)
        assert other.accepted == other.proposed == 0
        assert one.tokens_per_target_run == len(one.tokens) / one.target_runs
        assert one.accepted <= one.proposed <= 2 * one.target_runs
    assert any(g.accepted for g in fast) and len(set(tokens(fast))) == len(TEXTS)


def test_a_seed_gives_the_same_outputs_again_and_another_seed_others(pair, sampled):
    again = pair.generate(TEXTS, temperature=1.0, seed=3, **SHORT)
    assert again == sampled
    other = pair.generate(TEXTS, temperature=1.0, seed=4, **SHORT)
    assert tokens(other) != tokens(sampled)


def test_forbidden_ids_never_appear(pair, sampled):
    forbidden = sorted({token for row in tokens(sampled) for token in row} - {1})
    rows = pair.generate(TEXTS, temperature=1.0, seed=3, forbidden_ids=forbidden, **SHORT)
    assert forbidden and not set(forbidden) & {token for row in tokens(rows) for token in row}


def test_no_text_gives_no_generation(pair):
    assert pair.generate([]) == []


@pytest.mark.parametrize(
    ("texts", "settings", "parts"),
    [
        ("one string", {}, ["generate(texts)", "a list of texts", "one string"]),
        (["a"], {"gamma": 0}, ["generate(gamma)", "1 or more", "0", "speculative=False"]),
        (["a"], {"max_length": 0}, ["max_length", "at least 1", "0"]),
        (["a"], {"temperature": -1.0}, ["temperature", "-1.0"]),
        (["a"], {"top_p": 1.5}, ["top_p", "1.5"]),
        (["a"], {"forbidden_ids": [4096]}, ["token id", "4096"]),
    ],
)
def test_settings_that_cannot_be_meant(pair, texts, settings, parts):
    with pytest.raises(ConfigError) as caught:
        pair.generate(texts, **settings)
    assert_one_line(caught.value, parts)


def test_checkpoints_and_vocabularies_that_do_not_fit(checkpoints, tmp_path):
    target, draft = checkpoints / "target", checkpoints / "draft"
    cases = [
        ((target,), ConfigError, ["load_pair", "draft=None"]),
        ((target, draft), ConfigError, ["load_pair", "vocabulary=None"]),
        ((target, tmp_path / "absent", WORDS), CheckpointError, ["absent"]),
        ((target, draft, tmp_path / "absent.model"), VocabularyError, ["absent.model"]),
        ((target, draft, __file__), VocabularyError, ["not a SentencePiece model"]),
    ]
    for given, kind, parts in cases:
        with pytest.raises(kind) as caught:
            load_pair(*given)
        assert_one_line(caught.value, parts)


def test_a_vocabulary_of_another_size(checkpoints, tmp_path):
    small = CONFIG.replace(vocab_size=2000)
    t5x.write(tmp_path / "small", toys.random_tree(small, 0), 7)
    with pytest.raises(VocabularyError) as caught:
        load_pair(tmp_path / "small", tmp_path / "small", WORDS)
    assert_one_line(caught.value, ["does not fit target", "1873 to 2000", "4096", WORDS])


def test_a_draft_of_another_width(checkpoints):
    with pytest.raises(ConfigError) as caught:
        load_pair(checkpoints / "target", checkpoints / "wide", WORDS)
    assert_one_line(caught.value, ["draft's vocabulary", "4096", "4100"])


def test_a_configuration_of_another_shape(checkpoints):
    with pytest.raises(CheckpointError) as caught:
        load_pair(checkpoints / "target", checkpoints / "draft", WORDS, draft_config=CONFIG)
    assert_one_line(caught.value, ["missing", "draft"])


def assert_one_line(error: UserError, parts):
    assert "\n" not in str(error)
    for part in parts:
        assert part in str(error)


def test_no_tensorflow_seqio_or_gin_is_brought_in(checkpoints):
    code = (
        "import json, sys, speculative\n"
        f"pair = speculative.load_pair({str(checkpoints / 'target')!r}, "
        f"{str(checkpoints / 'draft')!r}, {WORDS!r})\n"
        "one = pair.generate(['And God said'], max_length=2, gamma=1)\n"
        "assert len(one[0].tokens) in (1, 2)\n"
        "print(json.dumps([name for name in sys.modules if '.' not in name]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(speculative.__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    heavy = {"tensorflow", "tensorflow_datasets", "tensorflow_text", "seqio", "gin", "t5x"}
    assert not heavy & set(json.loads(done.stdout.splitlines()[-1]))
