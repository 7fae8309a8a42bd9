"""Parameters whose layers are joined, each kind of leaf in one array `[L, ...]`: what a scan over layers reads.

A scan compiles one layer instead of all of them, but inside a program joining the layers copies them. Frozen weights,
which no step changes, are joined once instead, before training.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from herald_jax.model import Params, flatten, unflatten

JOINED = "all"  # in the place of the layers' numbers


def join(params: Params) -> Params:
    """`params` with joined layers; where layers differ (a mixture of experts with dense ones), as they are.

    The layers' own arrays are deleted, one kind after the other: the device never holds more than one kind twice.
    """
    layers = [flatten(params["layers"][str(i)]) for i in range(len(params["layers"]))]
    shapes = [{path: (leaf.shape, leaf.dtype) for path, leaf in layer.items()} for layer in layers]
    if any(other != shapes[0] for other in shapes[1:]):
        return params
    joined = {}
    for path in layers[0]:
        parts = [layer[path] for layer in layers]
        place = parts[0].sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, P(None, *place.spec))
        joined[path] = jax.block_until_ready(jax.jit(_stack, out_shardings=place)(*parts))
        for part in parts:
            part.delete()
    return params | {"layers": {JOINED: unflatten(joined)}}


def _stack(*parts: jax.Array) -> jax.Array:
    return jnp.stack(parts)


def leaves(params: Params) -> Iterator[tuple[str, jax.Array]]:
    """Every leaf of `params`, joined or not, one after the other, by its path as `model.flatten` gives it."""
    prefix = f"layers/{JOINED}/"
    for path, leaf in flatten(params).items():
        if path.startswith(prefix):
            yield from ((f"layers/{i}/{path.removeprefix(prefix)}", leaf[i]) for i in range(leaf.shape[0]))
        else:
            yield path, leaf
