"""From parameters, as the file format has them, to weights, as the machine reads them fastest.

`prepare` turns a T5X tree into a pytree of small matrix records. Every product in the network goes
through `matmul`, so a layout is decided in one place and never shows in a checkpoint:

- `Plain`: the kernel [in, out], `x @ kernel`. For training, and where XLA chooses layouts itself.
- `Transposed`: the kernel kept as [out, in], every output's weights side by side. For decoding on
  CPU: `kernels.product` reads it as fast as memory allows, for one row or a dozen.

Matrices that share an input (query, key, value; the MLP's input matrices) can be joined into one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from speculative.kernels.product import product, supports
from speculative.models.config import T5Config, mlp_input_names
from speculative.types import Leaf, wide_dtype

LAYOUTS = ("plain", "transposed")


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


Matrix = Plain | Transposed


def matmul(x: jax.Array, matrix: Matrix) -> jax.Array:
    """`x @ kernel`: [..., in] -> [..., out], in the kernel's dtype."""
    lead, width = x.shape[:-1], x.shape[-1]
    if isinstance(matrix, Plain):
        return x @ matrix.kernel
    rows = x.reshape(-1, width)
    if supports(rows, matrix.kernel):
        y = product(rows, matrix.kernel)
    else:
        # The barriers keep XLA from turning this into `rows @ kernel.T`, with the kernel on the
        # right, for which it would copy the kernel.
        rows = lax.optimization_barrier(rows)
        y = lax.optimization_barrier(
            lax.dot_general(matrix.kernel, rows, (((1,), (1,)), ((), ())))
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
    """`transposed` on CPU; `plain` where XLA lays matrices out itself (TPU, GPU)."""
    return "transposed" if jax.default_backend() == "cpu" else "plain"


def prepare(
    params: Mapping[str, object],
    config: T5Config,
    *,
    layout: str = "plain",
) -> dict[str, object]:
    """The weights that the block functions read.

    Args:
      params: a T5X tree (nested dicts, unrolled layout), any float dtype.
      config: its configuration; matrices are cast to `config.dtype`, except the output matrix,
        which stays float32 as in T5X (logits are always float32).
      layout: `plain` (differentiable; training) or `transposed` (decoding on CPU).

    Returns:
      A pytree of matrix records and arrays.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is none of {LAYOUTS}")
    dtype = jnp.dtype(config.dtype)

    def matrix(*kernels, dtype=dtype) -> Matrix:
        kernels = [jnp.asarray(k).astype(dtype) for k in kernels]
        sizes = tuple(k.shape[1] for k in kernels)
        if layout == "plain":
            joined = kernels[0] if len(kernels) == 1 else jnp.concatenate(kernels, axis=1)
            return Plain(joined, sizes)
        joined = jnp.concatenate([k.T for k in kernels], axis=0)
        return Transposed(joined, sizes)

    def scale(node) -> jax.Array:
        return jnp.asarray(node["scale"]).astype(dtype)

    def mlp(node) -> dict[str, object]:
        return {
            "wi": matrix(*[node[name]["kernel"] for name in mlp_input_names(config)]),
            "wo": matrix(node["wo"]["kernel"]),
        }

    def self_attention(node) -> dict[str, Matrix]:
        names = ("query", "key", "value")
        return {
            "qkv": matrix(*[node[name]["kernel"] for name in names]),
            "out": matrix(node["out"]["kernel"]),
        }

    def cross_attention(node) -> dict[str, Matrix]:
        return {
            "query": matrix(node["query"]["kernel"]),
            "kv": matrix(node["key"]["kernel"], node["value"]["kernel"]),
            "out": matrix(node["out"]["kernel"]),
        }

    encoder, decoder = params["encoder"], params["decoder"]
    embedding = jnp.asarray(params["token_embedder"]["embedding"])
    output_dtype = wide_dtype(dtype)
    if config.logits_via_embedding:
        logits = matrix(embedding.T, dtype=output_dtype)
    else:
        logits = matrix(decoder["logits_dense"]["kernel"], dtype=output_dtype)
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
