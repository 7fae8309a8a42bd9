"""What a block costs under a plan, from three runs of one compiled program: its call, its first step, its later steps.

Random weights, and a cache of random K and V instead of a prefill: a step's time does not depend on what the entries
say, and a 128K prompt need not be computed for every case. With a threshold of 0 a block takes one denoising step (or
one a sub-block), with 1 it takes 32. Runs of one block and of BLOCKS blocks tell a first step from what a call costs
whatever it does: arguments, CUDA graphs brought up to date, the result's way back. `generate` makes one call for all
blocks of an answer, `stream` one a block.

What a call costs varies by more than a first step may cost beyond a later one. So a first step is found from PAIRS
pairs of runs of one and of BLOCKS blocks, made one right after the other, in alternating order: each pair's difference
holds BLOCKS - 1 first steps, and how far the pairs are apart says how well the first step is known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from herald_jax import Mage, ModelConfig, Threshold
from herald_jax.block_loop import first_canvas, run_blocks
from herald_jax.cache import DeviceKV
from herald_jax.denoise import Sampling
from herald_jax.generate import capacity_for
from herald_jax.loop_state import LoopOptions, Rows
from herald_jax.mage import MageKV
from herald_jax.model import Params, param_specs, unflatten
from herald_jax.plans import Plan

BLOCKS = 9
PAIRS = 7  # 3 of a plan whose first step is like any other
FULL = 3  # runs of one block in as many steps as it has positions
GREEDY = Sampling.of(0.0, 0, 1.0)
NO_STOPS = np.array([-1], np.int32)


@dataclasses.dataclass(frozen=True)
class BlockTime:
    """Seconds of a block's first forward, of each later one, and of a call beside its forwards.

    The errors are standard errors of the first two.
    """

    first: float
    later: float
    call: float = 0.0
    first_error: float = 0.0
    later_error: float = 0.0

    def block(self, steps: int = 32) -> float:
        """A block of `steps` denoising steps and its commit, among others of one call."""
        return self.first + steps * self.later


class Taken(NamedTuple):
    """A run: seconds, and the forwards it made."""

    seconds: float
    forwards: int


def random_cache(config: ModelConfig, batch: int, capacity: int, *, peaked: bool = False) -> DeviceKV:
    """A cache full of random entries, made layer by layer: no second copy, no float32 one. `peaked`: see `contrast`."""
    empty = DeviceKV.empty(config, batch, capacity)
    of_k, of_v = contrast(config) if peaked else (1.0, 1.0)
    return DeviceKV(_fill(empty.k, jax.random.key(1), of_k), _fill(empty.v, jax.random.key(2), of_v))


def contrast(config: ModelConfig) -> tuple[float, float]:
    """What random K and V are multiplied with: 1 and 1, but for mixtures of experts.

    Attention to random entries averages them, and hardly anything is left of many: masks, which have one embedding,
    would all go to the same few experts. With these factors a query sees a handful of entries, another one at each
    position, and what it sees outweighs the embedding: masks touch nearly as many experts as random tokens do.
    """
    return (1.0, 1.0) if config.moe is None else (8.0, 4.0)


@functools.partial(jax.jit, donate_argnums=0)
def _fill(x: jax.Array, key: jax.Array, times: float) -> jax.Array:
    def one(layer: jax.Array, x: jax.Array) -> jax.Array:
        values = jax.random.normal(jax.random.fold_in(key, layer), x.shape[1:], x.dtype)
        values = values * jnp.asarray(times, x.dtype)
        return jax.lax.dynamic_update_index_in_dim(x, values, layer, 0)

    return jax.lax.fori_loop(0, x.shape[0], one, x)


def start(
    config: ModelConfig, params: Params, batch: int, context: int, plan: Plan, capacity: int | None = None
) -> tuple[Rows, LoopOptions]:
    """Rows whose prompt of `context` tokens is in the cache already, with room for BLOCKS blocks.

    `capacity`: slots of the cache, by default as many as `generate` would allocate.
    """
    block = config.diffusion.block_length
    end = context + BLOCKS * block
    capacity = capacity or capacity_for(end + block)
    cache: DeviceKV | MageKV = random_cache(config, batch, capacity, peaked=True)
    if isinstance(plan, Mage):
        cache = MageKV.around(cache, plan, config, end, None)
    options = LoopOptions(config, plan=plan)
    full = np.full((batch,), context, np.int32)
    rows = first_canvas(
        params, cache, jnp.zeros((batch, config.hidden_size), jnp.dtype(config.dtype)),
        np.ones((batch, capacity), np.int32), full, full, full + BLOCKS * block, np.zeros((batch,), bool),
        jax.random.split(jax.random.key(0), batch), NO_STOPS, GREEDY, options=options,
    )  # fmt: skip
    return rows, options


@functools.partial(jax.jit, static_argnames="seeded", donate_argnames="rows")
def rewind(rows: Rows, context: jax.Array, blocks: jax.Array | int = BLOCKS, *, seeded: bool) -> Rows:
    """Rows behind a prompt of `context` (i32 scalar) tokens that have written nothing and are to write `blocks` blocks.

    The cache's contents do not matter.
    """
    batch, block = rows.canvas.shape
    zero, off = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), bool)
    known = jnp.broadcast_to(jnp.arange(block)[None, :] < seeded, rows.known.shape)
    return dataclasses.replace(
        rows, prompt_length=zero + context, limit=zero + context + blocks * block,
        length=zero + context, ready=zero + context, done=off, step=zero, whole_block=off, fresh=off,
        known=known, forwards=zero, commits=zero, blocks=zero, batch_forwards=jnp.zeros((), jnp.int32),
    )  # fmt: skip


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters."""
    specs = param_specs(config)
    return unflatten({path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in specs.items()})


