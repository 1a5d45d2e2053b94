"""Writes tiny prepared TFDS data sets under their real names, with TFDS's own writer.

What a user has after `tfds build`, without the download: the code under test reads it unchanged.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

WMT_ENDE = "wmt_t2t_translate/de-en:1.0.0"
CNN_DAILYMAIL = "cnn_dailymail:3.4.0"
LM1B = "lm1b:1.1.0"


def write_prepared(
    name: str,
    data_dir: str | os.PathLike[str],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    examples_per_shard: int = 1_000,
) -> str:
    """Prepares the data set `name` below `data_dir` from `{split: [example, ...]}`; returns where.

    The schema is the registered builder's own. Within a shard the order is kept.
    """
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=os.fspath(data_dir))
    pathlib.Path(builder.data_dir).mkdir(parents=True, exist_ok=True)
    writer = tfds.core.SequentialWriter(builder.info, max_examples_per_shard=examples_per_shard)
    writer.initialize_splits(list(examples))
    writer.add_examples({split: list(rows) for split, rows in examples.items()})
    writer.close_all()
    builder.info.write_to_directory(builder.data_dir)
    return str(builder.data_dir)


def write_wmt_ende(
    data_dir: str | os.PathLike[str],
    pairs_by_split: Mapping[str, Sequence[tuple[str, str]]],
    **options: Any,
) -> str:
    """WMT English-German (`wmt_t2t_ende_v003`) from `{split: [(english, german), ...]}`."""
    rows = {
        split: [{"en": english, "de": german} for english, german in pairs]
        for split, pairs in pairs_by_split.items()
    }
    return write_prepared(WMT_ENDE, data_dir, rows, **options)


def write_cnn_dailymail(
    data_dir: str | os.PathLike[str],
    pairs_by_split: Mapping[str, Sequence[tuple[str, str]]],
    **options: Any,
) -> str:
    """CNN/DailyMail (`cnn_dailymail_v002`) from `{split: [(article, highlights), ...]}`."""
    rows = {
        split: [
            {"article": article, "highlights": summary, "publisher": "cnn", "id": f"{split}-{i}"}
            for i, (article, summary) in enumerate(pairs)
        ]
        for split, pairs in pairs_by_split.items()
    }
    return write_prepared(CNN_DAILYMAIL, data_dir, rows, **options)


def write_lm1b(
    data_dir: str | os.PathLike[str],
    texts_by_split: Mapping[str, Sequence[str]],
    **options: Any,
) -> str:
    """The one-billion-word benchmark (`lm1b`) from `{split: [text, ...]}`."""
    rows = {split: [{"text": text} for text in texts] for split, texts in texts_by_split.items()}
    return write_prepared(LM1B, data_dir, rows, **options)
