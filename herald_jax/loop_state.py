"""What the block loop carries from one forward to the next, and what it is compiled for."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
from jax.sharding import Mesh

from herald_jax import mage, pooled, sharding
from herald_jax.cache import DeviceKV
from herald_jax.config import ModelConfig
from herald_jax.mage import MageKV
from herald_jax.plans import Dense, Plan
from herald_jax.pooled import PooledKV


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Rows:
    """Everything that changes while a batch of B rows is written. M is the block length, N the cache's capacity.

    Attributes:
      cache: K and V; slots below `length[b]` are committed.
      tokens: i32[B, N], prompt and everything written so far.
      prompt_length, limit: i32[B], where new tokens begin and the position that ends the row.
      length: i32[B], committed prefix.
      canvas, known: i32[B, M], bool[B, M], the current block and which of its positions hold tokens.
      step: i32[B], denoising steps taken in the current block.
      whole_block: bool[B], whether the block's K and V have been written since its first step (sub-block cache).
      ready: i32[B], end of the tokens that are final; `fresh` bool[B] says that the last forward finished a block.
      done, failed: bool[B]; failed rows met a NaN.
      key: typed PRNG keys [B].
      forwards, commits, blocks: i32[B] counters; batch_forwards: i32.
      sparse_blocks: i32[B], blocks begun with a budget below their prefix; exact_forwards: i32, forwards that selected.
      post, edited: i32[B], forwards of the current block since it had no mask left, and tokens rewritten so far; both
        move under `denoise.Editing` only.
    """

    cache: DeviceKV | MageKV | PooledKV
    tokens: jax.Array
    prompt_length: jax.Array
    limit: jax.Array
    length: jax.Array
    canvas: jax.Array
    known: jax.Array
    step: jax.Array
    whole_block: jax.Array
    ready: jax.Array
    fresh: jax.Array
    done: jax.Array
    failed: jax.Array
    key: jax.Array
    forwards: jax.Array
    commits: jax.Array
    blocks: jax.Array
    batch_forwards: jax.Array
    sparse_blocks: jax.Array
    exact_forwards: jax.Array
    post: jax.Array
    edited: jax.Array


Phase = Literal["dense", "select", "sparse"]


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What the loop is compiled for.

    Attributes:
      spared: multiprocessors of a GPU that a step leaves to what runs beside it.
    """

    config: ModelConfig
    mesh: Mesh | None = None
    block_cache: bool = False
    implementation: str | None = None
    plan: Plan = dataclasses.field(default_factory=Dense)
    spared: int = 0


def placed_rows(rows: Rows, mesh: Mesh | None) -> Rows:
    """`rows` where they are split over "data": leaving the loop and entering it again must not compile anew."""
    if mesh is None:
        return rows
    state = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    state = {
        name: jax.lax.with_sharding_constraint(value, sharding.batch_sharding(mesh, value.ndim))
        for name, value in state.items()
        if isinstance(value, jax.Array)
    }
    if isinstance(rows.cache, MageKV):
        state["cache"] = mage.placed(rows.cache, mesh)
    if isinstance(rows.cache, PooledKV):
        state["cache"] = pooled.placed(rows.cache, mesh)
    return dataclasses.replace(rows, **state)
