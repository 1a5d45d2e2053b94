"""The sampled form of any verifier: draw the number accepted, then the next token.

A verifier is two pure functions without randomness,

- `acceptance(p, proposal)`: P(number accepted = n) for n = 0 .. G,
- `residual(p, proposal, n)`: the law of the token that follows n accepted ones,

and `decide` composes these and nothing else, so that the exact enumerator, which sums over the same
two functions, proves the code that runs. Where the paper draws one uniform per drafted token, the
law of n is inverted here with a single one: n = #{k >= 1 : u < P(at least k accepted)}.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from speculative import sampling
from speculative.types import Proposal, Verdict


@runtime_checkable
class Verifier(Protocol):
    """Hashable, without arrays. `exact`: whether the output law is the target's."""

    exact: bool

    def acceptance(self, p: jax.Array, proposal: Proposal) -> jax.Array:
        """P(number accepted = n): [B, G+1] from the target's laws [B, G+1, V]."""

    def residual(self, p: jax.Array, proposal: Proposal, accepted: jax.Array) -> jax.Array:
        """The law [B, V] of the token after `accepted` [B] drafted ones."""

    def verify_greedy(self, best: jax.Array, proposal: Proposal) -> Verdict:
        """Temperature 0, from the target's argmaxes [B, G+1]."""


def decide(
    verifier: Verifier,
    p: Float[Array, "B N V"],
    proposal: Proposal,
    accept_uniform: Float[Array, "B"],
    next_uniform: Float[Array, "B"],
) -> Verdict:
    """One verdict per row; consumes two independent uniforms in [0, 1) per row."""
    law = verifier.acceptance(p, proposal)
    # Summed from the far end: exactly 0 where nothing can be accepted, exactly 1 where all must be.
    at_least = jnp.cumsum(law[:, ::-1], axis=1)[:, ::-1][:, 1:]
    accepted = jnp.sum(accept_uniform.astype(p.dtype)[:, None] < at_least, axis=1, dtype=jnp.int32)
    next_token = sampling.draw(verifier.residual(p, proposal, accepted), next_uniform)
    return Verdict(accepted, next_token)
