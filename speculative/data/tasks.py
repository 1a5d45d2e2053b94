"""SeqIO tasks: T5's own translation and summarisation tasks, lm1b, and the embedded corpus.

Importing this module registers them. The T5 tasks carry names of ours (`speculative_` before T5's
own) so that the `t5` package can be imported beside; T5's names resolve to ours in `get_task`
where `t5` has not registered them. Text, features and metrics are T5's (data/tasks.py and
data/preprocessors.py there), except that ROUGE is the mean instead of a random bootstrap.

TFDS data sets are read where they have been prepared, never downloaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import os
from collections.abc import Mapping

import seqio
import tensorflow as tf

from speculative.data import metrics, offline
from speculative.data import vocabulary as vocabularies
from speculative.data.hosts import hide_accelerators
from speculative.errors import TaskError, VocabularyError

hide_accelerators()

# A window of the copying task has MIN_WINDOW to MAX_WINDOW tokens, before the end of sequence.
MIN_WINDOW, MAX_WINDOW = 4, 11

_LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}

# T5's name -> (TFDS data set, target language); the source is English.
_TRANSLATION = {
    "wmt_t2t_ende_v003": ("wmt_t2t_translate/de-en:1.0.0", "de"),
    "wmt14_ende_v003": ("wmt14_translate/de-en:1.0.0", "de"),
    "wmt14_enfr_v003": ("wmt14_translate/fr-en:1.0.0", "fr"),
    "wmt15_enfr_v003": ("wmt15_translate/fr-en:1.0.0", "fr"),
    "wmt16_enro_v003": ("wmt16_translate/ro-en:1.0.0", "ro"),
    "wmt19_ende_v003": ("wmt19_translate/de-en:1.0.0", "de"),
}
_SUMMARISATION = {"cnn_dailymail_v002": "cnn_dailymail:3.4.0"}
_LANGUAGE_MODELLING = {"lm1b": "lm1b:1.1.0"}

# Other names -> ours.
ALIASES: Mapping[str, str] = {
    name: f"speculative_{name}" for name in (*_TRANSLATION, *_SUMMARISATION, *_LANGUAGE_MODELLING)
}


@seqio.map_over_dataset
def translate(example, source_language: str, target_language: str):
    """`{'en': a, 'de': b}` -> inputs 'translate English to German: ' + a, targets b."""
    source, target = _LANGUAGES[source_language], _LANGUAGES[target_language]
    prefix = f"translate {source} to {target}: "
    return {
        "inputs": tf.strings.join([prefix, example[source_language]]),
        "targets": example[target_language],
    }


@seqio.map_over_dataset
def summarize(example, article_key: str, summary_key: str):
    """`{article_key: a, summary_key: b}` -> inputs 'summarize: ' + a, targets b."""
    return {
        "inputs": tf.strings.join(["summarize:", example[article_key]], separator=" "),
        "targets": example[summary_key],
    }


@seqio.map_over_dataset(num_seeds=1)
def copy_window(example, seed):
    """Tokens of one text -> a random window of them, as inputs and as targets alike."""
    tokens = example["targets"]
    draws = tf.random.stateless_uniform([2], seed=seed)
    spread = tf.cast(MAX_WINDOW - MIN_WINDOW + 1, tf.float32)
    length = MIN_WINDOW + tf.cast(draws[0] * spread, tf.int32)
    length = tf.minimum(length, tf.size(tokens))
    places = tf.cast(tf.size(tokens) - length + 1, tf.float32)
    start = tf.cast(draws[1] * places, tf.int32)
    window = tokens[start : start + length]
    return {"inputs": window, "targets": window}


def _at_least_min_window(dataset):
    return dataset.filter(lambda example: tf.size(example["targets"]) >= MIN_WINDOW)


def _verses(split, shuffle_files, seed=None):
    """King James inputs with World English targets; the numbers of the verses come along."""
    del shuffle_files, seed  # one in-memory source; SeqIO shuffles its examples
    pairs = offline.verse_pairs(split)
    return tf.data.Dataset.from_tensor_slices(
        {
            "inputs": [pair.source for pair in pairs],
            "targets": [pair.target for pair in pairs],
            "reference_id": [pair.reference_id for pair in pairs],
        }
    )


def _sentences(split, shuffle_files, seed=None):
    """Both sides of every verse, one after the other."""
    del shuffle_files, seed
    texts = [text for pair in offline.verse_pairs(split) for text in (pair.source, pair.target)]
    return tf.data.Dataset.from_tensor_slices({"targets": texts})


class _InMemory(seqio.FunctionDataSource):
    """A function's data set without the warning that shuffling it is poor.

    The warning is about buffers smaller than the data; `batches` shuffles the corpus whole.
    """

    def get_dataset(self, split="train", shuffle=True, seed=None, shard_info=None, **unused):
        del unused  # as FunctionDataSource does
        if shard_info and shard_info.num_shards > 1:
            raise ValueError("an in-memory source has one shard")
        return self._dataset_fn(split=split, shuffle_files=shuffle, seed=seed)


def _features(path: str, extra_ids: int) -> dict[str, seqio.Feature]:
    vocabulary = seqio.SentencePieceVocabulary(path, extra_ids)  # opened at its first use
    return {
        "inputs": seqio.Feature(vocabulary, add_eos=True, required=False),
        "targets": seqio.Feature(vocabulary, add_eos=True),
    }


def _register(name: str, source, text_steps, output_features, metric_fns, token_steps=()) -> None:
    if name in seqio.TaskRegistry.names():  # this module was loaded twice
        return
    seqio.TaskRegistry.add(
        name,
        source=source,
        preprocessors=[
            *text_steps,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            *token_steps,
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features=output_features,
        metric_fns=metric_fns,
    )


def _tfds(name: str) -> seqio.TfdsDataSource:
    return seqio.TfdsDataSource(tfds_name=name, read_only=True)


def _register_all() -> None:
    t5 = _features(vocabularies.T5_PATH, vocabularies.T5_EXTRA_IDS)
    for name, (dataset, language) in _TRANSLATION.items():
        step = functools.partial(translate, source_language="en", target_language=language)
        _register(ALIASES[name], _tfds(dataset), [step], t5, [metrics.bleu])
    for name, dataset in _SUMMARISATION.items():
        step = functools.partial(summarize, article_key="article", summary_key="highlights")
        _register(ALIASES[name], _tfds(dataset), [step], t5, [metrics.rouge])
    for name, dataset in _LANGUAGE_MODELLING.items():
        # Empty inputs: an encoder-decoder model reads a lone end of sequence.
        key_map = {"inputs": None, "targets": "text"}
        step = functools.partial(seqio.preprocessors.rekey, key_map=key_map)
        _register(ALIASES[name], _tfds(dataset), [step], t5, [])

    embedded = _features(vocabularies.EMBEDDED_PATH, 0)
    verses = _InMemory(_verses, splits=offline.SPLITS)
    _register("kjv_to_web", verses, [], embedded, [metrics.bleu])
    sentences = _InMemory(_sentences, splits=offline.SPLITS)
    steps = (_at_least_min_window, copy_window)
    _register("copy_windows", sentences, [], embedded, [], steps)


_register_all()


def task_names() -> list[str]:
    """Every name that `get_task` knows: ours, T5's, and whatever else is registered with SeqIO."""
    registered = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
    return sorted(registered | ALIASES.keys())


