"""The law that is sampled, draws from it, and the keys behind the draws."""

from __future__ import annotations

from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import strategies as st

from speculative import sampling
from speculative.errors import ConfigError

LARGEST_UNIFORM = np.float32(1 - 2**-24)

standardise = jax.jit(sampling.standardise, static_argnums=2)
draw = jax.jit(sampling.draw)


def law_of(logits, mode="sampled", **settings) -> np.ndarray:
    logits = jnp.asarray(logits, jnp.float32)
    return np.asarray(standardise(logits[None], sampling.make(1, **settings), mode))[0]


def reference(logits, temperature, top_k, top_p, min_p) -> tuple[np.ndarray, float]:
    """The law by sorting, in float64, and how near a sum of probabilities came to top_p."""
    scaled = np.asarray(logits, np.float64) / temperature
    if top_k:
        scaled = np.where(
            scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1], scaled, -np.inf
        )
    near = 1.0
    if top_p < 1:
        law = scipy.special.softmax(scaled)
        order = np.sort(law)[::-1]
        sums = np.cumsum(order)
        near = np.abs(sums - top_p).min()
        last = order[min(np.searchsorted(sums, top_p), len(law) - 1)]
        scaled = np.where(law >= last, scaled, -np.inf)
    law = scipy.special.softmax(scaled)
    law = np.where(law >= min_p * law.max(), law, 0.0)
    return law / law.sum(), near


# ----------------------------------------------------------------------------------- standardise


def test_temperature_acts_before_top_p():
    # The other order would give [.5065, .3072, .1863, 0].
    law = law_of([2.0, 1.0, 0.0, -1.0], temperature=2.0, top_p=0.9)
    np.testing.assert_allclose(law, [0.4551, 0.2760, 0.1674, 0.1015], atol=5e-5)
    late = law_of([2.0, 1.0, 0.0, -1.0], temperature=1.0, top_p=0.9)
    assert np.count_nonzero(late) == 3


def test_top_k_acts_before_top_p():
    # Of the two that top-k leaves, the first alone has .53 of the mass; of all three, only .36.
    law = law_of(np.log([0.36, 0.32, 0.32 - 1e-3]), temperature=1.0, top_k=1, top_p=0.5)
    np.testing.assert_array_equal(law > 0, [True, False, False])
    law = law_of(np.log([0.4, 0.35, 0.25]), temperature=1.0, top_k=2, top_p=0.5)
    np.testing.assert_array_equal(law > 0, [True, False, False])
    law = law_of(np.log([0.4, 0.35, 0.25]), temperature=1.0, top_p=0.5)
    np.testing.assert_array_equal(law > 0, [True, True, False])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 0}, [1, 1, 1, 1, 1]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [1, 1, 1, 0, 0]),  # two tie for the second place
        ({"top_k": 3}, [1, 1, 1, 0, 0]),
        ({"top_k": 99}, [1, 1, 1, 1, 1]),
        ({"top_p": 0.0}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.3}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.41}, [1, 1, 1, 0, 0]),
        ({"top_p": 0.85}, [1, 1, 1, 1, 0]),
        ({"top_p": 1.0}, [1, 1, 1, 1, 1]),
        ({"min_p": 0.0}, [1, 1, 1, 1, 1]),
        ({"min_p": 0.3}, [1, 1, 1, 0, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0, 0]),
    ],
)
def test_what_a_filter_keeps(settings, kept):
    law = law_of(np.log([0.2, 0.4, 0.2, 0.11, 0.09]), temperature=1.0, **settings)
    np.testing.assert_array_equal(law > 0, np.asarray(kept, bool))
    np.testing.assert_allclose(law.sum(), 1.0, rtol=1e-6)


def test_equal_logits_all_stay():
    for settings in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
        np.testing.assert_allclose(law_of(np.zeros(4), temperature=1.0, **settings), 0.25)


def test_no_filter_unless_asked():
    np.testing.assert_allclose(law_of(np.zeros(4), temperature=1.0), 0.25)