def compile_ahead(
    config: ModelConfig, batch: int, context: int, plan: Plan, capacity: int | None = None
) -> Callable[..., Rows]:
    """The program of `measure`, compiled from shapes alone."""
    return lower_ahead(config, batch, context, plan, capacity).compile()


def lower_ahead(config: ModelConfig, batch: int, context: int, plan: Plan, capacity: int | None = None) -> Any:
    """It lowered, which takes Python's lock; compiling it does not."""
    params = abstract_params(config)
    rows = jax.eval_shape(lambda params: start(config, params, batch, context, plan, capacity)[0], params)
    arguments = (params, rows, Threshold(0.5), GREEDY, NO_STOPS, np.bool_(False))
    return run_blocks.lower(*arguments, options=LoopOptions(config, plan=plan))


def split_times(pairs: Sequence[tuple[Taken, Taken]], full: Sequence[Taken]) -> BlockTime:
    """Times of first and later forwards and of a call, from runs of three kinds.

    `pairs`: one block in as few steps as it can be, and BLOCKS blocks likewise. `full`: one block in many steps. A
    block of a family with sub-blocks takes a step for each of these at the least, so the forwards are counted.
    """
    one = [one for one, _ in pairs]
    call, call_error = _median(run.seconds for run in one)
    whole, whole_error = _median(run.seconds for run in full)
    steps = full[0].forwards - one[0].forwards
    later, later_error = (whole - call) / steps, math.hypot(whole_error, call_error) / steps
    more = BLOCKS - 1
    others = (pairs[0][1].forwards - one[0].forwards - more) / more  # later forwards to a first one
    first, error = _median((b.seconds - a.seconds) / more - others * later for a, b in pairs)
    call -= first + (one[0].forwards - 1) * later
    return BlockTime(first, later, call, math.hypot(error, others * later_error), later_error)


def _median(values: Iterable[float]) -> tuple[float, float]:
    """The median of a few, and its standard error as it is of normal values with their median deviation.

    A run that something held up is as far off as it likes without telling anything of the others.
    """
    values = list(values)
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, 1.2533 * deviation / math.sqrt(len(values))


def measure(
    config: ModelConfig, params: Params, batch: int, context: int, plan: Plan,
    compiled: Callable[..., Rows] | None = None,
) -> BlockTime:  # fmt: skip
    """`measure_contexts` at one context."""
    return measure_contexts(config, params, batch, [context], plan, compiled)[context]


def measure_contexts(
    config: ModelConfig, params: Params, batch: int, contexts: Sequence[int], plan: Plan,
    compiled: Callable[..., Rows] | None = None, capacity: int | None = None,
) -> dict[int, BlockTime]:  # fmt: skip
    """Medians at each of `contexts`, by one program with room for the longest: `compiled`, if it is there already."""
    rows, options = start(config, params, batch, max(contexts), plan, capacity)
    run = compiled or functools.partial(run_blocks, options=options)
    # The same arrays in every call: CUDA graphs are brought up to date where an argument lies elsewhere than before.
    few, full = ((Threshold(value), GREEDY, NO_STOPS, np.bool_(False)) for value in (0.0, 1.0))
    few, full = jax.device_put((few, full))
    runs = {"one": (1, few), "several": (BLOCKS, few), "full": (1, full)}
    found = {}
    for context in contexts:
        taken: dict[str, list[Taken]] = {name: [] for name in runs}
        for name in _order(PAIRS if isinstance(plan, Mage) else 3):
            blocks, arguments = runs[name]
            rows = rewind(rows, np.int32(context), np.int32(blocks), seeded=config.diffusion.seeded)
            jax.block_until_ready(rows)
            began = time.perf_counter()
            rows = run(params, rows, *arguments)
            forwards = int(rows.batch_forwards)
            taken[name].append(Taken(time.perf_counter() - began, forwards))
        pairs = list(zip(taken["one"][1:], taken["several"], strict=True))  # the very first is not counted
        found[context] = split_times(pairs, taken["full"])
    return found


def _order(pairs: int) -> Iterator[str]:
    """The runs of a context by name: one to begin with, then the pairs, this way round and that, between full ones."""
    yield "one"
    for i in range(pairs):
        yield from ("one", "several") if i % 2 == 0 else ("several", "one")
        if i < FULL:
            yield "full"
