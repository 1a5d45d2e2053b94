"""`jit` for the decoding programs: on CPU, their sums may be added up in any order.

XLA's own rule on CPU is that a sum is added up from left to right, which keeps a reduction from
using the vector units. A program that is compiled here may reorder sums (nothing else: NaN,
infinities, divisions and functions keep their meaning), so that `models.attention` can write the
products of a few queries as plain reductions, which XLA turns into one vectorised kernel each; as
library products they are slower.

Attention asks `sums_reorder()`; outside it is False, and a library has the products.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

_CPU_OPTIONS = {
    "xla_cpu_enable_fast_math": True,
    "xla_cpu_fast_math_honor_nans": True,
    "xla_cpu_fast_math_honor_infs": True,
    "xla_cpu_fast_math_honor_division": True,
    "xla_cpu_fast_math_honor_functions": True,
    "xla_cpu_prefer_vector_width": 512,
    # XLA's library is for products alone: with norms and softmaxes given to it, too, a run over
    # four or eight positions took 5% longer.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
}
# Sums that one loop can keep in vector registers.
_REGISTERS = 24
_reorder = contextvars.ContextVar("sums_reorder", default=False)


def sums_reorder() -> bool:
    """Whether what is being traced is compiled so that sums may be added up in any order."""
    return _reorder.get()


@contextlib.contextmanager
def _reordering() -> Iterator[None]:
    token = _reorder.set(True)
    try:
        yield
    finally:
        _reorder.reset(token)


def parts(rows: int, size: int) -> int:
    """Into how many parts to cut `size` outputs of which each is a sum for every one of `rows`.

    Parts are read side by side: one stream of memory alone is slow, and a reduction with a single
    sum XLA turns back into the product it came from.
    """
    return max(n for n in (1, 2, 4) if n == 1 or (n * rows <= _REGISTERS and size % n == 0))


def sums(terms: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The sum over the last axis of each of `terms` (equal shapes), in one reduction.

    What the terms share, such as the keys that all queries are multiplied with, is read once.
    """
    zeros = (jnp.zeros((), terms[0].dtype),) * len(terms)
    return lax.reduce(
        tuple(terms),
        zeros,
        lambda a, b: tuple(map(operator.add, a, b)),
        dimensions=(terms[0].ndim - 1,),
    )


class Jitted:
    """A function compiled by `jax.jit` with the options of this module.

    Called with arguments that another program traces it is an ordinary `jax.jit`: compiler options
    belong to the outermost program alone.
    """

    def __init__(self, function: Callable, **settings):
        functools.update_wrapper(self, function)
        self._nested = jax.jit(function, **settings)

        @functools.wraps(function)
        def reordering(*args, **kwargs):
            with _reordering():
                return function(*args, **kwargs)

        self._on_cpu = jax.jit(reordering, compiler_options=_CPU_OPTIONS, **settings)

    def _top(self):
        return self._on_cpu if jax.default_backend() == "cpu" else self._nested

    def __call__(self, *args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._nested(*args, **kwargs)
        return self._top()(*args, **kwargs)

    def lower(self, *args, **kwargs):
        """As `jax.jit`'s; compiled with the same options as a call."""
        return self._top().lower(*args, **kwargs)

    def cache_size(self) -> int:
        """Programs compiled so far for this backend."""
        return self._top()._cache_size()


def jit(function: Callable, **settings) -> Jitted:
    """`jax.jit` with this module's options; `settings` are `jax.jit`'s own."""
    return Jitted(function, **settings)
