"""Planted bugs: each must make a named check fail, which passes without it.

The checks are those of the other tests: the law by summation, the law by sampling, equality with
autoregressive decoding at temperature 0, and what full acceptance must give.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from speculative import sampling, testing
from speculative.decoding import loop
from speculative.decoding import round as decode_round
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import Request
from speculative.drafts.model import ModelDraft
from speculative.verification import TokenVerifier
from speculative.verification.token import survival
from tests.statistical.law_checks import (
    MODEL,
    Named,
    check_by_sampling,
    check_by_summation,
    decoder,
    weights,
)

# ------------------------------------------------------------------------- bugs of a verifier


class ResidualLeftOut(TokenVerifier):
    def residual(self, p, proposal, accepted):
        return jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]


class ResidualAfterFullAcceptance(TokenVerifier):
    """What was rejected nowhere is taken off all the same."""

    def residual(self, p, proposal, accepted):
        longer = dataclasses.replace(proposal, length=proposal.length + 1)
        return super().residual(p, longer, accepted)


class BonusFromDraft(TokenVerifier):
    def residual(self, p, proposal, accepted):
        bonus = (accepted == proposal.length)[:, None]
        return jnp.where(bonus, proposal.law[:, -1], super().residual(p, proposal, accepted))


class ResidualBySoftmax(TokenVerifier):
    def residual(self, p, proposal, accepted):
        right = super().residual(p, proposal, accepted)
        rejected = (accepted < proposal.length)[:, None]
        return jnp.where(rejected, jax.nn.softmax(right, axis=-1), right)


class ResidualOnePlaceLate(TokenVerifier):
    def residual(self, p, proposal, accepted):
        late = jnp.minimum(accepted + 1, proposal.tokens.shape[1])
        return super().residual(p, proposal, late)


@dataclasses.dataclass(frozen=True)
class ChangedRatio(TokenVerifier):
    """Accepts with a factor times p / q, and something added."""

    factor: float = 1.0
    plus: float = 0.0

    def acceptance(self, p, proposal):
        at_least = survival(p, proposal)
        before = jnp.concatenate([jnp.ones_like(at_least[:, :1]), at_least[:, :-1]], axis=1)
        ratio = at_least / jnp.where(before > 0, before, 1.0)
        at_least = jnp.cumprod(jnp.minimum(ratio * self.factor + self.plus, 1.0), axis=1)
        one, none = jnp.ones_like(p[:, :1, 0]), jnp.zeros_like(p[:, :1, 0])
        return jnp.concatenate([one, at_least], 1) - jnp.concatenate([at_least, none], 1)


def test_the_changed_ratio_of_no_change_is_right():
    check_by_summation(decoder(verifier=ChangedRatio()))


VERIFIERS = {
    "residual left out": ResidualLeftOut(),
    "residual taken after full acceptance": ResidualAfterFullAcceptance(),
    "bonus token from q": BonusFromDraft(),
    "residual by softmax": ResidualBySoftmax(),
    "residual of the next place": ResidualOnePlaceLate(),
    "ratio + 0.01": ChangedRatio(plus=0.01),
    "lenience left on": ChangedRatio(factor=1 / 0.9),
}


@pytest.mark.parametrize("bug", VERIFIERS)
def test_summation_finds(bug):
    with pytest.raises(AssertionError, match="total variation"):
        check_by_summation(decoder(verifier=VERIFIERS[bug]))


@pytest.mark.parametrize("bug", ["residual left out", "bonus token from q"])
def test_sampling_finds_a_wrong_verifier(bug):
    with pytest.raises(AssertionError, match="chi-square"):
        check_by_sampling(decoder(verifier=VERIFIERS[bug]))


# ------------------------------------------------------------------- bugs of the loop and drafts


def same_uniform_twice(monkeypatch):
    monkeypatch.setattr(sampling, "NEXT", sampling.ACCEPT)


def draft_and_acceptance_share_a_uniform(monkeypatch):
    monkeypatch.setattr(sampling, "ACCEPT", sampling.DRAFT)


def key_without_the_length(monkeypatch):
    monkeypatch.setattr(sampling, "round_keys", lambda rows, lengths: rows)


def target_keeps_one_token_too_few(monkeypatch):
    def short(self, state, lengths):
        return dataclasses.replace(state, lengths=jnp.maximum(lengths - 1, 0))

    monkeypatch.setattr(testing.TableLanguageModel, "truncate", short)


def target_keeps_one_token_too_many(monkeypatch):
    def long(self, state, lengths):
        return dataclasses.replace(state, lengths=jnp.minimum(state.lengths, lengths + 1))

    monkeypatch.setattr(testing.TableLanguageModel, "truncate", long)


def target_is_never_rewound(monkeypatch):
    monkeypatch.setattr(testing.TableLanguageModel, "truncate", lambda self, state, lengths: state)


def temperature_left_off_the_target(monkeypatch):
    right = decode_round.verify

    def cold(decoder, logits, request, proposal, keys):
        settings = dataclasses.replace(
            request.sampling, temperature=jnp.ones_like(request.sampling.temperature)
        )
        return right(
            decoder, logits, dataclasses.replace(request, sampling=settings), proposal, keys
        )

    monkeypatch.setattr(decode_round, "verify", cold)


def draft_by_argmax_but_accepted_by_ratio(monkeypatch):
    monkeypatch.setattr(ModelDraft, "propose", _argmax_with_law)


def draft_law_before_the_temperature(monkeypatch):
    monkeypatch.setattr(ModelDraft, "propose", _law_without_temperature)


_propose = ModelDraft.propose


def _argmax_with_law(self, weights, state, context, keys, gamma, draw):
    def best(logits, place):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), draw(logits, place)[1]

    return _propose(self, weights, state, context, keys, gamma, best)


def _law_without_temperature(self, weights, state, context, keys, gamma, draw):
    def other(logits, place):
        return draw(logits, place)[0], jax.nn.softmax(logits, axis=-1)

    return _propose(self, weights, state, context, keys, gamma, other)


LOOPS = [
    same_uniform_twice,
    draft_and_acceptance_share_a_uniform,
    key_without_the_length,
    target_keeps_one_token_too_few,
    target_keeps_one_token_too_many,
    target_is_never_rewound,
    temperature_left_off_the_target,
    draft_by_argmax_but_accepted_by_ratio,
    draft_law_before_the_temperature,
]


def test_sampling_passes_without_a_bug():
    check_by_sampling(decoder(verifier=Named(name="none")), temperature=0.6)


@pytest.mark.parametrize("bug", LOOPS)
def test_sampling_finds(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="chi-square"):
        check_by_sampling(decoder(verifier=Named(name=bug.__name__)), temperature=0.6)


# ------------------------------------------------------------- bugs that greedy decoding shows


def check_equals_autoregressive(name: str) -> None:
    """Temperature 0, every budget from 0 to 6, EOS id 2: tokens, lengths and end reasons."""
    budgets = jnp.arange(7, dtype=jnp.int32)
    request = Request(jnp.ones((7, 1), jnp.int32), budgets, sampling.make(7), None)
    fast = decoder(mode="greedy", max_length=6, eos_id=2, verifier=Named(name=name))
    base = autoregressive(decoder(mode="greedy", max_length=6, eos_id=2))
    # Rows that end after four tokens: with EOS drafted, and with EOS in place of a wrong draft.
    for seed in (26, 27):
        some = weights(seed, seed, scale=3.0)
        some["draft"] = {"logits": some["draft"]["logits"].at[1].set(0.0)}
        slow, got = loop.decode(base, some, request), loop.decode(fast, some, request)
        assert int(slow.lengths.max()) == 4
        for field in ("tokens", "lengths", "end_reason"):
            same = getattr(got, field) == getattr(slow, field)
            assert same.all(), f"{field} differ from autoregressive decoding"


def eos_in_the_block_ignored(monkeypatch):
    right = decode_round.emitted_block

    def late(decoder, proposal, verdict, room, live):
        block, count, _ = right(
            dataclasses.replace(decoder, eos_id=None), proposal, verdict, room, live
        )
        last = jnp.take_along_axis(block, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        return block, count, live & (last == decoder.eos_id)

    monkeypatch.setattr(decode_round, "emitted_block", late)


def budget_overshot(monkeypatch):
    right = decode_round.emitted_block

    def more(decoder, proposal, verdict, room, live):
        return right(decoder, proposal, verdict, room + decoder.gamma, live)

    monkeypatch.setattr(decode_round, "emitted_block", more)


def rejected_token_committed(monkeypatch):
    right = TokenVerifier.verify_greedy

    def one_more(self, best, proposal):
        verdict = right(self, best, proposal)
        accepted = jnp.minimum(verdict.accepted + 1, proposal.length)
        return dataclasses.replace(verdict, accepted=accepted)

    monkeypatch.setattr(TokenVerifier, "verify_greedy", one_more)


def test_greedy_check_passes_without_a_bug():
    check_equals_autoregressive("no bug")


@pytest.mark.parametrize(
    "bug", [eos_in_the_block_ignored, budget_overshot, rejected_token_committed]
)
def test_greedy_finds(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="differ from autoregressive"):
        check_equals_autoregressive(bug.__name__)


# --------------------------------------- bugs of the draft's cache, which change no output's law


def check_full_acceptance(name: str) -> None:
    """A draft that is the target has all of its tokens accepted: 12 tokens in 4 rounds of 3."""
    tables = testing.random_tables(MODEL, 0, scale=3.0)
    always = decoder(
        draft=ModelDraft(MODEL, "block"),
        mode="greedy",
        max_length=12,
        verifier=Named(name=name),
    )
    request = Request(
        jnp.ones((1, 1), jnp.int32), jnp.full((1,), 12, jnp.int32), sampling.make(1), None
    )
    output = loop.decode(always, {"target": tables, "draft": tables}, request)
    assert int(output.statistics.target_runs[0]) == 4, "not fully accepted"
    assert int(output.statistics.accepted[0]) == 8


def draft_takes_the_last_token_for_fed(monkeypatch):
    def commit(self, state, outcome):
        return self.model.truncate(state, outcome.lengths)

    monkeypatch.setattr(ModelDraft, "commit", commit)


def draft_never_rewound(monkeypatch):
    # What was rejected stays; the next round's lag is then negative, and is taken for 0.
    def commit(self, state, outcome):
        return self.model.truncate(state, jnp.minimum(state.lengths + 1, outcome.lengths + 1))

    monkeypatch.setattr(ModelDraft, "commit", commit)


def test_full_acceptance_without_a_bug():
    check_full_acceptance("no bug")


@pytest.mark.parametrize("bug", [draft_takes_the_last_token_for_fed, draft_never_rewound])
def test_full_acceptance_finds(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="not fully accepted"):
        check_full_acceptance(bug.__name__)
