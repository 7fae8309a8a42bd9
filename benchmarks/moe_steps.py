"""Steps of mixtures of experts for `benchmarks.moe`: their programs, the experts that they touch, and their floor."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.block_times import GREEDY, abstract_params, random_cache
from benchmarks.shapes import SHAPES, step_weight_bytes, weight_bytes
from herald_jax import ModelConfig, moe
from herald_jax.cache import DenseAttend, DeviceKV
from herald_jax.denoise import predict
from herald_jax.model import Params, bind
from pallas_kernels import dispatch
from pallas_kernels.grouped import grouped_mlp

COUNTED = 2  # forwards in which experts are counted
FORMS = ("grouped", "ragged_dot", "jax_kernel")  # of one layer's experts: the implementations that are compared


@functools.partial(jax.jit, static_argnames=("config", "steps", "masked"), donate_argnames="cache")
def _steps(
    config: ModelConfig,
    params: Params,
    cache: DeviceKV,
    length: jax.Array,
    key: jax.Array,
    *,
    steps: int,
    masked: bool = False,
) -> tuple[DeviceKV, jax.Array]:
    """`steps` denoising forwards over blocks of random tokens behind `length` i32[B] entries, and their predictions.

    `masked`: over blocks of masks instead.
    """
    model, block = bind(config, params), config.diffusion.block_length
    batch = length.shape[0]
    positions = length[:, None] + jnp.arange(block)[None, :]

    def body(index: jax.Array, state: tuple[DeviceKV, jax.Array]) -> tuple[DeviceKV, jax.Array]:
        cache, last = state
        if masked:
            tokens = jnp.full((batch, block), config.diffusion.mask_token_id)
        else:
            drawn = jax.random.randint(jax.random.fold_in(key, index), (batch, block), 0, config.vocab_size)
            tokens = jnp.where(jnp.arange(block)[None, :] % 8 == 0, last, drawn)  # a step waits for the one before
        hidden, cache = model(tokens, positions, DenseAttend(length, (length + block)[:, None]), cache)
        return cache, predict(hidden, model.head_kernel(), GREEDY, implementation=None).token

    return jax.lax.fori_loop(0, steps, body, (cache, jnp.zeros((batch, block), jnp.int32)))


def slots(config: ModelConfig, longest: int) -> int:
    """Of a row's cache, none in vain: 16 rows of 32K beside 61 GB of weights leave no room for that."""
    return -(-(longest + config.diffusion.block_length) // 128) * 128


def bytes_needed(config: ModelConfig, batch: int, longest: int) -> float:
    """Device memory of the steps of a shape: weights, cache, and what a step works with."""
    return weight_bytes(config) + batch * slots(config, longest) * config.kv_bytes_per_token + 3e9


def _start(
    config: ModelConfig, batch: int, context: int, capacity: int, masked: bool = False
) -> tuple[DeviceKV, jax.Array, jax.Array]:
    cache = random_cache(config, batch, capacity, peaked=masked)
    return cache, jnp.full((batch,), context, jnp.int32), jax.random.key(1)


def _lowered(config: ModelConfig, batch: int, capacity: int, **static: Any) -> Any:
    start = jax.eval_shape(functools.partial(_start, config, batch, 0, capacity))
    return _steps.lower(config, abstract_params(config), *start, **static)


@contextmanager
def counting(block: int) -> Iterator[list[np.ndarray]]:
    """Programs traced inside collect the experts i32[B, T, k] that each layer of each forward over blocks chooses."""
    found: list[np.ndarray] = []
    original = moe.route

    def route(logits: jax.Array, config: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
        weights, experts = original(logits, config, *args)
        if logits.shape[1] == block:
            jax.debug.callback(lambda chosen: found.append(np.array(chosen)), experts)
        return weights, experts

    jax.clear_caches()
    moe.route = route  # type: ignore[assignment]
    try:
        yield found
    finally:
        moe.route = original
        jax.clear_caches()


class Touched:
    """How many experts of a layer a step touches, by a program of its own, compiled in a thread of `pool`.

    It serves all batches up to its own: their tokens are among those of the whole.
    """

    def __init__(self, config: ModelConfig, batch: int, longest: int, pool: Executor, *, masked: bool = False):
        self.config, self.batch, self.masked = config, batch, masked
        self.capacity = slots(config, longest)
        with counting(config.diffusion.block_length) as self._found:
            lowered = _lowered(config, batch, self.capacity, steps=COUNTED, masked=masked)
            self.program: Future = pool.submit(lowered.compile)

    def wait(self) -> None:
        """Until the program is compiled."""
        self.program.result()

    def count(self, params: Params, context: int, batches: Sequence[int]) -> dict[int, float]:
        """The mean over layers of the first so many rows of each of `batches`."""
        self._found.clear()
        start = _start(self.config, self.batch, context, self.capacity, self.masked)
        jax.block_until_ready(self.program.result()(params, *start)[1])
        jax.effects_barrier()
        return {b: float(np.mean([len(np.unique(chosen[:b])) for chosen in self._found])) for b in batches}


class Steps:
    """The programs of one shape and batch, with room for the longest context, and one layer's experts in all forms.

    They are lowered here and compiled in threads of `pool`, for which their first use waits. JAX's own kernel, which
    takes ten seconds to compile, is for one row only.
    """

    def __init__(self, name: str, batch: int, longest: int, steps: int, pool: Executor):
        self.name, self.config, self.batch, self.steps = name, SHAPES[name], batch, steps
        self.capacity = slots(self.config, longest)
        self._timed = pool.submit(_lowered(self.config, batch, self.capacity, steps=steps).compile)
        layer = abstract_params(self.config)["layers"][str(self.config.num_layers - 1)]["mlp"]["experts"]
        given = jax.eval_shape(self._tokens), layer["gate_up"], layer["down"]
        forms = FORMS if batch == 1 and dispatch.mosaic_gpu_missing() is None else FORMS[:2]
        self._forms = {form: pool.submit(_experts.lower(*given[0], *given[1:], form=form).compile) for form in forms}

    def wait(self) -> None:
        """Until all are compiled."""
        for program in (self._timed, *self._forms.values()):
            program.result()

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

    def _tokens(self) -> tuple[jax.Array, jax.Array]:
        """Random tokens `[T, E]` and experts i32[T, k]."""
        moe, tokens = self.config.moe, self.batch * self.config.diffusion.block_length
        assert moe is not None
        x = jax.random.normal(jax.random.key(2), (tokens, self.config.hidden_size), jnp.dtype(self.config.dtype))
        scores = jax.random.uniform(jax.random.key(3), (tokens, moe.num_experts))
        return x, jax.lax.top_k(scores, moe.experts_per_token)[1]

    def expert_row(self, params: Params) -> dict[str, Any]:
        """One layer's experts, on a block of random tokens per row: the grouped kernel, XLA's form and JAX's kernel."""
        layer = params["layers"][str(self.config.num_layers - 1)]["mlp"]["experts"]
        arguments = (*self._tokens(), layer["gate_up"], layer["down"])
        programs = {form: program.result() for form, program in self._forms.items()}
        results = {form: program(*arguments) for form, program in programs.items()}
        with common.Stopwatch() as watch:
            taken = {form: watch.time(program, [arguments], repeats=5) for form, program in programs.items()}
        touched = len(np.unique(arguments[1]))
        detail = {f"{form}_us": time.us for form, time in taken.items()} | {
            "touched": touched,
            "bytes": touched * expert_bytes(self.config),
            "error": common.rms_error(results["grouped"], results["ragged_dot"]),
        }
        ratio = taken["ragged_dot"].seconds / taken["grouped"].seconds
        return common.row(f"experts/{self.name}/b{self.batch}/vs_ragged_dot", ratio, "x", detail=detail)


@functools.partial(jax.jit, static_argnames="form")
def _experts(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array, *, form: str) -> jax.Array:
    if form == "jax_kernel":
        return _by_jax_kernel(x, chosen, gate_up, down)
    return grouped_mlp(x, chosen, gate_up, down, implementation=None if form == "grouped" else form)


def _by_jax_kernel(x: jax.Array, chosen: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """`grouped_mlp` by the grouped matmul for Hopper that JAX comes with, in its smallest tile: of 64 rows."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # Mosaic GPU, only where there is one

    k, flat = chosen.shape[1], chosen.reshape(-1)
    sizes = jnp.sum(flat[:, None] == jnp.arange(gate_up.shape[0])[None, :], axis=0, dtype=jnp.int32)
    dot: Any = functools.partial(
        ragged_dot, group_sizes=sizes, block_m=64, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=1
    )
    order = jnp.argsort(flat, stable=True)
    gate, up = jnp.split(dot(x[order // k], gate_up.reshape(*gate_up.shape[:2], -1)), 2, axis=-1)
    out = dot(jax.nn.silu(gate) * up, down)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    return out[place].reshape(*chosen.shape, -1).astype(jnp.float32)


def expert_bytes(config: ModelConfig) -> int:
    """Bytes of one expert."""
    assert config.moe is not None
    return 3 * config.hidden_size * config.moe.intermediate_size * jnp.dtype(config.dtype).itemsize


def step_bytes(config: ModelConfig, touched: float, batch: int, entries: float) -> float:
    """What a step must read when each expert layer touches `touched` experts and each row `entries` of the cache."""
    assert config.moe is not None
    layers = config.num_layers - config.moe.first_dense_layers
    rest = step_weight_bytes(config) - layers * config.moe.num_experts * expert_bytes(config)
    return rest + layers * touched * expert_bytes(config) + batch * entries * config.kv_bytes_per_token
