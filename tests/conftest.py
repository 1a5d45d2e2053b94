"""What holds in every test: four CPU devices, strict JAX, and checked shapes.

- Four devices, so that what is sharded is sharded in the tests too. (`XLA_FLAGS` has to be set
  before JAX starts; a number that the caller has set stays.)
- `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"`: a broadcast or a
  cast that nobody wrote is an error.
- The annotations of the modules that compute with JAX are checked at each call, by jaxtyping and
  beartype, unless `SPECULATIVE_TYPECHECK=0`.
"""

import os
import sys

_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{_DEVICES}=4 {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax  # noqa: E402  (after the environment that it reads)
import jaxtyping  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Where arrays have shapes to check. Not where NumPy's ArrayLike is taken, which beartype refuses
# plain numbers for.
CHECKED = (
    "kernels.attention",
    "kernels.product",
    "kernels.rows",
    "sampling",
    "verification",
    "decoding",
    "drafts",
    "models",
    "training",
    "partitioning",
)
if os.environ.get("SPECULATIVE_TYPECHECK", "1") != "0":
    names = [f"speculative.{name}" for name in CHECKED]
    early = [name for name in sys.modules if name.startswith(tuple(names))]
    assert not early, f"imported before the hook that checks their annotations: {early}"
    jaxtyping.install_import_hook(names, "beartype.beartype")
