"""Top-k selection beside ``lax.top_k``: floor, measured, exactness.

    python -m benchmarks.kernels_topk              # or as a part of benchmarks.kernels

``lax.top_k`` returns values and indices ordered by value; the selection's result is ascending indices, padded, with a
count per problem. The ratio that the goal names is to ``lax.top_k`` alone; the XLA form, which does all of it, is there
too.
The floor is one read of the importances and one write of the indices at copy bandwidth.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from pallas_kernels import select_topk

# (problems, N, P): 36 layers x 8 KV heads at 64K and 5 % is the goal's case; one layer, one model at short and long
# prefixes, a batch.
CASES = [
    (288, 65536, 3277),
    (288, 8192, 512),
    (288, 16384, 1024),
    (288, 32768, 1638),
    (288, 131072, 6554),
    (288, 131072, 16384),
    (1152, 32768, 1638),
    (64, 65536, 3277),
    (32, 131072, 6554),
    (8, 65536, 3277),
    (8, 4096, 512),
]
GOAL = (288, 65536, 3277)


def _importance(key: Any, problems: int, n: int) -> jax.Array:
    """Softmax weights of normal scores: many octaves, most of the mass in a few entries."""
    return jax.nn.softmax(3 * jax.random.normal(key, (problems, n)), axis=-1)


def rows(context: dict[str, Any]) -> list[dict]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs a tiny case with every implementation there is: for tests.
    """
    bandwidth = context["copy_bandwidth"]
    kernel = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    out = []
    for problems, n, p in [(5, 300, 20)] if context.get("quick") else CASES:
        make = jax.jit(functools.partial(_importance, problems=problems, n=n))
        copies = common.input_sets(problems * n * 4, at_most=8)
        counts = jnp.full((problems,), p, jnp.int32)
        inputs = [(make(jax.random.key(i)), counts) for i in range(copies)]
        ours = jax.jit(functools.partial(select_topk, capacity=p, implementation=kernel))
        plain = jax.jit(functools.partial(select_topk, capacity=p, implementation="xla"))
        first = ours(*inputs[0])
        for what, other in (("the XLA form", plain(*inputs[0])), ("its first run", ours(*inputs[0]))):
            if not bool(jnp.array_equal(first, other)):
                raise AssertionError(f"{problems}x{n}, P={p}: the selection differs from {what}")
        top_k = jax.jit(lambda x, counts, p=p: jax.lax.top_k(x, p))
        ours_s, plain_s, lax_s = (common.device_time(f, inputs, repeats=10).seconds for f in (ours, plain, top_k))
        floor = problems * (n + p) * 4 / bandwidth
        detail = {"ours_us": ours_s * 1e6, "lax_top_k_us": lax_s * 1e6, "xla_form_us": plain_s * 1e6}
        detail |= {"floor_us": floor * 1e6, "capacity": p}
        name = f"topk/{problems}x{n}" + ("" if (problems, n, p) == GOAL else f"/p{p}")
        goal = ">=3" if (problems, n, p) == GOAL else None
        out.append(common.row(f"{name}/vs_lax", lax_s / ours_s, "x", goal=goal, detail=detail))
    return out


if __name__ == "__main__":
    common.run_part(rows, __doc__)
