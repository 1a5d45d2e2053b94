"""The configuration of a T5, with T5X's own field names.

A gin block written for `t5x.examples.t5.network.T5Config` can be pasted: the fields that only
matter to T5X's training code are accepted and mean the same here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from speculative.errors import ConfigError

ACTIVATIONS = ("relu", "gelu", "linear", "silu", "swish")
DTYPES = ("float32", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Shapes and numerics of an encoder-decoder T5 (1.0 and 1.1).

    Attributes:
      vocab_size: rows of the embedding table, padding rows included (32128 for the public models).
      dtype: activation dtype, `float32` or `bfloat16`, by name or as a dtype; logits are always
        float32. (`float64` is for proofs on tiny models.)
      emb_dim, num_heads, head_dim, mlp_dim: widths; the attention width is heads * head_dim.
      num_encoder_layers, num_decoder_layers: depths.
      mlp_activations: `("relu",)` for 1.0; `("gelu", "linear")` (gated) for 1.1.
      dropout_rate: used in training only.
      logits_via_embedding: True for 1.0 (tied, scaled by emb_dim**-0.5); False for 1.1.
      float32_attention_logits: softmax of attention in float32 whatever `dtype` is.
    """

    vocab_size: int
    dtype: Any = "float32"
    emb_dim: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str] = ("relu",)
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False

    def __post_init__(self):
        object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        sizes = ("vocab_size", "emb_dim", "num_heads", "num_decoder_layers", "head_dim", "mlp_dim")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"T5Config.{name}", expected="a whole number >= 1", found=value)
        if self.num_encoder_layers < 1:
            raise ConfigError(
                "T5Config.num_encoder_layers",
                expected="a whole number >= 1",
                found=self.num_encoder_layers,
            )
        if self.dtype not in DTYPES:
            raise ConfigError(
                "T5Config.dtype",
                expected=" or ".join(DTYPES),
                found=self.dtype,
                mend="float16 overflows in T5's MLP; use bfloat16",
            )
        unknown = [a for a in self.mlp_activations if a not in ACTIVATIONS]
        if unknown or not self.mlp_activations:
            raise ConfigError(
                "T5Config.mlp_activations", expected=f"some of {ACTIVATIONS}", found=unknown
            )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ConfigError(
                "T5Config.dropout_rate", expected="0 <= rate < 1", found=self.dropout_rate
            )

    @property
    def joined_kv(self) -> int:
        """Width of the fused attention projections, heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP has two input matrices (1.1) rather than one (1.0)."""
        return len(self.mlp_activations) > 1

    def replace(self, **changes) -> T5Config:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _dtype_name(dtype) -> str:
    """`'bfloat16'`, `jnp.bfloat16` and `numpy.dtype('bfloat16')` alike, as a name."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return str(name if name is not None else dtype)


def parameter_shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a `config`, unrolled T5X layout, names joined by `/`.

    The names are those of T5X's `examples/t5/network.py`; kernels are [in, out], fused over heads.
    """
    emb, joined, mlp = config.emb_dim, config.joined_kv, config.mlp_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (config.vocab_size, emb)}

    def attention(prefix: str) -> None:
        for name in ("query", "key", "value"):
            shapes[f"{prefix}/{name}/kernel"] = (emb, joined)
        shapes[f"{prefix}/out/kernel"] = (joined, emb)

    def mlp_block(prefix: str) -> None:
        for name in mlp_input_names(config):
            shapes[f"{prefix}/{name}/kernel"] = (emb, mlp)
        shapes[f"{prefix}/wo/kernel"] = (mlp, emb)

    shapes["encoder/relpos_bias/rel_embedding"] = (config.num_heads, 32)
    for i in range(config.num_encoder_layers):
        layer = f"encoder/layers_{i}"
        shapes[f"{layer}/pre_attention_layer_norm/scale"] = (emb,)
        attention(f"{layer}/attention")
        shapes[f"{layer}/pre_mlp_layer_norm/scale"] = (emb,)
        mlp_block(f"{layer}/mlp")
    shapes["encoder/encoder_norm/scale"] = (emb,)

    shapes["decoder/relpos_bias/rel_embedding"] = (config.num_heads, 32)
    for i in range(config.num_decoder_layers):
        layer = f"decoder/layers_{i}"
        shapes[f"{layer}/pre_self_attention_layer_norm/scale"] = (emb,)
        attention(f"{layer}/self_attention")
        shapes[f"{layer}/pre_cross_attention_layer_norm/scale"] = (emb,)
        attention(f"{layer}/encoder_decoder_attention")
        shapes[f"{layer}/pre_mlp_layer_norm/scale"] = (emb,)
        mlp_block(f"{layer}/mlp")
    shapes["decoder/decoder_norm/scale"] = (emb,)
    if not config.logits_via_embedding:
        shapes["decoder/logits_dense/kernel"] = (emb, config.vocab_size)
    return shapes


def mlp_input_names(config: T5Config) -> tuple[str, ...]:
    """`("wi",)` for one activation, `("wi_0", "wi_1", ...)` for several, as T5X names them."""
    if not config.gated:
        return ("wi",)
    return tuple(f"wi_{i}" for i in range(len(config.mlp_activations)))


def parameter_count(config: T5Config) -> int:
    """Number of parameters (FACTS: 76,961,152 for T5 1.1 small)."""
    total = 0
    for shape in parameter_shapes(config).values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def config_from_shapes(
    shapes: Mapping[str, Sequence[int]],
    *,
    dtype: str = "float32",
    activation: str | None = None,
) -> T5Config:
    """Read a configuration off a checkpoint's tensor shapes (unrolled T5X layout).

    The shapes give everything but the activation, which is taken to be T5's own: gated gelu
    where there are two input matrices, relu where there is one.

    Raises:
      ConfigError: a tensor that every T5 has is missing.
    """
    from_names = {
        "embedding": "token_embedder/embedding",
        "bias": "decoder/relpos_bias/rel_embedding",
        "query": "decoder/layers_0/self_attention/query/kernel",
        "wo": "decoder/layers_0/mlp/wo/kernel",
    }
    missing = [name for name in from_names.values() if name not in shapes]
    if missing:
        raise ConfigError(
            "The configuration cannot be read off the checkpoint",
            expected=f"tensors {missing}",
            found=f"{len(shapes)} tensors without them",
            mend="Give a model gin file",
        )
    vocab_size, emb_dim = shapes[from_names["embedding"]]
    num_heads = shapes[from_names["bias"]][0]
    joined = shapes[from_names["query"]][1]
    gated = "decoder/layers_0/mlp/wi_0/kernel" in shapes

    def depth(stack: str, leaf: str) -> int:
        n = 0
        while f"{stack}/layers_{n}/{leaf}" in shapes:
            n += 1
        return n

    first = activation or ("gelu" if gated else "relu")
    return T5Config(
        vocab_size=int(vocab_size),
        dtype=dtype,
        emb_dim=int(emb_dim),
        num_heads=int(num_heads),
        num_encoder_layers=depth("encoder", "pre_attention_layer_norm/scale"),
        num_decoder_layers=depth("decoder", "pre_self_attention_layer_norm/scale"),
        head_dim=int(joined) // int(num_heads),
        mlp_dim=int(shapes[from_names["wo"]][0]),
        mlp_activations=(first, "linear") if gated else (first,),
        logits_via_embedding="decoder/logits_dense/kernel" not in shapes,
    )
