"""Row gather from host and device memory, and the scatter of a committed block: floor, measured, exactness.

    python -m benchmarks.kernels_gather            # or as a part of benchmarks.kernels

The floors: from the host, the same number of bytes as one contiguous host-to-device copy; on the device, the bytes read
and written over the bandwidth of a large copy. Both are measured in the same run.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks import common
from benchmarks.stopwatch import Measurement, Stopwatch, Time
from pallas_kernels import gather_rows, host_memory, scatter_rows, write_block

Array = jax.Array


class Case(NamedTuple):
    """A stacked cache ``[layers, batch, heads, length, dim]`` and how many rows of each head are gathered."""

    name: str
    layers: int
    length: int
    chosen: int
    dim: int = 128
    heads: int = 8

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered rows, K and V."""
        return 2 * self.layers * self.heads * self.chosen * self.dim * 2


# 256-byte rows unless said otherwise. 5 % of a 64K prefix is 3,277 rows.
CASES = [
    Case("8mb", 1, 65536, 2048),
    Case("27mb_2layers_5pct", 2, 65536, 3277),
    Case("64mb", 8, 65536, 2048),
    Case("107mb_8layers_5pct", 8, 65536, 3277),
    Case("256mb", 8, 65536, 8192),
    Case("64mb_128byte_rows", 8, 65536, 4096, dim=64),
]
BIG = 64 * 2**20
QUICK = [Case("tiny", 2, 512, 40)]


