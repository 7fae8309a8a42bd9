"""When to make the draft, and when to fetch: early enough to hide what follows from it, and no earlier.

From counts alone, not from measurements: what is drafted decides which tokens are written, and the same request is to
write the same tokens whatever else the machine is doing. The rates below are those of the machine this was measured on
(docs/herald.md); on a slower one more is exposed, on a faster one the draft could have been a little better.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import select
from herald_jax.config import ModelConfig
from herald_jax.denoise import Policy, Sequential, StaticLowConfidence
from herald_jax.model import param_specs
from herald_jax.plans import Herald

# Share of the block that is revealed at the latest draft that "auto" makes, and always if nothing is known.
_LATEST = 0.5
_SCAN_RATE = 60e9  # bytes of keys a second, 16 cores of the host: what XLA's scan reads at least (the native one 100e9)
_FETCH_RATE = 45e9  # bytes of selected entries a second, over PCIe
_STEP_RATE = 3e12  # bytes of weights and pools a second, in a denoising step on an H200
_LATENCY = 12e-3  # seconds until the CPU has the queries, the device the scores, and the next program is launched
_SCAN_BOUND = 1.1  # how many times as long as a block's steps and the fetch a scan takes at least that is made in parts
_PARTS = 12  # at most; the last one's fetch is what follows the scan, and each takes a program's start
_LAUNCHES = 12e-3  # seconds in which the host launches what follows a block's last program, up to the next draft
_STEPS_BESIDE = 3  # the block's commit is one more than its steps; the others to spare


@functools.partial(jax.jit, static_argnames=("plan", "config"))
def revealed(prefix: jax.Array, policy: Policy, *, plan: Herald, config: ModelConfig) -> jax.Array:
    """How many positions of its block each row must have revealed when it is drafted, i32[B].

    With `draft_at` "auto" and a policy of a known number of steps: so early that the steps left take as long as the
    scan and the fetch will, by the rates above; but not before the first step, nor after half of the block. Each row is
    judged as though all of the batch had its own `prefix` i32[B], so that this depends on no neighbour's length.
    """
    block = config.diffusion.block_length
    latest = math.ceil((_LATEST if plan.draft_at == "auto" else plan.draft_at) * block)
    if plan.draft_at != "auto" or not isinstance(policy, (StaticLowConfidence, Sequential)):
        return jnp.full_like(prefix, latest)
    batch, layers = prefix.shape[0], config.num_layers - plan.dense_layers
    vector = _vector_bytes(config)
    scanned = {"index": 0.0, "split": 1 - plan.split}.get(plan.selector, 1.0) * float(batch * layers * vector)
    entries = select.budget_of(plan, prefix).astype(jnp.float32)
    fetched = 2.0 * batch * layers * vector * entries
    step = (_weight_bytes(config) + fetched) / _STEP_RATE
    hidden = _LATENCY * (scanned > 0) + scanned * prefix.astype(jnp.float32) / _SCAN_RATE + fetched / _FETCH_RATE
    steps = jnp.int32(block) if policy.steps is None else jnp.minimum(policy.steps, block)
    before = jnp.maximum(steps - jnp.ceil(hidden / step).astype(jnp.int32) - _STEPS_BESIDE, 1)
    shown = before * (block // steps) + jnp.minimum(before, block % steps)  # `denoise.schedule`
    return jnp.minimum(shown, latest)


def parts(prefix: np.ndarray, layers: int, policy: Policy, plan: Herald, config: ModelConfig) -> int:
    """In how many equal parts the CPU scans `layers` layers of rows of `prefix` i32[B] tokens, each fetched by itself.

    One where the steps of a block are what takes long, and the fetch is hidden by some of them. More where the scan is
    clearly longer than both: a part is fetched while the next one is scanned, or the whole fetch would follow the scan.
    """
    scan = layers * _vector_bytes(config) * float(prefix.sum()) / _SCAN_RATE
    fetched = selected_bytes(prefix, layers, plan, config)
    steps = _steps(policy, config) * (_weight_bytes(config) + fetched) / _STEP_RATE
    if scan < _SCAN_BOUND * (steps + fetched / _FETCH_RATE):
        return 1
    return next(n for n in range(_PARTS, 0, -1) if layers % n == 0)


def selected_bytes(prefix: np.ndarray, layers: int, plan: Herald, config: ModelConfig) -> float:
    """Of the entries that `layers` layers' pools hold for rows of `prefix` i32[B] tokens: what is fetched at most."""
    return 2.0 * layers * _vector_bytes(config) * sum(plan.entries(int(n)) for n in prefix)


def _vector_bytes(config: ModelConfig) -> int:
    """Of one layer's K or V of a token."""
    return config.kv_bytes_per_token // (2 * config.num_layers)


def _steps(policy: Policy, config: ModelConfig) -> int:
    """Steps of a block; of a policy whose steps nobody knows beforehand as many as it can have."""
    block = config.diffusion.block_length
    steps = policy.steps if isinstance(policy, (StaticLowConfidence, Sequential)) else None
    return block if steps is None else min(int(steps), block)


@functools.cache
def _weight_bytes(config: ModelConfig) -> float:
    # In floating point like all that is traced here: most models exceed an int32.
    return float(sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in param_specs(config).values()))


def left_for_transfers(selected: float, score_bytes: int, policy: Policy, config: ModelConfig) -> tuple[int, int]:
    """How many of its block's masks the row that is furthest behind is to have left when two transfers begin.

    First that of the CPU's scores to the device, then the fetch of the selected entries, of `selected` bytes (and not
    of a pool, which has room for the longest row): as many as take the steps, over such entries, beside which both, or
    all entries, could be moved by the rates above. The block's commit is such a step, too. The fetch's are a program
    that also hides the launches behind it: so no fewer than take those, as long as that is no more than a quarter of
    the block. A policy whose steps nobody knows beforehand is taken to reveal one position in each.
    """
    block = config.diffusion.block_length
    step = (_weight_bytes(config) + selected) / _STEP_RATE
    steps = _steps(policy, config)
    each = math.ceil(block / steps)
    fetch, scores, launches = (
        math.ceil(seconds / step) for seconds in (selected / _FETCH_RATE, score_bytes / _FETCH_RATE, _LAUNCHES)
    )
    left = each * max(fetch - 1, min(launches - 1, steps // 4), 0)
    return min(left + each * scores, block), min(left, block)
