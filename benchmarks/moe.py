"""`python -m benchmarks.moe`: mixtures of experts, milliseconds per denoising step beside the floor, and the plans.

Random weights in real shapes, bfloat16, blocks of 32, a cache of random K and V (`benchmarks.mage`). A step is one
forward over a block of random tokens, so that its tokens go their own ways, head and argmax included; steps run in one
jitted loop. The floor is the bytes a step must read over the measured copy bandwidth: the experts that its tokens
actually chose, counted in a run of their own, every other weight and the cache once.

Also: the grouped kernel against `jax.lax.ragged_dot` for one layer; MAGE's later steps against dense ones; and HERALD's
throughput against the dense plan's where both may use the same amount of device memory. `--side-by-side` compiles the
parts at the same time, in a process each (`benchmarks.turns`).
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, herald
from benchmarks.block_times import GREEDY, abstract_params, compile_ahead, measure, random_cache
from benchmarks.mage import bytes_needed
from benchmarks.shapes import SHAPES, step_weight_bytes
from benchmarks.turns import Turns, run_side_by_side
from herald_jax import Dense, Herald, Mage, ModelConfig, moe
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.denoise import predict
from herald_jax.generate import capacity_for
from herald_jax.model import Params, bind, init_params
from pallas_kernels.grouped import grouped_mlp

GOALS = {
    "step/llada2_mini/4k/b1/over_floor": "<=1.6",
    "step/sdar_30b_a3b/4k/b1/over_floor": "<=1.6",
    "mage/llada2_mini/64k/step_speedup": ">=1.5",
    "herald/llada2_mini/64k/throughput": ">=2",
}


def parameters(config: ModelConfig) -> Params:
    """Random weights; embeddings of unit variance, so that tokens differ enough to be routed apart."""
    params = init_params(config, jax.random.key(0))
    scale = jax.jit(lambda x: x * 50, donate_argnums=0)
    params["embed"]["embedding"] = scale(params["embed"]["embedding"])
    return params


@functools.partial(jax.jit, static_argnames=("config", "steps"), donate_argnames="cache")
def _steps(
    config: ModelConfig, params: Params, cache: DeviceKV, length: jax.Array, key: jax.Array, *, steps: int
) -> tuple[DeviceKV, jax.Array]:
    """`steps` denoising forwards over blocks of random tokens behind `length` i32[B] entries, and their predictions."""
    model, block = bind(config, params), config.diffusion.block_length
    batch = length.shape[0]
    positions = length[:, None] + jnp.arange(block)[None, :]

    def body(index: jax.Array, state: tuple[DeviceKV, jax.Array]) -> tuple[DeviceKV, jax.Array]:
        cache, last = state
        drawn = jax.random.randint(jax.random.fold_in(key, index), (batch, block), 0, config.vocab_size)
        tokens = jnp.where(jnp.arange(block)[None, :] % 8 == 0, last, drawn)  # a step waits for the one before
        hidden, cache = model(tokens, positions, DenseAttend(length, (length + block)[:, None]), cache)
        return cache, predict(hidden, model.head_kernel(), GREEDY, implementation=None).token

    return jax.lax.fori_loop(0, steps, body, (cache, jnp.zeros((batch, block), jnp.int32)))


@contextmanager
def counting(block: int) -> Iterator[list[int]]:
    """Programs traced inside collect how many experts each layer of each forward over blocks touches."""
    counts: list[int] = []
    original = moe.route

    def route(logits: jax.Array, config: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
        weights, experts = original(logits, config, *args)
        if logits.shape[1] == block:
            jax.debug.callback(lambda chosen: counts.append(len(np.unique(chosen))), experts)
        return weights, experts

    jax.clear_caches()
    moe.route = route  # type: ignore[assignment]
    try:
        yield counts
    finally:
        moe.route = original
        jax.clear_caches()


def _start(config: ModelConfig, batch: int, context: int, capacity: int) -> tuple[DeviceKV, jax.Array, jax.Array]:
    return random_cache(config, batch, capacity), jnp.full((batch,), context, jnp.int32), jax.random.key(1)


class Steps:
    """The programs of one shape and batch, with room for the longest context: one counts experts, one is timed.

    They are lowered here and compiled in threads of `pool`, for which their first use waits.
    """

    def __init__(self, config: ModelConfig, batch: int, longest: int, steps: int, pool: Executor):
        self.config, self.batch, self.steps = config, batch, steps
        self.capacity = capacity_for(longest + config.diffusion.block_length)
        with counting(config.diffusion.block_length) as self._counts:
            self._counting = pool.submit(self._lowered(4).compile)
        self._timed = pool.submit(self._lowered(steps).compile)

    def wait(self) -> None:
        """Until both are compiled."""
        self._counting.result()
        self._timed.result()

    def _lowered(self, steps: int) -> Any:
        start = jax.eval_shape(functools.partial(_start, self.config, self.batch, 0, self.capacity))
        return _steps.lower(self.config, abstract_params(self.config), *start, steps=steps)

    def touched(self, params: Params, context: int) -> float:
        """How many experts of a layer a step touches on average."""
        self._counts.clear()
        jax.block_until_ready(self._counting.result()(params, *_start(self.config, self.batch, context, self.capacity)))
        jax.effects_barrier()
        return float(np.mean(self._counts))

    def seconds(self, params: Params, contexts: Sequence[int]) -> dict[int, float]:
        """Seconds per step at each context."""
        cache, _, key = _start(self.config, self.batch, 0, self.capacity)
        timed, found = self._timed.result(), {}
        for context in contexts:
            length, state = jnp.full((self.batch,), context, jnp.int32), [cache]

            def run(length=length, state=state) -> jax.Array:
                state[0], tokens = timed(params, state[0], length, key)
                return tokens

            found[context] = common.wall_time(run, [()], repeats=3) / self.steps
            cache = state[0]
        return found


def expert_bytes(config: ModelConfig) -> int:
    """Bytes of one expert."""
    assert config.moe is not None
    return 3 * config.hidden_size * config.moe.intermediate_size * jnp.dtype(config.dtype).itemsize


def step_bytes(config: ModelConfig, touched: float, batch: int, context: int) -> float:
    """What a step must read when each expert layer touches `touched` experts."""
    assert config.moe is not None
    layers = config.num_layers - config.moe.first_dense_layers
    rest = step_weight_bytes(config) - layers * config.moe.num_experts * expert_bytes(config)
    return rest + layers * touched * expert_bytes(config) + batch * context * config.kv_bytes_per_token


def expert_row(name: str, batch: int, params: Params) -> dict[str, Any]:
    """One layer's experts: the grouped kernel against XLA's form, on a block of random tokens per row."""
    config = SHAPES[name]
    assert config.moe is not None
    tokens = batch * config.diffusion.block_length
    layer = params["layers"][str(config.num_layers - 1)]["mlp"]["experts"]
    x = jax.random.normal(jax.random.key(2), (tokens, config.hidden_size), jnp.dtype(config.dtype))
    scores = jax.random.uniform(jax.random.key(3), (tokens, config.moe.num_experts))
    chosen = jax.lax.top_k(scores, config.moe.experts_per_token)[1]
    taken, results = {}, {}
    for form, implementation in (("grouped", None), ("ragged_dot", "xla")):
        fn = jax.jit(functools.partial(grouped_mlp, implementation=implementation))
        arguments = (x, chosen, layer["gate_up"], layer["down"])
        results[form] = fn(*arguments)
        taken[form] = common.device_time(fn, [arguments], repeats=5)
    touched = len(np.unique(chosen))
    detail = {
        "grouped_us": taken["grouped"].us,
        "ragged_dot_us": taken["ragged_dot"].us,
        "touched": touched,
        "bytes": touched * expert_bytes(config),
        "error": common.rms_error(results["grouped"], results["ragged_dot"]),
    }
    ratio = taken["ragged_dot"].seconds / taken["grouped"].seconds
    return common.row(f"experts/{name}/b{batch}/vs_ragged_dot", ratio, "x", detail=detail)


def fits(config: ModelConfig, batch: int, context: int, cap: float) -> bool:
    """Whether weights and the dense plan's cache leave a tenth of `cap` bytes free."""
    embedding = config.vocab_size * config.hidden_size * jnp.dtype(config.dtype).itemsize
    kv = batch * (context + 128) * config.kv_bytes_per_token  # not a slot in vain
    return step_weight_bytes(config) + embedding + kv < 0.9 * cap


