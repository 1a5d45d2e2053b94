"""Times: interleaved repeats of whole decodes, and of a round's parts on their own.

Everything is compiled and run once before it is timed, and blocked on until it is ready.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from speculative import sampling
from speculative.decoding import loop
from speculative.decoding import round as rounds
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import Decoder, DecodeState, Request
from speculative.models.weights import default_layout, matmul, matrix


def timed(function, *arguments):
    """(result, seconds), blocked until ready."""
    begun = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - begun


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One request decoded: output, and seconds, encoders included."""

    output: loop.Output
    seconds: float


def decode_timed(decoder: Decoder, weights, request: Request) -> Decoded:
    """Decode once."""
    state, seconds = timed(loop.complete, decoder, weights, request)
    return Decoded(loop.result(decoder, state), seconds)


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Interleaved repeats over the same requests; seconds summed over requests.

    Attributes:
      baseline_s, speculative_s: one total per repeat, encoders included.
      encoder_s, baseline_encoder_s: one total per repeat, everything before the loop.
      baseline, speculative: outputs of the first repeat, one per request.
    """

    baseline_s: list[float]
    speculative_s: list[float]
    encoder_s: list[float]
    baseline_encoder_s: list[float]
    baseline: list[loop.Output]
    speculative: list[loop.Output]


def warm_up(decoders: Sequence[Decoder], weights, requests: Sequence[Request]) -> float:
    """Compile the decoders for every shape among the requests; seconds it took."""
    begun = time.perf_counter()
    for request in {r.inputs.shape: r for r in requests}.values():
        for decoder in decoders:
            loop.decode(decoder, weights, request)
    return time.perf_counter() - begun


def interleaved(
    decoders: Sequence[Decoder],
    weights,
    requests: Sequence[Request],
    count: int,
    after_each=lambda: None,
) -> list[list[list[Decoded]]]:
    """Decode every request with every decoder, `count` times: [decoder][repeat][request].

    Which decoder goes first changes from request to request and from repeat to repeat, so that none
    has the warmer cache and a slow minute of the machine falls on all.
    """
    results = [[[] for _ in range(count)] for _ in decoders]
    for repeat in range(count):
        for i, request in enumerate(requests):
            for turn in range(len(decoders)):
                at = (i + repeat + turn) % len(decoders)
                results[at][repeat].append(decode_timed(decoders[at], weights, request))
            after_each()
    return results


def total_s(decoded: Sequence[Decoded]) -> float:
    """Seconds of these decodes, encoders included."""
    return sum(one.seconds for one in decoded)


def encoder_times(
    decoders: Sequence[Decoder], weights, requests: Sequence[Request], count: int
) -> list[list[float]]:
    """Seconds of everything before the loop, run by itself: [decoder][repeat], over all requests.

    Not between decodes: these would find the encoders' weights in a cache.
    """
    for request in {r.inputs.shape: r for r in requests}.values():
        for decoder in decoders:
            jax.block_until_ready(loop.start(decoder, weights, request))  # compiles
    totals = [[0.0] * count for _ in decoders]
    for repeat in range(count):
        for request in requests:
            for at, decoder in enumerate(decoders):
                totals[at][repeat] += timed(loop.start, decoder, weights, request)[1]
    return totals


def repeats(
    decoder: Decoder, weights, requests: Sequence[Request], count: int, after_each=lambda: None
) -> Repeats:
    """Decode every request autoregressively and speculatively, `count` times, interleaved."""
    both = (autoregressive(decoder), decoder)
    baseline, speculative = interleaved(both, weights, requests, count, after_each)
    baseline_encoder_s, encoder_s = encoder_times(both, weights, requests, count)
    return Repeats(
        baseline_s=[total_s(repeat) for repeat in baseline],
        speculative_s=[total_s(repeat) for repeat in speculative],
        encoder_s=encoder_s,
        baseline_encoder_s=baseline_encoder_s,
        baseline=[one.output for one in baseline[0]],
        speculative=[one.output for one in speculative[0]],
    )


# A part is run this often within one call, so that the host's dispatch is no part of its time.
_WITHIN = 8


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _propose(decoder: Decoder, weights, request: Request, draft_state, state: DecodeState):
    """All gamma draft steps on the real state, `_WITHIN` times; the state comes back as it was."""
    keys = None
    if decoder.mode != "greedy":
        keys = sampling.round_keys(request.keys, state.lengths)
    lengths = draft_state.lengths

    def once(_, carry):
        draft_state, last = carry
        full = dataclasses.replace(state, draft=draft_state)
        proposal, after = rounds.propose(decoder, weights, request, full, keys)
        return decoder.draft.model.truncate(after, lengths), last + proposal.tokens

    last = jnp.zeros((request.inputs.shape[0], decoder.gamma), jnp.int32)
    draft_state, last = lax.fori_loop(0, _WITHIN, once, (draft_state, last))
    return last, draft_state


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(decoder: Decoder, weights, target_state, tokens):
    """A target run over the given positions, `_WITHIN` times; the state comes back as it was."""
    lengths = target_state.lengths

    def once(_, carry):
        target_state, tokens = carry
        logits, after = decoder.target.extend(weights["target"], target_state, tokens)
        # What comes out goes in: no run can be moved out of the loop.
        best = sampling.first_largest(logits)
        return decoder.target.truncate(after, lengths), best

    target_state, tokens = lax.fori_loop(0, _WITHIN, once, (target_state, tokens))
    return tokens, target_state


@dataclasses.dataclass(frozen=True)
class Parts:
    """Medians in seconds: `propose` is all gamma draft steps, `verify` a run over gamma + 1
    positions, `step` a run over one. `propose_all` and `step_all` are the paired single times."""

    propose: float
    verify: float
    step: float
    propose_all: list[float]
    step_all: list[float]


class PartTimer:
    """Times propose and extend, each compiled by itself, on a state in mid-decode.

    `sample` is called now and then between the decodes that the parts are to explain, so that both
    see the same machine.
    """

    def __init__(self, decoder: Decoder, weights, request: Request):
        state = loop.start(decoder, weights, request)
        for _ in range(2):
            state, _ = loop.step(decoder, weights, request, state)
        batch = request.inputs.shape[0]
        self._one = jnp.full((batch, 1), 5, jnp.int32)
        self._block = jnp.full((batch, decoder.gamma + 1), 5, jnp.int32)
        # Copies: the timed functions give their states back into the same buffers.
        self._draft_state = jax.tree.map(jnp.copy, state.draft)
        self._target_state = jax.tree.map(jnp.copy, state.target)
        self._fixed: DecodeState = dataclasses.replace(state, draft=None)
        self._decoder, self._weights, self._request = decoder, weights, request
        self._times: list[tuple[float, float, float]] = []
        self.sample()  # compiles
        self._times.clear()

    def sample(self) -> None:
        """Time each part once, `_WITHIN` times over."""
        decoder, weights = self._decoder, self._weights
        (_, self._draft_state), propose_s = timed(
            _propose, decoder, weights, self._request, self._draft_state, self._fixed
        )
        (_, self._target_state), verify_s = timed(
            _extend, decoder, weights, self._target_state, self._block
        )
        (_, self._target_state), step_s = timed(
            _extend, decoder, weights, self._target_state, self._one
        )
        self._times.append((propose_s / _WITHIN, verify_s / _WITHIN, step_s / _WITHIN))

    def parts(self) -> Parts:
        """What the samples say."""
        propose, verify, step = (list(times) for times in zip(*self._times, strict=True))
        return Parts(
            propose=float(np.median(propose)),
            verify=float(np.median(verify)),
            step=float(np.median(step)),
            propose_all=propose,
            step_all=step,
        )


def read_bandwidth(megabytes: int = 256, count: int = 7) -> float:
    """Bytes per second at which this device reads memory: the best of a sum, a matrix-vector
    product, and the decoder's own kind of product over `megabytes` that no cache holds."""
    side = int((megabytes * 1e6 / 4) ** 0.5) // 16 * 16
    square = jnp.ones((side, side), jnp.float32)
    vector = jnp.ones((side,), jnp.float32)
    rates = []
    for function, arguments in (
        (jax.jit(jnp.sum), (square,)),
        (jax.jit(jnp.dot), (square, vector)),
        (jax.jit(matmul), (vector[None], matrix((square,), layout=default_layout()))),
    ):
        jax.block_until_ready(function(*arguments))
        seconds = [timed(function, *arguments)[1] for _ in range(count)]
        rates.append(square.size * 4 / float(np.median(seconds)))
    return max(rates)
