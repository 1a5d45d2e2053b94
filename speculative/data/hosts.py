"""Keeps TensorFlow, which reads the data, away from the accelerators, which JAX needs whole."""

from __future__ import annotations

import contextlib
import functools


@functools.cache
def hide_accelerators() -> None:
    """Tells TensorFlow of this process that there is no GPU or TPU.

    By default TensorFlow takes all the memory of every GPU that it uses. Called on import by every
    module here that imports TensorFlow (importing TensorFlow and SeqIO starts no device yet);
    without effect if the caller has started TensorFlow's devices already.
    """
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        # An error means: already started, or a build without this kind of device.
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.set_visible_devices([], kind)
