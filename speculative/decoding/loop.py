"""The drivers of the round: compiled, and stepped from Python.

    state = complete(decoder, weights, request)  # encoders and one lax.while_loop in one program
    output = result(decoder, state)

Its two halves are programs of their own, too: `start`, the encoders and empty caches, and `run`,
the loop from any state. `rounds` steps the same round function and yields what happened in each,
for traces, streaming and debugging.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from speculative.decoding import statistics as stats
from speculative.decoding.round import (
    ENDED_BY_BUDGET,
    RUNNING,
    Decoder,
    DecodeState,
    Request,
    RoundRecord,
    decode_round,
)


@dataclasses.dataclass(frozen=True)
class Output:
    """What a decode gives, on the host.

    Attributes:
      tokens: [B, max_length] int32, padding behind each row's end; no start token.
      lengths: [B] emitted tokens, EOS included.
      end_reason: [B] ENDED_BY_EOS or ENDED_BY_BUDGET.
      statistics: counts per row (numpy).
    """

    tokens: np.ndarray
    lengths: np.ndarray
    end_reason: np.ndarray
    statistics: stats.Statistics


@partial(jax.jit, static_argnums=0)
def start(decoder: Decoder, weights, request: Request) -> DecodeState:
    """Encoders, cross-attention keys and values, empty caches: everything before the first round.

    Rows whose budget is 0 have ended already.
    """
    batch = request.inputs.shape[0]
    tokens = jnp.full((batch, 1 + decoder.allocated), decoder.pad_id, jnp.int32)
    tokens = tokens.at[:, 0].set(decoder.start_id)
    target = decoder.target.prefill(weights["target"], request.inputs, None, decoder.allocated)
    draft = None
    if decoder.draft is not None:
        draft = decoder.draft.start(weights["draft"], request.inputs, None, decoder.allocated)
    done = request.budgets <= 0
    return DecodeState(
        tokens=tokens,
        lengths=jnp.zeros((batch,), jnp.int32),
        end_reason=jnp.where(done, ENDED_BY_BUDGET, RUNNING).astype(jnp.int32),
        target=target,
        draft=draft,
        statistics=stats.zeros(batch, decoder.gamma),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def run(decoder: Decoder, weights, request: Request, state: DecodeState) -> DecodeState:
    """Rounds until every row has ended. The state is donated: use the one that is returned."""
    return lax.while_loop(
        lambda s: jnp.any(s.live),
        lambda s: decode_round(decoder, weights, request, s)[0],
        state,
    )


@partial(jax.jit, static_argnums=0)
def complete(decoder: Decoder, weights, request: Request) -> DecodeState:
    """`start` and `run` as one program: nothing comes back to the host between them."""
    return run(decoder, weights, request, start(decoder, weights, request))


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def step(
    decoder: Decoder, weights, request: Request, state: DecodeState
) -> tuple[DecodeState, RoundRecord]:
    """One round, compiled by itself. The state is donated."""
    return decode_round(decoder, weights, request, state)


def rounds(
    decoder: Decoder, weights, request: Request
) -> Iterator[tuple[DecodeState, RoundRecord]]:
    """The stepwise driver: the state after every round, and what happened in it."""
    state = start(decoder, weights, request)
    while bool(jnp.any(state.live)):
        state, record = step(decoder, weights, request, state)
        yield state, record


def result(decoder: Decoder, state: DecodeState) -> Output:
    """The finished rows, on the host."""
    return Output(
        tokens=np.asarray(state.tokens[:, 1 : 1 + decoder.max_length]),
        lengths=np.asarray(state.lengths),
        end_reason=np.asarray(state.end_reason),
        statistics=jax.tree.map(np.asarray, state.statistics),
    )


def decode(decoder: Decoder, weights, request: Request) -> Output:
    """`complete` and `result` in one call."""
    return result(decoder, complete(decoder, weights, request))
