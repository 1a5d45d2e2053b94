"""Greedy decodes against T5X's own, and with another T5 as the draft."""

from __future__ import annotations

import numpy as np
import pytest

from speculative.decoding import loop
from speculative.decoding.autoregressive import autoregressive
from speculative.decoding.round import Decoder
from speculative.drafts.model import ModelDraft
from speculative.models.language_model import T5LanguageModel
from tests.decoding import toys
from tests.models import references


def load(case):
    config, tree, outputs = references.load(case)
    model = T5LanguageModel(config)
    return model, model.prepare(tree), outputs


@pytest.mark.parametrize("gamma", [0, 3])
def test_greedy_tokens_are_t5xs(gamma):
    target, target_weights, outputs = load("1.1")
    draft, draft_weights, _ = load("1.0")
    decoder = Decoder(target, ModelDraft(draft), gamma or 1, max_length=12)
    weights = {"target": target_weights, "draft": draft_weights}
    request = toys.request(outputs["in/encoder_input_tokens"], 12)
    got = loop.decode(decoder if gamma else autoregressive(decoder), weights, request)
    np.testing.assert_array_equal(got.tokens, outputs["greedy_tokens"])
