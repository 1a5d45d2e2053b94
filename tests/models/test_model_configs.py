"""The shipped model and pair files, as gin reads them: T5's published sizes."""

import pathlib

import pytest

from speculative.models.config import T5Config, parameter_count, parameter_shapes
from speculative.runs.launch.gin_files import PROJECT_PATHS, Source

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Parameters and tensors (FACTS 4.2).
SIZES = {
    "t5_1_1_small": (76_961_152, 190),
    "t5_1_1_base": (247_577_856, 282),
    "t5_1_1_large": (783_150_080, 558),
    "t5_1_1_xl": (2_849_757_184, 558),
    "t5_1_1_xxl": (11_135_332_352, 558),
    "t5_1_0_small": (60_506_624, 131),
    "t5_1_0_base": (222_903_552, 257),
    "t5_1_0_large": (737_668_096, 509),
    "t5_1_0_3b": (2_851_598_336, 509),
    "t5_1_0_11b": (11_307_321_344, 509),
}


def configuration(path: str, scope: str = "") -> T5Config:
    """The `T5Config` that a gin file binds under `scope`."""
    statements = Source("", PROJECT_PATHS, "speculative.runs.evaluate").read(path)
    bound = {s.argument: s.value for s in statements if s.argument and s.scope == scope}
    return T5Config(**bound)


def header(path: str) -> str:
    return (ROOT / path).read_text().partition("from __gin__")[0]


@pytest.mark.parametrize("name", SIZES)
def test_model_file_has_the_published_size(name):
    path = f"configs/models/{name}.gin"
    config = configuration(path)
    assert (parameter_count(config), len(parameter_shapes(config))) == SIZES[name]
    assert f"{SIZES[name][0]:,} parameters" in header(path)
    assert config.dtype == "bfloat16"
    assert config.dropout_rate == 0.0
    assert config.logits_via_embedding is name.startswith("t5_1_0")


def test_every_model_file_is_among_them():
    assert {p.stem for p in (ROOT / "configs" / "models").glob("*.gin")} == set(SIZES)


@pytest.mark.parametrize("draft", ["small", "base", "large"])
def test_pair_file_binds_what_the_model_files_do(draft):
    path = f"configs/pairs/t5_1_1_xxl_{draft}.gin"
    for scope, name in (("target", "t5_1_1_xxl"), ("draft", f"t5_1_1_{draft}")):
        assert configuration(path, scope) == configuration(f"configs/models/{name}.gin")
        assert f"{SIZES[name][0]:,} parameters" in header(path)
