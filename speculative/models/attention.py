"""Attention and T5's relative position bias, on explicit positions and masks.

Dimensions: B batch, M query positions, T key positions, H heads, D head_dim. Keys are [B, H, D, T]
throughout, values [B, H, T, D]: either has side by side what is computed together, positions in the
logits, features in the output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from speculative.models.config import T5Config

NUM_BUCKETS = 32
MAX_DISTANCE = 128
# T5X adds -1e10 to what must not be seen; softmax then gives exactly 0 beside any real logit.
MASKED = -1e10


def relative_buckets(distance: np.ndarray, *, bidirectional: bool) -> np.ndarray:
    """T5's bucket of each distance (query position - key position); FACTS 4.5.

    Args:
      distance: whole numbers of any shape.
      bidirectional: encoder (keys after the query get buckets 16 to 31) or decoder (keys after
        the query get bucket 0; they are masked anyway).

    Returns:
      int32 buckets in [0, 32), of the same shape.
    """
    n = np.asarray(distance)
    buckets, offset = NUM_BUCKETS, 0
    if bidirectional:
        buckets //= 2
        offset = (n < 0).astype(np.int32) * buckets
        n = np.abs(n)
    else:
        n = np.maximum(n, 0)
    exact = buckets // 2
    spread = np.log(n.astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (spread / np.log(MAX_DISTANCE / exact) * (buckets - exact)).astype(np.int32)
    return (offset + np.where(n < exact, n, np.minimum(far, buckets - 1))).astype(np.int32)


def encoder_bias(table: Float[Array, "H 32"], length: int) -> Float[Array, "H S S"]:
    """The encoder's relative bias for positions 0 .. length-1."""
    at = np.arange(length)
    return table[:, relative_buckets(at[:, None] - at[None, :], bidirectional=True)]


def bias_by_distance(table: Float[Array, "H 32"], length: int) -> Float[Array, "H T"]:
    """The decoder's relative bias of a key 0 .. length-1 positions before the query."""
    return table[:, relative_buckets(np.arange(length), bidirectional=False)]


def decoder_bias(
    table: Float[Array, "H 32"], positions: Int[Array, "B M"], length: int
) -> Float[Array, "B H M T"]:
    """The decoder's relative bias of queries at `positions` against keys 0 .. length-1."""
    by_distance = bias_by_distance(table, length)
    keys = jnp.arange(length, dtype=positions.dtype)[None, None]
    distance = jnp.clip(positions[:, :, None] - keys, 0, length - 1)
    return jnp.moveaxis(by_distance[:, distance], 0, 1)


def causal_mask(positions: Int[Array, "B M"], length: int) -> jax.Array:
    """[B, 1, M, length], True where a query at its position may see the key."""
    keys = jnp.arange(length, dtype=positions.dtype)[None, None]
    return (keys <= positions[:, :, None])[:, None]


def attend(
    query: Float[Array, "B H M D"],
    key: Float[Array, "B H D T"],
    value: Float[Array, "B H T D"],
    bias: jax.Array | None,
    mask: jax.Array,
    *,
    float32_logits: bool = False,
    dropout=None,
) -> Float[Array, "B M HD"]:
    """Softmax attention without T5's absent 1/sqrt(D) (it sits in the query initialiser).

    `bias` and `mask` broadcast to [B, H, M, T]; masked keys get exactly no weight beside any
    visible one. `dropout`, if given, acts on the attention weights.
    """
    dtype = query.dtype
    if float32_logits:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    logits = jnp.einsum("BHMD,BHDT->BHMT", query, key)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    logits = jnp.where(mask, logits, jnp.asarray(MASKED, logits.dtype))
    weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
    if dropout is not None:
        weights = dropout(weights, broadcast_axes=(2,))
    out = jnp.einsum("BHMT,BHTD->BMHD", weights, value)
    return out.reshape(*out.shape[:2], -1)


def attend_rows(
    config: T5Config,
    query: Float[Array, "B M HD"],
    key: Float[Array, "B H D T"],
    value: Float[Array, "B H T D"],
    bias: jax.Array | None,
    mask: jax.Array,
    dropout=None,
) -> Float[Array, "B M HD"]:
    """`attend` as a model is configured, from queries as their product gives them."""
    return attend(
        split_heads(query, config.num_heads),
        key,
        value,
        bias,
        mask,
        float32_logits=config.float32_attention_logits,
        dropout=dropout,
    )


def split_heads(x: Float[Array, "B M HD"], num_heads: int) -> Float[Array, "B H M D"]:
    """Queries or values: [B, M, heads * D] -> [B, heads, M, D]."""
    batch, length, width = x.shape
    return jnp.swapaxes(x.reshape(batch, length, num_heads, width // num_heads), 1, 2)


def split_keys(x: Float[Array, "B M HD"], num_heads: int) -> Float[Array, "B H D M"]:
    """Keys: [B, M, heads * D] -> [B, heads, D, M]."""
    return jnp.swapaxes(split_heads(x, num_heads), 2, 3)
