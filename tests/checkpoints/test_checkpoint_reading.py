"""Reading legacy checkpoints: T5X's own, every variant, and damaged ones."""

import json
import pathlib
import subprocess
import sys

import ml_dtypes
import msgpack
import numpy as np
import pytest

from speculative.checkpoints import t5x, zarr_arrays
from speculative.checkpoints.trees import flatten
from speculative.errors import CheckpointError
from speculative.models.config import T5Config, config_from_shapes, parameter_shapes
from tests.checkpoints.checkpoint_variants import extension, spec, write_index, write_zarr

ROOT = pathlib.Path(__file__).parents[2]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TINY = dict(
    vocab_size=384,
    emb_dim=24,
    num_heads=4,
    head_dim=8,
    mlp_dim=40,
    num_encoder_layers=2,
    num_decoder_layers=3,
)
CONFIGS = {
    "legacy_float32": T5Config(**TINY, mlp_activations=("gelu", "linear")),
    "legacy_bfloat16": T5Config(**TINY, mlp_activations=("gelu", "linear")),
    "legacy_t5_1_0": T5Config(**TINY, mlp_activations=("relu",), logits_via_embedding=True),
}
TRUTH = {
    "legacy_float32": "params",
    "legacy_bfloat16": "params",
    "legacy_t5_1_0": "tensors_t5_1_0",
}


def assert_equal(read, expected):
    read = flatten(read)
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        assert read[name].dtype == array.dtype, name
        assert np.array_equal(read[name], array), name


def fails(path, *fragments, **arguments):
    with pytest.raises(CheckpointError) as caught:
        t5x.read(path, **arguments)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 900, line
    for fragment in fragments:
        assert fragment in line, line
    return line


@pytest.mark.parametrize("name", ["legacy_float32", "legacy_t5_1_0"])
def test_float32_reference_is_read_exactly(reference, truth, name):
    read = t5x.read(reference(name), shapes=parameter_shapes(CONFIGS[name]))
    assert_equal(read, truth(TRUTH[name]))


def test_bfloat16_reference_is_the_rounded_truth(reference, truth):
    read = t5x.read(reference("legacy_bfloat16"))
    assert_equal(read, {k: v.astype(BFLOAT16) for k, v in truth("params").items()})


@pytest.mark.parametrize("form", ["model directory", "step directory", "file"])
def test_the_same_is_read_by_every_path(reference, truth, form):
    model = reference("legacy_float32")
    path = {
        "model directory": model,
        "step directory": model / "checkpoint_1000",
        "file": model / "checkpoint_1000" / "checkpoint",
    }[form]
    assert_equal(t5x.read(str(path)), truth("params"))
    assert t5x.read_step(path) == 1000


def test_casting_on_reading(reference, truth):
    down = t5x.read(reference("legacy_float32"), dtype="bfloat16")
    assert_equal(down, {k: v.astype(BFLOAT16) for k, v in truth("params").items()})
    up = t5x.read(reference("legacy_bfloat16"), dtype="float32")
    rounded = {k: v.astype(BFLOAT16).astype(np.float32) for k, v in truth("params").items()}
    assert_equal(up, rounded)
    fails(reference("legacy_float32"), "float16", dtype="float16")


@pytest.mark.parametrize("name", list(CONFIGS))
def test_tensor_shapes_are_those_of_the_model(reference, name):
    infos = t5x.tensor_shapes(reference(name))
    assert {k: i.shape for k, i in infos.items()} == parameter_shapes(CONFIGS[name])
    assert {i.dtype for i in infos.values()} == {
        "bfloat16" if name == "legacy_bfloat16" else "float32"
    }
    assert config_from_shapes({k: i.shape for k, i in infos.items()}) == CONFIGS[name]


def test_tensor_shapes_opens_no_array(step_directory):
    (step_directory / "target.a.b" / ".zarray").unlink()
    assert t5x.tensor_shapes(step_directory) == {"a/b": ((6, 4), "float32")}


def test_results_own_their_memory_and_progress_reaches_the_end(reference):
    seen = []
    read = t5x.read(reference("legacy_t5_1_0"), progress=lambda *now: seen.append(now))
    assert all(array.flags.writeable for array in flatten(read).values())
    assert len(seen) == 60 and seen == sorted(seen) and seen[-1] == (44008 * 4, 44008 * 4)


def test_few_in_flight_reads_the_same(reference, truth, monkeypatch):
    monkeypatch.setattr(zarr_arrays, "_MOST_TENSORS", 2)
    monkeypatch.setattr(zarr_arrays, "_MOST_BYTES", 1000)
    assert_equal(t5x.read(reference("legacy_float32")), truth("params"))


