"""Self-attention caches with a length of their own for every row.

A slot is valid when its position is below the row's length. Writing overwrites (T5X's cache adds,
so that going back and writing again sums old and new); going back is therefore only a smaller
length, and what lies above it is masked until it is written again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def allocate(batch: int, heads: int, length: int, head_dim: int, dtype):
    """Empty caches: keys [batch, heads, head_dim, length], values [batch, heads, length, head_dim].

    (`attention` says why they differ.)
    """
    keys = jnp.zeros((batch, heads, head_dim, length), dtype)
    return keys, jnp.zeros((batch, heads, length, head_dim), dtype)


def write(cache: jax.Array, block: jax.Array, starts: Int[Array, "B"], axis: int) -> jax.Array:
    """Row b's positions starts[b] .. starts[b]+M-1 become `block[b]`.

    Args:
      cache: keys [B, H, D, T] or values [B, H, T, D].
      block: the same with M in the place of T. The caller allocates room for the last block:
        `dynamic_update_slice` would move a block that does not fit, without a word.
      starts: first position to write, for each row.
      axis: where the positions are: 3 or 2.
    """
    if cache.shape[0] == 1:
        # One row needs no scatter; XLA updates the loop's buffer in place.
        return lax.dynamic_update_slice_in_dim(cache, block, starts[0], axis)
    return jax.vmap(
        lambda row, new, start: lax.dynamic_update_slice_in_dim(row, new, start, axis - 1)
    )(cache, block, starts)


def take(state, rows: Int[Array, "N"]):
    """The given rows of any state whose leaves have the batch at axis 0 (rows may repeat)."""
    return jax.tree.map(lambda leaf: leaf[rows], state)


def insert(state, rows: Int[Array, "N"], other):
    """`state` with its `rows` replaced by the rows of `other`."""
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), state, other)
