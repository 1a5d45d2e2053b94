"""Verifiers: how much of a proposal is accepted, and what follows it."""

from speculative.verification.decide import Verifier, decide
from speculative.verification.token import TokenVerifier

__all__ = ["TokenVerifier", "Verifier", "decide"]
