"""Scoring HERALD's index: what one layer takes beside the time of its bytes, and the plain form.

    python -m benchmarks.kernels_index              # or as a part of benchmarks.kernels

The floor is one read of the codes and scales and one write of the pages' importances at copy bandwidth. Layers are
scored together, as HERALD does: all there are by pages in one program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import common
from benchmarks.lowering import Program, Workshop
from benchmarks.stopwatch import Measurement, Stopwatch
from herald_jax import device_index
from pallas_kernels.index_scores import importance

PAGE = 16


class Case(NamedTuple):
    """SDAR-8B's heads: 8 of 128 numbers, asked by 4 queries each."""

    name: str
    bits: int
    layers: int
    batch: int
    slots: int


CASES = [
    Case("index_scores/4bit/64k/b8", 4, 6, 8, 66560),
    Case("index_scores/8bit/64k/b8", 8, 4, 8, 66560),
    Case("index_scores/4bit/128k/b1", 4, 36, 1, 132096),
    Case("index_scores/8bit/128k/b1", 8, 36, 1, 132096),
]
QUICK = [Case("index_scores/4bit/tiny", 4, 2, 2, 64)]
HEADS, QUERIES, DIM = 8, 4, 128


def _draw(key: Any, *, case: Case) -> Any:
    """Index, queries and lengths."""
    shape = (case.batch, HEADS, case.slots, DIM)
    index = []
    for layer in range(case.layers):
        if index:
            key, index[-1] = jax.lax.optimization_barrier((key, index[-1]))
        k = jax.random.normal(jax.random.fold_in(key, layer), shape, jnp.bfloat16)
        index.append(device_index.quantise(k, case.bits))
    q = jax.random.normal(key, (case.layers, case.batch, HEADS, QUERIES, DIM), jnp.bfloat16)
    lengths = jnp.full((case.batch,), case.slots - 1000 * (case.slots > 2000), jnp.int32)
    return [x.codes for x in index], [x.scales for x in index], q, lengths


def _programs(case: Case, kernel: str) -> dict[str, Program]:
    """Ours, the plain form of one layer, and what draws their arguments."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    all_layers = jax.eval_shape(functools.partial(_draw, case=case), key)
    one_layer = jax.eval_shape(functools.partial(_draw, case=case._replace(layers=1)), key)
    score = functools.partial(importance, reduce="mean", page=PAGE)
    return {
        "ours": (functools.partial(score, implementation=kernel), all_layers),
        "xla": (functools.partial(score, implementation="xla"), one_layer),
        "draw": (functools.partial(_draw, case=case), (key,)),
    }


def rows(context: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs a tiny case with every implementation there is: for tests.
    """
    kernel = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    found = []
    with Workshop.of(context) as shop:
        cases = QUICK if context.get("quick") else CASES
        for case in cases:
            for name, program in _programs(case, kernel).items():
                shop.add({("index", name, case): program}, kernels=name == "ours")
        for case in cases:
            ours, plain, draw = (shop["index", name, case] for name in ("ours", "xla", "draw"))
            codes, scales, q, lengths = draw(jax.random.key(case.bits))
            one = (codes[:1], scales[:1], q[:1], lengths)
            error = common.rms_error(ours(codes, scales, q, lengths)[0], plain(*one)[0])
            if not error < 0.01:
                raise AssertionError(f"{case.name}: the kernel differs from the plain form by {error}")
            with Stopwatch() as watch:
                times = [watch.time(ours, [(codes, scales, q, lengths)]), watch.time(plain, [one], repeats=5)]
            nbytes = sum(x.nbytes for x in (*codes, *scales)) / case.layers
            found.append(_row(case, times, nbytes, context["copy_bandwidth"]))
            del codes, scales, one
    return found


def _row(case: Case, times: list[Measurement], nbytes: float, bandwidth: float) -> dict[str, Any]:
    ours, plain = times[0].seconds / case.layers, times[1].seconds
    floor = (nbytes + case.batch * HEADS * case.slots / PAGE * 4) / bandwidth
    detail = {"layer_us": ours * 1e6, "xla_layer_us": plain * 1e6, "floor_us": floor * 1e6, "layers": case.layers}
    return common.row(case.name, ours / floor, "x", detail=detail)


if __name__ == "__main__":
    common.run_part(rows, __doc__)
