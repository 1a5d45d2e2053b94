"""Batches: SeqIO's own arrays, an endless stream that resumes, an evaluation that loses nothing."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
import seqio

from speculative.data import batches, offline, tasks, vocabulary
from speculative.errors import ConfigError, TaskError
from tests.data.tiny_data import CNN, WMT

KEYS = (
    "encoder_input_tokens",
    "decoder_input_tokens",
    "decoder_target_tokens",
    "decoder_loss_weights",
)


def _take(count, task="kjv_to_web", **options):
    options = {"split": "validation", "batch_size": 8, "seed": 3} | options
    return list(itertools.islice(batches.training_batches(task, **options), count))


def _equal(one, other):
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
        for a, b in zip(one, other, strict=True)
    )


def _rows(found):
    """(inputs, targets) of every row, without padding."""
    return [
        (tuple(x[x > 0].tolist()), tuple(y[y > 0].tolist()))
        for batch in found
        for x, y in zip(batch["encoder_input_tokens"], batch["decoder_target_tokens"], strict=True)
    ]


def test_arrays_are_those_of_the_encoder_decoder_converter():
    task = tasks.get_task("kjv_to_web")
    lengths = {"inputs": 40, "targets": 40}
    converter = seqio.EncDecFeatureConverter(pack=False)
    data = task.get_dataset(lengths, "validation", shuffle=False, seed=0)
    theirs = {
        tuple(x["encoder_input_tokens"].tolist()): x
        for x in converter(data, lengths).as_numpy_iterator()
    }
    for batch in _take(20, lengths=lengths, buckets=None):
        assert tuple(batch) == KEYS
        for row in range(8):
            same = theirs[tuple(batch["encoder_input_tokens"][row].tolist())]
            for key in KEYS:
                assert batch[key].dtype == np.int32
                np.testing.assert_array_equal(batch[key][row], same[key])


def test_shapes_are_few_and_padding_is_little():
    found = _take(100, batch_size=16)
    shapes = {b["encoder_input_tokens"].shape for b in found}
    assert shapes == {(16, 24), (16, 32), (16, 48), (16, 64)}
    assert all(b["decoder_target_tokens"].shape == b["encoder_input_tokens"].shape for b in found)
    used = sum(int((b[k] > 0).sum()) for b in found for k in (KEYS[0], KEYS[2]))
    assert used / sum(b[k].size for b in found for k in (KEYS[0], KEYS[2])) > 0.78


def test_each_epoch_holds_every_example_once_in_a_new_order():
    examples = len(offline.verse_pairs("validation"))
    size = 3  # 951 = 317 batches of 3 when there is one bucket
    assert examples % size == 0
    found = _take(2 * examples // size, batch_size=size, buckets=None)
    rows = _rows(found)
    first, second = rows[:examples], rows[examples:]
    assert len(set(first)) == examples
    assert sorted(first) == sorted(second)
    assert first != second


def test_the_stream_is_a_function_of_the_seed():
    assert _equal(_take(12), _take(12))
    assert not _equal(_take(12), _take(12, seed=4))


@pytest.mark.parametrize("task", ["kjv_to_web", "copy_windows"])
def test_resuming_equals_an_uninterrupted_run(task):
    # 951 verses, twice as many sentences: the last batches lie in another epoch than the first.
    size = 16 if task == "kjv_to_web" else 32
    whole = _take(66, task, batch_size=size)
    for start in (7, 62):
        assert _equal(_take(66 - start, task, batch_size=size, start_step=start), whole[start:])


def test_overlong_texts_are_cut_or_dropped():
    lengths = {"inputs": 30, "targets": 30}
    pieces = vocabulary.load(vocabulary.EMBEDDED_PATH)
    whole = {
        (tuple(pieces.encode(p.source, add_eos=True)), tuple(pieces.encode(p.target, add_eos=True)))
        for p in offline.verse_pairs("validation")
    }
    fitting = {row for row in whole if max(map(len, row)) <= 30}
    steps = len(fitting)
    rows = _rows(_take(steps, batch_size=1, lengths=lengths, buckets=None, overlong="drop"))
    assert set(rows) == fitting
    rows = _rows(_take(951, batch_size=1, lengths=lengths, buckets=None))
    assert max(len(side) for row in rows for side in row) == 30
    assert all(side[-1] == 1 for row in rows for side in row)
    assert len(set(rows) - fitting) > 400


def test_targets_shorter_than_inputs_have_shapes_of_their_own(tfds_data_dir):
    task = tasks.get_task("cnn_dailymail_v002", vocabulary=vocabulary.EMBEDDED_PATH)
    lengths = {"inputs": 128, "targets": 16}
    found = _take(6, task, split="test", batch_size=1, lengths=lengths, buckets=(16, 64))
    shapes = {(b[KEYS[0]].shape, b[KEYS[2]].shape) for b in found}
    assert shapes == {((1, 16), (1, 16)), ((1, 128), (1, 16))}


def test_training_on_prepared_data_resumes_too(tfds_data_dir):
    task = tasks.get_task("wmt_t2t_ende_v003", vocabulary=vocabulary.EMBEDDED_PATH)
    options = {"split": "train", "batch_size": 2, "buckets": None}
    whole = _take(9, task, **options)
    assert _equal(_take(4, task, start_step=5, **options), whole[5:])
    assert set(collections.Counter(_rows(whole[:7])).values()) == {2}  # 7 examples, two epochs


@pytest.mark.parametrize("buckets", [None, (24, 32, 48)])
@pytest.mark.parametrize("pad_last", [True, False])
def test_evaluation_loses_and_repeats_nothing(buckets, pad_last):
    pairs = offline.verse_pairs("validation")
    found = list(
        batches.evaluation_batches("kjv_to_web", batch_size=100, buckets=buckets, pad_last=pad_last)
    )
    ids = np.concatenate([b.example_ids[b.valid] for b in found])
    assert sorted(ids.tolist()) == list(range(len(pairs)))
    widths = {b.inputs.shape[1] for b in found}
    assert widths == {64} if buckets is None else {24, 32, 48, 64}
    if buckets is None:
        assert ids.tolist() == sorted(ids.tolist())
    pieces = vocabulary.load(vocabulary.EMBEDDED_PATH)
    for batch in found:
        rows = batch.num_examples
        assert len(batch.inputs_text) == len(batch.targets_text) == rows
        assert batch.example_ids.dtype == batch.inputs.dtype == batch.targets.dtype == np.int32
        assert batch.targets.shape[1] == 64
        if pad_last:
            assert batch.inputs.shape[0] == 100
            assert (batch.example_ids[rows:] == batches.NO_EXAMPLE).all()
            assert (batch.inputs[rows:, 0] == 1).all()
            assert (batch.inputs[rows:, 1:] == 0).all()
            assert (batch.targets[rows:] == 0).all()
        else:
            assert batch.inputs.shape[0] == rows
        for row, index in enumerate(batch.example_ids[:rows]):
            pair = pairs[index]
            assert (batch.inputs_text[row], batch.targets_text[row]) == (pair.source, pair.target)
            assert batch.fields["reference_id"][row] == pair.reference_id
            assert batch.fields["inputs_pretokenized"][row] == pair.source
            tokens = pieces.encode(pair.source)[:63] + [1]
            assert batch.inputs[row].tolist() == tokens + [0] * (
                len(batch.inputs[row]) - len(tokens)
            )


def test_evaluation_of_a_part():
    def ids(**options):
        found = batches.evaluation_batches("kjv_to_web", batch_size=7, **options)
        return [int(i) for b in found for i in b.example_ids[b.valid]]

    assert ids(num_examples=10) == list(range(10))
    assert ids(num_examples=10, shard=(1, 3)) == [1, 4, 7]
    assert ids(num_examples=10, skip={0, 3, 9}) == [1, 2, 4, 5, 6, 7, 8]
    assert len(ids(num_examples=5000)) == 951


def test_evaluation_of_prepared_data(tfds_data_dir):
    task = tasks.get_task("wmt_t2t_ende_v003", vocabulary=vocabulary.EMBEDDED_PATH)
    (batch,) = batches.evaluation_batches(task, split="test", batch_size=8)
    assert batch.num_examples == 5
    assert batch.targets_text == [german for _, german in WMT["test"]]
    assert batch.inputs_text[0] == f"translate English to German: {WMT['test'][0][0]}"
    task = tasks.get_task("cnn_dailymail_v002", vocabulary=vocabulary.EMBEDDED_PATH)
    (batch,) = batches.evaluation_batches(task, split="test", batch_size=2)
    assert batch.targets_text == [summary for _, summary in CNN["test"]]


def test_where_the_task_keeps_no_text_the_tokens_are_decoded():
    batch = next(batches.evaluation_batches("copy_windows", batch_size=4))
    pieces = vocabulary.load(vocabulary.EMBEDDED_PATH)
    assert batch.inputs_text == batch.targets_text
    assert batch.targets_text == [pieces.decode(row) for row in batch.targets]
    again = next(batches.evaluation_batches("copy_windows", batch_size=4))
    np.testing.assert_array_equal(batch.inputs, again.inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"start_step": -1},
        {"lengths": {"inputs": 64}},
        {"lengths": {"inputs": 64, "targets": 0}},
        {"buckets": (32, 24)},
        {"buckets": (0, 24)},
        {"overlong": "keep"},
    ],
)
def test_training_arguments_are_checked_at_the_call(options):
    with pytest.raises(ConfigError) as caught:
        batches.training_batches("kjv_to_web", **({"batch_size": 2, "seed": 0} | options))
    assert "\n" not in str(caught.value)


def test_errors_come_at_the_call():
    with pytest.raises(TaskError, match="no split 'dev'"):
        batches.evaluation_batches("kjv_to_web", split="dev", batch_size=2)
    with pytest.raises(ConfigError, match="shard"):
        batches.evaluation_batches("kjv_to_web", batch_size=2, shard=(2, 2))
    with pytest.raises(ConfigError, match="no example"):
        lengths = {"inputs": 2, "targets": 2}
        _take(1, lengths=lengths, overlong="drop")
