"""Writing: what T5X writes, byte for byte where it can be; whole or not at all."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest

from speculative.checkpoints import flax_msgpack, t5x, t5x_writer, zarr_arrays
from speculative.checkpoints.trees import flatten, unflatten
from speculative.errors import CheckpointError

ROOT = pathlib.Path(__file__).parents[2]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ARCHIVE = {None: "legacy_float32", "float32": "legacy_float32", "bfloat16": "legacy_bfloat16"}


def assert_equal(tree, expected):
    flat = flatten(tree)
    assert flat.keys() == expected.keys()
    for name, array in expected.items():
        assert flat[name].dtype == array.dtype and np.array_equal(flat[name], array), name


@pytest.fixture
def params(truth):
    return unflatten(truth("params"))


def raw_index(step_directory):
    return msgpack.unpackb((step_directory / "checkpoint").read_bytes())


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_the_files_are_those_of_t5x(tmp_path, params, reference, dtype):
    written = t5x.write(tmp_path / "model", params, 1000, dtype=dtype)
    theirs = reference(ARCHIVE[dtype]) / "checkpoint_1000"
    assert written.name == "checkpoint_1000" and os.listdir(tmp_path / "model") == [written.name]

    ours, other = raw_index(written), raw_index(theirs)
    assert list(ours) == ["version", "optimizer"] and ours["version"] == other["version"] == 3
    assert set(ours["optimizer"]) == {"state", "target"}
    assert ours["optimizer"]["state"] == {"step": other["optimizer"]["state"]["step"]}
    assert ours["optimizer"]["target"] == other["optimizer"]["target"]

    entries = {p.name for p in theirs.iterdir() if p.name.startswith("target.")}
    assert {p.name for p in written.iterdir()} == entries | {"checkpoint"}
    for entry in entries:
        files = sorted(p.name for p in (theirs / entry).iterdir())
        assert sorted(p.name for p in (written / entry).iterdir()) == files
        ours, other = (json.loads((d / entry / ".zarray").read_text()) for d in (written, theirs))
        assert ours == other


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_round_trip(tmp_path, params, truth, dtype):
    written = t5x.write(tmp_path, params, 12, dtype=dtype)
    target = BFLOAT16 if dtype == "bfloat16" else np.dtype(np.float32)
    assert_equal(t5x.read(written), {k: v.astype(target) for k, v in truth("params").items()})
    assert t5x.read_step(tmp_path) == 12
    assert {i.dtype for i in t5x.tensor_shapes(tmp_path).values()} == {target.name}


def test_what_was_read_is_written_again_unchanged(tmp_path, reference):
    read = t5x.read(reference("legacy_bfloat16"))
    assert_equal(t5x.read(t5x.write(tmp_path, read, 1000)), flatten(read))


def test_jax_arrays_odd_layouts_and_zeros(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    params = {
        "jax": jnp.asarray(base, jnp.bfloat16),
        "transposed": base.T,
        "strided": base[::2, ::-1],
        "zeros": np.zeros((3, 2), np.float32),
        "scalar": np.asarray(2.5, np.float32),
    }
    expected = {name: np.asarray(array) for name, array in params.items()}
    assert_equal(t5x.read(t5x.write(tmp_path, params, 0)), expected)


def test_doubles_need_a_dtype(tmp_path):
    params = {"w": np.ones((2, 2))}
    with pytest.raises(CheckpointError, match=r"'w'.*found float64"):
        t5x.write(tmp_path, params, 0)
    assert (
        flatten(t5x.read(t5x.write(tmp_path, params, 0, dtype="float32")))["w"].dtype == "float32"
    )


def test_several_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_arrays, "choose_chunks", lambda *_: (4, 3))
    array = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    written = t5x.write(tmp_path, {"w": array}, 1)
    assert len(list((written / "target.w").glob("?.?"))) == 4
    assert_equal(t5x.read(written), {"w": array})


def test_progress_counts_bytes_to_the_end(tmp_path, params):
    seen = []
    t5x.write(tmp_path, params, 1, dtype="bfloat16", progress=lambda *now: seen.append(now))
    assert len(seen) == 66 and seen == sorted(seen) and seen[-1] == (58024 * 2, 58024 * 2)


WRONG = {
    "negative step": (dict(params={"w": np.ones(1, np.float32)}, step=-1), "step"),
    "step too large": (dict(params={"w": np.ones(1, np.float32)}, step=2**31), "step"),
    "step a truth value": (dict(params={"w": np.ones(1, np.float32)}, step=True), "step"),
    "dtype": (dict(params={"w": np.ones(1, np.float32)}, step=1, dtype="float16"), "float16"),
    "nothing": (dict(params={}, step=1), "found none"),
    "whole numbers": (dict(params={"w": np.ones(1, np.int32)}, step=1), "int32"),
    "no array": (dict(params={"w": 1.0}, step=1), "'w'"),
    "no element": (dict(params={"w": np.ones((0, 2), np.float32)}, step=1), "one element"),
    "key": (dict(params={"a/b": np.ones(1, np.float32)}, step=1), "without '/'"),
    "one place for two": (
        dict(
            params={"a.b": {"c": np.ones(1, np.float32)}, "a": {"b.c": np.ones(1, np.float32)}},
            step=1,
        ),
        "for both",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments_write_nothing(tmp_path, name):
    arguments, fragment = WRONG[name]
    with pytest.raises(CheckpointError, match=fragment):
        t5x.write(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


ONE = {"w": np.float32([1, 2])}
TWO = {"w": np.float32([3, 4])}


def test_an_existing_step_stays_unless_it_is_to_be_replaced(tmp_path):
    t5x.write(tmp_path, ONE, 5)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        t5x.write(tmp_path, TWO, 5)
    assert_equal(t5x.read(tmp_path), ONE)
    t5x.write(tmp_path, TWO, 5, overwrite=True)
    assert_equal(t5x.read(tmp_path), TWO)
    assert os.listdir(tmp_path) == ["checkpoint_5"]


def break_at(monkeypatch, place):
    """Make the writer fail at one of its stages."""

    def fail(*_, **__):
        raise OSError("disk full")

    class Path(type(t5x_writer.epath.Path("."))):
        def rename(self, target):
            if ".tmp-" in self.name and "-replaced" not in self.name:
                fail()
            return super().rename(target)

    if place == "arrays":
        real = zarr_arrays.array_metadata
        calls = iter(range(100))
        monkeypatch.setattr(
            zarr_arrays, "array_metadata", lambda a: fail() if next(calls) == 7 else real(a)
        )
    elif place == "index":
        monkeypatch.setattr(flax_msgpack, "encode_index", fail)
    else:
        monkeypatch.setattr(t5x_writer.epath, "Path", Path)


@pytest.mark.parametrize("place", ["arrays", "index", "rename"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, place, overwrite):
    params = {f"t{i}": np.full((2, 3), i, np.float32) for i in range(10)}
    t5x.write(tmp_path, ONE, 5)
    step = 5 if overwrite else 6
    with monkeypatch.context() as broken:
        break_at(broken, place)
        with pytest.raises(CheckpointError, match="disk full"):
            t5x.write(tmp_path, params, step, overwrite=overwrite)
    assert os.listdir(tmp_path) == ["checkpoint_5"]
    assert_equal(t5x.read(tmp_path), ONE)
    t5x.write(tmp_path, params, step, overwrite=overwrite)
    assert t5x.read_step(tmp_path) == step


def test_an_interrupt_is_not_swallowed(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(flax_msgpack, "encode_index", interrupt)
    with pytest.raises(KeyboardInterrupt):
        t5x.write(tmp_path, ONE, 5)
    assert not list(tmp_path.iterdir())


def test_a_killed_write_leaves_no_checkpoint(tmp_path):
    t5x.write(tmp_path, ONE, 5)
    code = (
        "import sys, time, numpy as np\n"
        "from speculative.checkpoints import t5x\n"
        "def wait(done, total):\n"
        "    print('writing', flush=True); time.sleep(60)\n"
        "t5x.write(sys.argv[1], {'w': np.ones(8, np.float32)}, 6, progress=wait)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 2 and names[1].startswith("checkpoint_6.tmp-"), names
    assert_equal(t5x.read(tmp_path), ONE)
    t5x.write(tmp_path, TWO, 6)
    assert_equal(t5x.read(tmp_path), TWO)


def test_temporary_names_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1700000000.5)
    (tmp_path / "checkpoint_5.tmp-1700000000").mkdir()
    t5x.write(tmp_path, ONE, 5)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_5", "checkpoint_5.tmp-1700000000"]


def test_a_disk_that_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        t5x.write(tmp_path / "file" / "model", ONE, 5)


def test_in_a_bucket_the_index_is_the_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(t5x_writer, "is_local", lambda path: False)
    with monkeypatch.context() as broken:
        break_at(broken, "index")
        with pytest.raises(CheckpointError, match="disk full"):
            t5x.write(tmp_path, ONE, 5)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        t5x.read(tmp_path)
    t5x.write(tmp_path, TWO, 5)
    assert_equal(t5x.read(tmp_path), TWO)
    with pytest.raises(CheckpointError, match="Remove it first"):
        t5x.write(tmp_path, ONE, 5, overwrite=True)