def import_module(name: str | None) -> None:
    """Import the user's module that registers tasks or mixtures; None imports nothing.

    Raises:
      TaskError: there is no such module.
    """
    if name is None:
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise TaskError(
            f"MIXTURE_OR_TASK_MODULE {name!r} cannot be imported",
            found=str(error),
            mend="Name a module that is on PYTHONPATH",
        ) from None


def get_task(
    name: str,
    *,
    vocabulary: str | os.PathLike[str] | seqio.Vocabulary | None = None,
    extra_ids: int | None = None,
) -> seqio.Task | seqio.Mixture:
    """The task or mixture of this name, with another vocabulary if one is given.

    Args:
      name: a name of ours, of T5's, or of anything that an imported module registered with SeqIO.
      vocabulary: a SentencePiece model's path, or a SeqIO vocabulary, that replaces the one in
        every output feature; tasks only. Such a copy must not be read from a SeqIO cache, which
        holds the tokens of the task's own vocabulary.
      extra_ids: with a path, the number of sentinels to add (`vocabulary.load` tells the default).

    Raises:
      TaskError: nothing of this name (the closest names are given), or a vocabulary for a mixture.
      VocabularyError: the vocabulary cannot be read.
    """
    if name in seqio.TaskRegistry.names() or name in seqio.MixtureRegistry.names():
        task = seqio.get_mixture_or_task(name)
    elif name in ALIASES:
        task = seqio.TaskRegistry.get(ALIASES[name])
    else:
        close = difflib.get_close_matches(name, task_names(), n=3, cutoff=0.3)
        raise TaskError(
            f"unknown task {name!r}",
            expected=f"one of the registered tasks, of which the closest are {', '.join(close)}"
            if close
            else "a registered task",
            mend="If a module of yours defines it, name that module as MIXTURE_OR_TASK_MODULE",
        )
    if vocabulary is None:
        if extra_ids is not None:
            raise TaskError("extra_ids without a vocabulary", mend="Give both, or neither")
        return task
    if isinstance(task, seqio.Mixture):
        raise TaskError(
            f"{name!r} is a mixture, whose vocabulary cannot be replaced",
            mend="Name one of its tasks",
        )
    if not isinstance(vocabulary, seqio.Vocabulary):
        loaded = vocabularies.load(vocabulary, extra_ids)
        vocabulary = seqio.SentencePieceVocabulary(loaded.path, loaded.extra_ids)
    return task.replace(
        output_features={
            key: dataclasses.replace(feature, vocabulary=vocabulary)
            for key, feature in task.output_features.items()
        }
    )