def herald_row(name: str, context: int, cap: float, batch: int, params: Params) -> dict[str, Any]:
    """Tokens a second of HERALD with `batch` rows over those of the dense plan with as many rows as `cap` allows.

    Both at 8 steps a block and from caches of random K and V.
    """
    config, plan = SHAPES[name], Herald()
    dense_batch = max((b for b in range(1, batch + 1) if fits(config, b, context, cap)), default=0)
    if dense_batch == 0:
        raise SystemExit(f"{name} with one row of {context} tokens does not fit the cap of {cap / 1e9:.0f} GB")
    block = config.diffusion.block_length
    dense = dense_batch * block / herald.dense(config, params, dense_batch, [context])[context].block(8)
    common.stage(f"{name}: dense plan measured under the cap")
    got = herald.Case(config, params, batch, context).measure(plan, context, 8, 3)
    rate, kept = batch * block / got["block"], got["stats"]
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    held = weights + kept.pool_bytes + kept.dense_bytes + kept.index_bytes
    if held > 0.9 * cap:
        raise SystemExit(f"HERALD with {batch} rows holds {held / 1e9:.1f} GB, too close to the cap: take fewer rows")
    detail = {
        "cap_gb": cap / 1e9, "dense_rows": dense_batch, "herald_rows": batch, "dense_tokens_per_s": dense,
        "herald_tokens_per_s": rate, "herald_device_gb": held / 1e9, "host_gb": kept.host_bytes / 1e9,
        "exposed": got["exposed"], "scan_ms": got["scan"] * 1e3, "block_ms": got["block"] * 1e3,
    }  # fmt: skip
    id = f"herald/{name}/{context // 1024}k/throughput"
    return common.row(id, rate / dense, "x", goal=GOALS.get(id), detail=detail)


class Run:
    """Rows of the parts of one process. A part is a shape's `steps`, or `mage` or `herald` on one."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.turns = options, Turns(options.turns)
        self.rows: list[dict[str, Any]] = []
        self.loaded, self.params = "", {}

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(row, flush=True)
        common.write_results("moe", self.rows, folder=self.options.out)  # a run that is cut short keeps what it has

    def part(self, part: str, name: str) -> None:
        common.stage(f"{name} {part}: begins")
        getattr(self, part)(name)
        common.stage(f"{name} {part}: done")

    def _load(self, name: str, batch: int, context: int) -> Params:
        self.turns.begin_measuring(bytes_needed(SHAPES[name], batch, context, Mage()))
        if self.loaded != name:
            self.params = {}  # free the last model before the next is made
            self.params, self.loaded = parameters(SHAPES[name]), name
            common.stage(f"{name}: weights made")
        return self.params

    def steps(self, name: str) -> None:
        config = SHAPES[name]
        batches = [int(batch) for batch in self.options.batches.split(",")]
        contexts = [1024 * int(thousands) for thousands in self.options.contexts.split(",")]
        with self.turns.compiling(), ThreadPoolExecutor(3) as pool:
            programs = {batch: Steps(config, batch, max(contexts), self.options.steps, pool) for batch in batches}
            for program in programs.values():
                program.wait()
            common.stage(f"{name} steps: compiled")
        params = self._load(name, max(batches), max(contexts))
        bandwidth = common.copy_bandwidth()
        for batch, program in programs.items():
            self.add(expert_row(name, batch, params))
            # Once per batch: how many experts the tokens of a block choose hardly depends on what they attend to.
            touched = program.touched(params, contexts[0])
            for context, seconds in program.seconds(params, contexts).items():
                floor = step_bytes(config, touched, batch, context) / bandwidth
                id = f"step/{name}/{context // 1024}k/b{batch}/over_floor"
                detail = {"step_ms": seconds * 1e3, "floor_ms": floor * 1e3, "touched_experts": touched}
                self.add(common.row(id, seconds / floor, "x", goal=GOALS.get(id), detail=detail))

    def mage(self, name: str) -> None:
        config, context, batch = SHAPES[name], 1024 * self.options.plan_context, self.options.plan_rows
        plans = (Dense(), Mage())
        with self.turns.compiling(), ThreadPoolExecutor(2) as pool:
            programs = list(pool.map(lambda plan: compile_ahead(config, batch, context, plan), plans))
            common.stage(f"{name} mage: compiled")
        params = self._load(name, batch, context)
        dense, sparse = (
            measure(config, params, batch, context, plan, program)
            for plan, program in zip(plans, programs, strict=True)
        )
        id = f"mage/{name}/{self.options.plan_context}k/step_speedup"
        detail = {"batch": batch, "dense_step_ms": dense.later * 1e3, "sparse_step_ms": sparse.later * 1e3}
        self.add(common.row(id, dense.later / sparse.later, "x", goal=GOALS.get(id), detail=detail))

    def herald(self, name: str) -> None:
        context, batch = 1024 * self.options.plan_context, self.options.plan_rows
        # On the device are the rows of the dense plan that the cap allows, or both pools, which are less.
        params = self._load(name, batch // 4, context)
        self.add(herald_row(name, context, self.options.cap, batch, params))


def side_by_side(options: argparse.Namespace, parts: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Every part in a process of its own."""
    # This process only names the machine in the results file.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    shared = [
        "--batches", options.batches, "--contexts", options.contexts, "--steps", str(options.steps),
        "--plan-context", str(options.plan_context), "--plan-rows", str(options.plan_rows), "--cap", str(options.cap),
    ]  # fmt: skip
    arguments = [[*shared, "--shapes", name, "--plans", name, "--parts", part] for part, name in parts]

    def save(rows: list[dict[str, Any]]) -> None:
        if rows:
            common.write_results("moe", rows, folder=options.out)

    return run_side_by_side("benchmarks.moe", arguments, save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="llada2_mini,sdar_30b_a3b")
    parser.add_argument("--parts", default="steps,mage,herald", help="of these; comma-separated")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--contexts", default="4,32", help="in units of 1024 tokens")
    parser.add_argument("--steps", type=int, default=64, help="per timed loop")
    parser.add_argument("--plans", default="llada2_mini", help="shape of the MAGE and HERALD rows; empty: none")
    parser.add_argument("--plan-context", type=int, default=64, help="in units of 1024 tokens")
    parser.add_argument("--plan-rows", type=int, default=16, help="batch of the MAGE and HERALD rows")
    parser.add_argument("--cap", type=float, default=48e9, help="bytes of device memory that both plans may use")
    parser.add_argument("--side-by-side", action="store_true", help="compile the parts in a process each, all at once")
    parser.add_argument("--turns", type=Path, default=None, help=argparse.SUPPRESS)
    common.merge_option(parser)
    common.output_option(parser)
    options = parser.parse_args()
    if options.merge:
        common.print_rows(common.merge_results("moe", options.merge, folder=options.out))
        return

    # Before JAX's first use: 16 rows of 64K need more than the three quarters of the card that JAX takes by default.
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    wanted = options.parts.split(",")
    parts = [
        (part, name)
        for name in options.shapes.split(",")
        for part in ("steps", "mage", "herald")
        if part in wanted and (part == "steps" or name == options.plans)
    ]
    if options.side_by_side:
        common.print_rows(side_by_side(options, parts))
        return
    run = Run(options)
    for part, name in parts:
        run.part(part, name)
    if options.turns is None:
        common.print_rows(run.rows)


if __name__ == "__main__":
    main()
