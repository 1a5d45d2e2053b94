"""From parameters, as the file format has them, to weights, as the machine reads them fastest.

`prepare` turns a T5X tree into a pytree of small matrix records. Every product in the network goes
through `matmul`, so a layout is decided in one place and never shows in a checkpoint:

- `Plain`: the kernel [in, out], `x @ kernel`. For training, and where XLA chooses layouts itself.
- `Transposed`: the kernel kept as [out, in], every output's weights side by side, the left operand.
  For decoding on a CPU that there is no better code for, and for sizes that there is none for.
- `Panels`: the kernel in panels of 16 outputs. For decoding on CPU: `kernels.product` reads it as
  fast as memory allows, for one row or a dozen.

Matrices that share an input (query, key, value; the MLP's input matrices) can be joined into one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from speculative.kernels import product as kernels
from speculative.models.config import T5Config, mlp_input_names
from speculative.types import Leaf, wide_dtype

LAYOUTS = ("plain", "transposed", "panels")


@partial(jax.tree_util.register_dataclass, data_fields=["kernel"], meta_fields=["sizes"])
@dataclasses.dataclass(frozen=True)
class Plain:
    """A kernel [in, out]; `sizes` are the widths of the outputs that were joined into it."""

    kernel: Leaf
    sizes: tuple[int, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["kernel"], meta_fields=["sizes"])
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A kernel [out, in]; `sizes` as in `Plain`."""

    kernel: Leaf
    sizes: tuple[int, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["kernel"], meta_fields=["sizes"])
@dataclasses.dataclass(frozen=True)
class Panels:
    """A kernel [out / 16, in, 16] (`kernels.product.panels`); `sizes` as in `Plain`."""

    kernel: Leaf
    sizes: tuple[int, ...]


Matrix = Plain | Transposed | Panels


def matmul(x: jax.Array, matrix: Matrix) -> jax.Array:
    """`x @ kernel`: [..., in] -> [..., out], in the dtype of x, whatever the kernel is kept in."""
    if isinstance(matrix, Plain):
        return x @ matrix.kernel.astype(x.dtype)
    lead, width = x.shape[:-1], x.shape[-1]
    rows = x.reshape(-1, width)
    if isinstance(matrix, Panels):
        y = kernels.product(rows, matrix.kernel)
    else:
        # The barriers keep XLA from turning this into `rows @ kernel.T`, with the kernel on the
        # right, for which it would copy the kernel.
        rows = lax.optimization_barrier(rows)
        y = lax.optimization_barrier(
            lax.dot_general(matrix.kernel.astype(x.dtype), rows, (((1,), (1,)), ((), ())))
        ).T
    return y.reshape(*lead, y.shape[-1])


def matmul_split(x: jax.Array, matrix: Matrix) -> list[jax.Array]:
    """`matmul`, with the result cut into the outputs that were joined."""
    y = matmul(x, matrix)
    cuts, at = [], 0
    for size in matrix.sizes[:-1]:
        at += size
        cuts.append(at)
    return jnp.split(y, cuts, axis=-1)


def default_layout() -> str:
    """`panels` on CPU; `plain` where XLA lays matrices out itself (TPU, GPU)."""
    return "panels" if jax.default_backend() == "cpu" else "plain"


def matrix(given: Sequence[jax.Array], *, layout: str) -> Matrix:
    """One record of kernels [in, out] that share an input, joined along their outputs."""
    sizes = tuple(k.shape[1] for k in given)
    joined = given[0] if len(given) == 1 else jnp.concatenate(given, axis=1)
    if layout == "plain":
        return Plain(joined, sizes)
    if layout == "panels" and kernels.supports(joined.shape, joined.dtype):
        return Panels(kernels.panels(joined), sizes)
    return Transposed(joined.T, sizes)


