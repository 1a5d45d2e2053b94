"""Tasks to arrays: batches for training, and batches for evaluation.

Both are built on the task's own `get_dataset`, so that splitting, tokenising, trimming and the end
of sequence are SeqIO's. What is added here: rows of similar length share a batch (a bucket), so
that little of it is padding and only a few shapes are ever compiled; training can resume at any
step; and evaluation yields every example once, with its place in the task.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from speculative.data.hosts import hide_accelerators
from speculative.data.tasks import check_prepared, get_task
from speculative.errors import ConfigError

hide_accelerators()

PAD_ID = 0
BUCKETS = (24, 32, 48, 64)
# Examples among which training shuffles; the embedded corpus fits whole.
SHUFFLE_BUFFER = 32_768
# The example id of a row that only fills up a batch.
NO_EXAMPLE = -1


def training_batches(
    task: str | seqio.Task | seqio.Mixture,
    *,
    split: str = "train",
    lengths: Mapping[str, int] | None = None,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    buckets: Sequence[int] | None = BUCKETS,
    overlong: str = "trim",
    use_cached: bool = False,
) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches for teacher forcing; every epoch is shuffled anew.

    The stream is a function of the task, the lengths, the buckets and the seed alone. Resuming
    yields exactly what an uninterrupted run would have had: the earlier examples are read and
    passed over, at some thousands a second.

    Args:
      task: a task, or the name of one.
      split: of the task.
      lengths: most tokens of 'inputs' and 'targets', the end of sequence included; 64 each if None.
      batch_size: rows of a batch, always exactly so many. What is left in a bucket at the end of
        an epoch waits for the next: no example is dropped or repeated within an epoch.
      seed: of the shuffle, and of random steps of the task.
      start_step: number of batches to pass over.
      buckets: widths, ascending. A row goes to the first bucket that holds both its sides; inputs
        are as wide as the bucket or `lengths['inputs']`, whichever is less, and targets likewise.
        `lengths` themselves always form the last bucket; None: the only one.
      overlong: 'trim' cuts longer texts and ends them with an end of sequence, as T5 does; 'drop'
        leaves such examples out, so that no text is learned to end where it does not.
      use_cached: read SeqIO's cache of the task, if it has one.

    Yields:
      int32 arrays: encoder_input_tokens [B, S]; decoder_input_tokens [B, T] (the targets shifted
      right, beginning with 0), decoder_target_tokens [B, T], decoder_loss_weights [B, T] (1 where
      there is a target, 0 at padding). Padding is 0, and every row ends in the end of sequence.

    Raises:
      ConfigError: an argument out of range. TaskError, VocabularyError: see `check_prepared`.
    """
    if batch_size < 1 or start_step < 0:
        raise ConfigError(
            "batch_size and start_step",
            expected="at least 1 and at least 0",
            found=(batch_size, start_step),
        )
    if overlong not in ("trim", "drop"):
        raise ConfigError("overlong", expected="'trim' or 'drop'", found=repr(overlong))
    lengths = _lengths(lengths)
    shapes = _bucket_shapes(buckets, lengths)
    task = _ready(task, split)

    def batches() -> Iterator[dict[str, np.ndarray]]:
        waiting: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]]
        waiting = collections.defaultdict(list)
        step = 0
        for epoch in itertools.count():
            epoch_seed = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]) >> 1
            empty = True
            for inputs, targets in _epoch(task, split, lengths, epoch_seed, overlong, use_cached):
                empty = False
                shape = next(s for s in shapes if len(inputs) <= s[0] and len(targets) <= s[1])
                rows = waiting[shape]
                rows.append((inputs, targets))
                if len(rows) == batch_size:
                    if step >= start_step:
                        yield _teacher_forced(rows, shape)
                    step += 1
                    rows.clear()
            if empty:
                raise ConfigError(f"the split {split!r} of {task.name} has no example to train on")

    return batches()


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluationBatch:
    """Examples to decode, in rows. B rows, S input tokens, T target tokens.

    Attributes:
      example_ids: int32 [B], the example's index in the task's unsharded, unshuffled order;
        `NO_EXAMPLE` in rows that only fill up the batch.
      valid: bool [B], False in those rows. They come last, with a lone end of sequence as inputs.
      inputs: int32 [B, S], padded with 0.
      targets: int32 [B, T], padded with 0.
      inputs_text, targets_text: what the tokens were made from, one string for each valid row; the
        decoded tokens where the task keeps no text.
      fields: every other field of the examples, such as `inputs_pretokenized`, `id` or
        `reference_id`: a value for each valid row, bytes as strings.
    """

    example_ids: np.ndarray
    valid: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    inputs_text: list[str]
    targets_text: list[str]
    fields: Mapping[str, list[Any]]

    @property
    def num_examples(self) -> int:
        """Number of valid rows."""
        return int(self.valid.sum())


