"""From logits to the law that is really sampled, draws from it, and the keys behind the draws.

One standardisation (the paper's section 2.2) serves draft, target and bonus token alike: bias and
forbidden ids act on raw logits, then temperature, then top-k (ties kept), then top-p (ties kept),
then min-p, each on what the one before left. That is T5X's order; the order is part of the law.

Temperature 0 is the argmax and never a division.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from speculative.errors import ConfigError
from speculative.kernels import rows
from speculative.types import Leaf, wide_dtype

MODES = ("greedy", "sampled", "mixed")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "min_p", "bias"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of the law, traced: a sweep over their values compiles nothing.

    Which filters there are at all (None or not) is static.

    Attributes:
      temperature: [B]; 0 gives the argmax (only where the mode is `greedy` or `mixed`).
      top_k: [B] int32 or None; keeps the k largest and all that tie with the k-th; 0 keeps all.
      top_p: [B] or None; keeps the smallest set of largest ones whose mass reaches top_p, ties
        included; 1 keeps all.
      min_p: [B] or None; keeps what has at least min_p times the largest probability.
      bias: [V] or None, added to raw logits; -inf forbids an id.
    """

    temperature: Leaf
    top_k: Leaf | None = None
    top_p: Leaf | None = None
    min_p: Leaf | None = None
    bias: Leaf | None = None


def mode_of(temperature) -> str:
    """The static mode that these (concrete) temperatures need."""
    zero = [float(t) == 0.0 for t in jnp.ravel(jnp.asarray(temperature))]
    if all(zero):
        return "greedy"
    return "mixed" if any(zero) else "sampled"


def make(
    batch: int,
    *,
    temperature=0.0,
    top_k=None,
    top_p=None,
    min_p=None,
    bias=None,
    forbidden_ids=(),
    vocab_size: int | None = None,
) -> Sampling:
    """Checked settings for a batch, from numbers or one number per row.

    Args:
      batch: rows.
      temperature, top_k, top_p, min_p: see `Sampling`.
      bias: {id: added logit} or a [V] array.
      forbidden_ids: ids that are never emitted.
      vocab_size: width of the logits, needed for `bias` as a dict and for `forbidden_ids`.

    Raises:
      ConfigError: a value out of range.
    """

    def per_row(name, value, dtype, low, high, inclusive_high=True):
        value = jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
        lowest, highest = float(value.min()), float(value.max())
        fits = lowest >= low and (highest <= high if inclusive_high else highest < high)
        if not fits:  # also where it is NaN
            raise ConfigError(
                f"sampling.{name}", expected=f"{low} <= {name} <= {high}", found=(lowest, highest)
            )
        return value

    offsets = None
    if bias is not None or len(tuple(forbidden_ids)):
        if vocab_size is None:
            raise ConfigError("sampling.bias", expected="vocab_size beside it", found=None)
        offsets = jnp.zeros((vocab_size,), jnp.float32)
        if isinstance(bias, dict):
            for token, value in bias.items():
                offsets = offsets.at[_checked_id(token, vocab_size)].add(value)
        elif bias is not None:
            offsets = jnp.asarray(bias, jnp.float32)
            if offsets.shape != (vocab_size,):
                raise ConfigError(
                    "sampling.bias", expected=f"shape ({vocab_size},)", found=offsets.shape
                )
        for token in forbidden_ids:
            offsets = offsets.at[_checked_id(token, vocab_size)].set(-jnp.inf)
    most = float(jnp.finfo(jnp.float32).max)
    return Sampling(
        temperature=per_row("temperature", temperature, jnp.float32, 0.0, most),
        top_k=None if top_k is None else per_row("top_k", top_k, jnp.int32, 0, 2**31 - 1),
        top_p=None if top_p is None else per_row("top_p", top_p, jnp.float32, 0.0, 1.0),
        min_p=None if min_p is None else per_row("min_p", min_p, jnp.float32, 0.0, 1.0),
        bias=offsets,
    )


def _checked_id(token: int, vocab_size: int) -> int:
    if not 0 <= int(token) < vocab_size:
        raise ConfigError("sampling: token id", expected=f"0 <= id < {vocab_size}", found=token)
    return int(token)


