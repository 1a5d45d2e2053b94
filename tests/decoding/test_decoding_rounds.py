"""One round and the loop around it: caches, ends, counts, rows, and what is compiled."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative import testing
from speculative.decoding import loop
from speculative.decoding import round as rounds
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import ENDED_BY_BUDGET, ENDED_BY_EOS, Decoder
from speculative.drafts.model import CATCH_UPS, ModelDraft
from speculative.errors import ConfigError
from speculative.types import Context, Outcome
from tests.decoding import toys

TABLE = testing.TableLanguageModel(vocab_size=5, contexts=8)


def table_decoder(**changes) -> Decoder:
    settings = {
        "target": TABLE,
        "draft": ModelDraft(TABLE),
        "gamma": 3,
        "max_length": 9,
        "mode": "sampled",
        "eos_id": 4,
    }
    return Decoder(**(settings | changes))


def table_weights(seed: int = 0) -> dict:
    target = testing.random_tables(TABLE, seed)["logits"]
    noise = testing.random_tables(TABLE, seed + 100)["logits"]
    return {"target": {"logits": target}, "draft": {"logits": target + 0.5 * noise}}


def assert_same_rows(got, wanted, rows=slice(None)):
    for field in ("tokens", "lengths", "end_reason"):
        np.testing.assert_array_equal(getattr(got, field), getattr(wanted, field)[rows])


def table_request(budgets=9, **settings):
    """Eight rows and settings of one structure, so that the tests share programs."""
    same = {"temperature": 1.0, "top_k": 0, "bias": {0: 0.0}, "vocab_size": 5}
    rows = settings.pop("rows", 8)
    return toys.request(ones(rows), budgets, **(same | settings))


def ones(rows: int) -> np.ndarray:
    return np.ones((rows, 1), np.int32)


# ------------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("catch_up", CATCH_UPS)
def test_chain_gives_twelve_tokens_in_three_runs(catch_up):
    decoder = toys.chain_decoder(3, draft=ModelDraft(toys.CHAIN, catch_up))
    got = loop.decode(decoder, toys.chain_weights(), toys.request(ones(1), 12))
    np.testing.assert_array_equal(got.tokens[0], np.arange(1, 13))
    counts = got.statistics
    assert int(counts.target_runs[0]) == 3
    assert int(counts.accepted[0]) == 9
    np.testing.assert_array_equal(counts.histogram[0], [0, 0, 0, 3])
    np.testing.assert_array_equal(counts.accepted_per_position[0], [3, 3, 3])


def test_draft_that_is_always_wrong_changes_nothing():
    wrong = toys.chain_weights(1, 2)
    got = loop.decode(toys.chain_decoder(3), wrong, toys.request(ones(1), 12))
    np.testing.assert_array_equal(got.tokens[0], np.arange(1, 13))
    counts = got.statistics
    assert int(counts.target_runs[0]) == 12
    assert int(counts.accepted[0]) == 0
    assert int(counts.proposed[0]) == 36
    np.testing.assert_array_equal(counts.histogram[0], [12, 0, 0, 0])


@pytest.mark.parametrize("gamma", [4, 6])
def test_eos_within_the_block_ends_the_row_there(gamma):
    decoder = toys.chain_decoder(gamma, eos_id=3, pad_id=15)
    got = loop.decode(decoder, toys.chain_weights(), toys.request(ones(1), 12))
    np.testing.assert_array_equal(got.tokens[0], [1, 2, 3] + [15] * 9)
    assert int(got.lengths[0]) == 3
    assert int(got.end_reason[0]) == ENDED_BY_EOS
    # What was drafted past the end counts neither as output nor as accepted.
    counts = got.statistics
    assert int(counts.emitted[0]) == int(counts.accepted[0]) == 3
    assert int(counts.ended_on_draft[0]) == 1
    assert int(counts.proposed[0]) == gamma
    np.testing.assert_array_equal(counts.accepted_per_position[0], [1, 1, 1] + [0] * (gamma - 3))


def test_eos_as_the_bonus_token_ends_the_row():
    got = loop.decode(
        toys.chain_decoder(2, eos_id=3), toys.chain_weights(), toys.request(ones(1), 12)
    )
    assert int(got.lengths[0]) == 3
    assert int(got.statistics.ended_on_draft[0]) == 0
    assert int(got.statistics.accepted[0]) == 2


def test_without_eos_a_row_runs_to_its_budget():
    got = loop.decode(toys.chain_decoder(2), toys.chain_weights(), toys.request(ones(1), 11))
    np.testing.assert_array_equal(got.tokens[0], [*range(1, 12), 0])
    assert int(got.end_reason[0]) == ENDED_BY_BUDGET


def test_budgets_are_kept_to_the_token_and_zero_emits_nothing():
    budgets = np.arange(13)
    got = loop.decode(toys.chain_decoder(3), toys.chain_weights(), toys.request(ones(13), budgets))
    np.testing.assert_array_equal(got.lengths, budgets)
    for row, budget in enumerate(budgets):
        np.testing.assert_array_equal(got.tokens[row, :budget], np.arange(1, budget + 1))
        assert (got.tokens[row, budget:] == 0).all()
    np.testing.assert_array_equal(got.statistics.target_runs, -(-budgets // 4))
    assert int(got.end_reason[0]) == ENDED_BY_BUDGET
    assert int(got.statistics.proposed[0]) == 0


# --------------------------------------------------------------------------------- statistics


def test_a_budget_above_the_longest_output_is_bounded_by_it():
    """The caches end there: beyond it a write would be moved back over valid positions."""
    decoder = table_decoder(eos_id=None)
    weights = table_weights()
    wanted = loop.decode(decoder, weights, table_request(9))
    got = loop.decode(decoder, weights, table_request([9, 10, 11, 12, 13, 20, 100, 1000]))
    assert_same_rows(got, wanted)
    assert (got.lengths == 9).all()


def test_counts_keep_their_laws():
    budgets = np.asarray([9, 1, 2, 9, 5, 0, 9, 7])
    reasons, on_draft = [], []
    for seed in range(8):
        got = loop.decode(table_decoder(), table_weights(), table_request(budgets, seed=seed))
        counts = got.statistics
        np.testing.assert_array_equal(counts.emitted, got.lengths)
        np.testing.assert_array_equal(
            counts.emitted, counts.accepted + counts.target_runs - counts.ended_on_draft
        )
        np.testing.assert_array_equal(counts.histogram.sum(axis=1), counts.target_runs)
        np.testing.assert_array_equal(counts.histogram @ np.arange(4), counts.accepted)
        np.testing.assert_array_equal(counts.accepted_per_position.sum(axis=1), counts.accepted)
        np.testing.assert_array_equal(counts.proposed, 3 * counts.target_runs)
        assert (np.diff(counts.accepted_per_position, axis=1) <= 0).all()
        by_eos = got.end_reason == ENDED_BY_EOS
        last = got.tokens[np.arange(8), np.maximum(got.lengths - 1, 0)]
        np.testing.assert_array_equal(by_eos, (last == 4) & (got.lengths > 0))
        before = [row[: n - 1] for row, n in zip(got.tokens, got.lengths, strict=True) if n]
        assert not np.isin(np.concatenate(before), 4).any()
        reasons, on_draft = [*reasons, *got.end_reason], [*on_draft, *counts.ended_on_draft]
    assert {ENDED_BY_EOS, ENDED_BY_BUDGET} == set(reasons) and {0, 1} == set(on_draft)


# ------------------------------------------------------------------------------------- drivers


@pytest.mark.parametrize("catch_up", CATCH_UPS)
def test_stepping_from_python_equals_the_compiled_loop(catch_up):
    decoder, weights = table_decoder(draft=ModelDraft(TABLE, catch_up)), table_weights()
    request = table_request([9, 9, 5, 1, 0, 9, 3, 9])
    compiled = loop.decode(decoder, weights, request)
    seen, emitted, before = 0, np.zeros(8, int), None
    for state, record in loop.rounds(decoder, weights, request):
        seen += 1
        tokens, ended = np.asarray(state.tokens), ~np.asarray(record.live)
        if before is not None:  # a finished row changes no more
            np.testing.assert_array_equal(tokens[ended], before[ended])
        before = tokens
        emitted += np.asarray(record.emitted)
        np.testing.assert_array_equal(state.lengths, emitted)
        # The cache of the target holds all but the last committed token.
        np.testing.assert_array_equal(state.target.lengths, state.lengths)
        # The draft's lacks one more after a fully accepted block, unless a step made up for it.
        behind = np.asarray(state.lengths - state.draft.lengths)[np.asarray(state.live)]
        full = np.asarray(record.verdict.accepted == 3)[np.asarray(state.live)]
        np.testing.assert_array_equal(behind, full & (catch_up == "block"))
        last = loop.result(decoder, state)
    assert_same_rows(last, compiled)
    jax.tree.map(np.testing.assert_array_equal, last.statistics, compiled.statistics)
    assert seen == compiled.statistics.target_runs.max() > 2
    assert ended.any()


# ------------------------------------------------------------- rows, neighbours, seeds, batches


def test_rows_depend_on_their_ids_and_not_on_their_place():
    decoder, weights = table_decoder(), table_weights()
    budgets = np.asarray([9, 4, 9, 7, 9, 1, 9, 9])
    whole = loop.decode(decoder, weights, table_request(budgets))
    order = np.asarray([3, 7, 0, 1, 6, 2, 5, 4])
    moved = table_request(budgets[order], ids=order)
    assert_same_rows(loop.decode(decoder, weights, moved), whole, order)
    for row in (0, 3):
        alone = table_request(budgets[row : row + 1], ids=[row], rows=1)
        assert_same_rows(loop.decode(decoder, weights, alone), whole, slice(row, row + 1))
    assert len({tuple(row) for row in whole.tokens}) > 4


def test_t5_rows_alone_equal_rows_of_a_batch():
    decoder = toys.t5_decoder(3, mode="sampled")
    weights, inputs = toys.pair_weights(5), toys.encoder_inputs(8, 3)
    budgets = np.asarray([9, 4, 9, 7, 9, 1, 9, 9])
    whole = loop.decode(decoder, weights, toys.request(inputs, budgets, temperature=1.0))
    order = np.asarray([3, 7, 0, 1, 6, 2, 5, 4])
    moved = toys.request(inputs[order], budgets[order], ids=order, temperature=1.0)
    assert_same_rows(loop.decode(decoder, weights, moved), whole, order)
    for row in range(8):
        alone = toys.request(
            inputs[row : row + 1], budgets[row : row + 1], ids=[row], temperature=1.0
        )
        assert_same_rows(loop.decode(decoder, weights, alone), whole, slice(row, row + 1))


def test_samples_and_seeds_have_streams_of_their_own():
    decoder, weights = table_decoder(eos_id=None), table_weights()
    outputs = {}
    for seed in (0, 1):
        for sample in (0, 1):
            request = table_request(seed=seed, sample=sample)
            outputs[seed, sample] = loop.decode(decoder, weights, request).tokens
            again = loop.decode(decoder, weights, request).tokens
            np.testing.assert_array_equal(again, outputs[seed, sample])
    rows = [tuple(row) for tokens in outputs.values() for row in tokens]
    assert len(set(rows)) > 28


def test_rows_of_temperature_zero_among_others():
    weights = table_weights()
    request = table_request(temperature=[0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    mixed = loop.decode(table_decoder(mode="mixed"), weights, request)
    greedy = loop.decode(table_decoder(mode="greedy"), weights, table_request(temperature=0.0))
    sampled = loop.decode(table_decoder(), weights, table_request())
    zero = np.asarray(request.sampling.temperature) == 0
    np.testing.assert_array_equal(mixed.tokens[zero], greedy.tokens[zero])
    np.testing.assert_array_equal(mixed.tokens[~zero], sampled.tokens[~zero])
    assert len(np.unique(mixed.tokens[zero], axis=0)) == 1


def test_a_forbidden_id_is_never_emitted():
    for seed in range(8):
        request = table_request(forbidden_ids=(2, 4), seed=seed)
        got = loop.decode(table_decoder(), table_weights(), request)
        assert not np.isin(got.tokens, (2, 4)).any()
        assert (got.lengths == 9).all()


def test_top_k_of_one_is_the_argmax():
    weights = table_weights()
    greedy = loop.decode(table_decoder(mode="greedy"), weights, table_request(temperature=0.0))
    assert_same_rows(loop.decode(table_decoder(), weights, table_request(top_k=1)), greedy)


# -------------------------------------------------------------------------------- compilation


def test_nothing_is_compiled_for_other_values_of_the_same_shape():
    loop.decode(table_decoder(), table_weights(), table_request())
    compiled = loop.complete._cache_size()
    assert compiled >= 1
    for number, temperature in enumerate([0.3, 1.0, 2.5]):
        request = table_request(
            [8, number, 3, 1, 9, 9, 9, 9],
            seed=number,
            temperature=temperature,
            top_k=number,
            forbidden_ids=(number,),
        )
        request = dataclasses.replace(request, inputs=request.inputs + number)
        loop.decode(table_decoder(), table_weights(number), request)
        assert loop.complete._cache_size() == compiled


def test_a_draw_for_a_place_that_is_not_in_the_block_is_refused():
    """It would be given another place's uniform, and the two tokens would not be independent."""

    @dataclasses.dataclass(frozen=True)
    class TooFar(ModelDraft):
        def propose(self, weights, state, context, keys, gamma, draw):
            return super().propose(
                weights, state, context, keys, gamma, lambda logits, place: draw(logits, gamma)
            )

    far = table_decoder(draft=TooFar(table_decoder().target))
    with pytest.raises(ValueError, match="place is 3, of 3"):
        loop.decode(far, table_weights(), table_request())