def test_optimizer_state_is_never_read(reference, truth, tmp_path):
    source = reference("legacy_float32") / "checkpoint_1000"
    copy = tmp_path / "checkpoint_1000"
    copy.mkdir()
    for entry in source.iterdir():
        if not entry.name.startswith("state."):
            (copy / entry.name).symlink_to(entry)
    assert_equal(t5x.read(copy), truth("params"))
    # Even what no decoder would take, among the optimizer's leaves.
    bad = {"step": extension(np.int32(3)), "param_states": msgpack.ExtType(1, b"\xff")}
    target = {"w": extension(np.ones(2, np.float32))}
    content = {"version": 3, "optimizer": {"state": bad, "target": target}}
    assert t5x.read_step(write_index(tmp_path / "other", None, content=content)) == 3


@pytest.mark.parametrize(
    "compressor", [None, {"id": "gzip", "level": 1}, {"id": "zstd", "level": 1}]
)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_compressors_and_several_chunks(tmp_path, weights, compressor, dtype):
    array = weights.astype(dtype)
    directory = write_index(tmp_path / "checkpoint_7", {"a": {"b": spec(array, "target.a.b")}})
    write_zarr(directory / "target.a.b", array, compressor=compressor, chunks=[4, 2])
    assert len(list((directory / "target.a.b").glob("?.?"))) == 4
    assert_equal(t5x.read(tmp_path), {"a/b": array})


KVSTORES = {
    "file": {"kvstore": {"driver": "file", "path": "target.w"}},
    "file with slash": {"kvstore": {"driver": "file", "path": "target.w/"}},
    "gfile": {"kvstore": {"driver": "gfile", "path": "target.w/"}},
    "gcs": {"kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket", "path": "target.w"}},
    "path at the top": {"kvstore": {"driver": "file"}, "path": "target.w"},
    "no dtype": {"dtype": None},
    "no shape": {"metadata": {}},
}


@pytest.mark.parametrize("variant", list(KVSTORES))
def test_stores(tmp_path, weights, variant):
    directory = write_index(
        tmp_path / "checkpoint_7", {"w": spec(weights, "target.w/", **KVSTORES[variant])}
    )
    write_zarr(directory / "target.w", weights, compressor={"id": "gzip", "level": 1})
    assert t5x.tensor_shapes(tmp_path) == {"w": ((6, 4), "float32")}
    assert_equal(t5x.read(tmp_path), {"w": weights})


def test_single_file_with_everything_inline(tmp_path, weights):
    target = {
        "array": extension(weights),
        "half": extension(weights.astype(BFLOAT16)),
        "scalar": extension(np.float32(2.5), 3),
        "group": {"scale": extension(weights[0]), "empty": {}},
    }
    file = write_index(tmp_path, target) / "checkpoint"
    file = file.rename(tmp_path / "t5_tiny.checkpoint_0")
    expected = {
        "array": weights,
        "half": weights.astype(BFLOAT16),
        "scalar": np.array(2.5, np.float32),
        "group/scale": weights[0],
    }
    read = t5x.read(file)
    assert_equal(read, expected)
    assert all(array.flags.writeable for array in flatten(read).values())
    assert t5x.tensor_shapes(file)["half"] == ((6, 4), "bfloat16")


def test_chunked_inline_array(tmp_path):
    array = np.arange(33, dtype=np.float32).reshape(3, 11)
    flat = array.reshape(-1)
    # Eleven chunks: '10' must come after '9', not after '1'.
    chunked = {
        "__msgpack_chunked_array__": True,
        "shape": {"0": 3, "1": 11},
        "chunks": {str(i): extension(flat[3 * i : 3 * i + 3]) for i in range(11)},
    }
    assert_equal(t5x.read(write_index(tmp_path / "c", {"w": chunked})), {"w": array})
    chunked["chunks"].pop("4")
    fails(write_index(tmp_path / "d", {"w": chunked}), "'w'", "30 values for shape (3, 11)")


def test_bits_of_the_second_version_are_bfloat16(tmp_path, weights):
    half = weights.astype(BFLOAT16)
    bits = half.view(np.uint16)
    content = {"version": 2, "optimizer": {"state": {}, "target": {"w": spec(bits, "target.w")}}}
    directory = write_index(tmp_path / "checkpoint_7", None, content=content)
    write_zarr(directory / "target.w", bits)
    assert t5x.tensor_shapes(tmp_path) == {"w": ((6, 4), "bfloat16")}
    assert_equal(t5x.read(tmp_path), {"w": half})
    assert t5x.read_step(tmp_path) == 7  # from the name


