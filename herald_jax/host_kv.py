"""The KV cache in host memory: one K and one V array per layer, page-locked where the device is a GPU.

Layout is head-major as on the device, `[1, B, K, N, D]` per layer: a head's entries are contiguous, which the CPU's
scan needs (20 times faster than token-major), and the kernels gather from it and write into it in place. The arrays
come from prefill, one layer after the other, and are never all on the device. On a machine without GPU, host and device
memory are the same kind and the same code runs.

Slots are freed with the arrays: XLA keeps page-locked regions and gives them to the next request of similar size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from herald_jax.cache import CACHE_SPEC, DeviceKV
from herald_jax.config import ModelConfig
from herald_jax.errors import GenerationError
from herald_jax.sharding import one_device
from pallas_kernels.layers import write_layers

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_XLA_DEFAULT_LIMIT = 64 * 10**9


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class HostKV:
    """K and V of the layers that live in host memory: each a tuple of arrays `[1, B, K, N, D]`."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.k, *self.v))

    def append(
        self, block: DeviceKV, start: jax.Array, mask: jax.Array, mesh: Mesh | None, implementation: str | None
    ) -> HostKV:
        """With a block's K and V (`[L, B, K, M, D]`) at slots `start` i32[B] of the rows in `mask` bool[B]. In place.

        No scan of the cache may be running, and no `np.asarray` view of it may exist: such an array cannot be donated.
        """
        if mesh is None:
            return HostKV(
                *write_layers(block.k, block.v, start, self.k, self.v, mask=mask, implementation=implementation)
            )
        return _append_sharded(self, block, start, mask, mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _append_sharded(host: HostKV, block: DeviceKV, start: jax.Array, mask: jax.Array, mesh: Mesh) -> HostKV:
    """One strided update per layer, array and batch row, by XLA: every device changes the host memory of its heads."""
    from pallas_kernels import reference_rows

    def local(host: HostKV, block: DeviceKV, start: jax.Array, mask: jax.Array) -> HostKV:
        layers = range(len(host.k))
        new = [
            reference_rows.scatter_rows(block.k[i][None], block.v[i][None], start, host.k[i], host.v[i], mask)
            for i in layers
        ]
        return HostKV(tuple(k for k, _ in new), tuple(v for _, v in new))

    row = jax.sharding.PartitionSpec("data")
    cache = jax.tree.map(lambda _: CACHE_SPEC, host)
    both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(cache, both, row, row), out_specs=cache, check_vma=False)
    return mapped(host, block, start, mask)


def on_gpu(mesh: Mesh | None) -> bool:
    """Whether the arrays' devices are GPUs, and so whether host memory is another kind of memory."""
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    return device.platform == "gpu"


def host_sharding(mesh: Mesh | None) -> Any:
    """Where a layer `[1, B, K, N, D]` lives: page-locked host memory of each device's own heads and rows."""
    kind: dict[str, Any] = {"memory_kind": "pinned_host"} if on_gpu(mesh) else {}
    if mesh is not None:
        return NamedSharding(mesh, CACHE_SPEC, **kind)
    return SingleDeviceSharding(next(iter(one_device().device_set)), **kind)


def device_sharding(mesh: Mesh | None) -> Any:
    """Where a layer `[1, B, K, N, D]` lives while it is on the device."""
    return one_device() if mesh is None else NamedSharding(mesh, CACHE_SPEC)


def layer_to_host(kv: DeviceKV, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """A layer's K and V, `[1, B, K, N, D]` on the device, in host memory. The copy runs beside what follows."""
    place = host_sharding(mesh)
    # Where both are one memory, "moving" would hand out the very buffer that the next layer is about to overwrite.
    return jax.device_put(kv.k, place, may_alias=False), jax.device_put(kv.v, place, may_alias=False)


def bytes_needed(config: ModelConfig, batch: int, capacity: int, layers: int) -> int:
    """Host memory for `layers` layers of `batch` rows of up to `capacity` tokens."""
    heads = config.num_kv_heads * config.head_dim
    return 2 * layers * batch * capacity * heads * jnp.dtype(config.dtype).itemsize


def check_room(needed: int, *, gpu: bool) -> None:
    """Raises GenerationError, with both figures, if `needed` bytes of host memory are not there."""
    there = available()
    if there is not None and needed > there:
        raise GenerationError(
            f"the KV cache needs {needed / 1e9:.1f} GB of host memory, but {there / 1e9:.1f} GB are available; use "
            "fewer rows or shorter prompts"
        )
    if gpu:
        limit = os.environ.get(LIMIT_VARIABLE)
        allowed = int(float(limit) * 1e9) if limit else _XLA_DEFAULT_LIMIT
        if needed > allowed:
            raise GenerationError(
                f"the KV cache needs {needed / 1e9:.1f} GB of page-locked host memory, but XLA hands out at most "
                f"{allowed / 1e9:.0f} GB; set {LIMIT_VARIABLE}={math.ceil(needed / 1e9 * 1.1)} before starting Python"
            )


def allow_page_locking() -> None:
    """Let XLA page-lock as much host memory as there is, unless the user has set a limit.

    Its own limit is 64 GB, whatever the machine, and it is read once, when JAX starts using the GPU: so `import
    herald_jax` calls this. It allocates nothing.
    """
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        os.environ.setdefault(LIMIT_VARIABLE, str(total // 10**9))


def available() -> int | None:
    """Bytes of host memory that can still be had: the system's, or what the control group leaves. None: unknown."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        if match:
            found.append(int(match[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            found.append(max(int(text) - int(used.read_text()), 0))
    return min(found) if found else None
