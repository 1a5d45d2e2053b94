"""Token verification: the paper's anchors, and the law after one round, by summation."""

from __future__ import annotations

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from speculative.types import Proposal
from speculative.verification import TokenVerifier, Verifier, decide

VERIFIER = TokenVerifier()
# Compiled, as decoding has them: one program for each shape, and not one for each operation.
acceptance, residual_law = jax.jit(VERIFIER.acceptance), jax.jit(VERIFIER.residual)
decided = jax.jit(decide, static_argnums=0)
LARGEST_UNIFORM = np.float32(1 - 2**-24)
PAIRS = {
    "two tokens": ([0.6, 0.4], [0.8, 0.2], 0.8, [0, 1]),
    "mirrored": ([1 / 3, 2 / 3], [2 / 3, 1 / 3], 2 / 3, [0, 1]),
    "three tokens": ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 0.7, [1, 0, 0]),
    "disjoint": ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], 0.0, [0.5, 0.5, 0]),
}


def proposal_of(tokens, q, length=None) -> Proposal:
    tokens = jnp.asarray(tokens, jnp.int32)
    rows, gamma = tokens.shape
    length = np.full((rows,), gamma, np.int32) if length is None else np.asarray(length, np.int32)
    return Proposal(tokens, length, None if q is None else jnp.asarray(q))


def every_token(p, q):
    """One row for each drafted token, gamma 1: (p [V, 2, V], proposal)."""
    vocab = len(p)
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    laws = jnp.asarray(np.tile(p, (vocab, 2, 1)))
    return laws, proposal_of(np.arange(vocab)[:, None], np.tile(q, (vocab, 1, 1)))


def first_token_law(p, q) -> np.ndarray:
    """Summed over the drafted token and whether it is accepted."""
    laws, proposal = every_token(p, q)
    chance = np.asarray(acceptance(laws, proposal))
    rejected = residual_law(laws, proposal, np.zeros((len(p),), np.int32))
    return q * chance[:, 1] + (q * chance[:, 0]) @ np.asarray(rejected)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", PAIRS)
def test_anchors(name, float64):
    p, q, alpha, residual = PAIRS[name]
    p, q = np.asarray(p), np.asarray(q)
    laws, proposal = every_token(p, q)
    chance = np.asarray(acceptance(laws, proposal))
    assert float(q @ chance[:, 1]) == pytest.approx(alpha, abs=1e-15)
    rejected = np.asarray(residual_law(laws, proposal, np.zeros((len(p),), np.int32)))
    np.testing.assert_allclose(rejected[0], residual, atol=1e-15)
    np.testing.assert_allclose(first_token_law(p, q), p, atol=1e-15)


