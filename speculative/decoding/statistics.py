"""What a decoder counts on the device, per row, in rounds where the row was live."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from speculative.types import Leaf


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "target_runs",
        "draft_runs",
        "proposed",
        "accepted",
        "emitted",
        "ended_on_draft",
        "accepted_per_position",
        "histogram",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts per row; all int32.

    In every run `emitted = accepted + target_runs - ended_on_draft`: each target run emits one
    token of its own, unless the row ended on a drafted token before it.

    Attributes:
      target_runs: [B] target calls.
      draft_runs: [B] draft steps that proposed a token (a step that only catches up is not one).
      proposed: [B] drafted tokens.
      accepted: [B] drafted tokens that were emitted; none past the end of the row.
      emitted: [B] tokens, the end-of-sequence token included.
      ended_on_draft: [B] 1 where the row's last token was a drafted one.
      accepted_per_position: [B, G] how often the i-th drafted token was emitted.
      histogram: [B, G+1] how many rounds emitted n drafted tokens.
    """

    target_runs: Leaf
    draft_runs: Leaf
    proposed: Leaf
    accepted: Leaf
    emitted: Leaf
    ended_on_draft: Leaf
    accepted_per_position: Leaf
    histogram: Leaf


def zeros(batch: int, gamma: int) -> Statistics:
    """Nothing counted yet."""
    return Statistics(
        *(jnp.zeros((batch,), jnp.int32) for _ in range(6)),
        accepted_per_position=jnp.zeros((batch, gamma), jnp.int32),
        histogram=jnp.zeros((batch, gamma + 1), jnp.int32),
    )


def count_round(
    statistics: Statistics,
    *,
    live: Bool[Array, "B"],
    proposed: Int[Array, "B"],
    accepted: Int[Array, "B"],
    emitted: Int[Array, "B"],
    ended: Bool[Array, "B"],
) -> Statistics:
    """Add one round: `accepted` and `emitted` are after the cut by EOS and budget."""
    one = live.astype(jnp.int32)
    gamma = statistics.accepted_per_position.shape[1]
    places = jnp.arange(gamma, dtype=jnp.int32)[None]
    counts = jnp.arange(gamma + 1, dtype=jnp.int32)[None]
    on_draft = live & ended & (emitted == accepted)
    reached = live[:, None] & (places < accepted[:, None])
    hit = live[:, None] & (counts == accepted[:, None])
    return Statistics(
        target_runs=statistics.target_runs + one,
        draft_runs=statistics.draft_runs + proposed * one,
        proposed=statistics.proposed + proposed * one,
        accepted=statistics.accepted + accepted * one,
        emitted=statistics.emitted + emitted * one,
        ended_on_draft=statistics.ended_on_draft + on_draft.astype(jnp.int32),
        accepted_per_position=statistics.accepted_per_position + reached.astype(jnp.int32),
        histogram=statistics.histogram + hit.astype(jnp.int32),
    )