def prepare(
    params: Mapping[str, object],
    config: T5Config,
    *,
    layout: str = "plain",
    weights_dtype: str | None = None,
) -> dict[str, object]:
    """The weights that the block functions read.

    Args:
      params: a T5X tree (nested dicts, unrolled layout), any float dtype.
      config: its configuration.
      layout: `plain` (differentiable; training), or for decoding on CPU `panels` (`transposed` for
        those matrices that there are no panels for) or `transposed`.
      weights_dtype: of the matrices; None keeps them in `config.dtype`, except the output matrix,
        which stays float32 as in T5X. Activations are `config.dtype` and logits float32 whatever it
        is. Nothing changes where it holds every value, as bfloat16 does those of a bfloat16
        checkpoint: half as much memory is read.

    Returns:
      A pytree of matrix records and arrays.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {LAYOUTS}")
    dtype = jnp.dtype(config.dtype)
    if layout == "panels" and dtype == jnp.float64:
        layout = "transposed"  # Panels are multiplied in float32.

    def joined(*given, dtype=dtype) -> Matrix:
        kept = weights_dtype or dtype
        return matrix([jnp.asarray(k).astype(kept) for k in given], layout=layout)

    def scale(node) -> jax.Array:
        return jnp.asarray(node["scale"]).astype(dtype)

    def mlp(node) -> dict[str, object]:
        return {
            "wi": joined(*[node[name]["kernel"] for name in mlp_input_names(config)]),
            "wo": joined(node["wo"]["kernel"]),
        }

    def self_attention(node) -> dict[str, Matrix]:
        names = ("query", "key", "value")
        return {
            "qkv": joined(*[node[name]["kernel"] for name in names]),
            "out": joined(node["out"]["kernel"]),
        }

    def cross_attention(node) -> dict[str, Matrix]:
        return {
            "query": joined(node["query"]["kernel"]),
            "kv": joined(node["key"]["kernel"], node["value"]["kernel"]),
            "out": joined(node["out"]["kernel"]),
        }

    encoder, decoder = params["encoder"], params["decoder"]
    embedding = jnp.asarray(params["token_embedder"]["embedding"])
    output_dtype = wide_dtype(dtype)
    if config.logits_via_embedding:
        logits = joined(embedding.T, dtype=output_dtype)
    else:
        logits = joined(decoder["logits_dense"]["kernel"], dtype=output_dtype)
    return {
        "embedding": embedding.astype(dtype),
        "logits": logits,
        "encoder": {
            "bias": jnp.asarray(encoder["relpos_bias"]["rel_embedding"]).astype(dtype),
            "norm": scale(encoder["encoder_norm"]),
            "layers": [
                {
                    "attention_norm": scale(layer["pre_attention_layer_norm"]),
                    "attention": self_attention(layer["attention"]),
                    "mlp_norm": scale(layer["pre_mlp_layer_norm"]),
                    "mlp": mlp(layer["mlp"]),
                }
                for layer in (encoder[f"layers_{i}"] for i in range(config.num_encoder_layers))
            ],
        },
        "decoder": {
            "bias": jnp.asarray(decoder["relpos_bias"]["rel_embedding"]).astype(dtype),
            "norm": scale(decoder["decoder_norm"]),
            "layers": [
                {
                    "attention_norm": scale(layer["pre_self_attention_layer_norm"]),
                    "attention": self_attention(layer["self_attention"]),
                    "cross_norm": scale(layer["pre_cross_attention_layer_norm"]),
                    "cross": cross_attention(layer["encoder_decoder_attention"]),
                    "mlp_norm": scale(layer["pre_mlp_layer_norm"]),
                    "mlp": mlp(layer["mlp"]),
                }
                for layer in (decoder[f"layers_{i}"] for i in range(config.num_decoder_layers))
            ],
        },
    }


def bytes_per_step(
    config: T5Config, itemsize: int = 4, *, logits_itemsize: int | None = None
) -> int:
    """Bytes of weights that one decoding step reads, cross-attention keys and values cached.

    Decoder and output matrix, without the cross key and value kernels, the embedding table and
    the relative bias (FACTS 4.3: 153,930,496 for T5 1.1 small in float32).

    Args:
      config: of the model.
      itemsize: bytes of a weight.
      logits_itemsize: of the output matrix, which `prepare` keeps in float32; None: as the others.
    """
    emb, joined, mlp = config.emb_dim, config.joined_kv, config.mlp_dim
    layer = 6 * emb * joined + (len(config.mlp_activations) + 1) * emb * mlp + 3 * emb
    others = config.num_decoder_layers * layer + emb + config.num_heads * 32
    output = emb * config.vocab_size
    return itemsize * others + (logits_itemsize or itemsize) * output
