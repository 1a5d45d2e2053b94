"""Attention to a cache against float64, for every machine that there is code for."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from speculative.kernels import attention as kernels
from speculative.kernels import attention_code, engine, llvm

MACHINES = {
    "avx2": llvm.AVX2,
    "avx512": llvm.AVX512,
    "neon": llvm.NEON,
    "avx512_bfloat16": dataclasses.replace(llvm.AVX512, bfloat16=True),
}
# B, M, H, D, T: one query and several passes of them; D for tiles of every width; T shorter than a
# register, a multiple, and neither; the last are shared among threads.
SHAPES = [
    (1, 1, 8, 64, 112),
    (2, 5, 3, 32, 33),
    (3, 12, 4, 16, 20),
    (1, 7, 2, 48, 17),
    (2, 3, 2, 128, 5),
    (2, 8, 2, 80, 40),
    (8, 8, 8, 64, 80),
]


@dataclasses.dataclass(frozen=True)
class Machine:
    """Its two handlers, and the dtype of its caches."""

    causal: str
    masked: str
    dtype: jnp.dtype


@pytest.fixture(scope="module", params=list(MACHINES))
def machine(request):
    made_for = MACHINES[request.param]
    names = [f"test_{kind}_{request.param}" for kind in ("causal", "masked")]
    engine.register(names[0], attention_code.write_causal, made_for)
    engine.register(names[1], attention_code.write_masked, made_for)
    dtype = jnp.dtype("bfloat16" if made_for.bfloat16 else "float32")
    return Machine(*names, dtype)


def problem(shape, dtype, seed=0):
    """Queries [B, M, 3 * H * D] (a third counts), keys, values, bias [H, T], lengths, mask."""
    batch, count, heads, size, length = shape
    random = np.random.default_rng(seed)

    def normal(*dimensions):
        return jnp.asarray(random.normal(size=dimensions), jnp.float32)

    queries = normal(batch, count, 3 * heads * size) * 3 / np.sqrt(size)
    keys, values = normal(batch, heads, size, length), normal(batch, heads, length, size)
    lengths = jnp.asarray(random.integers(0, length - count + 1, batch), jnp.int32)
    mask = jnp.asarray(random.random((batch, length)) < 0.6).at[:, 0].set(True)
    return queries, keys.astype(dtype), values.astype(dtype), normal(heads, length), lengths, mask


def expected(queries, keys, values, bias=None, lengths=None, mask=None):
    """In float64, by the definition."""
    batch, count = queries.shape[:2]
    heads, size, length = keys.shape[1:]
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    queries = np.asarray(queries, np.float64)[:, :, : heads * size]
    queries = queries.reshape(batch, count, heads, size)
    logits = np.einsum("bmhd,bhdt->bhmt", queries, keys)
    if bias is None:
        logits = np.where(np.asarray(mask)[:, None, None], logits, -1e10)
    else:
        distance = (
            np.asarray(lengths)[:, None, None] + np.arange(count)[:, None] - np.arange(length)
        )
        by_distance = np.asarray(bias, np.float64)[:, np.clip(distance, 0, length - 1)]
        logits = logits + np.moveaxis(by_distance, 0, 1)
        logits = np.where((distance >= 0)[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhmt,bhtd->bmhd", weights, values).reshape(batch, count, heads * size)


@pytest.mark.parametrize("shape", SHAPES)
def test_causal(machine, shape):
    queries, keys, values, bias, lengths, _ = problem(shape, machine.dtype)
    got = kernels.causal_call(machine.causal, queries, keys, values, bias, lengths)
    np.testing.assert_allclose(got, expected(queries, keys, values, bias, lengths), atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_masked(machine, shape):
    queries, keys, values, _, _, mask = problem(shape, machine.dtype)
    got = kernels.masked_call(machine.masked, queries, keys, values, mask)
    np.testing.assert_allclose(got, expected(queries, keys, values, mask=mask), atol=3e-6)


def test_a_query_does_not_depend_on_the_others(machine):
    """To the bit: neither on how many there are, nor on the other rows."""
    queries, keys, values, bias, lengths, mask = problem((2, 13, 3, 32, 45), machine.dtype)
    together = np.asarray(kernels.causal_call(machine.causal, queries, keys, values, bias, lengths))
    crossed = np.asarray(kernels.masked_call(machine.masked, queries, keys, values, mask))
    for m in range(13):
        one = queries[:, m : m + 1]
        alone = kernels.causal_call(machine.causal, one, keys, values, bias, lengths + m)
        np.testing.assert_array_equal(np.asarray(alone)[:, 0], together[:, m])
        alone = kernels.masked_call(machine.masked, one, keys, values, mask)
        np.testing.assert_array_equal(np.asarray(alone)[:, 0], crossed[:, m])
    for b in range(2):
        row = slice(b, b + 1)
        alone = kernels.causal_call(
            machine.causal, queries[row], keys[row], values[row], bias, lengths[row]
        )
        np.testing.assert_array_equal(alone, together[row])


def test_what_may_not_be_seen_does_not_count(machine):
    """Not even values that are no numbers: behind a query there may be anything."""
    queries, keys, values, bias, lengths, mask = problem((1, 4, 2, 16, 30), machine.dtype)
    clean = kernels.causal_call(machine.causal, queries, keys, values, bias, lengths)
    behind = jnp.arange(30) >= lengths[0] + 4
    for what in (7e4, jnp.inf, jnp.nan):
        dirty = jnp.where(behind[None, None, None, :], jnp.asarray(what, keys.dtype), keys)
        other = jnp.where(behind[None, None, :, None], jnp.asarray(what, keys.dtype), values)
        got = kernels.causal_call(machine.causal, queries, dirty, other, bias, lengths)
        np.testing.assert_array_equal(got, clean)
    crossed = kernels.masked_call(machine.masked, queries, keys, values, mask)
    hidden = jnp.where(mask[:, None, None, :], keys, jnp.asarray(-7e4, keys.dtype))
    got = kernels.masked_call(machine.masked, queries, hidden, values, mask)
    np.testing.assert_array_equal(got, crossed)


def test_large_logits(machine):
    """One key has all the weight; the others' exponentials are far below the smallest float32."""
    queries, keys, values, bias, lengths, mask = problem((1, 2, 2, 16, 30), machine.dtype)
    queries = 300 * queries
    got = kernels.masked_call(machine.masked, queries, keys, values, mask)
    np.testing.assert_allclose(got, expected(queries, keys, values, mask=mask), atol=1e-4)
    got = kernels.causal_call(machine.causal, queries, keys, values, bias, lengths)
    np.testing.assert_allclose(got, expected(queries, keys, values, bias, lengths), atol=1e-4)


