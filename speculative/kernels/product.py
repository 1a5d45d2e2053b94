"""`rows @ kernel` on a CPU, for few rows at the speed at which the kernel can be read.

Of what XLA makes itself, products and reductions alike, eight rows take two to three times as long
as one (two cores with AVX2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from speculative.kernels import engine, product_code
from speculative.kernels.product_code import PANEL


def supports(shape: tuple[int, int], dtype) -> bool:
    """Whether there is a product for kernels [K, N] of this shape and dtype: float32 or bfloat16,
    K and N multiples of 4 and 16, on a CPU that there is code for."""
    inputs, outputs = shape
    return (
        inputs > 0
        and outputs > 0
        and inputs % product_code.STEP == 0
        and outputs % PANEL == 0
        and jax.default_backend() == "cpu"
        and engine.registered("product", product_code.write, str(jnp.dtype(dtype))) is not None
    )


def panels(kernel: Float[Array, "K N"]) -> Float[Array, "P K 16"]:
    """The kernel as the product reads it."""
    inputs, outputs = kernel.shape
    return jnp.swapaxes(kernel.reshape(inputs, outputs // PANEL, PANEL), 0, 1)


def product(rows: Float[Array, "M K"], kernel: Float[Array, "P K 16"]) -> Float[Array, "M N"]:
    """`rows @` the kernel in these panels, summed in float32, in the dtype of `rows`.

    Every output is the same bits however many rows there are. To be called where `supports` is
    true; not differentiable.
    """
    name = engine.registered("product", product_code.write, str(kernel.dtype))
    if name is None:
        raise ValueError(f"There is no product for kernels of {kernel.dtype}.")
    return call(name, rows, kernel)


def call(name: str, rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """`product` by the handler of that name (see `engine.register`)."""
    count, outputs = rows.shape[0], kernel.shape[0] * PANEL
    if rows.shape[1] != kernel.shape[1] or rows.shape[1] % product_code.STEP:
        raise ValueError(f"rows {rows.shape} and panels {kernel.shape} do not go together")
    if count == 0:
        return jnp.zeros((0, outputs), rows.dtype)
    shape = jax.ShapeDtypeStruct((count, outputs), jnp.float32)
    return jax.ffi.ffi_call(name, shape)(rows.astype(jnp.float32), kernel).astype(rows.dtype)
