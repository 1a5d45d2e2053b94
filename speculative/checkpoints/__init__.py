"""Checkpoints of T5 models: reading, writing, and telling one format from another.

`t5x` is the module to call: `resolve`, `tensor_shapes`, `read`, `read_step` and `write`. It tells
the formats apart and hands each to its reader, which gives a flat dictionary of tensors still on
disk; everything after that (the shape report, reading, casting) is common to all formats.

    steps           names of step directories; which of them a path means
    flax_msgpack    the msgpack file of the legacy format
    zarr_arrays     the arrays beside it: chunk rule, concurrent reading and writing
    trees           nested dictionaries and names joined by '/'
    t5x_legacy      the legacy format, from its msgpack file to tensors on disk
    t5x_writer      writing the legacy format whole or not at all
"""
