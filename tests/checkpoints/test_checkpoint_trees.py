"""Names joined by '/', the strict report, and the chunk rule."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.checkpoints.trees import TensorInfo, check_shapes, flatten, unflatten
from speculative.checkpoints.zarr_arrays import choose_chunks
from speculative.errors import CheckpointError

KEYS = st.text(st.characters(codec="ascii", exclude_characters="/\0"), min_size=1, max_size=3)
TREES = st.recursive(
    st.dictionaries(KEYS, st.integers(), min_size=1, max_size=3),
    lambda inner: st.dictionaries(KEYS, st.one_of(st.integers(), inner), min_size=1, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_unflatten_undoes_flatten(tree):
    flat = flatten(tree)
    assert list(flat) == sorted(flat)
    assert unflatten(flat) == tree


@pytest.mark.parametrize("tree", [{"a/b": 1}, {"": 1}, {5: 1}, {"a": {None: 1}}])
def test_keys_that_cannot_be_names(tree):
    with pytest.raises(CheckpointError, match="without '/'"):
        flatten(tree)


@pytest.mark.parametrize(
    "flat", [{"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}, {"a/b": 1, "a/b/c": 2}, {"a//b": 1}, {"": 1}]
)
def test_names_that_are_no_tree(flat):
    with pytest.raises(CheckpointError):
        unflatten(flat)


def test_check_shapes_passes_what_agrees():
    check_shapes({"a": TensorInfo((2, 3), "float32")}, {"a": [2, 3]}, "here")


# (shape, itemsize) -> chunks, computed with T5X's own rule.
CHUNKS = {
    ((32128, 4096), 4): (4016, 4096),
    ((4096, 32128), 4): (4096, 4016),
    ((4096, 10240), 4): (4096, 2560),
    ((32128, 1024), 4): (16064, 1024),
    ((32128, 512), 4): (32128, 512),
    ((384, 24), 4): (384, 24),
    ((), 4): (),
}


@pytest.mark.parametrize("case", list(CHUNKS))
def test_chunks_of_real_shapes(case):
    assert choose_chunks(*case) == CHUNKS[case]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 400), max_size=4), st.sampled_from([2, 4, 8]), st.integers(8, 10**6))
def test_chunks_divide_fit_and_are_no_smaller_than_needed(shape, itemsize, limit):
    chunks = choose_chunks(shape, itemsize, limit)
    assert len(chunks) == len(shape)
    assert all(n % c == 0 for n, c in zip(shape, chunks, strict=True))
    assert math.prod(chunks) * itemsize <= limit
    if math.prod(shape) * itemsize <= limit:
        assert chunks == tuple(shape)
    elif len(shape) == 1:
        # In one dimension the rule is the largest divisor that fits.
        fitting = [c for c in range(1, shape[0] + 1) if shape[0] % c == 0 and c * itemsize <= limit]
        assert chunks == (max(fitting),)
