"""The parameters of a T5 as Linen declares them: T5X's names, initialisers and logical axes.

One table, `_RULES`, maps a parameter's path to its initialiser and its logical axes; a path that
no rule knows is an error, so that a new parameter cannot go unsharded or wrongly initialised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from speculative.models.config import T5Config, parameter_shapes

Initialiser = Callable[..., jax.Array]
Axes = tuple[str, ...]


def _fan_in(scale: float, distribution: str) -> Initialiser:
    return jax.nn.initializers.variance_scaling(scale, "fan_in", distribution)


def _query_initialiser(config: T5Config) -> Initialiser:
    # Attention has no 1/sqrt(head_dim); T5 puts it here instead.
    base = _fan_in(1.0, "normal")

    def init(key, shape, dtype=jnp.float32):
        return base(key, shape, dtype) / jnp.sqrt(jnp.asarray(config.head_dim, dtype))

    return init


# (path pattern, logical axes, initialiser of a config); the source is T5X's examples/t5.
_RULES: tuple[tuple[str, Axes, Callable[[T5Config], Initialiser]], ...] = (
    (
        r"token_embedder/embedding",
        ("vocab", "embed"),
        lambda c: jax.nn.initializers.normal(1.0),
    ),
    (
        r"(en|de)coder/relpos_bias/rel_embedding",
        ("heads", "relpos_buckets"),
        lambda c: jax.nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    ),
    (r".*attention/query/kernel", ("embed", "joined_kv"), _query_initialiser),
    (
        r".*attention/(key|value)/kernel",
        ("embed", "joined_kv"),
        lambda c: _fan_in(1.0, "normal"),
    ),
    (r".*attention/out/kernel", ("joined_kv", "embed"), lambda c: _fan_in(1.0, "normal")),
    (r".*mlp/wi(_\d+)?/kernel", ("embed", "mlp"), lambda c: _fan_in(1.0, "truncated_normal")),
    (r".*mlp/wo/kernel", ("mlp", "embed"), lambda c: _fan_in(1.0, "truncated_normal")),
    (
        r"decoder/logits_dense/kernel",
        ("embed", "vocab"),
        lambda c: _fan_in(1.0, "truncated_normal"),
    ),
    (r".*_norm/scale", ("embed",), lambda c: jax.nn.initializers.ones),
)


def _rule(path: str):
    for pattern, axes, initialiser in _RULES:
        if re.fullmatch(pattern, path):
            return axes, initialiser
    raise KeyError(f"no rule gives the logical axes and initialiser of parameter {path!r}")


def logical_axes(path: str) -> Axes:
    """Logical axis names of the parameter at `path` ('/'-joined, unrolled T5X layout).

    Raises:
      KeyError: no rule knows the path.
    """
    return _rule(path)[0]


class _Branch(nn.Module):
    """Declares the parameters below one node of the tree and returns them as nested dicts."""

    config: T5Config
    prefix: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @nn.compact
    def __call__(self) -> dict[str, object]:
        below: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        tree: dict[str, object] = {}
        for name, shape in self.shapes:
            head, _, rest = name.partition("/")
            if rest:
                below.setdefault(head, []).append((rest, shape))
            else:
                init = _rule(self.prefix + head)[1](self.config)
                tree[head] = self.param(head, init, shape, jnp.float32)
        for head, shapes in below.items():
            branch = _Branch(self.config, f"{self.prefix}{head}/", tuple(shapes), name=head)
            tree[head] = branch()
        return tree


class Parameters(nn.Module):
    """The Linen module whose `params` collection is exactly a T5X `target` tree."""

    config: T5Config

    def setup(self):
        shapes = tuple(parameter_shapes(self.config).items())
        tops = dict.fromkeys(name.partition("/")[0] for name, _ in shapes)
        for top in tops:
            below = tuple(
                (name.partition("/")[2], shape)
                for name, shape in shapes
                if name.partition("/")[0] == top
            )
            setattr(self, top, _Branch(self.config, f"{top}/", below))
        self._tops = tuple(tops)

    def __call__(self) -> dict[str, object]:
        return {top: getattr(self, top)() for top in self._tops}


def init(config: T5Config, key: jax.Array) -> Mapping[str, object]:
    """Fresh float32 parameters by T5's initialisers (FACTS 4.4), a nested dict in T5X's names."""
    return Parameters(config).init(key)["params"]
