"""Names, shapes, counts, initialisers and logical axes of the parameters; the configuration."""

from __future__ import annotations

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speculative.errors import ConfigError
from speculative.models import parameters, t5
from speculative.models.config import (
    T5Config,
    config_from_shapes,
    parameter_count,
    parameter_shapes,
)
from speculative.models.weights import bytes_per_step
from tests.models import references

GATED, RELU = ("gelu", "linear"), ("relu",)
# (emb, heads, head_dim, layers, mlp), tensors, parameters, those without the encoder.
SIZES = {
    "1.1 tiny": ((8, 4, 3, 2, 16), 52, 518_240, 516_536),
    "1.1 small": ((512, 6, 64, 8, 1024), 190, 76_961_152, 58_077_888),
    "1.1 base": ((768, 12, 64, 12, 2048), 282, 247_577_856, 162_623_616),
    "1.1 large": ((1024, 16, 64, 24, 2816), 558, 783_150_080, 474_818_048),
    "1.1 xl": ((2048, 32, 64, 24, 5120), 558, 2_849_757_184, 1_692_027_904),
    "1.1 xxl": ((4096, 64, 64, 24, 10240), 558, 11_135_332_352, 6_504_617_984),
    "1.0 small": ((512, 8, 64, 6, 2048), 131, 60_506_624, 41_625_344),
    "1.0 base": ((768, 12, 64, 12, 3072), 257, 222_903_552, 137_949_312),
    "1.0 large": ((1024, 16, 64, 24, 4096), 509, 737_668_096, 435_627_520),
    "1.0 3B": ((1024, 32, 128, 24, 16384), 509, 2_851_598_336, 1_643_587_584),
    "1.0 11B": ((1024, 128, 128, 24, 65536), 509, 11_307_321_344, 6_475_428_864),
}
# Parameters that a decoding step reads, cross-attention's keys and values cached.
READ = {
    "1.1 small": 38_482_624,
    "1.1 base": 123_793_536,
    "1.1 large": 391_587_328,
    "1.1 xl": 1_424_903_168,
    "1.1 xxl": 5_567_715_328,
}


def config_of(name: str) -> T5Config:
    emb, heads, head_dim, layers, mlp = SIZES[name][0]
    old = name.startswith("1.0")
    return T5Config(
        vocab_size=32128,
        emb_dim=emb,
        num_heads=heads,
        num_encoder_layers=layers,
        num_decoder_layers=layers,
        head_dim=head_dim,
        mlp_dim=mlp,
        mlp_activations=RELU if old else GATED,
        logits_via_embedding=old,
    )


@pytest.mark.parametrize("name", SIZES)
def test_counts_of_the_public_models(name):
    _, tensors, total, without_encoder = SIZES[name]
    config = config_of(name)
    shapes = parameter_shapes(config)
    assert len(shapes) == tensors
    assert parameter_count(config) == total
    encoder = sum(int(np.prod(s)) for n, s in shapes.items() if n.startswith("encoder/"))
    assert total - encoder == without_encoder


@pytest.mark.parametrize("case", ["1.1", "1.0"])
def test_names_and_shapes_are_those_that_t5x_wrote(case):
    config, tree, _ = references.load(case)
    written = flax.traverse_util.flatten_dict(tree, sep="/")
    assert {name: value.shape for name, value in written.items()} == parameter_shapes(config)


@pytest.mark.parametrize("name", ["1.1 small", "1.0 base"])
def test_linen_declares_the_same_parameters(name):
    config = config_of(name)
    tokens = jnp.ones((1, 4), jnp.int32)
    variables = jax.eval_shape(t5.T5(config).init, jax.random.key(0), tokens, tokens, tokens)
    declared = flax.traverse_util.flatten_dict(dict(variables["params"]), sep="/")
    assert {n: v.shape for n, v in declared.items()} == parameter_shapes(config)
    assert {v.dtype for v in declared.values()} == {jnp.dtype("float32")}
    assert set(variables) == {"params"}


