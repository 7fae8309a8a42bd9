"""Where arrays live: one table from logical axes to mesh axes, used for parameters, caches and batch state alike.

A mesh has up to two axes: "data" splits the rows of a batch, "model" splits KV heads (with the query heads that read
them), the MLP width (each expert's too) and the vocabulary. Everything else is replicated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from herald_jax.config import ModelConfig
from herald_jax.errors import ConfigError
from herald_jax.model import ParamSpec

RULES: dict[str, str | None] = {
    "batch": "data",
    "kv_heads": "model",
    "mlp": "model",
    "vocab": "model",
    "experts": None,  # every device holds a slice of every expert's width, so a step's load is even whatever is routed
    "embed": None,
    "group": None,
    "head_dim": None,
    "pair": None,
}


def make_mesh(*, model: int = 1, data: int = 1, devices: list[Any] | None = None) -> Mesh:
    """A mesh of `data * model` devices (the first ones of `devices`, default `jax.devices()`)."""
    devices = list(jax.devices() if devices is None else devices)
    if min(data, model) < 1:
        raise ConfigError(f"a mesh of {data} x {model} devices is impossible; both numbers must be positive")
    if data * model > len(devices):
        raise ConfigError(f"a mesh of {data} x {model} needs {data * model} devices, but only {len(devices)} are there")
    return Mesh(np.asarray(devices[: data * model]).reshape(data, model), ("data", "model"))


def normalise_mesh(mesh: Mesh) -> Mesh:
    """The same devices with both axes present and left to the compiler (`AxisType.Auto`).

    Raises ConfigError for axes other than "data" and "model".
    """
    unknown = [name for name in mesh.axis_names if name not in ("data", "model")]
    if unknown:
        raise ConfigError(f"mesh axis {unknown[0]!r} is unknown; name the axes 'data' and 'model'")
    order = [mesh.axis_names.index(n) for n in ("data", "model") if n in mesh.axis_names]
    shape = [mesh.shape.get(name, 1) for name in ("data", "model")]
    return Mesh(mesh.devices.transpose(order).reshape(shape), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def replication(config: ModelConfig, mesh: Mesh | None) -> int:
    """How many copies of each KV head the "model" axis needs so that every device holds one: 1 where heads suffice.

    Raises ConfigError where heads can be neither split nor replicated evenly.
    """
    devices = 1 if mesh is None else mesh.shape["model"]
    heads, group = config.num_kv_heads, config.group_size
    if heads % devices == 0:
        return 1
    copies = devices // heads
    if devices % heads or group % copies:
        raise ConfigError(
            f"{heads} KV heads with {group} query heads each cannot be spread over {devices} devices of the 'model' "
            f"axis; use a number of devices that divides {heads}, or {heads} times a divisor of {group}"
        )
    return copies


def replicate_kv_heads(config: ModelConfig, copies: int) -> ModelConfig:
    """The same model with every KV head held `copies` times, each copy serving its share of the group's query heads."""
    return dataclasses.replace(config, num_kv_heads=config.num_kv_heads * copies)


def replicate_leaf(path: str, value: jax.Array, copies: int) -> jax.Array:
    """Rewrite one parameter for `replicate_kv_heads`; leaves that do not know about heads pass through."""
    if "/attn/qkv/" in path:
        *lead, heads, parts, dim = value.shape
        q = value[..., :-2, :].reshape(*lead, heads, copies, (parts - 2) // copies, dim)
        kv = jnp.broadcast_to(value[..., None, -2:, :], (*lead, heads, copies, 2, dim))
        return jnp.concatenate([q, kv], axis=-2).reshape(*lead, heads * copies, (parts - 2) // copies + 2, dim)
    if path.endswith("/attn/out/kernel"):
        heads, group, dim, size = value.shape
        return value.reshape(heads * copies, group // copies, dim, size)
    return value


def spec_of(axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of an array with logical `axes`. An undividable vocabulary is replicated, others are refused."""
    parts = []
    for axis, size in zip(axes, shape, strict=True):
        name = RULES[axis]
        if name is not None and size % mesh.shape[name]:
            if axis != "vocab":
                raise ConfigError(
                    f"axis {axis!r} of size {size} cannot be split over the {mesh.shape[name]} devices of mesh axis "
                    f"{name!r}; use a number of devices that divides it"
                )
            name = None
        parts.append(name)
    return P(*parts)


def one_device() -> SingleDeviceSharding:
    """Where everything lives without a mesh. Always named: the same array with and without a place compiles twice."""
    return SingleDeviceSharding(jax.local_devices()[0])


def batch_place(mesh: Mesh | None, ndim: int) -> Any:
    """Where `[B, ...]` batch state lives, named without a mesh too (see `one_device`)."""
    return one_device() if mesh is None else batch_sharding(mesh, ndim)


def param_sharding(spec: ParamSpec, mesh: Mesh | None) -> Any:
    """Placement of one parameter: by the table on a mesh, else JAX's default device."""
    return one_device() if mesh is None else NamedSharding(mesh, spec_of(spec.axes, spec.shape, mesh))


def loading_sharding(spec: ParamSpec, mesh: Mesh | None) -> Any:
    """Placement of a leaf as it is stored. Leaves whose KV heads must still be replicated arrive split over "embed"."""
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    if mesh is None or sizes.get("kv_heads", 0) % mesh.shape["model"] == 0:
        return param_sharding(spec, mesh)
    divides = "embed" in sizes and sizes["embed"] % mesh.shape["model"] == 0
    parts = ["model" if axis == "embed" and divides else None for axis in spec.axes]
    return NamedSharding(mesh, P(*parts))


def batch_sharding(mesh: Mesh | None, ndim: int) -> Any:
    """Placement of `[B, ...]` batch state (a scalar is replicated)."""
    if mesh is None:
        return None
    return NamedSharding(mesh, P(*("data", *(None,) * (ndim - 1))[:ndim]))