def test_not_a_number_stays_one(machine):
    queries, keys, values, bias, lengths, mask = problem((1, 3, 2, 16, 30), machine.dtype)
    # Any of them: the lowest bits that a NaN has free, too.
    for bits in (0x7FC00000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF):
        nan = np.asarray(bits, np.uint32).view(np.float32)
        odd = queries.at[0, 1, 0].set(nan)
        for got in (
            kernels.causal_call(machine.causal, odd, keys, values, bias, lengths),
            kernels.masked_call(machine.masked, odd, keys, values, mask),
        ):
            assert np.isnan(np.asarray(got)[0, 1, :16]).all()
            assert np.isfinite(np.asarray(got)[0, [0, 2]]).all()
            assert np.isfinite(np.asarray(got)[0, 1, 16:]).all()


def test_where_nothing_is_seen_all_count_alike(machine):
    """As in T5X: logits that are all alike. What lies behind T does not count."""
    queries, keys, values, _, _, mask = problem((2, 3, 2, 16, 21), machine.dtype)
    got = kernels.masked_call(machine.masked, queries, keys, values, mask & False)
    wanted = np.asarray(values, np.float64).mean(axis=2).reshape(2, 1, 32)
    np.testing.assert_allclose(got, np.broadcast_to(wanted, (2, 3, 32)), atol=1e-6)


def test_shared_work_is_that_of_each_row(machine):
    queries, keys, values, bias, lengths, mask = problem((8, 8, 8, 64, 80), machine.dtype)
    for _ in range(5):
        together = kernels.causal_call(machine.causal, queries, keys, values, bias, lengths)
        crossed = kernels.masked_call(machine.masked, queries, keys, values, mask)
        for b in range(8):
            row = slice(b, b + 1)
            part = queries[row], keys[row], values[row]
            alone = kernels.causal_call(machine.causal, *part, bias, lengths[row])
            np.testing.assert_array_equal(together[row], alone)
            alone = kernels.masked_call(machine.masked, *part, mask[row])
            np.testing.assert_array_equal(crossed[row], alone)


def test_what_does_not_go_together_is_refused(machine):
    queries, keys, values, bias, lengths, mask = problem((2, 3, 2, 16, 21), machine.dtype)
    for arguments in (
        (queries, keys, values[:, :, :20], bias, lengths),
        (queries, keys, values.astype(jnp.float16), bias, lengths),
        (queries[:, :, :31], keys, values, bias, lengths),
        (queries, keys, values, bias[:, :20], lengths),
        (queries, keys, values, bias, lengths[:1]),
        (jnp.concatenate([queries] * 8, axis=1), keys, values, bias, lengths),
    ):
        with pytest.raises(ValueError, match=r"keys|quer"):
            kernels.causal_call(machine.causal, *arguments)
    with pytest.raises(ValueError, match="mask"):
        kernels.masked_call(machine.masked, queries, keys, values, mask[:, :20])


def test_without_room_memory_is_safe(machine):
    """Positions beyond the cache are moved into it, as the write of their keys is."""
    queries, keys, values, bias, _, _ = problem((1, 5, 2, 16, 30), machine.dtype)
    last = kernels.causal_call(
        machine.causal, queries, keys, values, bias, jnp.asarray([25], jnp.int32)
    )
    for length in (26, 30, 10**6):
        got = kernels.causal_call(
            machine.causal, queries, keys, values, bias, jnp.asarray([length], jnp.int32)
        )
        np.testing.assert_array_equal(got, last)


@pytest.mark.parametrize("size, dtype", [(8, "float32"), (0, "float32"), (64, "float16")])
def test_what_is_left_to_xla(size, dtype):
    assert not kernels.supports(size, dtype)