def test_residual_is_exact_where_one_token_is_left():
    laws, proposal = every_token([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    residual = residual_law(laws, proposal, np.zeros((3,), np.int32))
    np.testing.assert_array_equal(residual, np.tile([1.0, 0.0, 0.0], (3, 1)))


simplex = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(p=simplex, q=simplex)
def test_first_token_has_the_law_p(p, q):
    p, q = np.asarray(p) / sum(p), np.asarray(q) / sum(q)
    with jax.enable_x64(True):
        np.testing.assert_allclose(first_token_law(p, q), p, atol=1e-12)


def random_laws(seed, gamma, vocab=3):
    """p [N, G+1, V] and q [N, G, V], which depend on the tokens before, and all N = V^G drafts."""
    random = np.random.default_rng(seed)
    drafts = np.asarray(list(itertools.product(range(vocab), repeat=gamma)))

    def place(i):
        tree = random.dirichlet(np.full(vocab, 0.7), size=[vocab] * i)
        return np.broadcast_to(tree[tuple(drafts[:, :i].T)], (len(drafts), vocab))

    p = np.stack([place(i) for i in range(gamma + 1)], axis=1)
    q = np.stack([place(i) for i in range(gamma)], axis=1)
    return p, q, drafts


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_acceptance_is_a_law_and_what_is_emitted_has_the_law_p(gamma, float64):
    p, q, drafts = random_laws(gamma, gamma)
    proposal = proposal_of(drafts, q)
    chance = np.asarray(acceptance(jnp.asarray(p), proposal))
    np.testing.assert_allclose(chance.sum(axis=1), 1.0, atol=1e-14)
    assert (chance >= 0).all()
    weight = np.prod(np.take_along_axis(q, drafts[:, :, None], axis=2)[:, :, 0], axis=1)
    np.testing.assert_allclose(weight.sum(), 1.0, atol=1e-12)
    # P(the first gamma + 1 tokens), filled up from p where a round emits fewer.
    law = np.zeros([3] * (gamma + 1))
    tables = {
        tuple(d[:i]): row[i] for d, row in zip(drafts, p, strict=True) for i in range(gamma + 1)
    }
    for n in range(gamma + 1):
        after = np.asarray(residual_law(jnp.asarray(p), proposal, np.full((len(p),), n, np.int32)))
        for i, draft in enumerate(drafts):
            for token in range(3):
                start = (*draft[:n], token)
                mass = weight[i] * chance[i, n] * after[i, token]
                for rest in itertools.product(range(3), repeat=gamma - n):
                    whole, part = (*start, *rest), mass
                    for place in range(n + 1, gamma + 1):
                        part *= tables[whole[:place]][whole[place]]
                    law[whole] += part
    for whole in itertools.product(range(3), repeat=gamma + 1):
        wanted = np.prod([tables[whole[:i]][whole[i]] for i in range(gamma + 1)])
        assert law[whole] == pytest.approx(wanted, abs=1e-12)


# ------------------------------------------------------------------------------- the sampled form


def one_round(p, q, tokens, accept, following=0.5, length=None):
    gamma = len(tokens)
    laws = jnp.asarray(np.tile(np.asarray(p, np.float32), (1, gamma + 1, 1)))
    laws_q = None if q is None else np.tile(np.asarray(q, np.float32), (1, gamma, 1))
    verdict = decided(
        VERIFIER,
        laws,
        proposal_of([tokens], laws_q, None if length is None else [length]),
        np.full((1,), accept, np.float32),
        np.full((1,), following, np.float32),
    )
    return int(np.asarray(verdict.accepted)[0]), int(np.asarray(verdict.next_token)[0])


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_p_equal_to_q_accepts_everything(uniform):
    for law in ([0.3, 0.5, 0.2], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]):
        accepted, following = one_round(law, law, [0, 0, 0, 0], uniform, uniform)
        assert accepted == 4
        assert law[following] > 0


def test_a_token_that_the_target_excludes_is_never_accepted():
    accepted, following = one_round([0.0, 0.5, 0.5], [0.6, 0.2, 0.2], [0, 1], 0.0)
    assert accepted == 0 and following != 0
    accepted, _ = one_round([0.5, 0.5, 0.0], [0.4, 0.3, 0.3], [0, 2, 0], 0.0)
    assert accepted == 1


def test_residual_never_gives_what_the_draft_has_more_of():
    for following in (0.0, 0.5, LARGEST_UNIFORM):
        assert one_round([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [2], LARGEST_UNIFORM, following) == (
            0,
            0,
        )


def test_acceptance_is_a_strict_comparison():
    # p / q = .5 for token 0: accepted below, rejected at it.
    assert one_round([0.25, 0.75], [0.5, 0.5], [0], np.nextafter(np.float32(0.5), 0))[0] == 1
    assert one_round([0.25, 0.75], [0.5, 0.5], [0], 0.5)[0] == 0


def test_point_masses(float64):
    p = np.asarray([0.6, 0.3, 0.1])
    laws = jnp.asarray(np.tile(p, (3, 2, 1)))
    proposal = proposal_of(np.arange(3)[:, None], None)
    np.testing.assert_allclose(np.asarray(acceptance(laws, proposal))[:, 1], p, atol=1e-15)
    rejected = np.asarray(residual_law(laws, proposal, np.zeros((3,), np.int32)))
    np.testing.assert_allclose(rejected[0], [0, 0.75, 0.25], atol=1e-15)
    for token in range(3):
        law = p[token] * np.eye(3)[token] + (1 - p[token]) * rejected[token]
        np.testing.assert_allclose(law, p, atol=1e-15)
    one_hot = proposal_of(np.arange(3)[:, None], np.eye(3)[:, None])
    np.testing.assert_allclose(acceptance(laws, one_hot), acceptance(laws, proposal), atol=1e-15)


def test_point_mass_that_is_certain_leaves_no_residual():
    accepted, following = one_round([0.0, 1.0, 0.0], None, [1, 1], LARGEST_UNIFORM)
    assert (accepted, following) == (2, 1)


def test_places_that_were_not_proposed_are_not_accepted():
    p, q = [0.5, 0.5], [0.5, 0.5]
    assert one_round(p, q, [0, 0, 0], 0.0, length=2)[0] == 2
    assert one_round(p, q, [0, 0, 0], 0.0, length=0)[0] == 0
    # After everything that was proposed comes p, and no residual.
    laws = jnp.asarray(np.tile(np.float32([0.2, 0.8]), (1, 4, 1)))
    proposal = proposal_of([[0, 0, 0]], np.tile(np.float32([0.9, 0.1]), (1, 3, 1)), [2])
    after = np.asarray(residual_law(laws, proposal, np.asarray([2], np.int32)))
    np.testing.assert_array_equal(after[0], np.float32([0.2, 0.8]))
    assert float(np.asarray(acceptance(laws, proposal))[0, 3]) == 0.0


def test_temperature_zero_accepts_what_the_argmax_names():
    best = jnp.asarray([[1, 2, 0, 1]] * 4, jnp.int32)
    tokens = [[1, 2, 0], [1, 0, 0], [0, 2, 0], [1, 2, 0]]
    verdict = VERIFIER.verify_greedy(best, proposal_of(tokens, None, [3, 3, 3, 1]))
    np.testing.assert_array_equal(verdict.accepted, [3, 1, 0, 1])
    np.testing.assert_array_equal(verdict.next_token, [1, 2, 1, 2])


def test_the_sampled_form_has_the_acceptance_law():
    gamma, rows = 3, 1 << 14
    p, q, drafts = random_laws(7, gamma)
    at = int(np.argmax(np.prod(q.max(axis=2), axis=1)))
    laws = jnp.asarray(np.tile(p[at].astype(np.float32), (rows, 1, 1)))
    proposal = proposal_of(
        np.tile(drafts[at], (rows, 1)), np.tile(q[at].astype(np.float32), (rows, 1, 1))
    )
    uniform = jnp.asarray((np.arange(rows) + 0.5) / rows, jnp.float32)
    verdict = decided(VERIFIER, laws, proposal, uniform, uniform)
    counts = np.bincount(np.asarray(verdict.accepted), minlength=gamma + 1)
    one = jax.tree.map(lambda x: np.asarray(x)[:1], (laws, proposal))
    wanted = rows * np.asarray(acceptance(*one))[0]
    np.testing.assert_allclose(counts, wanted, atol=2)


def test_it_is_a_verifier():
    assert isinstance(VERIFIER, Verifier)
    assert VERIFIER.exact
    assert hash(TokenVerifier()) == hash(VERIFIER)
