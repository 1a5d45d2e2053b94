"""The model draft: a smaller language model with a cache of its own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from speculative.types import Context, Draw, LanguageModel, Outcome, Proposal


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """Drafts autoregressively with `model`.

    Its state is the model's. The cache holds the committed tokens but for the last one or two: one
    is fed in every first step anyway, and after a fully accepted block the last drafted token was
    never fed either. The first step therefore feeds two places, right-padded, and takes the logits
    at the last real one, so that a fully accepted block is no special case.
    """

    model: LanguageModel

    @property
    def vocab_size(self) -> int:
        """Width of the draft's law."""
        return self.model.vocab_size

    def start(self, weights, inputs, prompt, max_length: int):
        """The draft's own encoder and an empty cache."""
        return self.model.prefill(weights, inputs, prompt, max_length)

    def propose(self, weights, state, context: Context, keys, gamma: int, draw: Draw):
        """Draw gamma tokens one after another; each is drawn through `draw`."""
        del keys  # every draw goes through `draw`
        batch = context.lengths.shape[0]
        behind = state.lengths
        lag = context.lengths - behind  # 0, or 1 after a fully accepted block
        places = behind[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        fed = jnp.take_along_axis(context.tokens, places, axis=1)
        logits, state = self.model.extend(weights, state, fed, logits_at=lag[:, None])
        state = self.model.truncate(state, context.lengths + 1)
        token, law = draw(logits[:, 0], 0)

        def next_one(carry, place):
            state, token = carry
            logits, state = self.model.extend(weights, state, token[:, None])
            token, law = draw(logits[:, 0], place)
            return (state, token), (token, law)

        later = jnp.arange(1, gamma, dtype=jnp.int32)
        (state, _), (tokens, laws) = lax.scan(next_one, (state, token), later)
        tokens = jnp.concatenate([token[None], tokens], axis=0).T
        if law is not None:
            laws = jnp.swapaxes(jnp.concatenate([law[None], laws], axis=0), 0, 1)
        length = jnp.full((batch,), gamma, jnp.int32)
        return Proposal(tokens, length, laws if law is not None else None), state

    def commit(self, state, outcome: Outcome):
        """Keep what was drafted and emitted; the rest is overwritten later."""
        return self.model.truncate(state, jnp.minimum(state.lengths, outcome.lengths))
