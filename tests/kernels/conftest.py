"""For every test of a kernel."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Whatever accelerator there is: XLA knows the kernels on CPU alone."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield
