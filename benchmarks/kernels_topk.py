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
import numpy as np

from benchmarks import common
from benchmarks.lowering import Program, Workshop
from benchmarks.stopwatch import Measurement, Stopwatch
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


def _top_k(importance: jax.Array, counts: jax.Array, *, capacity: int) -> Any:
    return jax.lax.top_k(importance, capacity)


def _programs(case: tuple[int, int, int], kernel: str) -> dict[str, Program]:
    """Ours, the same in XLA, lax.top_k alone, and what draws the importances."""
    problems, n, p = case
    shapes = (jax.ShapeDtypeStruct((problems, n), jnp.float32), jax.ShapeDtypeStruct((problems,), jnp.int32))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return {
        "ours": (functools.partial(select_topk, capacity=p, implementation=kernel), shapes),
        "xla": (functools.partial(select_topk, capacity=p, implementation="xla"), shapes),
        "lax": (functools.partial(_top_k, capacity=p), shapes),
        "draw": (functools.partial(_importance, problems=problems, n=n), (key,)),
    }


def rows(context: dict[str, Any]) -> list[dict]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs a tiny case with every implementation there is: for tests.
    """
    kernel = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    cases = [(5, 300, 20)] if context.get("quick") else CASES
    with Workshop.of(context) as shop:
        for case in cases:
            for name, program in _programs(case, kernel).items():
                shop.add({("topk", name, case): program}, kernels=name == "ours")
        taken: dict[tuple[int, int, int], list[Measurement]] = {}
        with Stopwatch() as watch:
            for case in cases:
                problems, n, p = case
                ours, plain, top_k, draw = (shop["topk", name, case] for name in ("ours", "xla", "lax", "draw"))
                copies = common.input_sets(problems * n * 4, at_most=8)
                counts = jnp.full((problems,), p, jnp.int32)
                inputs = [(draw(jax.random.key(i)), counts) for i in range(copies)]
                first = np.asarray(ours(*inputs[0]))
                for what, other in (("the XLA form", plain(*inputs[0])), ("its first run", ours(*inputs[0]))):
                    if not np.array_equal(first, np.asarray(other)):
                        raise AssertionError(f"{problems}x{n}, P={p}: the selection differs from {what}")
                taken[case] = [watch.time(f, inputs, repeats=10) for f in (ours, plain, top_k)]
    return [_row(case, times, context["copy_bandwidth"]) for case, times in taken.items()]


def _row(case: tuple[int, int, int], times: list[Measurement], bandwidth: float) -> dict[str, Any]:
    problems, n, p = case
    ours, plain, lax = (time.seconds for time in times)
    floor = problems * (n + p) * 4 / bandwidth
    detail = {"ours_us": ours * 1e6, "lax_top_k_us": lax * 1e6, "xla_form_us": plain * 1e6}
    detail |= {"floor_us": floor * 1e6, "capacity": p}
    name = f"topk/{problems}x{n}" + ("" if case == GOAL else f"/p{p}")
    return common.row(f"{name}/vs_lax", lax / ours, "x", goal=">=3" if case == GOAL else None, detail=detail)


if __name__ == "__main__":
    common.run_part(rows, __doc__)
