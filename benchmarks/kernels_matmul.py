"""The skinny matmuls of a denoising step beside jnp.einsum: floor, measured, error.

    python -m benchmarks.kernels_matmul            # or as a part of benchmarks.kernels

The four matmuls of a layer, for the 32 tokens of one block and for those of four. The floor is one read of the weights
at copy bandwidth. The peer is what XLA makes of the same product (its Triton matmul or cuBLAS, autotuned), its gate
included; both results are rounded to bfloat16, ours as partial sums that the next kernel adds up.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from benchmarks.shapes import SHAPES
from herald_jax.config import ModelConfig
from pallas_kernels.stream_matmul import gated_matmul, stream_matmul

CASES = [("sdar8b", 32), ("sdar8b", 128), ("fdv2_7b", 32), ("fdv2_1.5b", 32)]
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


def _measure(name: str, shape: tuple[int, ...], tokens: int, kernel: str, bandwidth: float) -> dict[str, Any]:
    nbytes = 2 * math.prod(shape)
    draw = jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))
    x = jax.random.normal(jax.random.key(1), (tokens, shape[0]), jnp.bfloat16)
    copies = common.input_sets(nbytes, at_most=8)
    inputs = [(x, draw(jax.random.key(i)) * jnp.bfloat16(0.02)) for i in range(copies)]
    product = gated_matmul if len(shape) == 3 else stream_matmul
    ours = jax.jit(functools.partial(product, implementation=kernel))
    plain = jax.jit(functools.partial(product, implementation="xla"))

    def whole(y: jax.Array) -> jax.Array:
        return y if len(shape) == 3 else jnp.sum(y.astype(jnp.float32), axis=0)

    error = common.rms_error(whole(ours(*inputs[0])), whole(plain(*inputs[0])))
    if not error < TOLERANCE:
        raise AssertionError(f"{name}: the kernel differs from jnp.einsum by {error}")
    ours_s, plain_s = (common.device_time(f, inputs, repeats=10).seconds for f in (ours, plain))
    detail = {"us": ours_s * 1e6, "einsum_us": plain_s * 1e6, "floor_us": nbytes / bandwidth * 1e6, "error": error}
    return common.row(f"{name}/over_floor", ours_s * bandwidth / nbytes, "x", detail=detail)


def rows(context: dict[str, Any]) -> list[dict]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs one tiny layer with every implementation there is: for tests.
    """
    bandwidth = context["copy_bandwidth"]
    kernel = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    if context.get("quick"):
        tiny = {"out": (64, 128), "gate_up": (64, 2, 64)}
        return [_measure(f"matmul/tiny/{n}", shape, 8, kernel, bandwidth) for n, shape in tiny.items()]
    return [
        _measure(f"matmul/{model}/{tokens}/{name}", shape, tokens, kernel, bandwidth)
        for model, tokens in CASES
        for name, shape in weight_shapes(SHAPES[model]).items()
    ]


if __name__ == "__main__":
    common.run_part(rows, __doc__)