def _memory(kind: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


def _indices(case: Case, seed: int) -> Array:
    """Distinct ascending rows of each head, as a selection yields them."""
    rng = np.random.default_rng(seed)
    problems = [np.sort(rng.choice(case.length, case.chosen, replace=False)) for _ in range(case.layers * case.heads)]
    return jnp.asarray(np.stack(problems).reshape(case.layers, 1, case.heads, case.chosen), jnp.int32)


def _named(taken: Time, name: str) -> float:
    """Seconds of the kernels called ``name``, or of everything where the profiler named nothing."""
    seconds = [s for kernel, s in taken.kernels if name in kernel]
    return sum(seconds) if seconds else taken.seconds


def _gather(implementation: str | None) -> Callable[..., Any]:
    return jax.jit(functools.partial(gather_rows, implementation=implementation))


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _h2d(nbytes: int, watch: Stopwatch) -> Measurement:
    """One contiguous copy of ``nbytes`` from pinned host memory to the device."""
    x = jax.device_put(jnp.ones((nbytes // 2,), jnp.bfloat16), _memory("pinned_host"))
    copy = jax.jit(host_memory.copy_to_device, out_shardings=_memory("device"))
    return watch.time(copy, [(x,)], repeats=10)


class _Sources:
    """K and V on the device and in host memory, kept for the cases of one shape: page-locking 2 GB takes seconds."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()

    def of(self, shape: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
        if shape != self.shape:
            make = jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))
            self.device = [make(jax.random.key(seed)) for seed in (1, 2)]
            self.host = [jax.device_put(x, _memory("pinned_host")) for x in self.device]
            self.shape = shape
        return self.device, self.host


def rows(context: dict[str, Any]) -> list[dict]:
    """All rows. ``context["copy_bandwidth"]``: bytes per second of a large device copy, measured in this run.

    ``context["quick"]``, if true, runs a tiny case with every implementation there is: for tests.
    """
    quick = bool(context.get("quick"))
    on_gpu = jax.default_backend() == "gpu"
    kernel = "mosaic_gpu" if on_gpu else "xla"
    bandwidth = context["copy_bandwidth"]
    sources, taken = _Sources(), {}
    with Stopwatch() as watch:
        for case in QUICK if quick else CASES:
            shape = (case.layers, 1, case.heads, case.length, case.dim)
            device, host = sources.of(shape)
            pools = [jnp.zeros((*shape[:3], case.chosen, case.dim), jnp.bfloat16) for _ in range(2)]
            inputs = [(_indices(case, seed), *pools) for seed in range(2)]
            expected = [jnp.take_along_axis(x, inputs[0][0][..., None], axis=3) for x in device]
            for name, source, form in (("device", device, kernel), ("xla", device, "xla"), ("host", host, kernel)):
                fn = functools.partial(_gather(form), *source)
                for a, b in zip(fn(*inputs[0]), expected, strict=True):
                    if not bool(jnp.array_equal(_bits(a), _bits(b))):
                        raise AssertionError(f"{name} {case.name}: gathered rows differ from the source's")
                taken[case, name] = watch.time(fn, inputs, repeats=10)
            taken[case, "h2d"] = _h2d(case.nbytes, watch)
            common.stage(f"gather: ran {case.name}")
    out, h2d_fractions, copy_fractions = [], {}, {}
    for case in QUICK if quick else CASES:
        names = ("device", "xla", "host")
        device_s, xla_s, host_s = (_named(taken[case, name].time, "gather_rows") for name in names)
        h2d_s = taken[case, "h2d"].seconds
        moved = 2 * case.nbytes / device_s
        h2d_fractions[case.name] = h2d_s / host_s
        copy_fractions[case.name] = moved / bandwidth
        detail: dict[str, Any] = {
            "ours_us": host_s * 1e6,
            "h2d_us": h2d_s * 1e6,
            "ours_gb_s": case.nbytes / host_s / 1e9,
        }
        detail |= {"h2d_gb_s": case.nbytes / h2d_s / 1e9, "bytes": case.nbytes}
        out.append(common.row(f"gather/host/{case.name}/h2d_fraction", h2d_s / host_s, "", detail=detail))
        detail = {"ours_us": device_s * 1e6, "floor_us": 2 * case.nbytes / bandwidth * 1e6, "ours_tb_s": moved / 1e12}
        detail |= {"xla_us": xla_s * 1e6, "bytes": case.nbytes}
        out.append(common.row(f"gather/device/{case.name}/copy_fraction", moved / bandwidth, "", detail=detail))
        out.append(common.row(f"gather/device/{case.name}/vs_xla", xla_s / device_s, "x"))

    large = [c.name for c in (QUICK if quick else CASES) if quick or (c.nbytes >= BIG and c.dim == 128)]
    worst = min(h2d_fractions[name] for name in large)
    out.append(common.row("gather/host/h2d_fraction", worst, "", goal=">=0.9", detail={"worst_of": large}))
    worst = min(copy_fractions[name] for name in large)
    out.append(common.row("gather/device/copy_fraction", worst, "", goal=">=0.5", detail={"worst_of": large}))
    return out + _scatter_rows(quick, on_gpu, bandwidth)


def _scatter_rows(quick: bool, on_gpu: bool, bandwidth: float) -> list[dict]:
    """A committed block of 32 tokens, 36 layers, at different positions in each batch row."""
    layers, batch, heads, length, block = (2, 2, 2, 128, 8) if quick else (36, 4, 8, 4096, 32)
    out = []
    positions = jnp.arange(batch, dtype=jnp.int32) * (length // batch) + 3
    blocks = [jax.random.normal(jax.random.key(i), (layers, batch, heads, block, 128), jnp.bfloat16) for i in range(2)]
    nbytes = 2 * blocks[0].nbytes
    forms = [("device", "xla"), ("pinned_host", "xla"), ("pinned_host", "write_block")]
    for memory, implementation in [("device", "mosaic_gpu"), *forms] if on_gpu else forms:
        caches = [
            jax.device_put(jnp.zeros((layers, batch, heads, length, 128), jnp.bfloat16), _memory(memory))
            for _ in range(2)
        ]
        write: Callable[..., Any] = write_block
        if implementation != "write_block":
            write = jax.jit(functools.partial(scatter_rows, implementation=implementation), donate_argnums=(3, 4))
        seconds = []
        for _ in range(8):  # in place: each call eats its caches, so the profiler's repeats do not apply
            address = caches[0].unsafe_buffer_pointer()
            start = time.perf_counter()
            caches = list(jax.block_until_ready(write(*blocks, positions, *caches)))
            seconds.append(time.perf_counter() - start)
            if caches[0].unsafe_buffer_pointer() != address:
                raise AssertionError("scatter_rows moved its cache")
        for b in range(batch):
            at = int(positions[b])
            got = np.asarray(caches[0][:, b, :, at : at + block])
            if not np.array_equal(got.view(np.uint16), np.asarray(blocks[0][:, b]).view(np.uint16)):
                raise AssertionError("the cache does not hold the block")
        median = float(np.median(seconds[2:]))
        detail: dict[str, Any] = {"bytes": nbytes, "gb_s": nbytes / median / 1e9, "how": "wall"}
        if memory == "device":
            detail["floor_us"] = 2 * nbytes / bandwidth * 1e6
        out.append(common.row(f"scatter/{memory}/{implementation}/us", median * 1e6, "us", detail=detail))
    return out


if __name__ == "__main__":
    common.run_part(rows, __doc__)
