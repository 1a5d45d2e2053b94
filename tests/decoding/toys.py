"""Tiny random T5s, and requests for them and for table models."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from speculative import sampling, testing
from speculative.decoding.round import Decoder, Request
from speculative.drafts.model import ModelDraft
from speculative.models.config import T5Config, parameter_shapes
from speculative.models.language_model import T5LanguageModel
from tests import tiny

CONFIG = tiny.config(vocab_size=32, num_decoder_layers=2)
TARGET = T5LanguageModel(CONFIG, layout="plain")
DRAFT = T5LanguageModel(CONFIG.replace(num_decoder_layers=1), layout="plain")
# Of sizes that the CPU's kernels take, all of them.
KERNEL_CONFIG = CONFIG.replace(emb_dim=32, head_dim=16, mlp_dim=48)
KERNEL_TARGET = T5LanguageModel(KERNEL_CONFIG)
KERNEL_DRAFT = T5LanguageModel(KERNEL_CONFIG.replace(num_decoder_layers=1))


def random_tree(config: T5Config, seed: int) -> dict:
    """A T5X tree of random values; the spread makes greedy outputs vary."""
    random = np.random.default_rng(seed)
    tree: dict = {}
    for path, shape in parameter_shapes(config).items():
        *nodes, leaf = path.split("/")
        node = tree
        for name in nodes:
            node = node.setdefault(name, {})
        if leaf == "scale":
            value = random.uniform(0.5, 1.5, size=shape)
        else:
            value = random.normal(size=shape) / (1.0 if len(nodes) < 3 else np.sqrt(shape[0]))
        node[leaf] = value.astype(np.float32)
    return tree


def pair_weights(seed: int, target=TARGET, draft=DRAFT) -> dict:
    """A random target, and the draft that is the same T5 without its last decoder layer."""
    tree = random_tree(target.config, seed)
    return {"target": target.prepare(tree), "draft": draft.prepare(tree)}


def t5_decoder(gamma: int, **changes) -> Decoder:
    """The pair on states of one size, whatever gamma is: up to 9 tokens and gamma 8."""
    settings = {
        "target": TARGET,
        "draft": ModelDraft(DRAFT),
        "gamma": gamma,
        "max_length": 9,
        "positions": 18,
    }
    return Decoder(**(settings | changes))


def encoder_inputs(rows: int, seed: int = 0, width: int = 7) -> np.ndarray:
    """Rows of 1 to `width` tokens, then padding."""
    random = np.random.default_rng(seed)
    inputs = random.integers(2, 32, size=(rows, width))
    lengths = 1 + np.arange(rows) % width
    return np.where(np.arange(width) < lengths[:, None], inputs, 0).astype(np.int32)


def request(inputs, budgets, *, ids=None, seed: int = 0, sample: int = 0, **settings) -> Request:
    """A request; `ids` are the rows' example ids, 0 .. B-1 if not given."""
    inputs = jnp.asarray(inputs, jnp.int32)
    rows = inputs.shape[0]
    ids = np.arange(rows) if ids is None else np.asarray(ids)
    return Request(
        inputs=inputs,
        budgets=jnp.asarray(np.broadcast_to(budgets, (rows,)), jnp.int32),
        sampling=sampling.make(rows, **settings),
        keys=sampling.row_keys(
            sampling.base_key(seed),
            jnp.asarray(ids, jnp.int32),
            jnp.full((rows,), sample, jnp.int32),
        ),
    )


CHAIN = testing.TableLanguageModel(vocab_size=16, contexts=1)


def chain_decoder(gamma: int, **changes) -> Decoder:
    """Target and draft over a vocabulary of 16, greedy, without EOS."""
    settings = {
        "target": CHAIN,
        "draft": ModelDraft(CHAIN),
        "gamma": gamma,
        "max_length": 12,
        "eos_id": None,
    }
    return Decoder(**(settings | changes))


def chain_weights(target: int = 1, draft: int = 1) -> dict:
    """Models that are certain of t -> t + step (mod 16)."""
    return {
        "target": testing.chain_tables(CHAIN, target),
        "draft": testing.chain_tables(CHAIN, draft),
    }
