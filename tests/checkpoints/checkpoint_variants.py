"""Makers of legacy checkpoints in all the forms found in the wild, damaged ones included."""

import msgpack
import numpy as np
import tensorstore as ts


def extension(array, code=1, *, shape=None, dtype=None, content=None):
    """A Flax array, whose parts can be falsified."""
    parts = (
        list(array.shape) if shape is None else shape,
        dtype or array.dtype.name,
        array.tobytes() if content is None else content,
    )
    return msgpack.ExtType(code, msgpack.packb(parts))


def spec(array, path, /, **changes):
    """A TensorStore spec as T5X writes it, with some fields changed (None removes one)."""
    fields = {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "kvstore": {"driver": "file", "path": path},
        "metadata": {
            "chunks": list(array.shape),
            "compressor": {"id": "gzip", "level": 1},
            "shape": list(array.shape),
        },
    }
    fields.update(changes)
    return {key: value for key, value in fields.items() if value is not None}


def write_zarr(directory, array, *, compressor=None, chunks=None):
    """One zarr directory, written with TensorStore alone."""
    store = ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{directory}/"},
            "dtype": array.dtype.name,
            "metadata": {
                "shape": list(array.shape),
                "chunks": chunks or list(array.shape),
                "compressor": compressor,
            },
        },
        create=True,
    ).result()
    store.write(array).result()


STEP = extension(np.int32(7))


def write_index(directory, target, *, step=STEP, content=None):
    """The msgpack file of a step directory."""
    directory.mkdir(parents=True, exist_ok=True)
    if content is None:
        content = {"version": 3, "optimizer": {"state": {"step": step}, "target": target}}
    (directory / "checkpoint").write_bytes(msgpack.packb(content))
    return directory