SIZE = 7


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=SIZE, max_size=SIZE),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, SIZE + 1),
    top_p=st.one_of(st.just(1.0), st.just(0.0), st.floats(0.0, 1.0, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)),
)
def test_law_is_that_of_sorting(logits, temperature, top_k, top_p, min_p):
    wanted, near = reference(logits, temperature, top_k, top_p, min_p)
    hypothesis.assume(near > 1e-9)
    edges = np.exp((np.asarray(logits) - max(logits)) / temperature)
    hypothesis.assume(np.abs(edges - min_p).min() > 1e-9)
    with jax.enable_x64(True):
        chosen = sampling.make(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        law = standardise(jnp.asarray([logits], jnp.float64), chosen, "sampled")[0]
    np.testing.assert_allclose(np.asarray(law), wanted, atol=1e-12)


def test_dtypes():
    with jax.enable_x64(True):
        one = sampling.make(1, temperature=0.7, top_k=2, top_p=0.9, min_p=0.1)
        for dtype, law in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
            assert standardise(jnp.zeros((1, 4), dtype), one, "sampled").dtype == law


def test_extreme_temperatures_stay_finite():
    logits = np.asarray([300.0, 299.9, -300.0, 0.0])
    np.testing.assert_array_equal(law_of(logits, temperature=1e-8), [1, 0, 0, 0])
    np.testing.assert_allclose(law_of(logits, temperature=1e4), 0.25, atol=0.02)
    big = np.asarray([3e38, 2e38, -3e38, 0.0])
    np.testing.assert_array_equal(law_of(big, temperature=1e-8), [1, 0, 0, 0])


def test_rows_have_settings_of_their_own():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5)), jnp.float32)
    both = sampling.make(3, temperature=[0.5, 1.0, 2.0], top_k=[1, 0, 2], top_p=[1.0, 0.6, 1.0])
    together = standardise(logits, both, "sampled")
    for row, (t, k, p) in enumerate([(0.5, 1, 1.0), (1.0, 0, 0.6), (2.0, 2, 1.0)]):
        for place in range(2):
            alone = law_of(logits[row, place], temperature=t, top_k=k, top_p=p)
            np.testing.assert_allclose(together[row, place], alone, rtol=1e-6)


def test_mixed_mode_has_one_hot_rows_at_temperature_zero():
    logits = jnp.asarray([[1.0, 3.0, 2.0]] * 3)
    law = standardise(logits, sampling.make(3, temperature=[0.0, 1.0, 0.0]), "mixed")
    np.testing.assert_array_equal(law[0], [0, 1, 0])
    np.testing.assert_array_equal(law[2], [0, 1, 0])
    np.testing.assert_allclose(law[1], law_of([1.0, 3.0, 2.0], temperature=1.0), rtol=1e-6)


