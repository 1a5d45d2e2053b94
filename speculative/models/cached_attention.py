"""What a decoder's new positions attend to: a cache with a length of its own for every row.

Where there are kernels for it (`kernels.attention`: CPU), attention over a cache is one pass over
what is valid. Elsewhere it is `attention.attend` under masks, which XLA fuses.

Dimensions: B batch, M new positions, T allocated positions, S encoder length, H heads, D head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from speculative.kernels import attention as kernels
from speculative.models import attention, kv_cache
from speculative.models.config import T5Config


class CachedAttention:
    """The attention of M positions that begin at `lengths` [B], in every layer of one run.

    Attributes:
      native: whether it is the kernels' work.
    """

    def __init__(
        self,
        config: T5Config,
        table: Float[Array, "H 32"],
        lengths: Int[Array, "B"],
        count: int,
        allocated: int,
        *,
        native: bool,
    ):
        """`table`: the decoder's relative bias; `count` is M, `allocated` T; `native`: use the
        kernels, if there are any for this configuration."""
        self._config, self._lengths = config, lengths
        self.native = native and kernels.supports(config.head_dim, config.dtype)
        if self.native:
            self._bias = attention.bias_by_distance(table, allocated)
        else:
            positions = lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
            self._bias = attention.decoder_bias(table, positions, allocated)
            self._mask = attention.causal_mask(positions, allocated)

    def to_self(
        self,
        joined: Float[Array, "B M W"],
        keys: Float[Array, "B H D T"],
        values: Float[Array, "B H T D"],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Self-attention [B, M, HD], and the caches with the new positions in them.

        Args:
          joined: queries, keys and values of the new positions, as one product gave them.
          keys, values: the layer's caches.
        """
        heads = self._config.num_heads
        query, key, value = jnp.split(joined, 3, axis=-1)
        keys = kv_cache.write(keys, attention.split_keys(key, heads), self._lengths, axis=3)
        values = kv_cache.write(values, attention.split_heads(value, heads), self._lengths, axis=2)
        if self.native:
            attended = kernels.causal(joined, keys, values, self._bias, self._lengths)
        else:
            attended = attention.attend_rows(
                self._config, query, keys, values, self._bias, self._mask
            )
        return attended, keys, values

    def to_encoded(
        self,
        query: Float[Array, "B M HD"],
        cross: tuple[jax.Array, jax.Array],
        mask: Bool[Array, "B S"],
    ) -> jax.Array:
        """Cross-attention [B, M, HD] to the encoder's kept keys [B, H, D, S] and values."""
        if self.native:
            return kernels.masked(query, *cross, mask)
        return attention.attend_rows(self._config, query, *cross, None, mask[:, None, None, :])