# ----------------------------------------------------------------------------- the draft's cache


def first_draft_logits(draft, weights, tokens, inputs, accepted, gamma=3, committed=2):
    """Logits of the draft's first step after a round in which row b had accepted[b] accepted.

    `tokens` [B, 1 + ..]: the start token and what is committed in the end; the last drafted places
    of the round are tokens + 1 where they were not accepted.
    """
    rows, seen = len(accepted), []

    def forced(logits, place):
        at = committed + 1 + place
        token = token_at(tokens, at) + jnp.where(place < accepted, 0, 1).astype(jnp.int32)
        return token, None

    def watched(logits, place):
        seen.append(logits)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None

    def context(lengths):
        return Context(tokens, lengths, jnp.ones((rows,), bool), inputs, None)

    before = jnp.full((rows,), committed, jnp.int32)
    after = before + accepted + 1
    state = draft.start(weights, inputs, tokens[:, :committed], 16)
    _, state = draft.propose(weights, state, context(before), None, gamma, forced)
    state = draft.commit(state, Outcome(accepted, after))
    draft.propose(weights, state, context(after), None, gamma, watched)
    return seen[0], after


def token_at(tokens, at):
    return jnp.take_along_axis(tokens, jnp.full((tokens.shape[0], 1), at, jnp.int32), axis=1)[:, 0]


