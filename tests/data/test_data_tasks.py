"""Tasks: T5's text to the letter, names, vocabularies, and the errors of a user."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import seqio

from speculative.data import metrics, tasks, vocabulary
from speculative.errors import TaskError, VocabularyError
from tests import helpers_tfds
from tests.data.tiny_data import ARTICLE, CNN, LM1B, WMT

T5_NAMES = (
    "wmt_t2t_ende_v003",
    "wmt14_ende_v003",
    "wmt14_enfr_v003",
    "wmt15_enfr_v003",
    "wmt16_enro_v003",
    "wmt19_ende_v003",
    "cnn_dailymail_v002",
    "lm1b",
)


def _examples(task, split, lengths=None):
    data = task.get_dataset(lengths, split, shuffle=False, seed=0)
    return list(data.as_numpy_iterator())


def _small(name):
    return tasks.get_task(name, vocabulary=vocabulary.EMBEDDED_PATH)


def test_wmt_text_and_tokens_are_those_of_t5(tfds_data_dir):
    task = _small("wmt_t2t_ende_v003")
    pieces = vocabulary.load(vocabulary.EMBEDDED_PATH)
    for split, pairs in WMT.items():
        rows = _examples(task, split)
        assert len(rows) == task.num_input_examples(split) == len(pairs)
        for row, (english, german) in zip(rows, pairs, strict=True):
            text = f"translate English to German: {english}"
            assert row["inputs_pretokenized"].decode() == text
            assert row["targets_pretokenized"].decode() == german
            assert row["inputs"].tolist() == pieces.encode(text, add_eos=True)
            assert row["targets"].tolist() == pieces.encode(german, add_eos=True)
            assert row["inputs"].dtype == row["targets"].dtype == np.int32


def test_cnn_dailymail_text_is_that_of_t5_and_is_cut_before_the_end_of_sequence(tfds_data_dir):
    task = _small("cnn_dailymail_v002")
    rows = _examples(task, "test", {"inputs": 32, "targets": 8})
    assert [row["inputs_pretokenized"].decode() for row in rows] == [
        f"summarize: {article}" for article, _ in CNN["test"]
    ]
    assert rows[0]["inputs_pretokenized"].decode() == f"summarize: {ARTICLE}"
    assert rows[0]["targets_pretokenized"].decode() == "God saw the light .\nThe people heard ."
    assert len(rows[0]["inputs"]) == 32
    assert len(rows[0]["targets"]) == 8
    assert rows[0]["inputs"][-1] == rows[0]["targets"][-1] == 1
    assert len(rows[1]["inputs"]) < 32


def test_lm1b_has_empty_inputs(tfds_data_dir):
    rows = _examples(_small("lm1b"), "train")
    assert [row["targets_pretokenized"].decode() for row in rows] == LM1B["train"]
    assert all(row["inputs"].tolist() == [1] for row in rows)


@pytest.mark.parametrize(
    ("name", "dataset", "prefix", "language"),
    [
        (
            "wmt_t2t_ende_v003",
            "wmt_t2t_translate/de-en:1.0.0",
            "translate English to German: ",
            "de",
        ),
        ("wmt14_ende_v003", "wmt14_translate/de-en:1.0.0", "translate English to German: ", "de"),
        ("wmt14_enfr_v003", "wmt14_translate/fr-en:1.0.0", "translate English to French: ", "fr"),
        ("wmt15_enfr_v003", "wmt15_translate/fr-en:1.0.0", "translate English to French: ", "fr"),
        ("wmt16_enro_v003", "wmt16_translate/ro-en:1.0.0", "translate English to Romanian: ", "ro"),
        ("wmt19_ende_v003", "wmt19_translate/de-en:1.0.0", "translate English to German: ", "de"),
    ],
)
def test_every_translation_task(name, dataset, prefix, language):
    import tensorflow as tf

    task = tasks.get_task(name)
    assert task.source.tfds_dataset.name == dataset
    assert list(task.metric_fns) == [metrics.bleu]
    data = tf.data.Dataset.from_tensors({"en": "One.", language: "Zwei."})
    (row,) = task.preprocessors[0](data).as_numpy_iterator()
    assert row == {"inputs": f"{prefix}One.".encode(), "targets": b"Zwei."}


@pytest.mark.parametrize("name", T5_NAMES)
def test_features_and_chain_are_those_of_t5(name):
    task = tasks.get_task(name)
    assert task.name == f"speculative_{name}" == tasks.get_task(task.name).name
    assert set(task.output_features) == {"inputs", "targets"}
    assert not task.output_features["inputs"].required
    for feature in task.output_features.values():
        assert feature.add_eos
        assert feature.dtype == "int32"
        assert feature.vocabulary == seqio.SentencePieceVocabulary(vocabulary.T5_PATH, 100)
    _, tokenize, placeholder, end = task.preprocessors
    assert tokenize is seqio.preprocessors.tokenize
    assert isinstance(placeholder, seqio.CacheDatasetPlaceholder)
    assert end is seqio.preprocessors.append_eos_after_trim
    assert task.postprocessor is None
    if name == "cnn_dailymail_v002":
        assert list(task.metric_fns) == [metrics.rouge]


def test_names_of_t5_are_left_to_t5_once_it_registers_them():
    theirs = tasks.get_task("kjv_to_web").replace(name="wmt14_ende_v003")
    seqio.TaskRegistry.add_provider("wmt14_ende_v003", theirs)
    try:
        assert tasks.get_task("wmt14_ende_v003") is theirs
    finally:
        seqio.TaskRegistry.remove("wmt14_ende_v003")
    assert tasks.get_task("wmt14_ende_v003").name == "speculative_wmt14_ende_v003"


def test_kjv_to_web_has_no_prefix():
    task = tasks.get_task("kjv_to_web")
    first = _examples(task, "test")[0]
    pair = tasks.offline.verse_pairs("test")[0]
    assert first["inputs_pretokenized"].decode() == pair.source
    assert first["targets_pretokenized"].decode() == pair.target
    assert first["reference_id"] == pair.reference_id
    assert list(task.metric_fns) == [metrics.bleu]


def test_windows_are_copied_and_drawn_by_the_seed():
    task = tasks.get_task("copy_windows")

    def draw(seed):
        data = task.get_dataset(None, "validation", shuffle=False, seed=seed)
        return [(x["inputs"].tolist(), x["targets"].tolist()) for x in data.as_numpy_iterator()]

    rows = draw(0)
    assert all(inputs == targets and inputs[-1] == 1 for inputs, targets in rows)
    sizes = {len(inputs) - 1 for inputs, _ in rows}
    assert sizes == set(range(tasks.MIN_WINDOW, tasks.MAX_WINDOW + 1))
    assert draw(0) == rows
    assert draw(1) != rows
    pieces = vocabulary.load(vocabulary.EMBEDDED_PATH)
    texts = {t for p in tasks.offline.verse_pairs("validation") for t in (p.source, p.target)}
    assert any(pieces.decode(rows[0][0]) in text for text in texts)


def test_a_given_vocabulary_is_in_a_copy_only(tmp_path):
    before = tasks.get_task("kjv_to_web")
    copy = tmp_path / "copy.model"
    copy.write_bytes(
        vocabulary.load(vocabulary.EMBEDDED_PATH, 9).processor.serialized_model_proto()
    )
    after = tasks.get_task("kjv_to_web", vocabulary=copy)
    assert after.output_features["targets"].vocabulary.vocab_size == 4105
    assert before.output_features["targets"].vocabulary.vocab_size == 4096
    assert after.name == before.name
    given = tasks.seqio_vocabulary(vocabulary.load(vocabulary.EMBEDDED_PATH, 5))
    third = tasks.get_task("kjv_to_web", vocabulary=given)
    assert third.output_features["inputs"].vocabulary is given
    assert dataclasses.replace(
        third.output_features["inputs"], vocabulary=None
    ) == dataclasses.replace(before.output_features["inputs"], vocabulary=None)


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("wmt_t2t_ende_v03", "wmt_t2t_ende_v003"),
        ("kjv_web", "kjv_to_web"),
        ("cnn_dailymail", "cnn_dailymail_v002"),
    ],
)
def test_unknown_task_names_the_closest(name, closest):
    with pytest.raises(TaskError, match=rf"unknown task '{name}'.*{closest}") as caught:
        tasks.get_task(name)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_cannot_be_read():
    with pytest.raises(VocabularyError, match=r"/nowhere/v\.model"):
        tasks.get_task("kjv_to_web", vocabulary="/nowhere/v.model")
    with pytest.raises(TaskError, match="extra_ids without a vocabulary"):
        tasks.get_task("kjv_to_web", extra_ids=100)


def test_a_vocabulary_of_a_task_that_cannot_be_opened(tfds_data_dir):
    absent = seqio.SentencePieceVocabulary("/nowhere/v.model")
    task = tasks.get_task("wmt_t2t_ende_v003", vocabulary=absent)
    with pytest.raises(VocabularyError, match=r"cannot open the vocabulary /nowhere/v\.model"):
        tasks.check_prepared(task, "test")


def test_data_that_is_not_prepared_and_then_is(tmp_path):
    task = _small("wmt_t2t_ende_v003")
    tasks.set_tfds_data_dir(tmp_path)
    try:
        where = str(tmp_path / "wmt_t2t_translate" / "de-en" / "1.0.0")
        with pytest.raises(TaskError, match="not prepared") as caught:
            tasks.check_prepared(task, "test")
        assert where in str(caught.value)
        assert "--tfds_data_dir" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []  # nothing was downloaded or made
        assert helpers_tfds.write_wmt_ende(tmp_path, {"test": WMT["test"]}) == where
        tasks.check_prepared(task, "test")
        with pytest.raises(TaskError, match=r"no split 'validation'; expected one of test"):
            tasks.check_prepared(task, "validation")
    finally:
        tasks.set_tfds_data_dir(None)


def test_several_shards_keep_every_example_in_a_fixed_order(tmp_path):
    pairs = [(f"Number {i}.", f"Nummer {i}.") for i in range(10)]
    helpers_tfds.write_wmt_ende(tmp_path, {"test": pairs}, examples_per_shard=4)
    tasks.set_tfds_data_dir(tmp_path)
    try:
        task = _small("wmt_t2t_ende_v003")
        texts = [x["targets_pretokenized"].decode() for x in _examples(task, "test")]
        assert sorted(texts) == sorted(german for _, german in pairs)
        assert texts == [x["targets_pretokenized"].decode() for x in _examples(task, "test")]
    finally:
        tasks.set_tfds_data_dir(None)


def test_tensorflow_never_sees_an_accelerator():
    # In a process of its own: devices can be hidden only before they are started.
    code = (
        "import speculative.data.batches, tensorflow as tf;"
        "print([d.device_type for d in tf.config.get_visible_devices()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['CPU']"


def test_task_files_are_macros_for_known_tasks():
    import pathlib
    import re

    folder = pathlib.Path(__file__).resolve().parents[2] / "configs" / "tasks"
    for name in ("kjv_to_web", "copy_windows", "wmt_ende", "cnn_dailymail"):
        text = (folder / f"{name}.gin").read_text()
        (task,) = re.findall(r"^MIXTURE_OR_TASK_NAME = '(.*)'$", text, re.MULTILINE)
        tasks.get_task(task)
        assert (
            len(
                re.findall(
                    r"^TASK_FEATURE_LENGTHS = \{'inputs': \d+, 'targets': \d+\}$",
                    text,
                    re.MULTILINE,
                )
            )
            == 1
        )
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert lines[0] == "from __gin__ import dynamic_registration"
        assert len(lines) == 3
