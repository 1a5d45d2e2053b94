"""What T5X wrote and computed: tiny T5s with random weights (see tests/data/t5x/README.md)."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from speculative.models.config import T5Config

HERE = pathlib.Path(__file__).parent.parent / "data" / "t5x"

# Name -> (file of parameters, file of T5X's outputs, changes of the configuration).
CASES = {
    "1.1": ("params.npz", "expected.npz", {}),
    "1.0": (
        "tensors_t5_1_0.npz",
        "expected_t5_1_0.npz",
        {"mlp_activations": ("relu",), "logits_via_embedding": True},
    ),
    "1.1 bfloat16": ("params.npz", "expected_bf16_activations.npz", {"dtype": "bfloat16"}),
}


def nested(flat) -> dict:
    """'/'-joined names to nested dicts."""
    tree: dict = {}
    for path, value in flat.items():
        *nodes, leaf = path.split("/")
        node = tree
        for name in nodes:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


def load(case: str):
    """(configuration, T5X tree, outputs by name) of one of `CASES`."""
    params, expected, changes = CASES[case]
    config = T5Config(**json.loads((HERE / "config.json").read_text())["config"])
    with np.load(HERE / params, allow_pickle=False) as file:
        tree = nested(dict(file))
    with np.load(HERE / expected, allow_pickle=False) as file:
        outputs = dict(file)
    return config.replace(**changes), tree, outputs
