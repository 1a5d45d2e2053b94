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

from speculative import sampling
from speculative.decoding import loop
from speculative.decoding import round as rounds
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import Decoder, DecodeState, Request


def timed(function, *arguments):
    """(result, seconds), blocked until ready."""
    begun = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter() - begun


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One request decoded: output, seconds of the encoders (`start`), and of the loop (`run`)."""

    output: loop.Output
    start_s: float
    run_s: float


def decode_timed(decoder: Decoder, weights, request: Request) -> Decoded:
    """Decode once."""
    state, start_s = timed(loop.start, decoder, weights, request)
    state, run_s = timed(loop.run, decoder, weights, request, state)
    return Decoded(loop.result(decoder, state), start_s, run_s)


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Interleaved repeats over the same requests; seconds summed over requests.

    Attributes:
      baseline_s, speculative_s: one total per repeat, encoders included.
      encoder_s: one total per repeat, encoders of the speculative decoder.
      baseline, speculative: outputs of the first repeat, one per request.
    """

    baseline_s: list[float]
    speculative_s: list[float]
    encoder_s: list[float]
    baseline: list[loop.Output]
    speculative: list[loop.Output]


def warm_up(decoder: Decoder, weights, requests: Sequence[Request]) -> float:
    """Compile `decoder` and its baseline for every shape among the requests; seconds it took."""
    begun = time.perf_counter()
    for request in {r.inputs.shape: r for r in requests}.values():
        for one in (autoregressive(decoder), decoder):
            loop.decode(one, weights, request)
    return time.perf_counter() - begun


def repeats(
    decoder: Decoder, weights, requests: Sequence[Request], count: int, after_each=lambda: None
) -> Repeats:
    """Decode every request autoregressively and speculatively, `count` times.

    Which of the two goes first alternates from request to request and from repeat to repeat, so
    that neither has the warmer cache and a slow minute of the machine falls on both.
    """
    baseline = autoregressive(decoder)
    result = Repeats([], [], [], [], [])
    for repeat in range(count):
        totals = np.zeros(3)
        for i, request in enumerate(requests):
            order = (baseline, decoder) if (i + repeat) % 2 == 0 else (decoder, baseline)
            both = {one: decode_timed(one, weights, request) for one in order}
            plain, fast = both[baseline], both[decoder]
            totals += (plain.start_s + plain.run_s, fast.start_s + fast.run_s, fast.start_s)
            if repeat == 0:
                result.baseline.append(plain.output)
                result.speculative.append(fast.output)
            after_each()
        result.baseline_s.append(float(totals[0]))
        result.speculative_s.append(float(totals[1]))
        result.encoder_s.append(float(totals[2]))
    return result


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _propose(decoder: Decoder, weights, request: Request, draft_state, state):
    """Gamma draft steps on the real state, which is handed back as it was."""
    full = dataclasses.replace(state, draft=draft_state)
    keys = None
    if decoder.mode != "greedy":
        keys = sampling.round_keys(request.keys, state.lengths)
    proposal, after = rounds.propose(decoder, weights, request, full, keys)
    lengths = draft_state.lengths
    return proposal, decoder.draft.model.truncate(after, lengths)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(decoder: Decoder, weights, target_state, tokens):
    """One target run over the given positions; the state is handed back as it was."""
    lengths = target_state.lengths
    logits, after = decoder.target.extend(weights["target"], target_state, tokens)
    return logits, decoder.target.truncate(after, lengths)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Medians in seconds: `propose` is all gamma draft steps, `verify` a run over gamma + 1
    positions, `step` a run over one. `propose_all` and `step_all` are the paired single times."""

    propose: float
    verify: float
    step: float
    propose_all: list[float]
    step_all: list[float]


def parts(decoder: Decoder, weights, request: Request, count: int = 60) -> Parts:
    """Time propose and extend alternately, each compiled by itself, on a state in mid-decode."""
    state = loop.start(decoder, weights, request)
    for _ in range(2):
        state, _ = loop.step(decoder, weights, request, state)
    batch = request.inputs.shape[0]
    one = jnp.full((batch, 1), 5, jnp.int32)
    block = jnp.full((batch, decoder.gamma + 1), 5, jnp.int32)
    # Copies: the timed functions give their states back into the same buffers.
    draft_state = jax.tree.map(jnp.copy, state.draft)
    target_state = jax.tree.map(jnp.copy, state.target)
    fixed: DecodeState = dataclasses.replace(state, draft=None)
    times: dict[str, list[float]] = {"propose": [], "verify": [], "step": []}
    for repeat in range(count + 3):
        (_, draft_state), propose_s = timed(_propose, decoder, weights, request, draft_state, fixed)
        (_, target_state), verify_s = timed(_extend, decoder, weights, target_state, block)
        (_, target_state), step_s = timed(_extend, decoder, weights, target_state, one)
        if repeat >= 3:  # the first ones compile and warm up
            for name, value in (("propose", propose_s), ("verify", verify_s), ("step", step_s)):
                times[name].append(value)
    return Parts(
        propose=float(np.median(times["propose"])),
        verify=float(np.median(times["verify"])),
        step=float(np.median(times["step"])),
        propose_all=times["propose"],
        step_all=times["step"],
    )


def read_bandwidth(megabytes: int = 256, count: int = 7) -> float:
    """Bytes per second at which this device reads memory: the best of a sum and a
    matrix-vector product over `megabytes` that no cache holds."""
    side = int((megabytes * 1e6 / 4) ** 0.5)
    matrix = jnp.ones((side, side), jnp.float32)
    vector = jnp.ones((side,), jnp.float32)
    rates = []
    for function, arguments in (
        (jax.jit(jnp.sum), (matrix,)),
        (jax.jit(jnp.dot), (matrix, vector)),
    ):
        jax.block_until_ready(function(*arguments))
        seconds = [timed(function, *arguments)[1] for _ in range(count)]
        rates.append(matrix.size * 4 / float(np.median(seconds)))
    return max(rates)
