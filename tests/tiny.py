"""The smallest T5 that still has every part, for tests to vary."""

from speculative.models.config import T5Config


def config(**changes) -> T5Config:
    """One encoder and one decoder layer, gated, untied; `changes` are fields of the result."""
    settings = {
        "vocab_size": 4096,
        "emb_dim": 16,
        "num_heads": 2,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "head_dim": 8,
        "mlp_dim": 24,
        "mlp_activations": ("gelu", "linear"),
        "dropout_rate": 0.0,
    }
    return T5Config(**(settings | changes))
