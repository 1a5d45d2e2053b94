"""The T5 network as pure block functions on prepared weights.

There is one set of blocks: teacher forcing (training, scoring) runs them over whole sequences,
decoding runs them over a few new positions against a cache. The numerics are T5X's (FACTS 4.4).

Dimensions: B batch, S encoder length, M decoder positions, T key positions, E emb_dim, H heads,
D head_dim, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from speculative.kernels import rows
from speculative.models import attention
from speculative.models.config import T5Config
from speculative.models.parameters import Parameters
from speculative.models.weights import Panels, matmul, matmul_split, prepare
from speculative.types import wide_dtype

_ACTIVATIONS: dict[str, Callable] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "linear": lambda x: x,
}


class Dropout:
    """Dropout whose masks are broadcast over the length axis, as T5's are.

    Consumes `key`: one fold per place where it is applied, in program order.
    """

    def __init__(self, key: jax.Array, rate: float):
        self._key, self._rate, self._place = key, rate, 0

    def __call__(self, x: jax.Array, broadcast_axes: tuple[int, ...] = (1,)) -> jax.Array:
        if self._rate == 0.0:
            return x
        self._place += 1
        key = jax.random.fold_in(self._key, self._place)
        shape = tuple(1 if i in broadcast_axes else n for i, n in enumerate(x.shape))
        keep = jax.random.bernoulli(key, 1.0 - self._rate, shape)
        return jnp.where(keep, x / jnp.asarray(1.0 - self._rate, x.dtype), jnp.zeros((), x.dtype))


def _drop(dropout: Dropout | None, x: jax.Array) -> jax.Array:
    return x if dropout is None else dropout(x)


def rms_norm(x: Float[Array, "B M E"], scale: Float[Array, "E"]) -> Float[Array, "B M E"]:
    """T5's layer norm: no mean, no bias, squares in float32, eps 1e-6."""
    wide = x.astype(wide_dtype(x.dtype))
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale[None, None]


def normalised(x: Float[Array, "B M E"], scale: Float[Array, "E"], matrix) -> jax.Array:
    """`rms_norm(x, scale)` as input of `matrix`: by a kernel, where that product is one's, too."""
    if isinstance(matrix, Panels) and rows.supports(x) and x.dtype == scale.dtype:
        return rows.rms_norm(x, scale)
    return rms_norm(x, scale)


def mlp_block(weights, config: T5Config, x: jax.Array, scale, dropout: Dropout | None) -> jax.Array:
    """Feed-forward block, its norm first: relu (1.0), or gelu times linear (1.1)."""
    inputs = matmul_split(normalised(x, scale, weights["wi"]), weights["wi"])
    hidden = _ACTIVATIONS[config.mlp_activations[0]](inputs[0])
    for name, extra in zip(config.mlp_activations[1:], inputs[1:], strict=True):
        hidden = hidden * _ACTIVATIONS[name](extra)
    return matmul(_drop(dropout, hidden), weights["wo"])


def embed(weights, tokens: Int[Array, "B M"], dropout: Dropout | None = None) -> jax.Array:
    """Rows of the embedding table, by gather (T5X multiplies by one-hots, with equal result)."""
    return _drop(dropout, weights["embedding"].at[tokens].get(mode="clip"))


def attend_to_all(
    config: T5Config, joined: Float[Array, "B M W"], bias, mask, dropout: Dropout | None
) -> jax.Array:
    """Self-attention [B, M, HD] of a whole sequence: queries, keys, values as one product gave
    them."""
    query, key, value = jnp.split(joined, 3, axis=-1)
    heads = config.num_heads
    key, value = attention.split_keys(key, heads), attention.split_heads(value, heads)
    return attention.attend_rows(config, query, key, value, bias, mask, dropout)


def encode(
    weights, config: T5Config, inputs: Int[Array, "B S"], dropout: Dropout | None = None
) -> Float[Array, "B S E"]:
    """The encoder's output; positions whose input is 0 (padding) are seen by nobody."""
    stack = weights["encoder"]
    bias = attention.encoder_bias(stack["bias"], inputs.shape[1])[None]
    real = inputs > 0
    mask = (real[:, None, :, None]) & (real[:, None, None, :])
    x = embed(weights, inputs, dropout)
    for layer in stack["layers"]:
        matrix = layer["attention"]["qkv"]
        joined = matmul(normalised(x, layer["attention_norm"], matrix), matrix)
        attended = attend_to_all(config, joined, bias, mask, dropout)
        x = x + _drop(dropout, matmul(attended, layer["attention"]["out"]))
        x = x + _drop(dropout, mlp_block(layer["mlp"], config, x, layer["mlp_norm"], dropout))
    reader = weights["decoder"]["layers"][0]["cross"]["kv"]
    return _drop(dropout, normalised(x, stack["norm"], reader))


