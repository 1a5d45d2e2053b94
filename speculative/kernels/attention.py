"""Attention of a few queries to a cache, on a CPU, in one pass.

What XLA makes of it is a dozen small programs, each of which goes over all positions, valid or not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from speculative.kernels import attention_code, engine

# What the scratch's rows are rounded up to: the widest register.
_LANES = 16


def supports(head_dim: int, dtype) -> bool:
    """Whether there is code for caches of this dtype (float32 or bfloat16) and D: a multiple of 16,
    on a CPU that there is code for."""
    return (
        head_dim > 0
        and head_dim % attention_code.FEATURES == 0
        and jax.default_backend() == "cpu"
        and engine.machine(str(jnp.dtype(dtype))) is not None
    )


def causal(
    queries: Float[Array, "B M W"],
    keys: Float[Array, "B H D T"],
    values: Float[Array, "B H T D"],
    bias: Float[Array, "H T"],
    lengths: Int[Array, "B"],
) -> Float[Array, "B M HD"]:
    """Row b's queries are at positions lengths[b] .. lengths[b]+M-1, and see what is at or before
    their own.

    Args:
      queries: in the first H * D columns; any others are not looked at.
      keys, values: caches into which the queries' own have been written already.
      bias: of every head by distance, added to the logits.
      lengths: int32, with room for M positions.

    Returns:
      In the dtype of `queries`; summed in float32.
    """
    name, _ = engine.registered("causal", attention_code.write_causal, str(keys.dtype))
    return causal_call(name, queries, keys, values, bias, lengths)


def masked(
    queries: Float[Array, "B M W"],
    keys: Float[Array, "B H D T"],
    values: Float[Array, "B H T D"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B M HD"]:
    """All of a row's queries see the positions where its mask is true; else as `causal`."""
    name, _ = engine.registered("masked", attention_code.write_masked, str(keys.dtype))
    return masked_call(name, queries, keys, values, mask)


def causal_call(name: str, queries, keys, values, bias, lengths) -> jax.Array:
    """`causal` by the handler of that name (see `engine.register`)."""
    # Position t of a query at p is found at T - 1 - p + t, side by side for every t.
    reversed_bias = jnp.pad(bias[:, ::-1], ((0, 0), (0, attention_code.PADDING)))
    return _call(name, queries, keys, values, reversed_bias.astype(jnp.float32), lengths)


def masked_call(name: str, queries, keys, values, mask) -> jax.Array:
    """`masked` by the handler of that name."""
    return _call(name, queries, keys, values, mask)


def _call(name: str, queries, keys, values, *others) -> jax.Array:
    batch, count = queries.shape[:2]
    heads, head_dim, length = keys.shape[1:]
    if 0 in (batch, count):
        return jnp.zeros((batch, count, heads * head_dim), queries.dtype)
    padded = -(-length // _LANES) * _LANES
    shapes = (
        jax.ShapeDtypeStruct((batch, count, heads * head_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, count, padded), jnp.float32),
    )
    call = jax.ffi.ffi_call(name, shapes)
    return call(queries.astype(jnp.float32), keys, values, *others)[0].astype(queries.dtype)
