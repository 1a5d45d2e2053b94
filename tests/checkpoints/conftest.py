"""Reference checkpoints written by T5X, and a small one to damage."""

import pathlib
import tarfile

import numpy as np
import pytest

from tests.checkpoints.checkpoint_variants import spec, write_index, write_zarr

DATA = pathlib.Path(__file__).parent.parent / "data" / "t5x"


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Name of an archive -> its unpacked model directory (not to be altered)."""
    unpacked = {}

    def get(name):
        if name not in unpacked:
            directory = tmp_path_factory.mktemp(name)
            with tarfile.open(DATA / f"{name}.tar.gz") as archive:
                archive.extractall(directory, filter="data")
            unpacked[name] = directory
        return unpacked[name]

    return get


@pytest.fixture(scope="session")
def truth():
    """Name of an npz -> flat dictionary of the true values."""

    def get(name):
        with np.load(DATA / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    return get


@pytest.fixture
def weights():
    """A small array of distinct values."""
    return np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


@pytest.fixture
def step_directory(tmp_path, weights):
    """A good checkpoint of one tensor `a/b`, for a test to damage."""
    directory = write_index(tmp_path / "checkpoint_7", {"a": {"b": spec(weights, "target.a.b/")}})
    write_zarr(directory / "target.a.b", weights, chunks=[3, 4])
    return directory
