"""The law of the whole output, by summation in float64: equal to the target's to 1e-9.

Four tokens at gamma 1 are two to four rounds, at gamma 2 two to four; target and draft depend on
everything that was fed to them.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import sampling, testing
from speculative.drafts.model import ModelDraft
from speculative.errors import ConfigError
from tests.statistical.law_checks import MODEL, check_by_summation, decoder, weights

# Of the same structure all, so that one program serves them.
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "bias": {0: 0.0}, "vocab_size": 3}
FILTERS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 2},
    "top-p": {"temperature": 1.5, "top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "forbidden": {"forbidden_ids": (1,)},
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("gamma", [1, 2])
def test_output_has_the_targets_law(gamma, filters):
    check_by_summation(decoder(gamma=gamma), **(NEUTRAL | FILTERS[filters]))


@pytest.mark.parametrize("gamma", [1, 2])
def test_output_has_the_targets_law_with_eos(gamma):
    check_by_summation(decoder(gamma=gamma, eos_id=2))


def test_gamma_three_over_two_rounds():
    check_by_summation(decoder(gamma=3, max_length=5))


@pytest.mark.parametrize("gamma", [1, 2])
def test_point_masses(gamma):
    check_by_summation(decoder(gamma=gamma, draft=testing.PointMassDraft(MODEL), eos_id=2))


def test_mixed_mode_at_temperature_above_zero():
    check_by_summation(decoder(mode="mixed"), temperature=0.8)


def test_mixed_mode_at_temperature_zero_is_the_argmax():
    with jax.enable_x64(True):
        law = testing.exact_law(decoder(mode="mixed"), weights(), sampling.make(1))
    (only,) = law.items()
    assert only[1] == pytest.approx(1.0, abs=1e-12)
    tables, fed = np.asarray(weights()["target"]["logits"]), [0]
    for _ in range(4):
        fed.append(int(np.argmax(tables[_context(fed), fed[-1]])))
    assert only[0] == tuple(fed[1:])


def test_draft_that_is_the_target():
    check_by_summation(decoder(), lambda: weights(0, 0), **NEUTRAL)


def test_disjoint_supports():
    def apart():
        return {
            "target": testing.tables_of_laws(MODEL, [0.5, 0.5, 0.0]),
            "draft": testing.tables_of_laws(MODEL, [0.0, 0.0, 1.0]),
        }

    check_by_summation(decoder(), apart, **NEUTRAL)


def _context(fed, source=1):
    return (source + sum((2 * j + 1) * (t + 1) for j, t in enumerate(fed))) % MODEL.contexts


def test_target_law_is_that_of_the_tables():
    with jax.enable_x64(True):
        law = testing.target_law(decoder(), weights(), sampling.make(1, temperature=0.7))
        tables = np.asarray(weights()["target"]["logits"]) / np.float64(np.float32(0.7))
    rows = np.exp(tables) / np.exp(tables).sum(axis=-1, keepdims=True)
    for sequence in itertools.product(range(3), repeat=4):
        fed, chance = [0], 1.0
        for token in sequence:
            chance *= rows[_context(fed), fed[-1], token]
            fed.append(token)
        assert law[sequence] == pytest.approx(chance, abs=1e-13)


def test_float32_agrees_to_its_own_precision():
    one = sampling.make(1, temperature=1.0)
    got = testing.exact_law(decoder(), weights(), one)
    assert testing.total_variation(got, testing.target_law(decoder(), weights(), one)) < 1e-5


def test_greedy_mode_has_no_law():
    with pytest.raises(ConfigError, match="mixed"):
        testing.exact_law(decoder(mode="greedy"), weights(), sampling.make(1))


def test_a_draft_whose_tokens_are_not_of_its_law_is_refused():
    class Liar(ModelDraft):
        def propose(self, weights, state, context, keys, gamma, draw):
            def best(logits, place):
                return jnp.argmax(logits, axis=-1).astype(jnp.int32), draw(logits, place)[1]

            return super().propose(weights, state, context, keys, gamma, best)

    with pytest.raises(ValueError, match="not drawn from the law"):
        testing.exact_law(decoder(draft=Liar(MODEL)), weights(), sampling.make(1, temperature=1.0))
