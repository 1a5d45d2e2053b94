"""Token verification: Algorithm 1 of the paper (section 2.3).

Its `acceptance` and `residual` are pure; `verification.decide` draws from them. A token of p = 0
makes the survival product 0, which no u in [0, 1) is below; p >= q makes the factor exactly 1.
There is no epsilon anywhere.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from speculative.types import Proposal, Verdict


def survival(
    p: Float[Array, "B N V"],
    proposal: Proposal,
) -> Float[Array, "B G"]:
    """P(at least k tokens are accepted) for k = 1 .. G: products of min(1, p / q).

    Args:
      p: the target's laws, N = G + 1 places.
      proposal: tokens and the laws they were drawn from (None: point masses, accepted with p).
    """
    gamma = proposal.tokens.shape[1]
    picked = proposal.tokens[:, :, None]
    p_token = jnp.take_along_axis(p[:, :gamma], picked, axis=2)[:, :, 0]
    if proposal.law is None:
        ratio = p_token
    else:
        q_token = jnp.take_along_axis(proposal.law, picked, axis=2)[:, :, 0]
        # A drawn token has q > 0; elsewhere (places beyond `length`) the value is masked below.
        safe = jnp.where(q_token > 0, q_token, jnp.ones_like(q_token))
        ratio = jnp.where(p_token >= q_token, jnp.ones_like(p_token), p_token / safe)
    proposed = jnp.arange(gamma, dtype=jnp.int32)[None] < proposal.length[:, None]
    return jnp.cumprod(jnp.where(proposed, ratio, jnp.zeros_like(ratio)), axis=1)


@dataclasses.dataclass(frozen=True)
class TokenVerifier:
    """Accept each drafted token with probability min(1, p / q); exact."""

    exact: bool = True

    def acceptance(self, p: Float[Array, "B N V"], proposal: Proposal) -> Float[Array, "B N"]:
        """P(number accepted = n), n = 0 .. G; every row sums to 1."""
        at_least = survival(p, proposal)
        one = jnp.ones((p.shape[0], 1), p.dtype)
        zero = jnp.zeros((p.shape[0], 1), p.dtype)
        return jnp.concatenate([one, at_least], 1) - jnp.concatenate([at_least, zero], 1)

    def residual(
        self, p: Float[Array, "B N V"], proposal: Proposal, accepted: Int[Array, "B"]
    ) -> Float[Array, "B V"]:
        """The law of the next token: norm(max(p - q, 0)) after a rejection, p after none.

        Where nothing is left of p - q (p = q: a rejection has probability 0), p itself.
        """
        p_next = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
        gamma = proposal.tokens.shape[1]
        if gamma == 0:
            return p_next
        place = jnp.minimum(accepted, gamma - 1)[:, None]
        if proposal.law is None:
            token = jnp.take_along_axis(proposal.tokens, place, axis=1)[:, 0]
            q_next = jax.nn.one_hot(token, p.shape[-1], dtype=p.dtype)
            left = jnp.where(q_next > 0, jnp.zeros_like(p_next), p_next)
        else:
            q_next = jnp.take_along_axis(proposal.law, place[:, :, None], axis=1)[:, 0]
            left = jnp.maximum(p_next - q_next, jnp.zeros_like(p_next))
        mass = jnp.sum(left, axis=-1, keepdims=True)
        rejected = (accepted < proposal.length)[:, None] & (mass > 0)
        safe = jnp.where(mass > 0, mass, jnp.ones_like(mass))
        return jnp.where(rejected, left / safe, p_next)

    def verify_greedy(self, best: Int[Array, "B N"], proposal: Proposal) -> Verdict:
        """Temperature 0: accept while the draft names the target's argmax; no law is needed."""
        gamma = proposal.tokens.shape[1]
        proposed = jnp.arange(gamma, dtype=jnp.int32)[None] < proposal.length[:, None]
        agrees = (proposal.tokens == best[:, :gamma]) & proposed
        accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
        return Verdict(accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0])