@pytest.mark.parametrize("catch_up", CATCH_UPS)
@pytest.mark.parametrize("kind", ["table", "t5"])
def test_draft_logits_equal_uncached_ones_whatever_was_accepted(kind, catch_up):
    model = TABLE if kind == "table" else toys.DRAFT
    weights = table_weights()["draft"] if kind == "table" else toys.pair_weights(1)["draft"]
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 4, size=(4, 17)), jnp.int32).at[:, 0].set(0)
    inputs = jnp.asarray(toys.encoder_inputs(4))
    accepted = jnp.arange(4, dtype=jnp.int32)  # the last row's block is accepted whole

    @jax.jit
    def both(weights):
        logits, after = first_draft_logits(
            ModelDraft(model, catch_up), weights, tokens, inputs, accepted
        )
        fresh = model.prefill(weights, inputs, None, 16)
        every, _ = model.extend(weights, fresh, tokens[:, :8])
        return logits, jnp.take_along_axis(every, after[:, None, None], axis=1)[:, 0]

    cached, uncached = both(weights)
    np.testing.assert_allclose(cached, uncached, atol=2e-5)


# ----------------------------------------------------------------------------------- settings


def test_baseline_is_the_same_decoder_without_a_draft():
    decoder = table_decoder()
    base = autoregressive(decoder)
    assert (base.gamma, base.draft, base.allocated) == (0, None, decoder.allocated)
    assert dataclasses.replace(base, draft=decoder.draft, gamma=3, positions=None) == decoder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gamma": 0}, "gamma"),
        ({"draft": None}, "gamma"),
        ({"gamma": -1, "draft": None}, "gamma"),
        ({"max_length": 0}, "max_length"),
        ({"mode": "beam"}, "mode"),
        ({"positions": 12}, "positions"),
        ({"draft": ModelDraft(testing.TableLanguageModel(7))}, "vocabulary"),
    ],
)
def test_errors_name_the_setting(changes, named):
    with pytest.raises(ConfigError, match=named):
        table_decoder(**changes)


def test_the_round_is_one_function():
    assert loop.decode_round is rounds.decode_round
