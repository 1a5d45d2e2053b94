"""The baseline: the same target, the same `extend`, one token at a time."""

from __future__ import annotations

import dataclasses

from speculative.decoding.round import Decoder


def autoregressive(decoder: Decoder) -> Decoder:
    """`decoder` without its draft, on states of the same allocated length.

    It is the same round at gamma 0: the target extends by one token, whose law (or argmax) gives
    the next one. Every speed-up of this project is over this decoder.
    """
    return dataclasses.replace(decoder, draft=None, gamma=0, positions=decoder.allocated)