@pytest.mark.parametrize("step", [extension(np.int32(9)), extension(np.int64(9), 3), 9])
def test_forms_of_the_step(tmp_path, weights, step):
    write_index(tmp_path / "checkpoint_5", {"w": extension(weights)}, step=step)
    assert t5x.read_step(tmp_path) == 9


@pytest.mark.parametrize(
    "step", [extension(np.float32(9)), "nine", extension(np.int32([1, 2])), -1]
)
def test_wrong_step(tmp_path, weights, step):
    fails(write_index(tmp_path / "c", {"w": extension(weights)}, step=step), "state/step")


def test_no_step_at_all(tmp_path, weights):
    content = {"version": 3, "optimizer": {"target": {"w": extension(weights)}}}
    directory = write_index(tmp_path / "renamed", None, content=content)
    with pytest.raises(CheckpointError, match="state/step"):
        t5x.read_step(directory)


def test_the_report_on_other_shapes_is_one_line_of_counts(reference):
    shapes = parameter_shapes(CONFIGS["legacy_float32"].replace(mlp_dim=48, num_encoder_layers=3))
    shapes.pop("decoder/logits_dense/kernel")
    line = fails(reference("legacy_float32"), shapes=shapes)
    assert "9 missing (encoder/layers_2/attention/key/kernel, " in line and "and 6 more" in line
    assert "1 extra (decoder/logits_dense/kernel)" in line
    assert "15 misshaped (decoder/layers_0/mlp/wi_0/kernel (24, 40) for (24, 48)" in line
    assert "expected 74 tensors; found 66: " in line


@pytest.mark.parametrize(
    "path",
    ["../other", "a/../../other", "/etc", "..", ".", "", "a//b", "gs://b/c", "a\0b", None, 3],
)
@pytest.mark.parametrize("where", ["kvstore", "top"])
def test_a_path_out_of_the_checkpoint_is_refused(tmp_path, weights, path, where):
    write_zarr(tmp_path / "other", weights)
    changes = {"kvstore": {"driver": "file"}, "path": path} if where == "top" else {}
    directory = write_index(tmp_path / "checkpoint_1", {"w": spec(weights, path, **changes)})
    fails(directory, "a path inside the checkpoint", repr(path))


def test_cut_msgpack(reference, tmp_path):
    content = (reference("legacy_float32") / "checkpoint_1000" / "checkpoint").read_bytes()
    for length in (0, 1, 10, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "checkpoint").write_bytes(content[:length])
        fails(tmp_path, "is cut short")


@pytest.mark.parametrize(
    "content", [b"hello, world", b"\xc1", b"\x00\x01", b"PK\x03\x04" + bytes(50), b"\xff" * 40]
)
def test_not_a_checkpoint(tmp_path, content):
    (tmp_path / "checkpoint").write_bytes(content)
    fails(tmp_path, "not a")


W = {"w": extension(np.ones(2, np.float32))}
TREES = {
    "no wrapper": ({"target": W, "state": {}}, "keys 'version' and 'optimizer'"),
    "no version": ({"optimizer": {"target": W}}, "keys 'version' and 'optimizer'"),
    "version 1": ({"version": 1, "optimizer": {"target": W}}, "version"),
    "version 4": ({"version": 4, "optimizer": {"target": W}}, "version"),
    "version of text": ({"version": "three", "optimizer": {"target": W}}, "version"),
    "optimizer a list": ({"version": 3, "optimizer": [1]}, "is not a T5X checkpoint"),
    "no target": ({"version": 3, "optimizer": {"state": {}}}, "optimizer/target"),
    "target of nothing": ({"version": 3, "optimizer": {"target": {}}}, "optimizer/target"),
    "target of empty groups": ({"version": 3, "optimizer": {"target": {"a": {}}}}, "parameters"),
    "target a number": ({"version": 3, "optimizer": {"target": 5}}, "optimizer/target"),
    "a list": ([1, 2, 3], "is not a T5X checkpoint"),
}


@pytest.mark.parametrize("name", list(TREES))
def test_wrong_trees(tmp_path, name):
    content, fragment = TREES[name]
    fails(write_index(tmp_path / "c", None, content=content), fragment)


ONES = np.ones((2, 3), np.float32)


def nested(depth):
    node = {"w": extension(ONES)}
    for _ in range(depth):
        node = {"a": node}
    return node


