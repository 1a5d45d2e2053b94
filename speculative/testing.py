"""Toy models of known law, and the exact law of what a decoder emits.

A new draft or verifier is right if the law of the *whole output* is the target's. On a vocabulary
of a few tokens that law can be computed without any sampling: `exact_law` sums over everything that
a draft can propose and over every number of tokens that a verifier can accept, through the draft's
own `propose` and the verifier's own `acceptance` and `residual`.

    with jax.enable_x64(True):
        model = TableLanguageModel(vocab_size=3)
        weights = {"target": random_tables(model, seed=0), "draft": random_tables(model, seed=1)}
        decoder = Decoder(model, ModelDraft(model), gamma=2, max_length=4, mode="sampled")
        got = exact_law(decoder, weights, sampling.make(1, temperature=0.7))
        wanted = target_law(decoder, weights, sampling.make(1, temperature=0.7))
        assert total_variation(got, wanted) < 1e-9
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from speculative import sampling
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import Decoder
from speculative.drafts.model import ModelDraft
from speculative.errors import ConfigError
from speculative.types import Context, Outcome, Proposal
from speculative.verification import TokenVerifier

# A law of sequences: the emitted tokens of a row, EOS included, to their probability.
SequenceLaw = dict[tuple[int, ...], float]


# ------------------------------------------------------------------------------------- toy models


@partial(jax.tree_util.register_dataclass, data_fields=["fed", "source", "lengths"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TableState:
    """The cache of a `TableLanguageModel`.

    Attributes:
      fed: [B, T] int32, the tokens that were fed, by position; stale beyond `lengths`.
      source: [B] int32, the sum of the encoder's tokens.
      lengths: [B] int32, positions written and valid.
    """

    fed: jax.Array
    source: jax.Array
    lengths: jax.Array


@dataclasses.dataclass(frozen=True)
class TableLanguageModel:
    """A `LanguageModel` whose law is read from a table.

    The next token's logits are `weights["logits"][context, last]`: `last` is the token just fed and
    `context` a number that *every* cached token and its position go into,

        context = (sum of inputs + sum over positions j of (2 j + 1) (token_j + 1)) mod contexts,

    read, like attention, from the slots up to the token's own. A token that was not written, was
    written one place off, or should have been forgotten, changes the law.

    Attributes:
      vocab_size: width of the logits.
      contexts: how many tables there are; 1 makes a Markov chain. With a power of two and a
        vocabulary no larger, every single token matters.
    """

    vocab_size: int = 3
    contexts: int = 4

    def prefill(self, weights, inputs, prompt, max_length: int) -> TableState:
        """An empty cache of `max_length` positions, into which `prompt` [B, P] is fed."""
        batch = inputs.shape[0]
        state = TableState(
            fed=jnp.zeros((batch, max_length), jnp.int32),
            source=jnp.sum(inputs, axis=1, dtype=jnp.int32),
            lengths=jnp.zeros((batch,), jnp.int32),
        )
        if prompt is None or prompt.shape[1] == 0:
            return state
        return self.extend(weights, state, prompt)[1]

    def extend(self, weights, state: TableState, tokens, *, logits_at=None, features=False):
        """Feed tokens [B, M]; logits [B, M or K, V] in the tables' dtype, and the new state.

        The features, where they are asked for, are all places' logits.
        """
        fed = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))(
            state.fed, tokens, state.lengths
        )
        slots = jnp.arange(fed.shape[1], dtype=jnp.int32)
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        places = state.lengths[:, None] + steps[None]
        terms = (2 * slots + 1)[None] * (fed + 1)
        seen = slots[None, None] <= places[:, :, None]
        digest = jnp.sum(jnp.where(seen, terms[:, None], 0), axis=2, dtype=jnp.int32)
        context = (digest + state.source[:, None]) % self.contexts
        last = jnp.take_along_axis(fed, places, axis=1)
        every = weights["logits"][context, last]
        logits = every
        if logits_at is not None:
            logits = jnp.take_along_axis(every, logits_at[:, :, None], axis=1)
        width = jnp.asarray(tokens.shape[1], jnp.int32)
        state = TableState(fed, state.source, state.lengths + width)
        return (logits, every, state) if features else (logits, state)

    def truncate(self, state: TableState, lengths) -> TableState:
        """Forget all but the first lengths[b] positions of row b."""
        return dataclasses.replace(state, lengths=lengths.astype(jnp.int32))


def random_tables(
    model: TableLanguageModel, seed: int, *, scale: float = 1.0, dtype: Any = None
) -> dict[str, jax.Array]:
    """Weights of a `TableLanguageModel`: normal logits of standard deviation `scale`.

    `dtype` is float64 where JAX has it enabled, else float32.
    """
    shape = (model.contexts, model.vocab_size, model.vocab_size)
    logits = np.random.default_rng(seed).normal(scale=scale, size=shape)
    return {"logits": jnp.asarray(logits, dtype or _widest())}


def tables_of_laws(
    model: TableLanguageModel, laws: np.ndarray | Sequence[Any], *, dtype: Any = None
) -> dict[str, jax.Array]:
    """Weights whose law at temperature 1 is `laws`, which broadcasts to [contexts, V, V]."""
    shape = (model.contexts, model.vocab_size, model.vocab_size)
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(laws, np.float64))
    return {"logits": jnp.asarray(np.broadcast_to(logits, shape), dtype or _widest())}


def chain_tables(model: TableLanguageModel, step: int = 1) -> dict[str, jax.Array]:
    """Weights of the model that is certain that token t is followed by t + step (mod V)."""
    certain = np.roll(np.eye(model.vocab_size), step, axis=1)
    return tables_of_laws(model, certain)


def _widest():
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


@dataclasses.dataclass(frozen=True)
class PointMassDraft(ModelDraft):
    """Proposes its model's argmaxes at every temperature, as point masses (`law` is None)."""

    def propose(self, weights, state, context, keys, gamma, draw):
        """Draft gamma tokens; `draw` is not used, since nothing is drawn."""
        del draw

        def best(logits, place):
            del place
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), None

        return super().propose(weights, state, context, keys, gamma, best)


