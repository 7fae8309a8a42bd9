"""`python -m benchmarks.moe`: mixtures of experts, milliseconds per denoising step beside the floor, and the plans.

Random weights in real shapes, bfloat16, blocks of 32, a cache of random K and V (`benchmarks.mage`). A step is one
forward over a block of random tokens, so that its tokens go their own ways, head and argmax included; steps run in one
jitted loop. The floor is the bytes a step must read over the measured copy bandwidth: the experts that its tokens
actually chose, counted in a run of their own, every other weight and the cache once.

Also: the grouped kernel against `jax.lax.ragged_dot` for one layer; MAGE's later steps against dense ones; and HERALD's
throughput against the dense plan's where both may use the same amount of device memory.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import herald_jax
from benchmarks import common
from benchmarks.mage import measure, random_cache
from benchmarks.shapes import SHAPES, step_weight_bytes
from herald_jax import Dense, GenerateConfig, Herald, Mage, Model, ModelConfig, StaticLowConfidence, moe
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.denoise import Sampling, predict
from herald_jax.generate import capacity_for
from herald_jax.model import Params, bind, init_params
from herald_jax.plans import Plan
from pallas_kernels.grouped import grouped_mlp

GOALS = {
    "step/llada2_mini/4k/b1/over_floor": "<=1.6",
    "step/sdar_30b_a3b/4k/b1/over_floor": "<=1.6",
    "mage/llada2_mini/64k/step_speedup": ">=1.5",
    "herald/llada2_mini/64k/throughput": ">=2",
}
_GREEDY = Sampling.of(0.0, 0, 1.0)


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
        return cache, predict(hidden, model.head_kernel(), _GREEDY).token

    return jax.lax.fori_loop(0, steps, body, (cache, jnp.zeros((batch, block), jnp.int32)))


@contextmanager
def counting(block: int) -> Iterator[list[int]]:
    """Collects how many experts each layer of each forward over blocks touches. What runs inside is compiled anew."""
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
        jax.effects_barrier()
    finally:
        moe.route = original
        jax.clear_caches()


def _start(config: ModelConfig, batch: int, context: int) -> tuple[DeviceKV, jax.Array, jax.Array]:
    cache = random_cache(config, batch, capacity_for(context + config.diffusion.block_length))
    return cache, jnp.full((batch,), context, jnp.int32), jax.random.key(1)


def count_touched(config: ModelConfig, params: Params, batch: int, context: int) -> float:
    """How many experts of a layer a step of `batch` rows touches on average."""
    with counting(config.diffusion.block_length) as counts:
        jax.block_until_ready(_steps(config, params, *_start(config, batch, context), steps=4))
    return float(np.mean(counts))


def measure_step(config: ModelConfig, params: Params, batch: int, context: int, steps: int) -> float:
    """Seconds per step."""
    cache, length, key = _start(config, batch, context)
    state = [cache]

    def run() -> jax.Array:
        state[0], tokens = _steps(config, params, state[0], length, key, steps=steps)
        return tokens

    return common.wall_time(run, [()], repeats=3) / steps


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
    kv = batch * capacity_for(context + 4 * config.diffusion.block_length) * config.kv_bytes_per_token
    return step_weight_bytes(config) + embedding + kv < 0.9 * cap


def throughput(model: Model, batch: int, context: int, new_tokens: int, plan: Plan) -> herald_jax.Stats:
    """Statistics of a second, compiled run over `batch` prompts of `context` random tokens."""
    block = model.config.diffusion.block_length
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, context)).tolist()
    request = GenerateConfig(
        new_tokens, StaticLowConfidence(8), ignore_stop=True, prefill_chunk=max(2048 // batch, block)
    )
    for _ in range(2):
        stats = herald_jax.generate(model, prompts, request, plan).stats
    return stats


def herald_row(name: str, context: int, cap: float, batch: int, new_tokens: int, params: Params) -> dict[str, Any]:
    """Tokens a second of HERALD with `batch` rows over those of the dense plan with as many rows as `cap` allows."""
    config = SHAPES[name]
    dense_batch = max((b for b in range(1, batch + 1) if fits(config, b, context, cap)), default=0)
    if dense_batch == 0:
        raise SystemExit(f"{name} with one row of {context} tokens does not fit the cap of {cap / 1e9:.0f} GB")
    model = Model.from_params(config, params)
    dense = throughput(model, dense_batch, context, new_tokens, Dense())
    herald = throughput(model, batch, context, new_tokens, Herald())
    rates = [stats.new_tokens / stats.decode_seconds for stats in (dense, herald)]
    weights = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))
    kept = herald.offload
    held = weights + (0 if kept is None else kept.pool_bytes + kept.dense_bytes + kept.index_bytes)
    if held > 0.9 * cap:
        raise SystemExit(f"HERALD with {batch} rows holds {held / 1e9:.1f} GB, too close to the cap: take fewer rows")
    detail = {
        "cap_gb": cap / 1e9, "dense_rows": dense_batch, "herald_rows": batch, "dense_tokens_per_s": rates[0],
        "herald_tokens_per_s": rates[1], "herald_device_gb": held / 1e9,
    }  # fmt: skip
    id = f"herald/{name}/{context // 1024}k/throughput"
    return common.row(id, rates[1] / rates[0], "x", goal=GOALS.get(id), detail=detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="llada2_mini,sdar_30b_a3b")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--contexts", default="4,32", help="in units of 1024 tokens")
    parser.add_argument("--steps", type=int, default=64, help="per timed loop")
    parser.add_argument("--plans", default="llada2_mini", help="shape of the MAGE and HERALD rows; empty: none")
    parser.add_argument("--plan-context", type=int, default=64, help="in units of 1024 tokens")
    parser.add_argument("--cap", type=float, default=48e9, help="bytes of device memory that both plans may use")
    parser.add_argument("--new-tokens", type=int, default=128)
    common.output_option(parser)
    options = parser.parse_args()

    bandwidth = common.copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        common.write_results("moe", rows, folder=options.out)  # a run that is cut short keeps what it has

    for name in options.shapes.split(","):
        config, params = SHAPES[name], parameters(SHAPES[name])
        for batch in map(int, options.batches.split(",")):
            add(expert_row(name, batch, params))
            # Once per batch: how many experts the tokens of a block choose hardly depends on what they attend to.
            contexts = [int(thousands) for thousands in options.contexts.split(",")]
            touched = count_touched(config, params, batch, contexts[0] * 1024)
            for thousands in contexts:
                context = thousands * 1024
                seconds = measure_step(config, params, batch, context, options.steps)
                floor = step_bytes(config, touched, batch, context) / bandwidth
                id = f"step/{name}/{thousands}k/b{batch}/over_floor"
                detail = {"step_ms": seconds * 1e3, "floor_ms": floor * 1e3, "touched_experts": touched}
                add(common.row(id, seconds / floor, "x", goal=GOALS.get(id), detail=detail))
        if name == options.plans:
            context, batch = options.plan_context * 1024, 16
            dense, sparse = (measure(config, params, batch, context, plan) for plan in (Dense(), Mage()))
            id = f"mage/{name}/{options.plan_context}k/step_speedup"
            detail = {"batch": batch, "dense_step_ms": dense.later * 1e3, "sparse_step_ms": sparse.later * 1e3}
            add(common.row(id, dense.later / sparse.later, "x", goal=GOALS.get(id), detail=detail))
            add(herald_row(name, context, options.cap, batch, options.new_tokens, params))
    common.print_rows(rows)


if __name__ == "__main__":
    main()
