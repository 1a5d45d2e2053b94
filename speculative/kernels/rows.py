"""What is done to every row by itself, on a CPU: one pass where XLA makes several programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from speculative.kernels import engine, rows_code


def supports(x: jax.Array) -> bool:
    """Whether there is code for rows like these: float32, at least one value, on a CPU that there
    is code for."""
    return (
        x.dtype == jnp.float32
        and x.size > 0
        and jax.default_backend() == "cpu"
        and engine.machine() is not None
    )


def first_largest(x: Float[Array, "*rest N"]) -> Int[Array, "*rest"]:
    """The first place of each row's largest value; N - 1 where there is a NaN."""
    name = engine.registered("largest", rows_code.write_largest, "float32")
    rows = lax.stop_gradient(x).reshape(-1, x.shape[-1])
    return largest_call(name, rows).reshape(x.shape[:-1])


def largest_call(name: str | None, x: Float[Array, "M N"]) -> jax.Array:
    """`first_largest` by the handler of that name (see `engine.register`)."""
    shape = jax.ShapeDtypeStruct((x.shape[0],), jnp.int32)
    return jax.ffi.ffi_call(name, shape, vmap_method="sequential")(x)


def rms_norm(x: Float[Array, "*rest N"], scale: Float[Array, "N"]) -> Float[Array, "*rest N"]:
    """`x / sqrt(mean of x^2 + 1e-6) * scale` for every row; not differentiable."""
    name = engine.registered("norm", rows_code.write_norm, "float32")
    return norm_call(name, x.reshape(-1, x.shape[-1]), scale).reshape(x.shape)


def norm_call(name: str | None, x: Float[Array, "M N"], scale: Float[Array, "N"]) -> jax.Array:
    """`rms_norm` by the handler of that name."""
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jax.ffi.ffi_call(name, shape)(x, scale)