# --------------------------------------------------------------------------------- exact laws


def exact_law(
    decoder: Decoder,
    weights: Mapping[str, Any],
    settings: sampling.Sampling,
    *,
    budget: int | None = None,
    inputs: Sequence[int] = (1,),
) -> SequenceLaw:
    """The law of a row that `decoder` emits, by summation; nothing is sampled.

    From every prefix that can be committed, every draft x of gamma tokens is forced upon
    `decoder.draft.propose` and weighed with the law that the draft reports for it,
    q(x_1) q(x_2 | x_1) ..; for every number n that can be accepted,

        P(prefix, x_1 .. x_n, t) += P(prefix) q(x) acceptance(n | x) residual(t | x, n),

    and what that emits is cut at EOS and at the budget. A budget above gamma + 1 makes it at least
    two rounds. The cost is V^(budget - 1 + gamma) rows, of one program.

    Args:
      decoder: of mode `sampled` or `mixed`; its draft has to draw through the `draw` that it is
        handed, to take a prompt in `start`, and to accept a shorter length in `commit`.
      weights: as for `decoding.loop.decode`; in float64 under `jax.enable_x64(True)`, where sums
        should be exact to 1e-12.
      settings: of one row (`sampling.make(1, ...)`).
      budget: tokens to emit at most; None is `decoder.max_length`.
      inputs: the encoder's tokens.

    Returns:
      Sequence -> probability, of all that have any.

    Raises:
      ValueError: the weights of a prefix's drafts do not sum to 1: the draft's tokens are not
        drawn from the law that it reports.
      ConfigError: the decoder's mode is `greedy`.
    """
    budget = decoder.max_length if budget is None else budget
    vocab, gamma = decoder.target.vocab_size, decoder.gamma
    prefixes = _prefixes(vocab, budget, decoder.eos_id)
    drafts = list(itertools.product(range(vocab), repeat=gamma))
    rows = [(prefix, draft) for prefix in prefixes for draft in drafts]
    weight, acceptance, residual = _on_prefixes(
        _round_laws,
        decoder,
        weights,
        settings,
        budget,
        inputs,
        [r[0] for r in rows],
        np.asarray([r[1] for r in rows], np.int32).reshape(len(rows), gamma),
    )
    weight = weight.reshape(len(prefixes), len(drafts))
    wrong = np.abs(weight.sum(axis=1) - 1.0) > 1e-5
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"after {prefixes[at]} the drafts' probabilities sum to {weight[at].sum():.6f}, not 1: "
            "the draft's tokens are not drawn from the law that it reports"
        )
    law: SequenceLaw = {}
    mass: SequenceLaw = {(): 1.0}
    for i, prefix in enumerate(prefixes):  # from short to long: every way to a prefix is before it
        here = mass.pop(prefix, 0.0)
        if here == 0.0:
            continue
        for j, draft in enumerate(drafts):
            row = i * len(drafts) + j
            for n in range(gamma + 1):
                share = here * weight[i, j] * acceptance[row, n]
                if share == 0.0:
                    continue
                for token in range(vocab):
                    part = share * residual[row, n, token]
                    if part == 0.0:
                        continue
                    emitted, ended = _cut(
                        (*prefix, *draft[:n], token), len(prefix), budget, decoder.eos_id
                    )
                    into = law if ended else mass
                    into[emitted] = into.get(emitted, 0.0) + float(part)
    return law


