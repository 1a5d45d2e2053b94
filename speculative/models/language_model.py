"""The contract between a decoder and a model, and T5 behind it.

A model is a frozen, hashable object without arrays (static under `jit`); its weights and its state
are pytrees that are passed in and handed back. Every leaf of a state has the batch at axis 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from speculative.models import kv_cache, t5
from speculative.models.cached_attention import CachedAttention
from speculative.models.config import T5Config
from speculative.models.weights import default_layout, prepare
from speculative.types import Leaf


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "cross", "cross_mask", "lengths"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class T5State:
    """What decoding has to remember.

    Attributes:
      keys, values: per decoder layer, self-attention cache, [B, H, D, T] and [B, H, T, D].
      cross: per decoder layer, (keys [B, H, D, S], values [B, H, S, D]) of the encoder's output.
      cross_mask: [B, S], True where the input is not padding.
      lengths: [B] int32, positions written and valid.
    """

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]
    cross: tuple[tuple[Leaf, Leaf], ...]
    cross_mask: Leaf
    lengths: Leaf


@dataclasses.dataclass(frozen=True)
class T5LanguageModel:
    """An encoder-decoder T5 as a `LanguageModel` (see `speculative.types`).

    Attributes:
      config: shapes and numerics.
      layout: of the prepared weights, one of `weights.LAYOUTS`; None takes what suits the backend.
        With `panels`, attention to the cache is a kernel's work, too.
      weights_dtype: that the matrices are kept in; None as activations are (see `weights.prepare`).
    """

    config: T5Config
    layout: str | None = None
    weights_dtype: str | None = None

    @property
    def vocab_size(self) -> int:
        """Width of the logits, padding ids included."""
        return self.config.vocab_size

    def prepare(self, params: Mapping[str, object]):
        """Weights for this model from a T5X tree."""
        return prepare(params, self.config, layout=self._layout(), weights_dtype=self.weights_dtype)

    def _layout(self) -> str:
        return self.layout or default_layout()

    def prefill(
        self,
        weights,
        inputs: Int[Array, "B S"],
        prompt: Int[Array, "B P"] | None,
        max_length: int,
    ) -> T5State:
        """Run the encoder, keep the cross-attention's keys and values, feed the prompt.

        Args:
          weights: from `prepare`.
          inputs: encoder tokens, 0 is padding.
          prompt: decoder tokens to feed first, right-padded; its rows' true lengths are set by
            `truncate` afterwards. None or width 0 feeds nothing.
          max_length: positions to allocate, room for the last round's overshoot included.
        """
        config = self.config
        batch = inputs.shape[0]
        encoded = t5.encode(weights, config, inputs)
        layers = weights["decoder"]["layers"]
        cross = tuple(t5.cross_keys_values(layer, config, encoded) for layer in layers)
        keys, values = kv_cache.allocate(
            batch, config.num_heads, max_length, config.head_dim, jnp.dtype(config.dtype)
        )
        state = T5State(
            keys=(keys,) * len(layers),
            values=(values,) * len(layers),
            cross=cross,
            cross_mask=inputs > 0,
            lengths=jnp.zeros((batch,), jnp.int32),
        )
        if prompt is None or prompt.shape[1] == 0:
            return state
        no_logits = jnp.zeros((batch, 0), jnp.int32)
        return self.extend(weights, state, prompt, logits_at=no_logits)[1]

    def extend(
        self,
        weights,
        state: T5State,
        tokens: Int[Array, "B M"],
        *,
        logits_at: Int[Array, "B K"] | None = None,
        features: bool = False,
    ):
        """Feed M tokens to every row, at that row's own next positions.

        Args:
          weights: from `prepare`.
          state: rows may have different lengths; there must be room for M more positions.
          tokens: what to feed.
          logits_at: which of the M places to compute logits for, [B, K]; None is all of them.
          features: also return the decoder's normalised output [B, M, E].

        Returns:
          (logits [B, M or K, V] float32, state), or (logits, features, state).
        """
        config = self.config
        stack = weights["decoder"]
        attend = CachedAttention(
            config,
            stack["bias"],
            state.lengths,
            tokens.shape[1],
            state.keys[0].shape[3],
            native=self._layout() == "panels",
        )
        keys, values = [], []

        x = t5.embed(weights, tokens)
        for i, layer in enumerate(stack["layers"]):

            def attend_to_self(joined, i=i):
                attended, key, value = attend.to_self(joined, state.keys[i], state.values[i])
                keys.append(key)
                values.append(value)
                return attended

            def attend_to_encoded(query, i=i):
                return attend.to_encoded(query, state.cross[i], state.cross_mask)

            x = t5.decoder_layer(layer, config, x, attend_to_self, attend_to_encoded)
        x = t5.normalised(x, stack["norm"], weights["logits"])
        wanted = x if logits_at is None else jnp.take_along_axis(x, logits_at[:, :, None], axis=1)
        logits = t5.features_to_logits(weights, config, wanted)
        state = dataclasses.replace(
            state,
            keys=tuple(keys),
            values=tuple(values),
            lengths=state.lengths + jnp.asarray(tokens.shape[1], jnp.int32),
        )
        return (logits, x, state) if features else (logits, state)

    def truncate(self, state: T5State, lengths: Int[Array, "B"]) -> T5State:
        """Forget all but the first `lengths[b]` positions of row b; costs nothing."""
        return dataclasses.replace(state, lengths=lengths.astype(jnp.int32))
