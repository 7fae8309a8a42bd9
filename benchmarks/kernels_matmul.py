"""The skinny matmuls of a denoising step beside jnp.einsum: floor, measured, error.

    python -m benchmarks.kernels_matmul            # or as a part of benchmarks.kernels

The four matmuls of a layer, for the 32 tokens of one block and for those of four and eight. The floor is one read of
the weights at copy bandwidth (with eight blocks the tensor cores take longer: `tflops`); the peer is what XLA makes of
the same product (its Triton matmul or cuBLAS, autotuned), its gate included; both results are rounded to bfloat16, ours
as partial sums that the next kernel adds up.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.lowering import Program, Workshop
from benchmarks.shapes import SHAPES
from benchmarks.stopwatch import Measurement, Stopwatch
from herald_jax.config import ModelConfig
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul

CASES = [
    ("sdar8b", 32),
    ("sdar8b", 128),
    ("sdar8b", 256),
    ("fdv2_7b", 32),
    ("fdv2_7b", 128),
    ("fdv2_1.5b", 32),
    ("fdv2_1.5b", 256),
]
TOLERANCE = 1e-2  # RMS, relative: both sides are rounded to bfloat16


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights of one layer as the matmuls see them; `[E, 2, F]` is the gated one."""
    width = config.num_kv_heads * (config.group_size + 2) * config.head_dim
    return {
        "qkv": (config.hidden_size, width),
        "out": (config.num_heads * config.head_dim, config.hidden_size),
        "gate_up": (config.hidden_size, 2, config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
    }


def _draw(key: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02)


def _error(ours: jax.Array, plain: jax.Array, *, gated: bool) -> float:
    """RMS of the difference over RMS, of partial sums added up. On the host: it would be a program for each shape."""
    y, wanted = (np.asarray(x).astype(np.float32).sum(axis=() if gated else 0) for x in (ours, plain))
    return float(np.sqrt(np.mean((y - wanted) ** 2) / np.mean(wanted**2)))


def _programs(shape: tuple[int, ...], tokens: int, kernel: str) -> dict[str, Program]:
    """Ours, XLA's, and what draws the weights."""
    gated = len(shape) == 3
    product = gated_matmul if gated else stream_matmul
    shapes = tuple(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((tokens, shape[0]), shape))
    forms = {name: functools.partial(product, implementation=name) for name in (kernel, "xla")}
    return {
        "ours": (forms[kernel], shapes),
        "einsum": (forms["xla"], shapes),
        "draw": (functools.partial(_draw, shape=shape), (jax.eval_shape(lambda: jax.random.key(0)),)),
    }


def rows(context: dict[str, Any]) -> list[dict]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs one tiny layer with every implementation there is: for tests.
    """
    kernel = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    cases = {
        f"matmul/{model}/{tokens}/{name}": (shape, tokens)
        for model, tokens in CASES
        for name, shape in weight_shapes(SHAPES[model]).items()
    }
    if context.get("quick"):
        cases = {"matmul/tiny/out": ((64, 128), 8), "matmul/tiny/gate_up": ((64, 2, 64), 8)}
    with Workshop.of(context) as shop:
        for id, case in cases.items():
            for name, program in _programs(*case, kernel).items():
                shop.add({(id, name): program}, kernels=name == "ours")
        for id in cases:  # XLA tunes its products on the GPU: before anything is measured there
            _ = shop[id, "einsum"]
        common.stage("matmul: compiled what XLA tunes")
        taken: dict[str, list[Measurement]] = {}
        errors = {}
        with Stopwatch() as watch:
            for id, (shape, tokens) in cases.items():
                ours, plain, draw = (shop[id, name] for name in ("ours", "einsum", "draw"))
                x = jax.random.normal(jax.random.key(1), (tokens, shape[0]), jnp.bfloat16)
                copies = common.input_sets(2 * math.prod(shape), at_most=8)
                inputs = [(x, draw(jax.random.key(i))) for i in range(copies)]
                error = _error(ours(*inputs[0]), plain(*inputs[0]), gated=len(shape) == 3)
                if not error < TOLERANCE:
                    raise AssertionError(f"{id}: the kernel differs from jnp.einsum by {error}")
                errors[id] = error
                taken[id] = [watch.time(f, inputs, repeats=10) for f in (ours, plain)]
    found = []
    for id, (ours_time, plain_time) in taken.items():
        shape, tokens = cases[id]
        floor = 2 * math.prod(shape) / context["copy_bandwidth"]
        detail = {"us": ours_time.us, "einsum_us": plain_time.us, "floor_us": floor * 1e6, "error": errors[id]}
        detail["tflops"] = 2 * tokens * math.prod(shape) / ours_time.seconds / 1e12
        found.append(common.row(f"{id}/over_floor", ours_time.seconds / floor, "x", detail=detail))
    return found


if __name__ == "__main__":
    common.run_part(rows, __doc__)
