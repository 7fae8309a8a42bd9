"""Prompt to a cache in host memory: layer by layer, so that the device never holds more than two layers' K and V.

The whole prompt's hidden states `[B, N, E]` go through one layer, chunk by chunk, against that layer's K and V in a
device buffer; the buffer is then copied to host memory while the next layer fills the other one. The mask block that
follows the prompt rides along and attends exactly, so that the first block's entries are selected, and gathered into
the pool, while their layer is on the device: nothing has to come back over PCIe.

Device memory: the weights, two layers of K and V, the hidden states (1/18 of the whole cache for SDAR-8B), one chunk's
activations, and the pool.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from herald_jax import host_kv, select, sharding
from herald_jax.block_loop import step
from herald_jax.cache import CACHE_SPEC, DenseAttend, DeviceKV, write
from herald_jax.config import ModelConfig
from herald_jax.host_kv import HostKV
from herald_jax.loop_state import LoopOptions, Rows, placed_rows
from herald_jax.model import Params, bind, rope_angles
from herald_jax.plans import Herald
from herald_jax.pooled import PooledKV, pool_slots
from pallas_kernels import Importance, block_attention, gather_rows


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """What prefill leaves: the host's cache, the device's dense layers and first pool, and what is in that pool.

    Attributes:
      host: the pooled layers' K and V; dense: the dense layers', on the device, or None.
      pool: `[Ls, B, K, S, D]`; indices: i32[Ls, B, K, P], its entries' positions, ascending, -1 padded.
      last_hidden: `[B, E]`, of each row's last prefilled token.
    """

    host: HostKV
    dense: DeviceKV | None
    pool: DeviceKV
    indices: jax.Array
    last_hidden: jax.Array


def prefill(
    params: Params,
    tokens: np.ndarray,
    lengths: np.ndarray,
    known: np.ndarray,
    *,
    config: ModelConfig,
    plan: Herald,
    capacity: int,
    longest: int,
    chunk: int,
    mesh: Mesh | None = None,
    implementation: str | None = None,
    on_layer: Any = None,
) -> Prefilled:
    """Compute and store the first `lengths[b]` (whole blocks) tokens of each row, and select for its first block.

    Args:
      tokens: i32[B, N], N at least `capacity`. lengths: i32[B].
      known: bool[B, M], which positions of the block behind each row's prefix hold prompt tokens.
      capacity: slots per row, a multiple of `chunk`-rounded lengths and with room for a block more.
      longest: the largest prefix any row will have; sizes the pool.
      on_layer: called with (layer, k `[1, B, K, N, D]`) for every pooled layer while it is on the device.

    Compiles one program for all layers of a kind.
    """
    batch = tokens.shape[0]
    block = config.diffusion.block_length
    model = bind(config, params)

    def put(x: np.ndarray) -> jax.Array:
        return jax.device_put(x, sharding.batch_place(mesh, x.ndim))

    whole = np.zeros((batch, capacity), np.int32)
    whole[:, : tokens.shape[1]] = tokens[:, :capacity]
    index = np.minimum(lengths[:, None] + np.arange(block)[None, :], capacity - 1)
    assert config.diffusion.mask_token_id is not None  # `check_request` saw to it
    canvas = np.where(known, np.take_along_axis(whole, index, axis=1), config.diffusion.mask_token_id)
    used = max(int(lengths.max(initial=0)), 1)
    hidden = _embed(model.embed.embedding[...], put(whole[:, : -(-used // chunk) * chunk]))
    ahead = _embed(model.embed.embedding[...], put(canvas.astype(np.int32)))
    # A seed comes from the prefill's last hidden state, not there yet: its place holds a mask that does not ask.
    seed = np.arange(block)[None, :] < int(config.diffusion.seeded)
    rows, masked = put(lengths.astype(np.int32)), put(~known & ~seed)

    one = _layers_of(config, 1)
    buffers = [DeviceKV.empty(one, batch, capacity, mesh) for _ in range(2)]
    pooled_layers = config.num_layers - plan.dense_layers
    dense = DeviceKV.empty(_layers_of(config, plan.dense_layers), batch, capacity, mesh) if plan.dense_layers else None
    slots = pool_slots(plan, longest, block)
    pool = DeviceKV.empty(_layers_of(config, pooled_layers), batch, slots, mesh)
    selected = select.selected_capacity(plan, longest)
    indices = jnp.full((pooled_layers, batch, config.num_kv_heads, selected), -1, jnp.int32)
    if mesh is not None:
        spec = jax.sharding.NamedSharding(mesh, P(None, "data", "model", None))
        indices = jax.device_put(indices, spec)
    keys, values = [], []
    for i, layer in enumerate(model.layers):
        graph, state = nnx.split(layer)
        is_dense = i < plan.dense_layers
        kv = buffers[i % 2]
        hidden, ahead, kv, importance = _one_layer(
            graph, state, hidden, ahead, kv, rows, masked, config=config, plan=plan, chunk=chunk, mesh=mesh,
            implementation=implementation, exact_only=is_dense,
        )  # fmt: skip
        buffers[i % 2] = kv
        if is_dense:
            assert dense is not None  # made above
            dense = _keep(dense, kv, jnp.int32(i))
            continue
        at = i - plan.dense_layers
        pool, indices = _fill(
            pool, indices, kv, importance, rows, jnp.int32(at), plan=plan, mesh=mesh, implementation=implementation
        )
        if on_layer is not None:
            on_layer(at, kv.k)
        k, v = host_kv.layer_to_host(kv, mesh)
        keys.append(k)
        values.append(v)
    last = _last_hidden(model.norm, hidden, rows)
    jax.block_until_ready((keys, values))  # the buffers may be freed only now
    return Prefilled(HostKV(tuple(keys), tuple(values)), dense, pool, indices, last)


def _layers_of(config: ModelConfig, layers: int) -> ModelConfig:
    """The same cache shape with another number of layers."""
    return dataclasses.replace(config, num_layers=layers)


@jax.jit
def _embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(table, tokens, axis=0)


@functools.partial(jax.jit, donate_argnums=0)
def _keep(dense: DeviceKV, kv: DeviceKV, layer: jax.Array) -> DeviceKV:
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, layer, 0), dense, kv)


@jax.jit
def _last_hidden(norm: Any, hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    at = jnp.maximum(lengths - 1, 0)[:, None, None]
    last = norm(jnp.take_along_axis(hidden, at, axis=1)[:, 0])
    return jnp.where(lengths[:, None] > 0, last, jnp.zeros_like(last))


@functools.partial(
    jax.jit,
    static_argnames=("graph", "config", "plan", "chunk", "mesh", "implementation", "exact_only"),
    donate_argnames=("hidden", "ahead", "kv"),
)
def _one_layer(
    graph: Any,
    state: Any,
    hidden: jax.Array,
    ahead: jax.Array,
    kv: DeviceKV,
    lengths: jax.Array,
    masked: jax.Array,
    *,
    config: ModelConfig,
    plan: Herald,
    chunk: int,
    mesh: Mesh | None,
    implementation: str | None,
    exact_only: bool,
) -> tuple[jax.Array, jax.Array, DeviceKV, jax.Array]:
    """`hidden` `[B, N', E]` and the mask block `ahead` `[B, M, E]` through a layer; its K and V, and the importance."""
    layer = nnx.merge(graph, state)
    batch, block = ahead.shape[:2]
    zero = jnp.int32(0)

    def one_chunk(i: jax.Array, carry: tuple[jax.Array, DeviceKV]) -> tuple[jax.Array, DeviceKV]:
        hidden, kv = carry
        start = i * chunk
        positions = jnp.broadcast_to(start + jnp.arange(chunk)[None, :], (batch, chunk))
        ends = (start + block * (1 + jnp.arange(chunk // block)))[None, :]
        visible = jnp.where(ends <= lengths[:, None], ends, 0)
        attend = DenseAttend(start, visible, mesh=mesh, implementation=implementation)
        x = jax.lax.dynamic_slice_in_dim(hidden, start, chunk, axis=1)
        y, kv = layer(zero, x, rope_angles(config.rope, config.head_dim, positions), attend, kv)
        return jax.lax.dynamic_update_slice_in_dim(hidden, y, start, axis=1), kv

    chunks = -(-jnp.max(lengths) // chunk)
    hidden, kv = jax.lax.fori_loop(0, chunks, one_chunk, (hidden, kv))

    ahead, kv, importance = _ahead(layer, ahead, kv, lengths, masked, config, plan, mesh, implementation, exact_only)
    return hidden, ahead, kv, importance


def _ahead(
    layer: Any, ahead: jax.Array, kv: DeviceKV, lengths: jax.Array, masked: jax.Array, config: ModelConfig,
    plan: Herald, mesh: Mesh | None, implementation: str | None, exact_only: bool,
) -> tuple[jax.Array, DeviceKV, jax.Array]:  # fmt: skip
    """A block `[B, M, E]` behind `lengths` committed tokens through one layer, exactly, with the importance."""
    positions = lengths[:, None] + jnp.arange(ahead.shape[1])[None, :]
    angles = rope_angles(config.rope, config.head_dim, positions)
    attend = _SelectAttend(lengths, masked, plan, mesh, implementation, exact_only)
    ahead, (kv, importance) = layer(jnp.int32(0), ahead, angles, attend, (kv, None))
    return ahead, kv, importance


@functools.partial(
    jax.jit,
    static_argnames=("graph", "config", "plan", "mesh", "implementation", "exact_only"),
    donate_argnames=("ahead", "kv"),
)
def _ahead_alone(
    graph: Any, state: Any, ahead: jax.Array, kv: DeviceKV, lengths: jax.Array, masked: jax.Array, *,
    config: ModelConfig, plan: Herald, mesh: Mesh | None, implementation: str | None, exact_only: bool,
) -> tuple[jax.Array, DeviceKV, jax.Array]:  # fmt: skip
    layer = nnx.merge(graph, state)
    return _ahead(layer, ahead, kv, lengths, masked, config, plan, mesh, implementation, exact_only)


@functools.partial(jax.jit, static_argnames="layer")
def _take(dense: DeviceKV, *, layer: int) -> DeviceKV:
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, layer, layer + 1), dense)


@functools.partial(jax.jit, static_argnames="options", donate_argnames="rows")
def _revealed(
    params: Params, rows: Rows, hidden: jax.Array, policy: Any, sampling: Any, stops: jax.Array, options: LoopOptions
) -> Rows:
    """What follows from a forward that was made layer by layer, for every row."""
    assert isinstance(rows.cache, PooledKV)
    plan, model = options.plan, bind(options.config, params)
    assert isinstance(plan, Herald)
    sparse = ~rows.done & (select.budget_of(plan, rows.length) < rows.length)
    counts = select.budget_of(plan, rows.length)
    cache = dataclasses.replace(rows.cache, counts=counts, committed=jnp.zeros_like(rows.cache.committed))
    rows = dataclasses.replace(rows, cache=cache, sparse_blocks=rows.sparse_blocks + sparse)
    hidden = model.norm(hidden)
    rows = step(model, rows, policy, sampling, stops, options, phase="select", hidden=hidden)
    return placed_rows(rows, options.mesh)


def exact_step(params: Params, rows: Rows, host: HostKV, how: tuple[Any, Any, Any], options: LoopOptions) -> Rows:
    """A block's first step with exact attention, which fills its pool: MAGE's selection over a cache in host memory.

    Every layer's K and V come to the device once, one layer while the one before is attended to.
    """
    plan, config, mesh = options.plan, options.config, options.mesh
    cache = rows.cache
    assert isinstance(plan, Herald)
    assert isinstance(cache, PooledKV)
    model = bind(config, params)
    fixed: dict[str, Any] = {"plan": plan, "mesh": mesh, "implementation": options.implementation}
    ahead = _embed(model.embed.embedding[...], _inputs(rows, config.diffusion.mask_token_id))
    masked, lengths = ~rows.known, rows.length
    pool, dense = cache.pool, cache.dense
    indices = None
    place = host_kv.device_sharding(mesh)
    for i, layer in enumerate(model.layers):
        graph, state = nnx.split(layer)
        at = i - plan.dense_layers
        if at < 0:
            assert dense is not None  # there are dense layers
            kv = _take(dense, layer=i)
        else:
            kv = DeviceKV(*(jax.device_put(x[at], place, may_alias=False) for x in (host.k, host.v)))
        ahead, kv, importance = _ahead_alone(
            graph, state, ahead, kv, lengths, masked, config=config, exact_only=at < 0, **fixed
        )
        if at < 0:
            continue  # the steps that follow write the block's K and V into the dense layers
        if indices is None:
            capacity = pool.k.shape[3] - 3 * config.diffusion.block_length
            indices = jnp.full((*pool.k.shape[:3], capacity), -1, jnp.int32)
        pool, indices = _fill(pool, indices, kv, importance, lengths, jnp.int32(at), **fixed)
    rows = dataclasses.replace(rows, cache=dataclasses.replace(cache, pool=pool))
    return _revealed(params, rows, ahead, *how, options)


@functools.partial(jax.jit, static_argnames="mask")
def _inputs(rows: Rows, mask: int) -> jax.Array:
    return jnp.where(rows.known, rows.canvas, mask)


class _SelectAttend:
    """Exact attention of the mask block over a one-layer cache, with the importance by which HERALD selects."""

    def __init__(self, start: Any, masked: Any, plan: Herald, mesh: Mesh | None, implementation: Any, exact_only: bool):
        self.start, self.masked, self.plan = start, masked, plan
        self.mesh, self.implementation, self.exact_only = mesh, implementation, exact_only

    def __call__(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        def local(q: Any, k: Any, v: Any, kv: DeviceKV, start: Any, masked: Any) -> Any:
            t = q.shape[1]
            if self.exact_only:
                attend = DenseAttend(start, (start + t)[:, None], implementation=self.implementation)
                out, kv = attend(0, q, k, v, kv)
                return out, kv, jnp.zeros((*kv.k.shape[1:4],), jnp.float32)
            return self._with_importance(q, k, v, kv, start, masked)

        kv, _ = cache
        if self.mesh is not None:
            both = DeviceKV(CACHE_SPEC, CACHE_SPEC)  # type: ignore[arg-type]
            heads, queries = P("data", None, "model", None), P("data", None, "model", None, None)
            in_specs = (queries, heads, heads, both, P("data"), P("data", None))
            out_specs = (queries, both, P("data", "model", None))
            local = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        out, kv, importance = local(q, k, v, kv, self.start, self.masked)
        return out, (kv, importance)

    def _with_importance(
        self, q: jax.Array, k: Any, v: Any, kv: DeviceKV, start: jax.Array, masked: jax.Array
    ) -> tuple[jax.Array, DeviceKV, jax.Array]:
        plan, (b, t, heads, group, d) = self.plan, q.shape
        kv = DeviceKV(write(kv.k, 0, k, start), write(kv.v, 0, v, start))
        how = Importance(plan.reduce, "prefix")
        run = functools.partial(
            block_attention, k=kv.k, v=kv.v, layer=jnp.int32(0), implementation=self.implementation
        )  # fmt: skip
        folded = q.reshape(b, t, heads * group, d)
        if plan.query == "mean":
            out = run(folded, lengths=start + t).out
            share = jnp.where(masked, 1.0, 0.0) / jnp.maximum(jnp.sum(masked, axis=1, keepdims=True), 1)
            mean = jnp.einsum("bt,bthd->bhd", share, folded.astype(jnp.float32))[:, None].astype(q.dtype)
            scored = run(mean, lengths=start + t, importance=how, prefix_lengths=start)
            assert scored.importance is not None  # asked for
            return out.reshape(q.shape), kv, scored.importance
        rows = select.query_rows(plan, masked)
        result = run(folded, lengths=start + t, importance=how, importance_rows=rows, prefix_lengths=start)
        assert result.importance is not None  # asked for
        return result.out.reshape(q.shape), kv, result.importance


@functools.partial(jax.jit, static_argnames=("plan", "mesh", "implementation"), donate_argnames=("pool", "indices"))
def _fill(
    pool: DeviceKV,
    indices: jax.Array,
    kv: DeviceKV,
    importance: jax.Array,
    lengths: jax.Array,
    layer: jax.Array,
    *,
    plan: Herald,
    mesh: Mesh | None,
    implementation: str | None,
) -> tuple[DeviceKV, jax.Array]:
    """One layer's selection into layer `layer` of the pool."""

    def local(pool: Any, indices: jax.Array, kv: Any, importance: jax.Array, lengths: jax.Array, layer: Any) -> Any:
        counts = select.budget_of(plan, lengths)
        chosen = select.pick(plan, importance, counts, lengths, indices.shape[-1], implementation)
        old = [jax.lax.dynamic_slice_in_dim(x, layer, 1) for x in (pool.k, pool.v)]
        new = gather_rows(kv.k, kv.v, chosen[None], *old, implementation=implementation)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=layer, axis=0)
        return DeviceKV(put(pool.k, new[0]), put(pool.v, new[1])), put(indices, chosen[None])

    if mesh is not None:
        both, chosen = DeviceKV(CACHE_SPEC, CACHE_SPEC), P(None, "data", "model", None)  # type: ignore[arg-type]
        in_specs = (both, chosen, both, P("data", "model", None), P("data"), P())
        local = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(both, chosen), check_vma=False)
    return local(pool, indices, kv, importance, lengths, layer)
