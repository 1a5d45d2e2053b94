"""A batch that is split over devices decodes as it does on one."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speculative.decoding import loop
from tests.decoding import toys


def test_rows_split_over_four_devices_give_the_same_tokens():
    assert jax.device_count() >= 4, "the tests run on four CPU devices"
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    decoder, weights = toys.t5_decoder(3, mode="mixed"), toys.pair_weights(2)
    budgets = np.asarray([9, 4, 9, 7, 9, 0, 9, 1])
    temperature = np.asarray([0.0, 1.0, 1.0, 0.0, 0.5, 1.0, 0.0, 2.0])
    request = toys.request(toys.encoder_inputs(8), budgets, temperature=temperature)
    wanted = loop.decode(decoder, weights, request)

    split = jax.device_put(request, NamedSharding(mesh, PartitionSpec("data")))
    copied = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    state = loop.run(decoder, copied, split, loop.start(decoder, copied, split))
    assert len(state.tokens.sharding.device_set) == 4
    got = loop.result(decoder, state)
    for field in ("tokens", "lengths", "end_reason"):
        np.testing.assert_array_equal(getattr(got, field), getattr(wanted, field))
    jax.tree.map(np.testing.assert_array_equal, got.statistics, wanted.statistics)