def evaluation_batches(
    task: str | seqio.Task | seqio.Mixture,
    *,
    split: str = "validation",
    lengths: Mapping[str, int] | None = None,
    batch_size: int,
    num_examples: int | None = None,
    buckets: Sequence[int] | None = None,
    pad_last: bool = True,
    skip: Container[int] = (),
    shard: tuple[int, int] = (0, 1),
    use_cached: bool = False,
) -> Iterator[EvaluationBatch]:
    """Every example of a split once.

    Args:
      task: a task, or the name of one.
      split: of the task.
      lengths: most tokens of 'inputs' and 'targets', the end of sequence included; 64 each if None.
      batch_size: rows of a batch.
      num_examples: take the first so many examples of the split; None takes all.
      buckets: None: batches in the task's order, all of width `lengths['inputs']`. Otherwise the
        widths of inputs, ascending (`lengths['inputs']` is always the last): an example waits for
        enough others of its width, so that batches leave the task's order. At most one shape for
        each width. Targets always have width `lengths['targets']`.
      pad_last: fill a batch that would be smaller with rows marked invalid, so that it has the
        shape of the others. False: it is smaller. With buckets, each width has one such batch.
      skip: ids of examples to leave out, because they are done.
      shard: (index, count): this reader takes the examples whose id is `index` modulo `count`.
        Ids are those of the whole split all the same.
      use_cached: read SeqIO's cache of the task, if it has one.

    Raises:
      ConfigError: an argument out of range. TaskError, VocabularyError: see `check_prepared`.
    """
    if batch_size < 1 or not 0 <= shard[0] < shard[1]:
        raise ConfigError(
            "batch_size and shard",
            expected="at least 1, and an index below the count",
            found=(batch_size, shard),
        )
    lengths = _lengths(lengths)
    shapes = _bucket_shapes(buckets, lengths)
    task = _ready(task, split)

    def batches() -> Iterator[EvaluationBatch]:
        waiting: dict[int, list[tuple[int, dict[str, Any]]]] = {shape[0]: [] for shape in shapes}
        dataset = _dataset(task, split, lengths, shuffle=False, seed=0, use_cached=use_cached)
        examples = itertools.islice(dataset.as_numpy_iterator(), num_examples)
        for index, example in enumerate(examples):
            if index % shard[1] != shard[0] or index in skip:
                continue
            size = len(example.get("inputs", ()))
            width = next(width for width in waiting if size <= width)
            waiting[width].append((index, example))
            if len(waiting[width]) == batch_size:
                yield _evaluation_batch(task, waiting[width], width, lengths["targets"], batch_size)
                waiting[width] = []
        for width, rows in waiting.items():
            if rows:
                size = batch_size if pad_last else len(rows)
                yield _evaluation_batch(task, rows, width, lengths["targets"], size)

    return batches()


def _lengths(lengths: Mapping[str, int] | None) -> dict[str, int]:
    lengths = dict(lengths or {"inputs": 64, "targets": 64})
    if set(lengths) != {"inputs", "targets"} or min(lengths.values()) < 1:
        raise ConfigError(
            "the feature lengths",
            expected="positive numbers of tokens for 'inputs' and 'targets'",
            found=lengths,
            mend="Set TASK_FEATURE_LENGTHS = {'inputs': ..., 'targets': ...}",
        )
    return lengths


