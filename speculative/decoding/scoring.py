"""Teacher-forced figures about a pair: alpha by the paper's definition, and top-two gaps."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from speculative import sampling
from speculative.types import LanguageModel


def logits_of(
    model: LanguageModel, weights, inputs, tokens: Int[Array, "B L"], start_id: int
) -> jax.Array:
    """Raw logits [B, L, V] of every place given the tokens before it, in one `extend`."""
    length = tokens.shape[1]
    start = jnp.full((tokens.shape[0], 1), start_id, tokens.dtype)
    fed = jnp.concatenate([start, tokens[:, :-1]], axis=1)
    state = model.prefill(weights, inputs, None, length)
    return model.extend(weights, state, fed)[0]


@partial(jax.jit, static_argnums=(0, 1), static_argnames=("mode", "start_id"))
def acceptance(
    target: LanguageModel,
    draft: LanguageModel,
    weights,
    inputs: Int[Array, "B S"],
    tokens: Int[Array, "B L"],
    settings: sampling.Sampling,
    *,
    mode: str,
    start_id: int = 0,
) -> jax.Array:
    """`sum_x min(p, q)` [B, L] at every place of `tokens` (the paper's Corollary 3.6).

    alpha is its mean over tokens that the *target* generated; both laws are the adjusted ones.
    At temperature 0 both are one-hot, and the sum says whether the argmaxes agree.
    """
    p = logits_of(target, weights["target"], inputs, tokens, start_id)
    q = logits_of(draft, weights["draft"], inputs, tokens, start_id)
    if mode == "greedy":
        agree = sampling.argmax(p, settings) == sampling.argmax(q, settings)
        return agree.astype(jnp.float32)
    p, q = (sampling.standardise(logits, settings, mode) for logits in (p, q))
    return jnp.sum(jnp.minimum(p, q), axis=-1)


@partial(jax.jit, static_argnums=0, static_argnames=("start_id",))
def top_two_gap(
    target: LanguageModel,
    weights,
    inputs: Int[Array, "B S"],
    tokens: Int[Array, "B L"],
    settings: sampling.Sampling,
    *,
    start_id: int = 0,
) -> jax.Array:
    """The target's lead of its best over its second logit [B, L], given the tokens before."""
    logits = logits_of(target, weights["target"], inputs, tokens, start_id)
    best = jax.lax.top_k(sampling.adjusted_logits(logits, settings), 2)[0]
    return best[:, :, 0] - best[:, :, 1]