LEAVES = {
    "a number": (5, "an array or a TensorStore spec"),
    "text": ("PLACEHOLDER://w", "an array or a TensorStore spec"),
    "nothing": (None, "an array or a TensorStore spec"),
    "complex": (msgpack.ExtType(2, msgpack.packb((1.0, 2.0))), "an array or a TensorStore spec"),
    "key of a number": ({5: extension(ONES)}, "a non-empty string"),
    "key with a slash": ({"a/b": extension(ONES)}, "without '/'"),
    "deep": (nested(400), "at most 64 levels"),
    "bytes missing": (extension(ONES, content=b"123"), "3 bytes for float32 of shape (2, 3)"),
    "unknown dtype": (extension(ONES, dtype="float33"), "float33"),
    "object dtype": (extension(ONES, dtype="object"), "not numeric"),
    "negative shape": (extension(ONES, shape=[-2, 3]), "shape"),
    "shape of text": (extension(ONES, shape="23"), "shape"),
    "no array": (msgpack.ExtType(1, b"\x01"), "not (shape, dtype, bytes)"),
    "empty array": (msgpack.ExtType(1, b""), "is not a T5X checkpoint"),
    "chunks of text": (
        {"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": "x"},
        "a chunked array",
    ),
    "chunks of odd keys": (
        {"__msgpack_chunked_array__": True, "shape": {"0": 6}, "chunks": {"x": extension(ONES)}},
        "a chunked array",
    ),
    "another driver": (spec(ONES, "w", driver="n5"), "driver 'zarr'"),
    "metadata of text": (spec(ONES, "w", metadata="gzip"), "metadata"),
    "kvstore of text": (spec(ONES, "w", kvstore="file://w"), "kvstore"),
    "shape of spec": (spec(ONES, "w", metadata={"shape": [2, "3"]}), "whole numbers"),
    "shape a number": (spec(ONES, "w", metadata={"shape": 6}), "whole numbers"),
    "dtype of spec": (spec(ONES, "w", dtype="string"), "numeric"),
    "no directory": (spec(ONES, "target.w/"), "'w' cannot be read"),
}


@pytest.mark.parametrize("name", list(LEAVES))
def test_wrong_leaves(tmp_path, name):
    leaf, fragment = LEAVES[name]
    fails(write_index(tmp_path / "c", {"w": leaf}), fragment)


def falsify(key, value):
    def damage(array):
        metadata = json.loads((array / ".zarray").read_text())
        metadata[key] = value
        (array / ".zarray").write_text(json.dumps(metadata))

    return damage


DAMAGES = {
    "no metadata": lambda array: (array / ".zarray").unlink(),
    "metadata not JSON": lambda array: (array / ".zarray").write_text("{"),
    "other format": falsify("zarr_format", 3),
    "unknown compressor": falsify("compressor", {"id": "snappy9"}),
    "unknown dtype": falsify("dtype", "<q9"),
    "dtype of no number": falsify("dtype", "|S4"),
    "other shape": falsify("shape", [6, 5]),
    "no chunk": lambda array: (array / "1.0").unlink(),
    # By half: gzip's trailing checksum alone can go without anything being lost.
    "chunk cut": lambda array: (array / "1.0").write_bytes((array / "1.0").read_bytes()[:30]),
    "chunk of noise": lambda array: (array / "0.0").write_bytes(b"noise" * 20),
    "empty chunk": lambda array: (array / "0.0").write_bytes(b""),
}


@pytest.mark.parametrize(
    "compressor", [None, {"id": "gzip", "level": 1}, {"id": "zstd", "level": 1}]
)
@pytest.mark.parametrize("name", list(DAMAGES))
def test_damaged_arrays(tmp_path, weights, name, compressor):
    directory = write_index(tmp_path / "checkpoint_7", {"a": {"b": spec(weights, "target.a.b/")}})
    write_zarr(directory / "target.a.b", weights, chunks=[3, 4], compressor=compressor)
    DAMAGES[name](directory / "target.a.b")
    line = fails(directory, "'a/b'", str(directory / "target.a.b"))
    assert "tensorstore_spec" not in line and "source locations" not in line


def test_bucket_paths_reach_tensorstore_as_buckets():
    from etils import epath

    class Bucket(type(epath.Path("."))):
        def __fspath__(self):
            return "gs://bucket/models/checkpoint_1/target.w"

    expected = {"driver": "gcs", "bucket": "bucket", "path": "models/checkpoint_1/target.w/"}
    assert zarr_arrays.kvstore_of(Bucket(".")) == expected


def test_importing_takes_neither_tensorstore_nor_tensorflow():
    code = (
        "import sys; import speculative.checkpoints.t5x; "
        "bad = {'tensorstore', 'tensorflow', 'seqio', 'gin', 'jax', 'orbax'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