def cross_keys_values(
    layer, config: T5Config, encoded: Float[Array, "B S E"]
) -> tuple[jax.Array, jax.Array]:
    """A decoder layer's cross-attention keys [B, H, D, S] and values [B, H, S, D], kept."""
    key, value = matmul_split(encoded, layer["cross"]["kv"])
    heads = config.num_heads
    return attention.split_keys(key, heads), attention.split_heads(value, heads)


def decoder_layer(
    layer,
    config: T5Config,
    x: Float[Array, "B M E"],
    attend_to_self: Callable[[jax.Array], jax.Array],
    attend_to_encoded: Callable[[jax.Array], jax.Array],
    dropout: Dropout | None = None,
) -> jax.Array:
    """One decoder block.

    Args:
      attend_to_self: from the new positions' queries, keys and values, [B, M, 3 * H * D], to what
        they attend to, [B, M, HD]: to one another in teacher forcing, to a cache in decoding.
      attend_to_encoded: the same from queries [B, M, HD] over the encoder's output.
    """
    matrix = layer["attention"]["qkv"]
    joined = matmul(normalised(x, layer["attention_norm"], matrix), matrix)
    x = x + _drop(dropout, matmul(attend_to_self(joined), layer["attention"]["out"]))
    matrix = layer["cross"]["query"]
    query = matmul(normalised(x, layer["cross_norm"], matrix), matrix)
    x = x + _drop(dropout, matmul(attend_to_encoded(query), layer["cross"]["out"]))
    return x + _drop(dropout, mlp_block(layer["mlp"], config, x, layer["mlp_norm"], dropout))


def features_to_logits(weights, config: T5Config, x: Float[Array, "B M E"]) -> jax.Array:
    """Float32 logits [B, M, V] from the decoder's normalised output."""
    wide = x.astype(wide_dtype(x.dtype))
    if config.logits_via_embedding:
        wide = wide / jnp.sqrt(jnp.asarray(config.emb_dim, wide.dtype))
    return matmul(wide, weights["logits"])


def teacher_forced(
    weights,
    config: T5Config,
    inputs: Int[Array, "B S"],
    decoder_inputs: Int[Array, "B M"],
    targets: Int[Array, "B M"],
    dropout: Dropout | None = None,
) -> Float[Array, "B M V"]:
    """Logits of every target position given the true tokens before it.

    Args:
      inputs: encoder tokens, 0 is padding.
      decoder_inputs: targets shifted right, starting with 0.
      targets: 0 is padding; padded positions see nothing and are seen by nobody, as in T5X.

    Returns:
      Float32 logits; those of padded positions mean nothing.
    """
    encoded = encode(weights, config, inputs, dropout)
    stack = weights["decoder"]
    batch, length = decoder_inputs.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    bias = attention.decoder_bias(stack["bias"], positions[:1], length)
    real = targets > 0
    mask = attention.causal_mask(positions[:1], length)
    mask = mask & real[:, None, :, None] & real[:, None, None, :]
    cross_mask = real[:, None, :, None] & (inputs > 0)[:, None, None, :]
    x = embed(weights, decoder_inputs, dropout)
    for layer in stack["layers"]:
        cross = cross_keys_values(layer, config, encoded)

        def attend_to_self(joined):
            return attend_to_all(config, joined, bias, mask, dropout)

        def attend_to_encoded(query, cross=cross):
            return attention.attend_rows(config, query, *cross, None, cross_mask, dropout)

        x = decoder_layer(layer, config, x, attend_to_self, attend_to_encoded, dropout)
    x = _drop(dropout, normalised(x, stack["norm"], weights["logits"]))
    return features_to_logits(weights, config, x)


class T5(nn.Module):
    """The Linen face of the network: `init` and `apply` as a Flax user expects.

    `params` is a T5X `target` tree. The computing is `teacher_forced`, on plain matrices.
    """

    config: T5Config

    def setup(self):
        self.parameters = Parameters(self.config)
        nn.share_scope(self, self.parameters)

    def __call__(
        self,
        encoder_input_tokens: Int[Array, "B S"],
        decoder_input_tokens: Int[Array, "B M"],
        decoder_target_tokens: Int[Array, "B M"],
        *,
        enable_dropout: bool = False,
    ) -> Float[Array, "B M V"]:
        """Teacher-forced logits; consumes the `dropout` key where dropout is enabled."""
        weights = prepare(self.parameters(), self.config)
        dropout = None
        if enable_dropout:
            dropout = Dropout(self.make_rng("dropout"), self.config.dropout_rate)
        return teacher_forced(
            weights,
            self.config,
            encoder_input_tokens,
            decoder_input_tokens,
            decoder_target_tokens,
            dropout,
        )