def target_law(
    decoder: Decoder,
    weights: Mapping[str, Any],
    settings: sampling.Sampling,
    *,
    budget: int | None = None,
    inputs: Sequence[int] = (1,),
) -> SequenceLaw:
    """The target's own law of a row, by the chain rule on its teacher-forced laws.

    No draft, verifier or round has a part in it. Arguments as for `exact_law`.
    """
    budget = decoder.max_length if budget is None else budget
    decoder = autoregressive(dataclasses.replace(decoder, verifier=TokenVerifier()))
    decoder = dataclasses.replace(decoder, positions=None)  # one program whatever the decoder is
    prefixes = _prefixes(decoder.target.vocab_size, budget, decoder.eos_id)
    (p,) = _on_prefixes(_next_laws, decoder, weights, settings, budget, inputs, prefixes)
    law: SequenceLaw = {}
    mass: SequenceLaw = {(): 1.0}
    for prefix, following in zip(prefixes, p, strict=True):
        here = mass.pop(prefix, 0.0)
        for token, chance in enumerate(following):
            if here * chance > 0:
                emitted, ended = _cut((*prefix, token), len(prefix), budget, decoder.eos_id)
                (law if ended else mass)[emitted] = here * float(chance)
    return law


def total_variation(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Half the sum of absolute differences; NaN where a law has one."""
    return 0.5 * float(sum(abs(one.get(k, 0.0) - other.get(k, 0.0)) for k in {**one, **other}))


def _prefixes(vocab: int, budget: int, eos_id: int | None) -> list[tuple[int, ...]]:
    """Everything from which a row goes on, from short to long."""
    tokens = [token for token in range(vocab) if token != eos_id]
    return [p for n in range(budget) for p in itertools.product(tokens, repeat=n)]


def _cut(sequence: tuple[int, ...], start: int, budget: int, eos_id: int | None):
    """(what is emitted of `sequence`, whether the row has ended); new tokens begin at `start`."""
    for place in range(start, min(len(sequence), budget)):
        if sequence[place] == eos_id:
            return sequence[: place + 1], True
    return sequence[:budget], len(sequence) >= budget


def _on_prefixes(function, decoder, weights, settings, budget, inputs, prefixes, *more):
    """`function` on one row for every prefix, as NumPy arrays."""
    if decoder.mode == "greedy":
        raise ConfigError(
            "Decoder.mode",
            expected="sampled or mixed",
            found="greedy",
            mend="A law of temperature 0 is that of mode mixed",
        )
    rows, room = len(prefixes), budget + decoder.gamma + 1
    tokens = np.full((rows, 1 + room), decoder.pad_id, np.int32)
    tokens[:, 0] = decoder.start_id
    for row, prefix in enumerate(prefixes):
        tokens[row, 1 : 1 + len(prefix)] = prefix
    lengths = np.asarray([len(prefix) for prefix in prefixes], np.int32)
    source = np.tile(np.asarray(inputs, np.int32)[None], (rows, 1))

    def spread(value):
        return None if value is None else jnp.broadcast_to(value, (rows,))

    settings = dataclasses.replace(
        settings,
        **{n: spread(getattr(settings, n)) for n in ("temperature", "top_k", "top_p", "min_p")},
    )
    out = function(decoder, budget, weights, settings, source, tokens, lengths, *more)
    return [np.asarray(part, np.float64) for part in out]


@partial(jax.jit, static_argnums=(0, 1))
def _round_laws(decoder: Decoder, budget: int, weights, settings, inputs, tokens, lengths, forced):
    """Of one round: the weight of each row's draft, P(n accepted), and the laws after n."""
    rows, gamma = forced.shape
    room = tokens.shape[1] - 1
    prompt = tokens[:, :budget]
    state = decoder.target.prefill(weights["target"], inputs, prompt, room)
    state = decoder.target.truncate(state, lengths)
    if decoder.draft is None:
        proposal = Proposal(forced, jnp.zeros((rows,), jnp.int32), None)
        weight = jnp.ones((rows,))
    else:
        proposal = _forced_proposal(
            decoder, weights, settings, inputs, tokens, lengths, forced, state
        )
        weight = _weight(proposal, forced)
    last = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
    block = jnp.concatenate([last, proposal.tokens], axis=1)
    logits, _ = decoder.target.extend(weights["target"], state, block)
    p = sampling.standardise(logits, settings, decoder.mode)
    residual = [
        decoder.verifier.residual(p, proposal, jnp.full((rows,), n, jnp.int32))
        for n in range(gamma + 1)
    ]
    return weight, decoder.verifier.acceptance(p, proposal), jnp.stack(residual, axis=1)


def _forced_proposal(decoder, weights, settings, inputs, tokens, lengths, forced, target_state):
    rows, room = tokens.shape[0], tokens.shape[1] - 1
    draft = decoder.draft
    # As after a round that ended at `lengths`: more was fed, and `commit` takes it back.
    state = draft.start(weights["draft"], inputs, tokens[:, : room - decoder.gamma - 1], room)
    state = draft.commit(state, Outcome(jnp.zeros_like(lengths), lengths))

    def draw(logits, place):
        law = sampling.standardise(logits, settings, decoder.mode)
        return lax.dynamic_index_in_dim(forced, place, axis=1, keepdims=False), law

    live = jnp.ones((rows,), bool)
    context = Context(tokens, lengths, live, inputs, target_state)
    ids = jnp.arange(rows, dtype=jnp.int32)
    keys = sampling.row_keys(sampling.base_key(0), ids, jnp.zeros_like(ids))
    return draft.propose(weights["draft"], state, context, keys, decoder.gamma, draw)[0]


def _weight(proposal: Proposal, forced):
    """P(the draft proposes `forced`); places that are not proposed count once, as token 0."""
    gamma = forced.shape[1]
    proposed = jnp.arange(gamma, dtype=jnp.int32)[None] < proposal.length[:, None]
    same = jnp.where(proposed, proposal.tokens == forced, forced == 0)
    chance = same.astype(jnp.float32)
    if proposal.law is not None:
        q = jnp.take_along_axis(proposal.law, forced[:, :, None], axis=2)[:, :, 0]
        chance = jnp.where(proposed, q, jnp.ones_like(q)) * same.astype(q.dtype)
    return jnp.prod(chance, axis=1)


@partial(jax.jit, static_argnums=(0, 1))
def _next_laws(decoder: Decoder, budget: int, weights, settings, inputs, tokens, lengths):
    """The target's law after each prefix."""
    target = decoder.target
    state = target.prefill(weights["target"], inputs, None, tokens.shape[1])
    logits, _ = target.extend(weights["target"], state, tokens[:, :budget])
    last = jnp.take_along_axis(logits, lengths[:, None, None], axis=1)
    return (sampling.standardise(last, settings, decoder.mode)[:, 0],)