def _bucket_shapes(
    buckets: Sequence[int] | None, lengths: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(S, T) of every bucket, narrowest first; the last holds everything."""
    longest = max(lengths.values())
    widths = [*(width for width in buckets or () if width < longest), longest]
    if sorted(set(widths)) != widths or widths[0] < 1:
        raise ConfigError("buckets", expected="ascending widths in tokens", found=buckets)
    shapes = [(min(w, lengths["inputs"]), min(w, lengths["targets"])) for w in widths]
    return list(dict.fromkeys(shapes))


def _ready(task: str | seqio.Task | seqio.Mixture, split: str) -> seqio.Task | seqio.Mixture:
    task = get_task(task) if isinstance(task, str) else task
    check_prepared(task, split)
    return task


def _dataset(task, split, lengths, *, shuffle, seed, use_cached) -> tf.data.Dataset:
    options: dict[str, Any] = {}
    if shuffle and isinstance(task, seqio.Task):
        options["shuffle_buffer_size"] = SHUFFLE_BUFFER
    dataset = task.get_dataset(
        sequence_length=lengths,
        split=split,
        shuffle=shuffle,
        seed=seed,
        use_cached=use_cached,
        num_epochs=1,
        **options,
    )
    settings = tf.data.Options()
    settings.deterministic = True
    return dataset.with_options(settings)


def _epoch(task, split, lengths, seed, overlong, use_cached):
    """(inputs, targets) of one epoch as int32 arrays without padding."""
    # With room for one token more, an example that fills it was longer than allowed.
    room = {key: length + (overlong == "drop") for key, length in lengths.items()}
    dataset = _dataset(task, split, room, shuffle=True, seed=seed, use_cached=use_cached)
    nothing = tf.zeros([0], tf.int32)
    dataset = dataset.map(lambda x: (x.get("inputs", nothing), x["targets"]))
    for inputs, targets in dataset.as_numpy_iterator():
        if len(inputs) <= lengths["inputs"] and len(targets) <= lengths["targets"]:
            yield inputs, targets


def _padded(rows: Sequence[np.ndarray], height: int, width: int) -> np.ndarray:
    out = np.full((height, width), PAD_ID, np.int32)
    for row, tokens in zip(out, rows, strict=False):
        row[: len(tokens)] = tokens
    return out


def _teacher_forced(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    inputs, targets = zip(*rows, strict=True)
    target_tokens = _padded(targets, len(rows), shape[1])
    input_tokens = np.zeros_like(target_tokens)
    input_tokens[:, 1:] = target_tokens[:, :-1]
    return {
        "encoder_input_tokens": _padded(inputs, len(rows), shape[0]),
        "decoder_input_tokens": input_tokens,
        "decoder_target_tokens": target_tokens,
        "decoder_loss_weights": (target_tokens != PAD_ID).astype(np.int32),
    }


def _evaluation_batch(task, rows, width: int, target_width: int, size: int) -> EvaluationBatch:
    indices, examples = zip(*rows, strict=True)
    empty = np.zeros([0], np.int32)
    tokens = {key: [x.get(key, empty) for x in examples] for key in ("inputs", "targets")}
    ids = np.full([size], NO_EXAMPLE, np.int32)
    ids[: len(rows)] = indices
    inputs = _padded(tokens["inputs"], size, width)
    feature = task.output_features.get("inputs", task.output_features["targets"])
    inputs[len(rows) :, 0] = feature.vocabulary.eos_id or PAD_ID
    fields = {key: [_plain(x[key]) for x in examples] for key in examples[0] if key not in tokens}
    texts = {}
    for key, of_rows in tokens.items():
        texts[key] = fields.get(f"{key}_pretokenized")
        if texts[key] is None:
            vocabulary = task.output_features["targets"].vocabulary
            texts[key] = [vocabulary.decode(row.tolist()) for row in of_rows]
    return EvaluationBatch(
        example_ids=ids,
        valid=ids != NO_EXAMPLE,
        inputs=inputs,
        targets=_padded(tokens["targets"], size, target_width),
        inputs_text=texts["inputs"],
        targets_text=texts["targets"],
        fields=fields,
    )


def _plain(value: Any) -> Any:
    """A NumPy value as plain Python, bytes as text."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        value = value.item()
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
