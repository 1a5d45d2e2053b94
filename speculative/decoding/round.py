"""One round of speculative decoding: propose, extend, verify, commit.

This is the only loop body there is. `loop.run` puts it into a `lax.while_loop`, `loop.rounds` steps
it from Python, and autoregressive decoding is the same round with gamma 0 and no draft.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from speculative import sampling
from speculative.decoding import statistics as stats
from speculative.errors import ConfigError
from speculative.types import (
    Context,
    Draft,
    LanguageModel,
    Leaf,
    Outcome,
    Proposal,
    State,
    Verdict,
)
from speculative.verification import TokenVerifier, Verifier, decide

RUNNING, ENDED_BY_EOS, ENDED_BY_BUDGET = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Everything static about a decode: one `Decoder` compiles once per shape of batch.

    Attributes:
      target: the model whose law the output has.
      draft: proposes; None with gamma 0 is autoregressive decoding.
      gamma: drafted tokens per target run.
      max_length: most tokens a row may emit; a row's own budget may be smaller.
      mode: `greedy`, `sampled` or `mixed` (see `sampling.mode_of`).
      eos_id: ends a row, and is part of its output; None never ends one before its budget.
      start_id: the decoder's first token (T5: the pad id).
      pad_id: what stands behind a row's end.
      verifier: decides what is accepted.
      positions: cache positions to allocate; None is as many as gamma needs. Set it where two
        decoders are compared, so that both run on states of the same size.
    """

    target: LanguageModel
    draft: Draft | None
    gamma: int
    max_length: int
    mode: str = "greedy"
    eos_id: int | None = 1
    start_id: int = 0
    pad_id: int = 0
    verifier: Verifier = TokenVerifier()
    positions: int | None = None

    def __post_init__(self):
        if self.gamma < 0 or (self.gamma > 0) != (self.draft is not None):
            raise ConfigError(
                "Decoder.gamma",
                expected="at least 1 with a draft, 0 without one",
                found=f"gamma {self.gamma} with draft {self.draft!r}",
            )
        if self.max_length < 1:
            raise ConfigError("Decoder.max_length", expected="at least 1", found=self.max_length)
        if self.mode not in sampling.MODES:
            raise ConfigError("Decoder.mode", expected=f"one of {sampling.MODES}", found=self.mode)
        if self.positions is not None and self.positions < self.needed_positions:
            raise ConfigError(
                "Decoder.positions",
                expected=f"at least {self.needed_positions}",
                found=self.positions,
            )
        drafted = getattr(self.draft, "vocab_size", self.target.vocab_size)
        if drafted != self.target.vocab_size:
            raise ConfigError(
                "The draft's vocabulary",
                expected=f"the target's width {self.target.vocab_size}",
                found=drafted,
                mend="Use a draft with the target's vocabulary",
            )

    @property
    def needed_positions(self) -> int:
        """Cache positions: the longest output and the last round's overshoot."""
        return self.max_length + self.gamma + 1

    @property
    def allocated(self) -> int:
        """Cache positions that a state of this decoder has."""
        return self.positions or self.needed_positions


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["inputs", "budgets", "sampling", "keys"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, constant through the loop.

    Attributes:
      inputs: [B, S] int32 encoder tokens.
      budgets: [B] int32, most tokens to emit; `Decoder.max_length` bounds them.
      sampling: the law's settings.
      keys: [B] row keys (`sampling.row_keys`); None in greedy mode.
    """

    inputs: Leaf
    budgets: Leaf
    sampling: sampling.Sampling
    keys: Leaf | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "end_reason", "target", "draft", "statistics"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The loop's carry.

    Attributes:
      tokens: [B, 1 + positions] int32: the start token, what was emitted, padding.
      lengths: [B] int32 emitted tokens. The target's cache holds places 0 .. lengths[b]-1 of
        `tokens`: all but the last committed token.
      end_reason: [B] int32: RUNNING, ENDED_BY_EOS or ENDED_BY_BUDGET.
      target, draft: states of the two models.
      statistics: counts.
    """

    tokens: Leaf
    lengths: Leaf
    end_reason: Leaf
    target: State
    draft: State
    statistics: stats.Statistics

    @property
    def live(self) -> jax.Array:
        """[B] rows that have not ended."""
        return self.end_reason == RUNNING


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["proposal", "verdict", "emitted", "live"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What happened in a round, for traces: `emitted` [B] tokens after the cut."""

    proposal: Proposal
    verdict: Verdict
    emitted: Leaf
    live: Leaf


def propose(decoder: Decoder, weights, request: Request, state: DecodeState, keys):
    """The draft's part of a round: (Proposal, draft state). Nothing is drafted at gamma 0."""
    batch = request.inputs.shape[0]
    if decoder.draft is None:
        empty = jnp.zeros((batch, 0), jnp.int32)
        return Proposal(empty, jnp.zeros((batch,), jnp.int32), None), state.draft

    if decoder.mode != "greedy":
        # Of all places at once: a draft's steps come one after another.
        places = jnp.arange(decoder.gamma, dtype=jnp.int32)
        drawn = jax.vmap(lambda place: sampling.uniforms(keys, place, sampling.DRAFT))(places)

    def draw(logits, place):
        if decoder.mode == "greedy":
            return sampling.argmax(logits, request.sampling), None
        if isinstance(place, int) and not 0 <= place < decoder.gamma:
            raise ValueError(f"draw's place is {place}, of {decoder.gamma}")
        law = sampling.standardise(logits, request.sampling, decoder.mode)
        return sampling.draw(law, drawn[place]), law

    context = Context(state.tokens, state.lengths, state.live, request.inputs, state.target)
    return decoder.draft.propose(weights["draft"], state.draft, context, keys, decoder.gamma, draw)


def verify(decoder: Decoder, logits: jax.Array, request: Request, proposal: Proposal, keys):
    """The verifier's part: from the target's raw logits [B, G+1, V] to a Verdict."""
    if decoder.mode == "greedy":
        return decoder.verifier.verify_greedy(sampling.argmax(logits, request.sampling), proposal)
    law = sampling.standardise(logits, request.sampling, decoder.mode)
    return decide(
        decoder.verifier,
        law,
        proposal,
        sampling.uniforms(keys, 0, sampling.ACCEPT),
        sampling.uniforms(keys, 0, sampling.NEXT),
    )


def emitted_block(
    decoder: Decoder, proposal: Proposal, verdict: Verdict, room: Int[Array, "B"], live: jax.Array
):
    """What a round emits, to the token exactly.

    Args:
      room: [B] tokens that the row's budget still allows.

    Returns:
      (block [B, G+1] with padding behind what is emitted, count [B], ended by EOS [B]).
    """
    places = jnp.arange(decoder.gamma + 1, dtype=jnp.int32)[None]
    accepted = verdict.accepted[:, None]
    drafted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    block = jnp.where(places < accepted, drafted, verdict.next_token[:, None])
    count = jnp.where(live, jnp.minimum(verdict.accepted + 1, room), 0)
    if decoder.eos_id is None:
        by_eos = jnp.zeros_like(live)
    else:
        is_eos = (block == decoder.eos_id) & (places < count[:, None])
        by_eos = jnp.any(is_eos, axis=1)
        first = jnp.argmax(is_eos, axis=1).astype(jnp.int32)
        count = jnp.where(by_eos, first + 1, count)
    return jnp.where(places < count[:, None], block, decoder.pad_id), count, by_eos


def decode_round(
    decoder: Decoder, weights, request: Request, state: DecodeState
) -> tuple[DecodeState, RoundRecord]:
    """One target run and what it yields: 1 to gamma + 1 tokens for every live row.

    Args:
      weights: {"target": ..., "draft": ...} as prepared by the models.

    Consumes one key per row and round, folded from the row's committed length.
    """
    live = state.live
    keys = None
    if decoder.mode != "greedy":
        keys = sampling.round_keys(request.keys, state.lengths)
    proposal, draft_state = propose(decoder, weights, request, state, keys)

    last = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)
    block = jnp.concatenate([last, proposal.tokens], axis=1)
    logits, target_state = decoder.target.extend(weights["target"], state.target, block)
    verdict = verify(decoder, logits, request, proposal, keys)

    budgets = jnp.minimum(request.budgets, decoder.max_length)
    room = budgets - state.lengths
    emitted, count, by_eos = emitted_block(decoder, proposal, verdict, room, live)
    lengths = state.lengths + count
    by_budget = lengths >= budgets
    reason = jnp.where(by_eos, ENDED_BY_EOS, jnp.where(by_budget, ENDED_BY_BUDGET, RUNNING))
    reason = jnp.where(live, reason, state.end_reason).astype(jnp.int32)
    accepted = jnp.minimum(verdict.accepted, count)

    state = DecodeState(
        tokens=_write(state.tokens, emitted, state.lengths + 1),
        lengths=lengths,
        end_reason=reason,
        target=decoder.target.truncate(target_state, lengths),
        draft=draft_state
        if decoder.draft is None
        else decoder.draft.commit(draft_state, Outcome(accepted, lengths)),
        statistics=stats.count_round(
            state.statistics,
            live=live,
            proposed=proposal.length,
            accepted=accepted,
            emitted=count,
            ended=reason != RUNNING,
        ),
    )
    return state, RoundRecord(proposal, verdict, count, live)


def _write(tokens: Int[Array, "B T"], block: Int[Array, "B N"], starts: Int[Array, "B"]):
    return jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))(
        tokens, block, starts
    )