def test_the_first_of_the_largest():
    """As `jnp.argmax` has it, ties, signed zeros and rows without any mass included."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, size=(64, 2, 9)).astype(np.float32)  # Hardly a row without ties.
    x[:8] = -np.inf
    x[8:16, :, 4:] = -np.inf
    x[16:24] = [-0.0, 0.0, -1, -1, 0.0, -0.0, -1, -1, -1]
    assert sampling.first_largest(jnp.asarray(x)).dtype == jnp.int32
    np.testing.assert_array_equal(sampling.first_largest(jnp.asarray(x)), np.argmax(x, axis=-1))
    x[3, 1, 2] = np.nan
    assert int(sampling.first_largest(jnp.asarray(x))[3, 1]) == 8


def test_bias_and_forbidden_ids_act_at_every_temperature():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 2.5]])
    one = sampling.make(
        1, temperature=1.0, forbidden_ids=(1,), bias={2: 1.0}, vocab_size=4, top_k=2
    )
    law = np.asarray(standardise(logits, one, "sampled")[0])
    assert law[1] == 0 and law[0] == 0
    np.testing.assert_allclose(law[2] / law[3], np.exp(0.5), rtol=1e-5)
    assert int(sampling.argmax(logits, one)[0]) == 2
    np.testing.assert_array_equal(standardise(logits, one, "mixed")[0] > 0, law > 0)
    none = sampling.make(1, forbidden_ids=(1,), vocab_size=4)
    np.testing.assert_array_equal(standardise(logits, none, "mixed")[0], [0, 0, 0, 1])


def test_mode_of_temperatures():
    assert sampling.mode_of([0.0, 0.0]) == "greedy"
    assert sampling.mode_of(0.5) == "sampled"
    assert sampling.mode_of([0.0, 1.0]) == "mixed"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"forbidden_ids": (3,)}, "bias"),
        ({"forbidden_ids": (9,), "vocab_size": 4}, "token id"),
        ({"bias": np.zeros(5), "vocab_size": 4}, "bias"),
    ],
)
def test_errors_name_the_setting(settings, named):
    with pytest.raises(ConfigError, match=named):
        sampling.make(2, **settings)


# ------------------------------------------------------------------------------------------ draws


def sparse_laws(rows: int, vocab: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    law = random.exponential(size=(rows, vocab)) * (random.random((rows, vocab)) < 0.3)
    law[np.arange(rows), random.integers(vocab, size=rows)] += 1e-3
    return (law / law.sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("vocab", [3, 64, 5000])
def test_draw_never_gives_a_token_without_probability(vocab):
    law = sparse_laws(64, vocab, 0)
    for uniform in (0.0, 0.5, LARGEST_UNIFORM):
        token = np.asarray(draw(law, np.full(64, uniform, np.float32)))
        assert (law[np.arange(64), token] > 0).all()


def test_draw_at_the_steps_of_the_cumulative_law():
    # XLA's cumulative sum rises by a rounding at some entries without any probability.
    law = sparse_laws(32, 5000, 1)
    cumulative = np.asarray(jax.jit(partial(jnp.cumsum, axis=1))(law))
    steps = [
        np.nonzero((row == 0)[1:] & (np.diff(c) > 0))[0]
        for row, c in zip(law, cumulative, strict=True)
    ]
    assert sum(len(s) for s in steps) > 0
    for place in range(20):
        at = [int(s[place % len(s)]) if len(s) else 0 for s in steps]
        uniform = np.minimum(cumulative[np.arange(32), at], LARGEST_UNIFORM)
        token = np.asarray(draw(law, uniform.astype(np.float32)))
        assert (law[np.arange(32), token] > 0).all()


def test_draw_at_both_ends():
    law = np.asarray([[0.0, 0.4, 0.6, 0.0]], np.float32)
    assert int(draw(law, np.zeros(1, np.float32))[0]) == 1
    assert int(draw(law, np.full(1, LARGEST_UNIFORM))[0]) == 2
    one_hot = np.eye(4, dtype=np.float32)
    for uniform in (0.0, LARGEST_UNIFORM):
        np.testing.assert_array_equal(draw(one_hot, np.full(4, uniform, np.float32)), np.arange(4))


@pytest.mark.parametrize(("vocab", "size"), [(5, 1 << 16), (1000, 1 << 13)])
def test_draw_has_the_law(vocab, size):
    law = sparse_laws(1, vocab, 2)
    uniform = (np.arange(size) + 0.5) / size
    tokens = draw(np.tile(law, (size, 1)), uniform.astype(np.float32))
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    np.testing.assert_allclose(counts, size * law[0], atol=2)


# ------------------------------------------------------------------------------------------- keys


def keys_of(ids, samples=None, seed=0):
    ids = jnp.asarray(ids, jnp.int32)
    samples = jnp.zeros_like(ids) if samples is None else jnp.asarray(samples, jnp.int32)
    return sampling.row_keys(sampling.base_key(seed), ids, samples)


def numbers(keys):
    return np.asarray(sampling.uniforms(keys, 0, sampling.NEXT))


def test_a_rows_key_is_its_own_wherever_it_stands():
    whole = numbers(keys_of(np.arange(8)))
    np.testing.assert_array_equal(numbers(keys_of([5])), whole[5:6])
    np.testing.assert_array_equal(numbers(keys_of([7, 0, 3])), whole[[7, 0, 3]])
    np.testing.assert_array_equal(numbers(keys_of([2, 2])), whole[[2, 2]])


def test_seeds_ids_samples_lengths_places_and_purposes_have_streams_of_their_own():
    seen = [
        float(
            sampling.uniforms(
                sampling.round_keys(keys, jnp.asarray([n], jnp.int32)), place, purpose
            )[0]
        )
        for keys in (keys_of([1]), keys_of([0], [1]), keys_of([0]), keys_of([0], seed=1))
        for n in (0, 1)
        for place in (0, 1)
        for purpose in (sampling.DRAFT, sampling.ACCEPT, sampling.NEXT, sampling.SPARE)
    ]
    assert len(set(seen)) == len(seen)
    again = sampling.uniforms(sampling.round_keys(keys_of([1]), jnp.zeros(1, jnp.int32)), 0, 0)
    assert float(again[0]) == seen[0]


def test_keys_are_threefry_whatever_the_default_is():
    with jax.default_prng_impl("rbg"):
        other = numbers(keys_of([3]))
    np.testing.assert_array_equal(other, numbers(keys_of([3])))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0, sampling.ACCEPT), (0, 0, sampling.NEXT)),
        ((0, 0, sampling.DRAFT), (0, 0, sampling.ACCEPT)),
        ((0, 0, sampling.DRAFT), (0, 1, sampling.DRAFT)),
        ((0, 0, sampling.NEXT), (1, 0, sampling.NEXT)),
    ],
)
def test_uniforms_are_uniform_and_independent_in_pairs(one, other):
    rows = 1 << 14
    keys = keys_of(np.arange(rows))

    def cells(length, place, purpose):
        chosen = sampling.round_keys(keys, jnp.full((rows,), length, jnp.int32))
        return (np.asarray(sampling.uniforms(chosen, place, purpose)) * 8).astype(int)

    counts = np.bincount(cells(*one) * 8 + cells(*other), minlength=64)
    assert scipy.stats.chisquare(counts).pvalue > 1e-6
