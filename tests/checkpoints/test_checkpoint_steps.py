"""Which checkpoint a path and a step mean, and what is refused on the way."""

import numpy as np
import pytest
from etils import epath

from speculative.checkpoints import steps, t5x, t5x_legacy
from speculative.errors import CheckpointError
from tests.checkpoints.checkpoint_variants import extension, write_index

W = {"w": extension(np.ones(2, np.float32))}


def refused(path, *fragments, step="latest", call=t5x.resolve):
    with pytest.raises(CheckpointError) as caught:
        call(path, step)
    line = str(caught.value)
    assert "\n" not in line
    for fragment in fragments:
        assert fragment in line, line


@pytest.fixture
def model(tmp_path):
    """A model directory with finished steps 9 and 100, and much that is not a step."""
    for step in (9, 100):
        write_index(tmp_path / f"checkpoint_{step}", W, step=extension(np.int32(step)))
    write_index(tmp_path / "checkpoint_200.tmp-1700000000", W)
    write_index(tmp_path / "checkpoint_201.orbax-checkpoint-tmp-5", W)
    write_index(tmp_path / "checkpoint_300_old", W)
    write_index(tmp_path / "old_checkpoint_300", W)
    (tmp_path / "checkpoint_400").mkdir()  # half copied: no checkpoint file yet
    (tmp_path / "checkpoint_500").write_text("a file")
    (tmp_path / "train_ds-000-of-001").write_text("")
    return tmp_path


def test_latest_is_the_largest_number_that_is_finished(model):
    assert t5x.resolve(model) == epath.Path(model / "checkpoint_100")
    assert list(steps.list_steps(epath.Path(model))) == [9, 100]
    assert t5x.read_step(model) == 100


@pytest.mark.parametrize("step", [9, "9"])
def test_a_given_step(model, step):
    assert t5x.resolve(str(model), step).name == "checkpoint_9"
    assert t5x.read_step(model, step) == 9
    assert t5x.resolve(model / "checkpoint_9", step).name == "checkpoint_9"
    file = model / "checkpoint_9" / "checkpoint"
    assert t5x.resolve(file, step) == epath.Path(file)


def test_a_step_that_is_not_there(model):
    refused(model, "expected step 10", "found steps 9, 100", step=10)
    refused(model, "expected step 400", step=400)
    refused(model / "checkpoint_9", "expected step 10", "found step 9", step=10)
    refused(model / "checkpoint_9" / "checkpoint", "expected step 10", step=10)


@pytest.mark.parametrize("step", [-1, "newest", 1.0, True, None, "-3", "²"])
def test_no_step(step):
    with pytest.raises(CheckpointError, match="'latest' or a whole number >= 0"):
        steps.parse_step(step)


def test_no_step_of_a_model_directory(model):
    refused(model, "'latest' or a whole number >= 0", step="newest")


def test_a_step_directory_of_any_name(model):
    (model / "checkpoint_9").rename(model / "t5_small")
    assert t5x.read_step(model / "t5_small") == 9


def test_a_number_with_leading_zeros(tmp_path):
    write_index(tmp_path / "checkpoint_0100", W)
    assert t5x.resolve(tmp_path, 100).name == "checkpoint_0100"


def test_unfinished_is_refused_by_name(model):
    for name in ("checkpoint_200.tmp-1700000000", "checkpoint_201.orbax-checkpoint-tmp-5"):
        refused(model / name, "is unfinished")
        refused(model / name / "checkpoint", "is unfinished")


def test_nothing_there(tmp_path):
    refused(tmp_path / "missing", "nothing at", str(tmp_path / "missing"))
    refused(tmp_path, "an empty directory")
    write_index(tmp_path / "checkpoint_1.tmp-5", W)
    refused(tmp_path, "found checkpoint_1.tmp-5", "an unfinished directory is not read")
    for i in range(7):
        (tmp_path / f"other{i}").mkdir()
    refused(tmp_path, "and 3 more")


@pytest.mark.parametrize("names", [["checkpoint"], ["model.ckpt-5.index", "model.ckpt-5.meta"]])
def test_mesh_tensorflow_is_named(tmp_path, names):
    for directory in (tmp_path, tmp_path / "checkpoint_5"):
        directory.mkdir(exist_ok=True)
        for name in names:
            (directory / name).write_text('model_checkpoint_path: "model.ckpt-5"\n')
        refused(directory, "Mesh TensorFlow")
        refused(directory / names[0], "Mesh TensorFlow")
        refused(directory, "Mesh TensorFlow", call=t5x.tensor_shapes)
    (tmp_path / "model.ckpt-5.index").write_text("")
    refused(tmp_path / "model.ckpt-5", "Mesh TensorFlow")


def test_a_mesh_tensorflow_file_in_a_step_directory(tmp_path):
    (tmp_path / "checkpoint_5").mkdir()
    (tmp_path / "checkpoint_5" / "checkpoint").write_text('model_checkpoint_path: "m"\n')
    refused(tmp_path, "Mesh TensorFlow")


ORBAX = {
    "OCDBT": ["_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt"],
    "zarr": ["state/checkpoint"],
    "state alone": ["_METADATA", "manifest.ocdbt"],
    "state of zarr alone": ["_METADATA", "checkpoint"],
}


@pytest.mark.parametrize("layout", list(ORBAX))
def test_orbax_is_found_and_refused(tmp_path, layout):
    directory = tmp_path / "checkpoint_5"
    for name in ORBAX[layout]:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"\x80")
    for path in (tmp_path, directory):
        assert t5x.resolve(path).name == "checkpoint_5"
        refused(path, "is an Orbax checkpoint", call=t5x.tensor_shapes)
        refused(path, "is an Orbax checkpoint", call=t5x.read_step)
        with pytest.raises(CheckpointError, match="Orbax"):
            t5x.read(path)


def failing(error):
    def fail(*_):
        raise error

    return fail


def test_a_file_system_that_fails_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "detect", failing(PermissionError("no entry")))
    refused(tmp_path, "Cannot look into", "no entry")
    # A bucket's client raises exceptions of its own; on a local disk those are faults of ours.
    monkeypatch.setattr(steps, "detect", failing(RuntimeError("no\nroute")))
    with pytest.raises(RuntimeError):
        t5x.resolve(tmp_path)
    monkeypatch.setattr(steps, "is_local", lambda path: False)
    refused(tmp_path, "Cannot look into", "RuntimeError: no route")


def test_a_checkpoint_file_without_permission(model, monkeypatch):
    file = model / "checkpoint_9" / "checkpoint"
    monkeypatch.setattr(t5x_legacy.flax_msgpack, "read_index", failing(PermissionError("denied")))
    refused(file, f"{file} cannot be read", "denied", call=t5x.read_step)
