"""Speculative decoding of T5X checkpoints in JAX.

`load_pair` is the small door; `speculative.main` runs gin-configured experiments;
`speculative.decoding.round.decode_round` is the loop's one body.
"""

from speculative.errors import UserError
from speculative.pair import Generation, Pair, load_model, load_pair

__all__ = ["Generation", "Pair", "UserError", "load_model", "load_pair"]
