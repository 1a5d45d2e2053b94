"""Fixtures of the data tests: one prepared TFDS directory for all of them."""

from __future__ import annotations

import pathlib

import pytest

from tests import helpers_tfds
from tests.data import tiny_data


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> pathlib.Path:
    """A TFDS data directory with a few examples of wmt_t2t_translate, cnn_dailymail and lm1b."""
    data_dir = tmp_path_factory.mktemp("tfds")
    helpers_tfds.write_wmt_ende(data_dir, tiny_data.WMT)
    helpers_tfds.write_cnn_dailymail(data_dir, tiny_data.CNN)
    helpers_tfds.write_lm1b(data_dir, tiny_data.LM1B)
    return data_dir


@pytest.fixture
def tfds_data_dir(prepared):
    """The prepared directory, named to SeqIO for the duration of one test."""
    from speculative.data import tasks

    tasks.set_tfds_data_dir(prepared)
    yield prepared
    tasks.set_tfds_data_dir(None)
