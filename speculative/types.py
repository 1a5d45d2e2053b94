"""The words of this project as types: dimension legend, protocols, and what passes between rooms.

Dimensions, everywhere:
  B  rows of the batch            V  vocabulary width, padding ids included
  M  decoder positions of a call  T  positions that a cache has room for
  S  encoder length               G  gamma, drafted tokens per round

Words (the paper's): the *target* has law p, the *draft* law q; *gamma* tokens are drafted per
target run; a fully accepted block is followed by a *bonus token* from the target's law; a rejected
draft by a draw from the *residual* law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

Weights = Any
State = Any
# A field of a pytree record: an array, but also what `jax.tree.map` makes of one (a NumPy array, a
# sharding, a shape), so that it is not checked at run time.
if TYPE_CHECKING:
    Leaf = jax.Array
else:
    Leaf = Any


def wide_dtype(dtype) -> jnp.dtype:
    """The dtype in which laws and norms are computed: float32, or float64 where it is given."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype == jnp.float64 else jnp.dtype(jnp.float32)


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "length", "law"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a draft proposes.

    Attributes:
      tokens: [B, G] int32.
      length: [B] int32, how many of them a row really proposes (0 to G).
      law: [B, G, V], the law that each token was *actually* drawn from, after every filter; None
        where the tokens are deterministic (point masses).
    """

    tokens: Leaf
    length: Leaf
    law: Leaf | None


@partial(jax.tree_util.register_dataclass, data_fields=["accepted", "next_token"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a verifier decides: `accepted` [B] drafted tokens, then `next_token` [B]."""

    accepted: Leaf
    next_token: Leaf


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "live", "inputs", "target_state", "features"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Context:
    """What a draft may look at when it proposes.

    Attributes:
      tokens: [B, T] int32, the decoder's tokens with the start token at place 0.
      lengths: [B] int32, emitted tokens: places 0 .. lengths[b] of `tokens` are committed.
      live: [B] bool, rows that have not ended.
      inputs: [B, S] int32, the encoder's tokens.
      target_state: the target's state, whose cache holds places 0 .. lengths[b]-1.
      features: [B, E] the target's last features, or None.
    """

    tokens: Leaf
    lengths: Leaf
    live: Leaf
    inputs: Leaf
    target_state: State
    features: Leaf | None = None


@partial(jax.tree_util.register_dataclass, data_fields=["accepted", "lengths"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a round, after the cut by EOS and budget.

    Attributes:
      accepted: [B] int32, drafted tokens that were emitted.
      lengths: [B] int32, emitted tokens of each row so far.
    """

    accepted: Leaf
    lengths: Leaf


@runtime_checkable
class LanguageModel(Protocol):
    """A model that a decoder can run: hashable, without arrays; weights and state are passed.

    Laws that every implementation keeps (`tests/models` checks them): extending by M tokens equals
    M extensions by one; extend, truncate, extend equals a fresh extend; neighbours in the batch and
    padding never change a row.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def prefill(self, weights: Weights, inputs, prompt, max_length: int) -> State:
        """State after the encoder [B, S] and the decoder prompt [B, P]."""

    def extend(self, weights: Weights, state: State, tokens, *, logits_at=None, features=False):
        """Feed tokens [B, M]; logits [B, M, V] float32 and the new state."""

    def truncate(self, state: State, lengths) -> State:
        """Forget all but the first lengths[b] positions of row b."""


# From logits [B, V] and the place in the block to (tokens [B], law [B, V], or None when greedy).
Draw = Callable[[jax.Array, int | jax.Array], tuple[jax.Array, jax.Array | None]]


@runtime_checkable
class Draft(Protocol):
    """A proposer of tokens: hashable, without arrays."""

    def start(self, weights: Weights, inputs, prompt, max_length: int) -> State:
        """State before the first round; `prompt` as in `LanguageModel.prefill`."""

    def propose(
        self, weights: Weights, state: State, context: Context, keys, gamma: int, draw: Draw
    ) -> tuple[Proposal, State]:
        """Propose up to `gamma` tokens after the committed ones, each through `draw`."""

    def commit(self, state: State, outcome: Outcome) -> State:
        """Make the state fit what was really emitted."""