def set_tfds_data_dir(path: str | os.PathLike[str] | None) -> None:
    """Has every TFDS task read the data prepared in `path` (None: TFDS's own default).

    SeqIO's override alone is remembered by a task at its first use; this one can be set again.
    """
    path = None if path is None else os.fspath(path)
    seqio.set_tfds_data_dir_override(path)
    for name in seqio.TaskRegistry.names():
        source = seqio.TaskRegistry.get(name).source
        if isinstance(source, seqio.TfdsDataSource):
            source.tfds_dataset.override_data_dir(path)


def check_prepared(task: seqio.Task | seqio.Mixture, split: str) -> None:
    """Makes sure that a split of a task can be read, before a pipeline is built on it.

    Raises:
      TaskError: its TFDS data set is not prepared, or it has no such split.
      VocabularyError: one of its vocabularies cannot be opened.
    """
    if isinstance(task, seqio.Mixture):
        for part in task.tasks:
            check_prepared(part, split)
        return
    if isinstance(task.source, seqio.TfdsDataSource):
        _check_tfds(task)
    # TFDS also takes slices such as 'train[:1%]'.
    if split.split("[")[0] not in task.splits:
        raise TaskError(
            f"the task {task.name} has no split {split!r}",
            expected=f"one of {', '.join(sorted(task.splits))}",
        )
    for feature in task.output_features.values():
        _check_vocabulary(feature.vocabulary)


def _check_tfds(task: seqio.Task) -> None:
    loader = task.source.tfds_dataset
    name, data_dir = loader.name, loader.data_dir

    def error(expected: str, found: str) -> TaskError:
        return TaskError(
            f"the data set {name} of task {task.name} is not prepared",
            expected=f"its files in {expected}",
            found=found,
            mend="Prepare it with `tfds build` and give the directory above it as --tfds_data_dir",
        )

    try:
        if not loader.info.splits:
            # What SeqIO remembers may be older than the data.
            loader._MEMOIZED_BUILDERS.pop((name, data_dir), None)
        prepared = bool(loader.info.splits)
    except Exception as cause:  # TFDS raises many kinds
        where = f"{data_dir or '~/tensorflow_datasets'}/{name.replace(':', '/')}"
        raise error(where, f"{type(cause).__name__}: {cause}".splitlines()[0]) from cause
    if not prepared:
        raise error(str(loader.builder.data_dir), "no prepared data there")


def _check_vocabulary(vocabulary: seqio.Vocabulary) -> None:
    if not isinstance(vocabulary, seqio.SentencePieceVocabulary):
        return
    path = vocabulary.sentencepiece_model_file
    try:
        vocabulary.load_model()
    except Exception as error:  # of TensorFlow's file systems, or SentencePiece's
        raise VocabularyError(
            f"cannot open the vocabulary {path}",
            expected="a SentencePiece model file",
            found=f"{type(error).__name__}: {error}".strip().splitlines()[0],
            mend="Give a local copy of it as the vocabulary",
        ) from error


def seqio_vocabulary(vocabulary: vocabularies.Vocabulary) -> seqio.SentencePieceVocabulary:
    """The SeqIO vocabulary of the same file and sentinels."""
    return seqio.SentencePieceVocabulary(vocabulary.path, vocabulary.extra_ids)
