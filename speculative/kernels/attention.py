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
      lengths: with room for M positions.

    Returns:
      In the dtype of `queries`; summed in float32. Where all values are finite, a query's output is
      the same bits however many there are.

    Raises:
      ValueError: shapes or dtypes that do not go together.
    """
    name = engine.registered("causal", attention_code.write_causal, str(keys.dtype))
    return causal_call(name, queries, keys, values, bias, lengths)


def masked(
    queries: Float[Array, "B M W"],
    keys: Float[Array, "B H D T"],
    values: Float[Array, "B H T D"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B M HD"]:
    """All of a row's queries see the positions where its mask is true; else as `causal`."""
    name = engine.registered("masked", attention_code.write_masked, str(keys.dtype))
    return masked_call(name, queries, keys, values, mask)


def causal_call(name: str | None, queries, keys, values, bias, lengths) -> jax.Array:
    """`causal` by the handler of that name (see `engine.register`)."""
    heads, length = keys.shape[1], keys.shape[3]
    if bias.shape != (heads, length) or lengths.shape != keys.shape[:1]:
        raise ValueError(f"bias {bias.shape} and lengths {lengths.shape} for keys {keys.shape}")
    if queries.shape[1] > length:
        raise ValueError(f"{queries.shape[1]} queries for {length} positions")
    # Position t of a query at p is found at T - 1 - p + t, side by side for every t.
    beside = bias[:, ::-1].astype(jnp.float32), lengths.astype(jnp.int32)
    return _call(name, queries, keys, values, *beside)


def masked_call(name: str | None, queries, keys, values, mask) -> jax.Array:
    """`masked` by the handler of that name."""
    if mask.shape != (keys.shape[0], keys.shape[3]):
        raise ValueError(f"mask {mask.shape} for keys {keys.shape}")
    return _call(name, queries, keys, values, mask.astype(jnp.bool_))


def _call(name: str | None, queries, keys, values, *others) -> jax.Array:
    # What the code does not look at: it would read something else, or beyond the end.
    batch, count = queries.shape[:2]
    heads, head_dim, length = keys.shape[1:]
    if values.shape != (batch, heads, length, head_dim) or keys.dtype != values.dtype:
        raise ValueError(
            f"keys {keys.dtype}{keys.shape} and values {values.dtype}{values.shape} of {batch} rows"
        )
    if name is None or head_dim % attention_code.FEATURES or queries.shape[2] < heads * head_dim:
        raise ValueError(f"no attention for queries {queries.shape} to {keys.dtype}{keys.shape}")
    if 0 in (batch, count):
        return jnp.zeros((batch, count, heads * head_dim), queries.dtype)
    padded = -(-length // _LANES) * _LANES
    shapes = (
        jax.ShapeDtypeStruct((batch, count, heads * head_dim), jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, count, padded), jnp.float32),
    )
    call = jax.ffi.ffi_call(name, shapes)
    return call(queries.astype(jnp.float32), keys, values, *others)[0].astype(queries.dtype)
