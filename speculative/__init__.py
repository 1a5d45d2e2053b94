"""Speculative decoding of T5X checkpoints in JAX.

`load_pair` is the small door; `speculative.main` runs gin-configured experiments;
`speculative.decoding.round.decode_round` is the loop's one body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculative.errors import UserError

if TYPE_CHECKING:
    from speculative.pair import Generation, Pair, load_model, load_pair

__all__ = ["Generation", "Pair", "UserError", "load_model", "load_pair"]


def __getattr__(name: str):
    # On first use: records, reports and the launcher's help need no JAX.
    if name in __all__:
        from speculative import pair

        return getattr(pair, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