def test_initialisers_have_t5s_spread():
    config = T5Config(
        vocab_size=64,
        emb_dim=64,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=1,
        head_dim=16,
        mlp_dim=96,
        mlp_activations=GATED,
    )
    tree = flax.traverse_util.flatten_dict(parameters.init(config, jax.random.key(0)), sep="/")
    layer = "decoder/layers_0"
    spread = {
        "token_embedder/embedding": 1.0,
        f"{layer}/self_attention/query/kernel": 1 / 8 / 4,  # 1/sqrt(fan in), over sqrt(head_dim)
        f"{layer}/self_attention/key/kernel": 1 / 8,
        f"{layer}/encoder_decoder_attention/out/kernel": 1 / 8,
        f"{layer}/mlp/wi_0/kernel": 1 / 8,
        f"{layer}/mlp/wo/kernel": 96**-0.5,
        "decoder/logits_dense/kernel": 1 / 8,
        "decoder/relpos_bias/rel_embedding": (2 / (4 + 32)) ** 0.5,
    }
    for name, wanted in spread.items():
        assert float(jnp.std(tree[name])) == pytest.approx(wanted, rel=0.12), name
    assert (np.asarray(tree["encoder/encoder_norm/scale"]) == 1).all()


@pytest.mark.parametrize("name", ["1.1 small", "1.0 small"])
def test_every_parameter_has_logical_axes(name):
    for path, shape in parameter_shapes(config_of(name)).items():
        axes = parameters.logical_axes(path)
        assert len(axes) == len(shape), path
    assert parameters.logical_axes("token_embedder/embedding") == ("vocab", "embed")
    kernel = "decoder/layers_3/encoder_decoder_attention/out/kernel"
    assert parameters.logical_axes(kernel) == ("joined_kv", "embed")
    assert parameters.logical_axes("encoder/layers_0/mlp/wi_1/kernel") == ("embed", "mlp")


@pytest.mark.parametrize(
    "path", ["decoder/layers_0/mlp/bias", "decoder/logits_dense/scale", "embedding", ""]
)
def test_an_unknown_parameter_is_an_error(path):
    with pytest.raises(KeyError, match="no rule"):
        parameters.logical_axes(path)


@pytest.mark.parametrize("name", READ)
def test_bytes_read_by_a_decoding_step(name):
    # The relative bias, heads * 32, is in both figures.
    assert bytes_per_step(config_of(name)) == 4 * READ[name]
    assert bytes_per_step(config_of(name), itemsize=2) == 2 * READ[name]


# ------------------------------------------------------------------------------ the configuration


@pytest.mark.parametrize("name", SIZES)
def test_a_configuration_can_be_read_off_the_shapes(name):
    assert config_from_shapes(parameter_shapes(config_of(name))) == config_of(name)


def test_other_activations_cannot_be_read_but_given():
    config = config_of("1.1 small").replace(mlp_activations=("silu", "linear"))
    shapes = parameter_shapes(config)
    assert config_from_shapes(shapes, activation="silu") == config
    assert config_from_shapes(shapes, dtype="bfloat16").dtype == "bfloat16"


def test_shapes_of_something_else_are_refused():
    with pytest.raises(ConfigError, match="cannot be read off"):
        config_from_shapes({"token_embedder/embedding": (32, 8)})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"emb_dim": 0}, "emb_dim"),
        ({"num_heads": -1}, "num_heads"),
        ({"num_encoder_layers": 0}, "num_encoder_layers"),
        ({"num_decoder_layers": 0}, "num_decoder_layers"),
        ({"dtype": "float16"}, "float16 overflows"),
        ({"mlp_activations": ("tanh",)}, "mlp_activations"),
        ({"mlp_activations": ()}, "mlp_activations"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
    ],
)
def test_errors_name_the_field(changes, named):
    with pytest.raises(ConfigError, match=named):
        T5Config(**({"vocab_size": 32} | changes))


def test_a_dtype_may_be_given_in_any_form():
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)):
        assert T5Config(vocab_size=32, dtype=dtype).dtype == "bfloat16"
    assert hash(T5Config(vocab_size=32, mlp_activations=["relu"])) == hash(T5Config(vocab_size=32))


def test_dropout_is_broadcast_over_the_length():
    x = jnp.ones((2, 5, 64))
    dropped = np.asarray(t5.Dropout(jax.random.key(0), 0.25)(x))
    np.testing.assert_array_equal(dropped, np.broadcast_to(dropped[:, :1], dropped.shape))
    np.testing.assert_allclose(np.unique(dropped), [0, 1 / 0.75], rtol=1e-6)
    assert 0.6 < (dropped > 0).mean() < 0.9
    assert t5.Dropout(jax.random.key(0), 0.0)(x) is x
    drop = t5.Dropout(jax.random.key(0), 0.25)
    assert not np.array_equal(drop(x), drop(x))  # each place has a mask of its own