def adjusted_logits(logits: jax.Array, settings: Sampling) -> jax.Array:
    """Raw logits [B, ..., V] with the bias added, in float32 or wider."""
    logits = logits.astype(wide_dtype(logits.dtype))
    if settings.bias is None:
        return logits
    bias = settings.bias.astype(logits.dtype)
    return logits + bias.reshape((1,) * (logits.ndim - 1) + bias.shape)


def argmax(logits: Float[Array, "B *rest V"], settings: Sampling) -> Int[Array, "B *rest"]:
    """The token of temperature 0: top-k, top-p and min-p always keep it."""
    return first_largest(adjusted_logits(logits, settings))


def first_largest(x: Float[Array, "*rest V"]) -> Int[Array, "*rest"]:
    """`jnp.argmax` over V; a row that holds NaN gets V - 1.

    Where there is no kernel for it, it is two reductions, which XLA vectorises and argmax not.
    """
    if rows.supports(x):
        return rows.first_largest(x)
    last = x.shape[-1] - 1
    places = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    is_largest = x == jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_largest, places, last), axis=-1)


def standardise(
    logits: Float[Array, "B *rest V"], settings: Sampling, mode: str
) -> Float[Array, "B *rest V"]:
    """The law that is sampled: non-negative, sums to 1 over V.

    Args:
      logits: raw, any number of places per row.
      settings: one entry per row.
      mode: `sampled` (every temperature above 0) or `mixed` (rows of temperature 0 get a one-hot
        law at the argmax). `greedy` needs no law.

    Returns:
      float32 (float64 for float64 logits).
    """
    logits = adjusted_logits(logits, settings)

    def per_row(value):
        return value.reshape(value.shape + (1,) * (logits.ndim - 1))

    temperature = settings.temperature.astype(logits.dtype)
    if mode == "mixed":
        zero = per_row(temperature == 0)
        temperature = jnp.where(temperature == 0, jnp.ones((), logits.dtype), temperature)
    # The maximum is taken off before the division: 1 / 1e-8 times a large logit would be inf.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / per_row(temperature)
    if settings.top_k is not None:
        scaled = _keep_top_k(scaled, per_row(settings.top_k))
    if settings.top_p is not None:
        scaled = _keep_top_p(scaled, per_row(settings.top_p.astype(scaled.dtype)))
    if settings.min_p is not None:
        floor = jnp.log(per_row(settings.min_p.astype(scaled.dtype)))
        scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
    law = jax.nn.softmax(scaled, axis=-1)
    if mode == "mixed":
        one_hot = jax.nn.one_hot(first_largest(logits), logits.shape[-1], dtype=law.dtype)
        law = jnp.where(zero, one_hot, law)
    return law


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats x."""
    wide = x.dtype == jnp.float64
    signed, unsigned = (jnp.int64, jnp.uint64) if wide else (jnp.int32, jnp.uint32)
    bits = lax.bitcast_convert_type(x, signed)
    top = jnp.asarray(1 << (63 if wide else 31), unsigned)
    raw = bits.astype(unsigned)
    return jnp.where(bits < 0, ~raw, raw | top)


def _keep_above(scaled: jax.Array, enough) -> jax.Array:
    """Keep the entries at or above the highest threshold whose kept set is `enough`.

    `enough(kept)` [B, ..., 1] must be monotone in the set. The threshold is found by bisection on
    the floats' own order, exactly, in as many passes as a float has bits: no sort.
    """
    keys = _ordered_bits(scaled)
    bits = 64 if scaled.dtype == jnp.float64 else 32

    def step(i, threshold):
        trial = threshold | (jnp.asarray(1, keys.dtype) << (bits - 1 - i).astype(keys.dtype))
        return jnp.where(enough(keys >= trial), trial, threshold)

    start = jnp.zeros((*scaled.shape[:-1], 1), keys.dtype)
    threshold = lax.fori_loop(0, bits, step, start)
    return jnp.where(keys >= threshold, scaled, -jnp.inf)


def _keep_top_k(scaled: jax.Array, k: jax.Array) -> jax.Array:
    vocab = scaled.shape[-1]
    k = jnp.where(k == 0, vocab, jnp.minimum(k, vocab))
    return _keep_above(
        scaled, lambda kept: jnp.sum(kept, axis=-1, keepdims=True, dtype=jnp.int32) >= k
    )


def _keep_top_p(scaled: jax.Array, p: jax.Array) -> jax.Array:
    law = jax.nn.softmax(scaled, axis=-1)
    zero = jnp.zeros((), law.dtype)

    def enough(kept):
        mass = jnp.sum(jnp.where(kept, law, zero), axis=-1, keepdims=True)
        # The set must hold the largest entry, also for p = 0; and p = 1 keeps everything, though
        # the sum may round to something below or above 1.
        return jnp.any(kept, axis=-1, keepdims=True) & (mass >= p) & (p < 1)

    return _keep_above(scaled, enough)


# Places of the law that are summed up together: the square root of a usual vocabulary.
_BLOCK = 64


def draw(law: Float[Array, "B V"], uniform: Float[Array, "B"]) -> Int[Array, "B"]:
    """Tokens by inverting the cumulative law at `uniform` in [0, 1).

    In two levels, first the block of the vocabulary, then the place in it: a cumulative sum over
    all of a large vocabulary costs ten times as much on CPU. Never a token of probability 0.
    """
    batch, vocab = law.shape
    blocks = -(-vocab // _BLOCK)
    padded = jnp.pad(law, ((0, 0), (0, blocks * _BLOCK - vocab)))
    padded = padded.reshape(batch, blocks, _BLOCK)
    block, rest = _invert(jnp.sum(padded, axis=-1), uniform.astype(law.dtype), relative=True)
    row = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    place, _ = _invert(row, rest, relative=False)
    return (block * _BLOCK + place).astype(jnp.int32)


def _invert(masses: Float[Array, "B N"], at: Float[Array, "B"], *, relative: bool):
    """The first place whose cumulative mass exceeds `at`, and how far `at` reaches into it.

    `relative`: `at` is a share of the total. What rounding puts at or beyond the total is taken
    just below it, and only places that have mass are looked at, so that one is always found.
    """
    cumulative = jnp.cumsum(masses, axis=-1)
    # XLA sums in a tree: by rounding, the sum may rise at a place without mass, and fall behind it.
    mass = masses > 0
    zero = jnp.zeros_like(cumulative)
    total = jnp.max(jnp.where(mass, cumulative, zero), axis=-1)
    at = jnp.minimum(at * total if relative else at, jnp.nextafter(total, zero[:, 0]))
    place = jnp.argmax(mass & (cumulative > at[:, None]), axis=-1)
    before = jnp.take_along_axis(cumulative, jnp.maximum(place - 1, 0)[:, None], axis=1)[:, 0]
    rest = jnp.where(place > 0, at - before, at)
    return place, jnp.maximum(rest, zero[:, 0])


# Purposes of the uniforms within a round; the place in the block is folded in before them.
DRAFT, ACCEPT, NEXT, SPARE = 0, 1, 2, 3


def base_key(seed: int) -> jax.Array:
    """The key that a run's draws descend from: threefry whatever the global default is."""
    return jax.random.key(seed, impl="threefry2x32")


def row_keys(base: jax.Array, example_ids: Int[Array, "B"], sample_index: Int[Array, "B"]):
    """[B] keys that depend on a row's example and sample index, not on batch, padding or mesh."""

    def one(example, sample):
        return jax.random.fold_in(jax.random.fold_in(base, example), sample)

    return jax.vmap(one)(example_ids, sample_index)


def round_keys(rows: jax.Array, lengths: Int[Array, "B"]) -> jax.Array:
    """[B] keys of a round: the committed length grows strictly, so that none returns."""
    return jax.vmap(jax.random.fold_in)(rows, lengths)


def uniforms(keys: jax.Array, place, purpose: int) -> Float[Array, "B"]:
    """One uniform in [0, 1) per row, for a place in the block and a purpose."""

    def one(key):
        key = jax.random.fold_in(jax.random.fold_in(key, place), purpose)
        return jax.random.uniform(key, ())

    return jax.vmap(one)(keys)
