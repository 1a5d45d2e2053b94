"""Relative position buckets, masks, and where the bias goes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from speculative.models import attention

# First distance of each decoder bucket from 16 on, and of each encoder bucket from 8 on.
DECODER = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
ENCODER = [8, 12, 16, 23, 32, 46, 64, 91]


def test_decoder_buckets():
    distance = np.arange(400)
    wanted = np.where(distance < 16, distance, 15 + np.searchsorted(DECODER, distance, "right"))
    got = attention.relative_buckets(distance, bidirectional=False)
    np.testing.assert_array_equal(got, wanted)
    assert (attention.relative_buckets(-1 - distance, bidirectional=False) == 0).all()


def test_encoder_buckets():
    distance = np.arange(400)
    wanted = np.where(distance < 8, distance, 7 + np.searchsorted(ENCODER, distance, "right"))
    got = attention.relative_buckets(distance, bidirectional=True)
    np.testing.assert_array_equal(got, wanted)
    after = attention.relative_buckets(-distance[1:], bidirectional=True)
    np.testing.assert_array_equal(after, wanted[1:] + 16)


@pytest.mark.parametrize(
    ("key_minus_query", "bucket"),
    [
        (-128, 15),
        (-64, 14),
        (-8, 8),
        (-7, 7),
        (0, 0),
        (1, 17),
        (7, 23),
        (8, 24),
        (64, 30),
        (128, 31),
    ],
)
def test_spot_values(key_minus_query, bucket):
    distance = np.asarray([-key_minus_query])
    assert attention.relative_buckets(distance, bidirectional=True).tolist() == [bucket]


def test_bias_follows_each_rows_own_positions():
    table = jnp.arange(2 * 32, dtype=jnp.float32).reshape(2, 32)
    positions = jnp.asarray([[0, 1, 2], [5, 6, 7]], jnp.int32)
    bias = np.asarray(attention.decoder_bias(table, positions, 9))
    assert bias.shape == (2, 2, 3, 9)
    for row, place, key in [(0, 2, 0), (1, 0, 5), (1, 2, 0), (1, 1, 6)]:
        distance = int(positions[row, place]) - key
        np.testing.assert_array_equal(bias[row, :, place, key], [distance, 32 + distance])
    mask = np.asarray(attention.causal_mask(positions, 9))
    np.testing.assert_array_equal(mask[1, 0, 0], np.arange(9) <= 5)


def test_masked_keys_have_no_weight():
    query = jnp.ones((1, 1, 1, 2))
    key = jnp.asarray([[[[1.0, 9.0], [1.0, 9.0]]]])
    value = jnp.asarray([[[[1.0, 2.0], [1e30, 1e30]]]])
    mask = jnp.asarray([True, False]).reshape(1, 1, 1, 2)
    out = attention.attend(query, key, value, None, mask)
    np.testing.assert_array_equal(out[0, 0], [1.0, 2.0])
